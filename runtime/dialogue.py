"""The text of a chat's next turn: what a template puts behind the last answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvsift.builder.errors import UsageError
from kvsift.runtime.chat import Message

#: Stands for the answer of the turn before; no text of a template or a person holds it.
_ANSWER = "\ue000answer\ue001"


def next_turn(render: Callable[[Sequence[Message]], str], messages: Sequence[Message]) -> str:
    """Return what follows an answer when `messages` come next: its closing marks, then they.

    `render` makes a prompt of a conversation. Earlier turns need not be told again, so a template
    that shortens them (by their thoughts, say) has no say in what the cache holds. UsageError if
    the template does not show answers as they are.
    """
    told = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    _, found, after = render([*told, *messages]).partition(_ANSWER)
    if not found:
        raise UsageError(
            "the chat template rewrites answers, so a session cannot go on from one; send whole "
            "conversations without session_id"
        )
    return after
