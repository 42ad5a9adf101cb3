"""Shared prefixes: the dense rows of a text with which many prompts begin, kept once."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvsift.builder.errors import CapacityError, UsageError
from kvsift.runtime.cache import KVCache
from kvsift.runtime.held import HeldRows, take_rows
from kvsift.runtime.params import check_integer, prompt_ids
from kvsift.runtime.slots import Slot

#: Default of `Prefixes.max_bytes`.
MAX_BYTES = 1 << 30


class Prefixes:
    """The registered prefixes of an engine; every method may be called from any thread.

    A registered prefix is a cut: a prompt that begins with it (and goes on) is always read up to
    its end first. The first such prompt leaves a copy of those rows, from before any eviction, and
    later ones start from it. Since the cut is there either way, reuse changes no bit of a result.
    `longest` is the most tokens of a prefix; the copies take `max_bytes` at most.
    """

    def __init__(self, longest: int, token_bytes: int, max_bytes: int = MAX_BYTES) -> None:
        self.longest = longest
        self.token_bytes = token_bytes
        self.max_bytes = max_bytes
        self._known: dict[tuple[int, ...], HeldRows | None] = {}
        self._lock = threading.Lock()

    @property
    def max_bytes(self) -> int:
        """Most bytes of all copies; UsageError if it is set to what is no number of bytes."""
        return self._max_bytes

    @max_bytes.setter
    def max_bytes(self, value: int) -> None:
        fix = "it is the bytes of all copies of prefixes"
        self._max_bytes = check_integer("max_bytes", value, 0, fix)

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        with self._lock:
            return sum(rows.nbytes for rows in self._known.values() if rows is not None)

    def __len__(self) -> int:
        return len(self._known)

    def add(self, ids: Sequence[int]) -> None:
        """Register a prefix of token ids.

        UsageError if it is empty, CapacityError if the scratch or `max_bytes` cannot hold it.
        """
        key = tuple(prompt_ids(ids))
        if not key:
            raise UsageError("an empty prefix saves nothing; give the text that prompts begin with")
        if len(key) > self.longest:
            raise CapacityError(
                f"the prefix has {len(key)} tokens and the engine can keep one of "
                f"{self.longest}; shorten it, or rebuild with a larger --max-input or "
                "--max-scratch"
            )
        with self._lock:
            size = sum(len(known) for known in {*self._known, key}) * self.token_bytes
            if size > self.max_bytes:
                raise CapacityError(
                    f"the prefixes would take {size} bytes and may take {self.max_bytes}; remove "
                    "one, or raise max_bytes"
                )
            self._known.setdefault(key, None)

    def remove(self, ids: Sequence[int]) -> None:
        """Forget a prefix; UsageError if it is not registered."""
        key = tuple(prompt_ids(ids))
        with self._lock:
            if self._known.pop(key, self) is self:
                raise UsageError(
                    f"no prefix of {len(key)} such tokens is registered; give the ids that "
                    "were added"
                )

    def cut(self, prompt: Sequence[int], start: int, end: int) -> int:
        """Return where a chunk [start, end) of a prompt must end for the sake of a prefix."""
        ends = [len(key) for key in self._matching(prompt) if start < len(key) < end]
        return min(ends, default=end)

    def rows(self, prompt: Sequence[int]) -> HeldRows | None:
        """Return the longest copy with which a prompt begins, None if there is none."""
        found = [r for key in self._matching(prompt) if (r := self._known.get(key)) is not None]
        return max(found, key=lambda rows: rows.seen, default=None)

    def offer(self, prompt: Sequence[int], scratch: KVCache, source: Slot) -> None:
        """Copy the rows of a prompt that has just been read up to a prefix's end, if none is."""
        key = tuple(prompt[: source.seen])
        if source.steps == 0 and self._known.get(key, source) is None:
            rows = take_rows(scratch, source)
            with self._lock:
                if key in self._known:  # nobody has removed it meanwhile
                    self._known[key] = rows

    def _matching(self, prompt: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the prefixes with which a prompt begins and after which it goes on."""
        with self._lock:
            return [
                key
                for key in self._known
                if len(key) < len(prompt) and tuple(prompt[: len(key)]) == key
            ]
