"""The Python interface: an engine directory in, answers out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any, TypeVar, cast

from kvsift.builder.errors import UsageError
from kvsift.runtime.chat import ChatTemplate, Message
from kvsift.runtime.engine import Engine, Request
from kvsift.runtime.params import EvictionParams, SamplingParams
from kvsift.runtime.pins import role_pins
from kvsift.runtime.results import GenerationResult

Params = TypeVar("Params", SamplingParams, EvictionParams)
Prompt = str | Sequence[int]
Conversation = Sequence[Message]


class LLM:
    """An engine with its tokenizer and chat template.

    `max_batch` sequences run at a time (default: what the engine was built for) on `threads`
    threads (default: ONNX Runtime's choice); `verify` compares the files' hashes with the manifest
    first. Raises PackageError or EngineError when the engine cannot run here. One thread of the
    program may use it at a time.
    """

    def __init__(
        self,
        engine_dir: str | os.PathLike[str],
        *,
        max_batch: int | None = None,
        threads: int | None = None,
        verify: bool = False,
    ) -> None:
        directory = Path(engine_dir).expanduser()
        self.engine = Engine(directory, max_batch=max_batch, threads=threads, verify=verify)

    @cached_property
    def template(self) -> ChatTemplate:
        """The model's chat template; UsageError if it has none."""
        return ChatTemplate.load(self.engine.directory)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        eviction: EvictionParams | Sequence[EvictionParams] | None = None,
    ) -> list[GenerationResult]:
        """Continue prompts (texts or lists of token ids) and return the results in their order.

        Parameters are for all prompts, or one for each. UsageError if a prompt is empty, too long
        or does not fit the cache; then nothing runs.
        """
        asked = _prompts(prompts)
        sampling = _spread("sampling_params", sampling_params, SamplingParams, len(asked))
        evict = _spread("eviction", eviction, EvictionParams, len(asked))
        return self.engine.generate([Request(*r) for r in zip(asked, sampling, evict, strict=True)])

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        eviction: EvictionParams | Sequence[EvictionParams] | None = None,
        *,
        pin_roles: str | Sequence[str] = (),
        **variables: Any,
    ) -> list[GenerationResult]:
        """Answer conversations: messages {"role", "content"}, or a list of such lists.

        The model's chat template makes the prompt; `variables` go to it as they are. What the
        roles of `pin_roles` say is never evicted.
        """
        single = not isinstance(messages, Sequence) or not messages
        single = single or isinstance(messages[0], Mapping)
        talks: Sequence[Any] = [messages] if single else messages
        sampling = _spread("sampling_params", sampling_params, SamplingParams, len(talks))
        evict = _spread("eviction", eviction, EvictionParams, len(talks))
        return self.engine.generate(
            [
                self.chat_request(talk, s, e, pin_roles=pin_roles, **variables)
                for talk, s, e in zip(talks, sampling, evict, strict=True)
            ]
        )

    def stream(
        self,
        prompt: Prompt | Conversation,
        sampling_params: SamplingParams | None = None,
        eviction: EvictionParams | None = None,
    ) -> Iterator[str]:
        """Yield the answer to a prompt, or to messages, piece by piece as it becomes certain."""
        sampling = _spread("sampling_params", sampling_params, SamplingParams, 1)[0]
        evict = _spread("eviction", eviction, EvictionParams, 1)[0]
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            request = self.chat_request(cast(Conversation, prompt), sampling, evict)
        else:
            request = Request(cast(Prompt, prompt), sampling, evict)
        return (update.text for update in self.engine.run([request]) if update.text)

    def chat_request(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        eviction: EvictionParams | None = None,
        *,
        pin_roles: str | Sequence[str] = (),
        **variables: Any,
    ) -> Request:
        """Return the request for messages, its text made by the chat template.

        What the roles of `pin_roles` (such as "system") say is never evicted. UsageError if no
        message has such a role.
        """

        def render(told: Conversation) -> str:
            return self.template.render(told, **variables)

        evict = eviction or EvictionParams()
        if pin_roles:
            pins = role_pins(render, self.engine.tokenizer, messages, pin_roles)
            evict = replace(evict, pin=[*evict.pin, *pins])
        return Request(
            render(messages),
            sampling_params or SamplingParams(),
            evict,
            add_special_tokens=False,  # the template writes its own
        )


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts from one prompt or several; a list of numbers is one prompt."""
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
        return [cast(Prompt, prompts)]  # the engine refuses what is no prompt
    items: list[Prompt] = list(cast(Sequence[Prompt], prompts))
    return [cast(Prompt, items)] if items and isinstance(items[0], Integral) else items


def _spread(
    name: str, given: Params | Sequence[Params] | None, kind: type[Params], count: int
) -> list[Params]:
    """Return one parameter object per request."""
    if given is None:
        return [kind()] * count
    if isinstance(given, kind):
        return [given] * count
    if not isinstance(given, Sequence) or not all(isinstance(item, kind) for item in given):
        raise UsageError(
            f"{name} must be {kind.__name__} or a list of them, got {given!r:.60}; "
            f"write {kind.__name__}(...)"
        )
    if len(given) != count:
        raise UsageError(
            f"{name} has {len(given)} entries for {count} prompts; give one for all or one each"
        )
    return list(given)
