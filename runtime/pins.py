"""Pinned roles: where in a rendered conversation the messages of a role stand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from tokenizers import Tokenizer

from kvsift.builder.errors import UsageError
from kvsift.runtime.chat import Message
from kvsift.runtime.params import Span, check_text, check_texts

#: Stands for the content of message i; no text of a template or a person holds it.
_MARK = "\ue000{}\ue001"


def role_pins(
    render: Callable[[Sequence[Message]], str],
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    roles: str | Iterable[str],
) -> list[Span]:
    """Return the token spans [start, end) of the contents of all messages of the given roles.

    `render` makes a prompt of messages, whose tokens are counted as `encode_chat` gives them. A
    span takes in every token that holds a part of a content. UsageError if no message has one of
    the roles, or if the template rewrites contents, so that they cannot be found.
    """
    wanted = role_names(roles)
    text = check_text("the prompt", render(messages))  # refuses what are no messages
    known = {str(m.get("role")) for m in messages}
    for role in wanted:
        if role not in known:
            raise UsageError(
                f"no message has the pinned role {role!r}; roles here: {', '.join(sorted(known))}"
            )
    spans = [
        span
        for span, message in zip(_contents(render, messages, text), messages, strict=True)
        if message["role"] in wanted
    ]
    offsets = tokenizer.encode(text, add_special_tokens=False).offsets
    return [pin for start, end in spans if (pin := _tokens(offsets, start, end))]


def role_names(roles: object) -> list[str]:
    """Return roles as a list, one may be given bare; UsageError if they are no texts."""
    return list(check_texts("pin_roles", roles, "role"))


def _contents(
    render: Callable[[Sequence[Message]], str], messages: Sequence[Message], text: str
) -> Iterator[tuple[int, int]]:
    """Yield the characters [start, end) of each message's content in the rendered text."""
    marks = [_MARK.format(i) for i in range(len(messages))]
    marked = [{**m, "content": mark} for m, mark in zip(messages, marks, strict=True)]
    at, rest = 0, render(marked)
    for message, mark in zip(messages, marks, strict=True):
        before, found, rest = rest.partition(mark)
        content = message.get("content")
        if not found or not isinstance(content, str) or not text.startswith(before, at):
            raise _lost(message)
        at += len(before)
        upto = rest.partition("\ue000")[0]
        for form in (content, content.strip()):
            if text.startswith(form + upto, at):
                yield at, at + len(form)
                at += len(form)
                break
        else:
            raise _lost(message)


def _tokens(offsets: Sequence[tuple[int, int]], start: int, end: int) -> Span | None:
    """Return the tokens that hold characters of [start, end), None if there are none."""
    inside = [i for i, (a, b) in enumerate(offsets) if a < end and b > start]
    return (inside[0], inside[-1] + 1) if inside else None


def _lost(message: Message) -> UsageError:
    return UsageError(
        f"the chat template rewrites the content of a {message.get('role')} message, so its "
        "tokens cannot be found; pin token spans instead of roles"
    )
