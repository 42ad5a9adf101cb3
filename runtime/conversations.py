"""Sessions: conversations whose compact cache lives on between turns.

What a turn has evicted never comes back: the next one reads on top of the rows that are left.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvsift.builder.errors import CapacityError, SessionError, UsageError
from kvsift.builder.package import ModelConfig
from kvsift.runtime.held import HeldRows
from kvsift.runtime.params import Span, check_in_range, check_integer
from kvsift.runtime.seeds import Seeds, request_seed

#: Default of `Conversations.max_bytes`.
MAX_BYTES = 1 << 30
#: Names of dropped sessions that are remembered, so that a late turn is told what happened.
_REMEMBERED = 4096


@dataclass(frozen=True)
class Conversation:
    """What a session has said and holds.

    `tokens`: every id of prompts and answers. The cache has read the first `rows.seen` of them,
    all but the last one of an answer. `pins`: spans of token positions that no turn evicts.
    `seeds`: the first turn's. `turns`: how many there have been.
    """

    tokens: tuple[int, ...]
    rows: HeldRows
    pins: tuple[Span, ...]
    seeds: Seeds
    turns: int = 1

    def prompt(self, ids: list[int], model: ModelConfig) -> list[int]:
        """Return all tokens up to the end of the next turn's prompt `ids`.

        An end token that closed the last answer is not repeated. CapacityError beyond the model's
        positions.
        """
        last = self.tokens[-1]
        if len(ids) > 1 and ids[0] == last and last in model.eos_token_ids:
            ids = ids[1:]
        if (count := len(self.tokens) + len(ids)) > model.max_positions:
            raise CapacityError(
                f"the session has {len(self.tokens)} tokens, with this turn {count}, and the model "
                f"has {model.max_positions} positions; start a new session"
            )
        return [*self.tokens, *ids]

    def all_pins(self, pins: Sequence[Span]) -> tuple[Span, ...]:
        """Return the spans of all turns so far and of the next one, each once."""
        return tuple(dict.fromkeys((*self.pins, *pins)))

    def next_seeds(self, seed: int | None, eviction_seed: int | None) -> Seeds:
        """Return the seeds of the next turn, where it names none: functions of the first turn's.

        Evictions go on counting, so the eviction seed may stay; sampling starts afresh.
        """
        sampling = request_seed(self.seeds.sampling, self.turns) if seed is None else seed
        return Seeds(sampling, self.seeds.eviction if eviction_seed is None else eviction_seed)


@dataclass
class _Entry:
    conversation: Conversation
    used: float


@dataclass
class Conversations:
    """The sessions of an engine by their id; every method may be called from any thread.

    A session that was not used for `ttl_s` seconds (None: no limit) is dropped, and the longest
    unused ones are while all together exceed `max_bytes`; those that are answering are not.
    """

    max_bytes: int = MAX_BYTES
    ttl_s: float | None = None
    clock: Callable[[], float] = time.monotonic
    _held: OrderedDict[str, _Entry] = field(default_factory=OrderedDict)
    _busy: set[str] = field(default_factory=set)
    _dropped: OrderedDict[str, str] = field(default_factory=OrderedDict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute; UsageError if it is a limit that would break the engine's thread."""
        if name == "max_bytes":
            value = check_integer(name, value, 0, "it is the bytes of all sessions between turns")
        elif name == "ttl_s" and value is not None:
            value = check_in_range(name, value, "[0, inf)", "use None for no limit")
        super().__setattr__(name, value)

    @property
    def nbytes(self) -> int:
        """Bytes of all sessions between turns."""
        with self._lock:
            return sum(e.conversation.rows.nbytes for e in self._held.values())

    def ids(self) -> list[str]:
        """Return the ids of the sessions that can go on, the longest unused first."""
        with self._lock:
            self._expire()
            return list(self._held)

    def find(self, session_id: str) -> Conversation | None:
        """Return a session, None if there was none of that id.

        SessionError if it is answering or was dropped, UsageError if the id is no text.
        """
        with self._lock:
            self.check_idle(session_id)
            if session_id in self._dropped:
                raise SessionError(
                    f"session {session_id!r} is gone: {self._dropped[session_id]}; tell the whole "
                    "conversation again under another session_id, or load it "
                    "from a file"
                )
            entry = self._held.get(session_id)
            return None if entry is None else entry.conversation

    def check_idle(self, session_id: str) -> None:
        """Raise SessionError if a session is answering, UsageError if the id is no text."""
        check_session_id(session_id)
        with self._lock:
            self._expire()
            if session_id in self._busy:
                raise SessionError(
                    f"session {session_id!r} is busy with an earlier request; wait for its end, "
                    "cancel it, or use another session_id"
                )

    def claim(self, session_id: str, conversation: Conversation | None) -> None:
        """Make a session busy that `find` returned; SessionError if it has changed since then."""
        with self._lock:
            if self.find(session_id) is not conversation:
                raise SessionError(
                    f"session {session_id!r} has gone on meanwhile; send its turns one by one"
                )
            self._busy.add(session_id)

    def release(self, session_id: str) -> None:
        """Leave a session as it was before it was claimed."""
        with self._lock:
            self._busy.discard(session_id)
            if session_id in self._held:
                self._held[session_id].used = self.clock()
            self._expire()

    def put(self, session_id: str, conversation: Conversation) -> None:
        """Store what a session holds now; it is not busy any more."""
        check_session_id(session_id)
        with self._lock:
            self._busy.discard(session_id)
            self._dropped.pop(session_id, None)
            self._held[session_id] = _Entry(conversation, self.clock())
            self._held.move_to_end(session_id)
            self._expire()

    def replace(self, session_id: str, conversation: Conversation) -> None:
        """Store a session under an id, as `put`; SessionError if the id's session is answering."""
        with self._lock:
            self.check_idle(session_id)
            self.put(session_id, conversation)

    def drop(self, session_id: str) -> None:
        """Forget a session, its id included; SessionError if it is answering or unknown.

        The id of one that was dropped for its age or size is free again, too.
        """
        with self._lock:
            self.check_idle(session_id)
            if self._dropped.pop(session_id, None) or self._held.pop(session_id, None):
                return
            raise self._unknown(session_id)

    def get(self, session_id: str) -> Conversation:
        """Return a session; SessionError if it is answering, was dropped or is unknown."""
        found = self.find(session_id)
        if found is None:
            raise self._unknown(session_id)
        return found

    def _unknown(self, session_id: str) -> SessionError:
        known = ", ".join(map(repr, self.ids()[-5:])) or "there are none"
        return SessionError(f"no session {session_id!r}; sessions here: {known}")

    def _expire(self) -> None:
        """Drop what is too old, then the longest unused ones that are too much."""
        now = self.clock()
        if self.ttl_s is not None:
            for name, entry in list(self._held.items()):
                if name not in self._busy and now - entry.used > self.ttl_s:
                    self._forget(name, f"it was not used for {self.ttl_s:g} s")
        total = sum(e.conversation.rows.nbytes for e in self._held.values())
        for name in list(self._held):
            if total <= self.max_bytes:
                return
            if name not in self._busy:
                total -= self._held[name].conversation.rows.nbytes
                self._forget(name, f"sessions may hold {self.max_bytes} bytes in all")

    def _forget(self, session_id: str, why: str) -> None:
        del self._held[session_id]
        self._dropped[session_id] = why
        while len(self._dropped) > _REMEMBERED:
            self._dropped.popitem(last=False)


def check_session_id(session_id: object) -> None:
    """Raise UsageError if a session's id is no text of 1 to 256 characters."""
    if not isinstance(session_id, str) or not 1 <= len(session_id) <= 256:
        raise UsageError(
            f"session_id must be a text of 1 to 256 characters, got {session_id!r:.60}; "
            "leave it out for a request without a session"
        )
