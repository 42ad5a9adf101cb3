"""The Python interface: an engine directory in, answers out."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from numbers import Integral
from types import TracebackType
from typing import Any, TypeVar, cast

from kvsift.builder.errors import UsageError
from kvsift.builder.package import load_manifest
from kvsift.runtime.chat import ChatTemplate, Message, encode_chat
from kvsift.runtime.dialogue import next_turn
from kvsift.runtime.engine import Engine
from kvsift.runtime.kv_cache_config import KvCacheConfig
from kvsift.runtime.output import RequestOutput
from kvsift.runtime.params import EvictionParams, SamplingParams, listed
from kvsift.runtime.paths import user_path
from kvsift.runtime.pins import role_names, role_pins
from kvsift.runtime.prompts import check_length
from kvsift.runtime.request import Request, Update
from kvsift.runtime.results import GenerationResult
from kvsift.runtime.scheduler import Scheduler

Params = TypeVar("Params", SamplingParams, EvictionParams)
Prompt = str | Sequence[int]
Conversation = Sequence[Message]


class LLM:
    """An engine with its tokenizer and chat template, and a scheduler that runs its requests.

    `max_batch` sequences run at a time (default: what the engine was built for) on `threads`
    threads (default: ONNX Runtime's choice). `kv_memory` (bytes, or text such as "2GiB") bounds the
    KV caches and decides how many sequences run at a time, `max_batch` at most; `kv_cache_config`
    says the same under TensorRT-LLM's names. `verify` compares the files' hashes with the manifest
    first. `max_queue` requests may wait; `prefill_chunks` as in
    `Scheduler`. Any thread and any event loop may use it. `close()`, or leaving it as a context
    manager, cancels what still runs. Raises PackageError or EngineError when the engine cannot run
    here, CapacityError when not one sequence fits.
    """

    def __init__(
        self,
        engine_dir: str | os.PathLike[str],
        *,
        max_batch: int | None = None,
        kv_memory: int | str | None = None,
        kv_cache_config: KvCacheConfig | None = None,
        threads: int | None = None,
        verify: bool = False,
        max_queue: int = 256,
        prefill_chunks: int = 1,
    ) -> None:
        if isinstance(kv_memory, str):
            from kvsift.runtime.console import parse_size

            kv_memory = parse_size(kv_memory)
        directory = user_path("engine_dir", engine_dir)
        if kv_cache_config is not None:
            if kv_memory is not None:
                raise UsageError(
                    f"kv_memory and kv_cache_config both bound the caches, got {kv_memory} and "
                    f"{kv_cache_config}; give one of them"
                )
            if not isinstance(kv_cache_config, KvCacheConfig):
                raise UsageError(
                    f"kv_cache_config must be a KvCacheConfig, got {type(kv_cache_config).__name__}"
                    "; give KvCacheConfig(max_tokens=...)"
                )
            kv_memory = kv_cache_config.kv_memory(load_manifest(directory))
        self.engine = Engine(
            directory,
            max_batch=max_batch,
            kv_memory=kv_memory,
            threads=threads,
            verify=verify,
        )
        self.scheduler = Scheduler(self.engine, max_queue=max_queue, prefill_chunks=prefill_chunks)
        # The scheduler's thread keeps the scheduler alive, and nothing else of this.
        self._stop = weakref.finalize(self, self.scheduler.stop)
        self._stop.atexit = False

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what still runs, stop and free the engine; no request can be made after that."""
        self.scheduler.close()
        self.engine.close()

    @cached_property
    def template(self) -> ChatTemplate:
        """The model's chat template; UsageError if it has none."""
        return ChatTemplate.load(self.engine.directory)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        eviction: EvictionParams | Sequence[EvictionParams] | None = None,
        *,
        session_id: str | None = None,
    ) -> list[GenerationResult]:
        """Continue prompts (texts or lists of token ids) and return the results in their order.

        Parameters are for all prompts, or one for each; with `session_id` the only prompt goes on
        from what that session has said (see `Request`). UsageError if a prompt is empty, too long
        or does not fit the cache; then nothing runs.
        """
        asked = _prompts(prompts)
        _check_one(session_id, asked)
        sampling = _spread("sampling_params", sampling_params, SamplingParams, len(asked))
        evict = _spread("eviction", eviction, EvictionParams, len(asked))
        return self._finish(
            [Request(*r, session_id=session_id) for r in zip(asked, sampling, evict, strict=True)]
        )

    def generate_async(
        self,
        prompt: Prompt | Conversation,
        sampling_params: SamplingParams | None = None,
        eviction: EvictionParams | None = None,
        *,
        streaming: bool = False,
        session_id: str | None = None,
    ) -> RequestOutput:
        """Submit one prompt, or messages, and return at once.

        Await what is returned for the GenerationResult; with `streaming`, iterate over it with
        `async for` (or `for`) for the answer as it grows. UsageError if the prompt is empty, too
        long or does not fit the cache; QueueFullError when too many requests wait.
        """
        request = self._request(prompt, sampling_params, eviction, session_id)
        return RequestOutput(self.scheduler.submit(request), streaming, self)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        eviction: EvictionParams | Sequence[EvictionParams] | None = None,
        *,
        pin_roles: str | Sequence[str] = (),
        session_id: str | None = None,
        **variables: Any,
    ) -> list[GenerationResult]:
        """Answer conversations: messages {"role", "content"}, or a list of such lists.

        The model's chat template makes the prompt; `variables` go to it as they are. What the
        roles of `pin_roles` say is never evicted. With `session_id` there is one conversation, of
        which a later call gives the new messages only.
        """
        single = not isinstance(messages, Sequence) or not messages
        single = single or isinstance(messages[0], Mapping)
        talks: Sequence[Any] = [messages] if single else messages
        _check_one(session_id, talks)
        sampling = _spread("sampling_params", sampling_params, SamplingParams, len(talks))
        evict = _spread("eviction", eviction, EvictionParams, len(talks))
        return self._finish(
            [
                self.chat_request(
                    talk, s, e, pin_roles=pin_roles, session_id=session_id, **variables
                )
                for talk, s, e in zip(talks, sampling, evict, strict=True)
            ]
        )

    def stream(
        self,
        prompt: Prompt | Conversation,
        sampling_params: SamplingParams | None = None,
        eviction: EvictionParams | None = None,
        *,
        session_id: str | None = None,
    ) -> Iterator[str]:
        """Yield the answer to a prompt, or to messages, piece by piece as it becomes certain.

        Closing the iterator, or dropping it, cancels the request.
        """
        updates = self.updates(self._request(prompt, sampling_params, eviction, session_id))
        return (update.text for update in updates if update.text)

    def updates(self, request: Request) -> Iterator[Update]:
        """Run a request and yield its news; closing the iterator, or dropping it, cancels it."""
        ticket = self.scheduler.submit(request)
        try:
            yield from ticket
        finally:
            ticket.cancel()

    def chat_request(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        eviction: EvictionParams | None = None,
        *,
        pin_roles: str | Sequence[str] = (),
        session_id: str | None = None,
        **variables: Any,
    ) -> Request:
        """Return the request for messages, its text made by the chat template.

        What the roles of `pin_roles` (such as "system") say is never evicted. With a `session_id`
        that has said something the messages are what comes next. UsageError if no message has such
        a role, SessionError if the session is answering.
        """
        talk = None if session_id is None else self.engine.conversations.find(session_id)

        def render(told: Conversation) -> str:
            if talk is None:
                return self.template.render(told, **variables)
            return next_turn(partial(self.template.render, **variables), told)

        evict, text, pin_roles = (
            eviction or EvictionParams(),
            render(messages),
            role_names(pin_roles),
        )
        if talk is not None:  # roles that spoke before are pinned already
            pin_roles = [r for r in pin_roles if any(m.get("role") == r for m in messages)]
        if pin_roles:
            tokenizer, model = self.engine.tokenizer, self.engine.manifest.model
            check_length(text, tokenizer, self.engine.manifest)
            pins = role_pins(render, tokenizer, messages, pin_roles)
            if talk is not None:
                ids = encode_chat(tokenizer, text)
                start = len(talk.prompt(ids, model)) - len(ids)
                pins = [(start + a, start + b) for a, b in pins]
            evict = replace(evict, pin=[*evict.pin, *pins])
        return Request(
            text,
            sampling_params or SamplingParams(),
            evict,
            add_special_tokens=False,  # the template writes its own
            session_id=session_id,
            session_turn=None if session_id is None else 1 + (talk.turns if talk else 0),
        )

    def add_prefix(self, prompt: Prompt | Conversation) -> None:
        """Keep the dense rows of a text (token ids, messages) that many prompts begin with.

        The first prompt that begins with it leaves them, later ones do not read it again. Of
        messages it is the text before the mark that begins an answer. UsageError if it is empty,
        CapacityError if it is too long.
        """
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            text = self.template.render(cast(Conversation, prompt), False)
            request = Request(text, add_special_tokens=False)
        else:
            request = Request(cast(Prompt, prompt))
        self.engine.prefixes.add(self.engine.encode(request))

    def _request(
        self,
        prompt: Prompt | Conversation,
        sampling_params: SamplingParams | None,
        eviction: EvictionParams | None,
        session_id: str | None,
    ) -> Request:
        """Return the request for a prompt or for messages."""
        sampling = _spread("sampling_params", sampling_params, SamplingParams, 1)[0]
        evict = _spread("eviction", eviction, EvictionParams, 1)[0]
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            talk = cast(Conversation, prompt)
            return self.chat_request(talk, sampling, evict, session_id=session_id)
        return Request(cast(Prompt, prompt), sampling, evict, session_id=session_id)

    def _finish(self, requests: list[Request]) -> list[GenerationResult]:
        """Run requests to their end; an interrupt cancels them."""
        tickets = self.scheduler.submit_all(requests, unlimited=True)
        try:
            return [ticket.result() for ticket in tickets]
        finally:
            for ticket in tickets:
                ticket.cancel()


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts from one prompt or several; a list of numbers is one prompt."""
    items = cast("list[Prompt] | None", listed(prompts))
    if items is None:
        return [cast(Prompt, prompts)]  # the engine refuses what is no prompt
    return [cast(Prompt, items)] if items and isinstance(items[0], Integral) else items


def _check_one(session_id: str | None, asked: Sequence[Any]) -> None:
    """Raise UsageError if several prompts are to be one turn of a session."""
    if session_id is not None and len(asked) != 1:
        raise UsageError(
            f"session_id {session_id!r} is for one prompt, got {len(asked)}; give each its own turn"
        )


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
