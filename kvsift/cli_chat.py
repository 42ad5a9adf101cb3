"""`kvsift chat`: a session in the terminal, whose cache goes on from turn to turn."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvsift.builder.errors import KvsiftError, UsageError
from kvsift.runtime import console
from kvsift.runtime.conversation_file import check_writable
from kvsift.runtime.llm import LLM
from kvsift.runtime.params import EvictionParams, SamplingParams

SESSION = "chat"


def converse(
    llm: LLM,
    system: str | None,
    sampling: SamplingParams,
    evict: EvictionParams,
    pin_roles: Sequence[str] = (),
    file: Path | None = None,
) -> None:
    """Answer what the user types, line by line; the session is kept in `file`, if one is given.

    A turn that is refused, or stopped before its prompt was read, did not happen. A role is pinned
    in the turns in which it speaks. Seeds are the session's: they count in its first turn.
    """
    for role in pin_roles:
        if role not in ("system", "user"):
            raise UsageError(f"--pin-role {role!r} never speaks in a chat; pin system or user")
    llm.template  # noqa: B018 (without one there is no use in asking for a first message)
    sessions = llm.engine.conversations
    if file is not None and check_writable(file).exists():
        llm.engine.load_session(file, SESSION)
        print(f"{file}: {len(sessions.get(SESSION).tokens)} tokens so far", file=sys.stderr)
    try:
        for line in console.typed_lines():
            messages = [{"role": "user", "content": line}]
            if SESSION in sessions.ids():
                sampling, evict = replace(sampling, seed=None), replace(evict, eviction_seed=None)
            elif system is not None:
                messages.insert(0, {"role": "system", "content": system})
            roles = [role for role in pin_roles if role in {m["role"] for m in messages}]
            try:
                _answer(llm, messages, sampling, evict, roles)
            except KvsiftError as error:  # too long, say: it goes on without the turn
                print(f"error: {error}", file=sys.stderr)
            print(flush=True)
    finally:
        if file is not None and SESSION in sessions.ids():
            llm.engine.save_session(SESSION, file)


def _answer(
    llm: LLM,
    messages: list[dict[str, str]],
    sampling: SamplingParams,
    evict: EvictionParams,
    pin_roles: Sequence[str],
) -> None:
    """Print an answer as it comes; Ctrl-C ends it, and what has been said stays."""
    request = llm.chat_request(messages, sampling, evict, pin_roles=pin_roles, session_id=SESSION)
    ticket = llm.scheduler.submit(request)
    try:
        for update in ticket:
            sys.stdout.write(update.text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    finally:  # a reader of stdout that has gone ends an answer, too
        ticket.cancel()
        ticket.result()  # the session is free when it is there
