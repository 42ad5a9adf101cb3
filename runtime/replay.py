"""Replays: a traced run again, compared with its trace as it goes."""

from __future__ import annotations

from kvsift.builder.errors import UsageError
from kvsift.builder.package import Manifest
from kvsift.runtime.params import EvictionParams, SamplingParams
from kvsift.runtime.recorder import Numbered
from kvsift.runtime.request import Request
from kvsift.runtime.sequence import Sequence
from kvsift.runtime.sessions import Kept
from kvsift.runtime.slots import Slot
from kvsift.runtime.trace import (
    Phase,
    ReplayError,
    Trace,
    difference,
    first_difference,
    header_difference,
    place,
)


class Replay(Numbered):
    """Compares a run with a trace as it goes; ReplayError at the first difference.

    Requests must begin in the order of the trace, on the engine that made it (UsageError if it is
    another). One that was cancelled or whose end is missing is compared as far as its trace goes.
    `compared` counts the evictions that were equal.
    """

    def __init__(self, trace: Trace, manifest: Manifest) -> None:
        super().__init__(manifest)
        if why := header_difference(self.header, trace.header):
            raise UsageError(f"the trace was made by another engine: {why}; replay it on its own")
        later = next((r.request for r in trace.requests if r.past), None)
        if later is not None:
            raise UsageError(
                f"request {later} of the trace goes on from an earlier turn, which a trace does "
                "not hold; replay the trace of a first turn"
            )
        self.trace = trace
        self.compared = 0
        self._events = {r.request: trace.of(r.request) for r in trace.requests}
        self._endings = {e.request: e for e in trace.endings}

    @property
    def cut(self) -> int:
        """Number of requests that the trace does not hold to their end."""
        return sum(self._is_cut(r.request) for r in self.trace.requests)

    def _is_cut(self, request: int) -> bool:
        ending = self._endings.get(request)
        return ending is None or ending.finish_reason == "cancelled"

    def requests(self) -> list[Request]:
        """Return the traced requests, to be run again with the seeds that they used."""
        return [
            Request(r.prompt, SamplingParams(**r.sampling), EvictionParams(**r.eviction))
            for r in self.trace.requests
        ]

    def begin(self, sequence: Sequence) -> None:
        """Compare what the request starts with."""
        mine = self.enter(sequence)
        if mine.request >= len(self.trace.requests):
            raise ReplayError(f"request {mine.request} is not in the trace")
        theirs = self.trace.requests[mine.request]
        for name in ("prompt", "eviction", "budget_units"):
            if getattr(mine, name) != getattr(theirs, name):
                raise ReplayError(
                    f"request {mine.request} starts with another {name}: "
                    f"{getattr(mine, name)!s:.60}, traced {getattr(theirs, name)!s:.60}"
                )

    def evict(self, sequence: Sequence, slot: Slot, kept: Kept, e: int, phase: Phase) -> None:
        """Compare one eviction."""
        mine = self.eviction(sequence, slot, kept, e, phase)
        if mine is None:
            return
        theirs = self._events[mine.request]
        if mine.step >= len(theirs):
            if self._is_cut(mine.request):
                return
            raise ReplayError(f"{place(mine)} is not in the trace, which has {len(theirs)} of it")
        if why := difference(mine, theirs[mine.step], "replayed", "traced"):
            raise ReplayError(why)
        self.compared += 1

    def end(self, sequence: Sequence) -> None:
        """Compare the number of evictions and the tokens."""
        mine = self.leave(sequence)
        if mine is None:
            return
        traced, cut = len(self._events[mine.request]), self._is_cut(mine.request)
        if (steps := sequence.slot.steps) < traced or (steps > traced and not cut):
            raise ReplayError(f"request {mine.request} evicted {steps} times, traced {traced}")
        if (theirs := self._endings.get(mine.request)) is None:
            return
        said = mine.token_ids[: len(theirs.token_ids)] if cut else mine.token_ids
        if said != theirs.token_ids:
            at = first_difference(said, theirs.token_ids)
            raise ReplayError(f"request {mine.request} has another token at place {at}")
