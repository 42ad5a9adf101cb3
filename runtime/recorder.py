"""Recorders: what an engine tells of its evictions while it runs, to a file or to a replay.

An engine without a recorder pays one comparison with None per eviction.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import numpy as np
from numpy.typing import NDArray

from kvsift.builder.errors import EngineError, UsageError
from kvsift.builder.package import Manifest
from kvsift.runtime.params import EvictionParams, SamplingParams
from kvsift.runtime.request import Request
from kvsift.runtime.results import plain
from kvsift.runtime.sequence import Sequence
from kvsift.runtime.sessions import Kept
from kvsift.runtime.slots import Slot
from kvsift.runtime.trace import (
    Ending,
    Eviction,
    Header,
    Phase,
    ReplayError,
    Trace,
    TracedRequest,
    difference,
    first_difference,
    header_difference,
    header_of,
    place,
)

if TYPE_CHECKING:
    from kvsift.runtime.engine import Engine


class Recorder(Protocol):
    """What an engine tells of its requests, each as it happens."""

    def begin(self, sequence: Sequence) -> None:
        """Note that a request starts to run."""
        ...

    def evict(self, sequence: Sequence, slot: Slot, kept: Kept, e: int, phase: Phase) -> None:
        """Note what evicting slot number `e` of a step keeps, before any row has moved."""
        ...

    def end(self, sequence: Sequence) -> None:
        """Note that a request has ended."""
        ...


class _Numbered:
    """Numbers requests in the order in which they begin, whatever their callers call them."""

    def __init__(self, manifest: Manifest) -> None:
        self.header = header_of(manifest)
        self._begun = 0
        self._numbers: dict[int, int] = {}

    def _enter(self, sequence: Sequence) -> TracedRequest:
        number = self._numbers[id(sequence)] = self._begun
        self._begun += 1
        seeds = sequence.seeds
        sampling = asdict(sequence.sampling) | {"seed": seeds.sampling}
        evict = asdict(sequence.eviction) | {"eviction_seed": seeds.eviction}
        return TracedRequest(
            request=number,
            prompt=list(sequence.prompt),
            past=sequence.past,
            sampling=plain(sampling),
            eviction=plain(evict),
            budget_units=sequence.budget,
        )

    def _eviction(
        self, sequence: Sequence, slot: Slot, kept: Kept, e: int, phase: Phase
    ) -> Eviction:
        keep, counts = kept.keep[:, e], kept.keep_len[:, e]
        coverage = kept.coverage[:, e]
        held = np.broadcast_to(slot.units, slot.ids.shape[:2])
        units = scores = None
        if kept.scores is not None:
            units = _ragged(slot.ids, held)
            scores = _ragged(kept.scores[:, e], held)
        ids = np.take_along_axis(slot.ids, np.maximum(keep, 0).astype(np.int64), axis=2)
        assert slot.budgets is not None
        return Eviction(
            request=self._numbers[id(sequence)],
            phase=phase,
            step=slot.steps,
            seed=slot.seed,
            tokens_seen=slot.seen,
            budget=slot.budgets.tolist(),
            kept=[[sorted(row) for row in layer] for layer in _ragged(ids, counts)],
            coverage=plain(coverage),
            units=units,
            scores=plain(scores),
        )

    def _leave(self, sequence: Sequence) -> Ending | None:
        """Return how a request ended, None if it was cancelled before it began."""
        number = self._numbers.pop(id(sequence), None)
        if number is None:
            return None
        return Ending(number, sequence.finish_reason, list(sequence.tokens))


class TraceWriter(_Numbered):
    """Writes a trace to a file, which an existing one gives way to.

    `manifest` is that of the engine. Raises UsageError if the file cannot be written. Close it, or
    use it as a context.
    """

    def __init__(self, path: str | Path, manifest: Manifest) -> None:
        super().__init__(manifest)
        self.path = Path(path).expanduser()
        try:
            self._file: TextIO = self.path.open("w", encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"cannot write the trace {self.path}: {error.strerror}; choose another file"
            ) from None
        self._write("engine", self.header)

    def begin(self, sequence: Sequence) -> None:
        """Write the request's parameters and seeds."""
        self._write("request", self._enter(sequence))

    def evict(self, sequence: Sequence, slot: Slot, kept: Kept, e: int, phase: Phase) -> None:
        """Write one eviction."""
        self._write("eviction", self._eviction(sequence, slot, kept, e, phase))

    def end(self, sequence: Sequence) -> None:
        """Write the request's tokens, and everything so far to the disk."""
        if (ending := self._leave(sequence)) is not None:
            self._write("end", ending)
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    def _write(self, event: str, record: Header | TracedRequest | Eviction | Ending) -> None:
        values = {k: v for k, v in asdict(record).items() if v is not None}
        line = json.dumps({"event": event, **values}, separators=(",", ":"), allow_nan=False)
        try:
            self._file.write(line + "\n")
        except OSError as error:
            raise EngineError(f"cannot write the trace {self.path}: {error.strerror}") from None


class Replay(_Numbered):
    """Compares a run with a trace as it goes; ReplayError at the first difference.

    Requests must begin in the order of the trace, on the engine that made it (UsageError if it is
    another). `compared` counts the evictions that were equal.
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

    def requests(self) -> list[Request]:
        """Return the traced requests, to be run again with the seeds that they used."""
        return [
            Request(r.prompt, SamplingParams(**r.sampling), EvictionParams(**r.eviction))
            for r in self.trace.requests
        ]

    def begin(self, sequence: Sequence) -> None:
        """Compare what the request starts with."""
        mine = self._enter(sequence)
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
        mine = self._eviction(sequence, slot, kept, e, phase)
        theirs = self.trace.of(mine.request)
        if mine.step >= len(theirs):
            raise ReplayError(f"{place(mine)} is not in the trace, which has {len(theirs)} of it")
        if why := difference(mine, theirs[mine.step], "replayed", "traced"):
            raise ReplayError(why)
        self.compared += 1

    def end(self, sequence: Sequence) -> None:
        """Compare the number of evictions and the tokens."""
        mine = self._leave(sequence)
        if mine is None:
            return
        traced = len(self.trace.of(mine.request))
        if (steps := sequence.slot.steps) != traced:
            raise ReplayError(f"request {mine.request} evicted {steps} times, traced {traced}")
        for theirs in self.trace.endings:
            if theirs.request == mine.request and theirs.token_ids != mine.token_ids:
                at = first_difference(mine.token_ids, theirs.token_ids)
                raise ReplayError(f"request {mine.request} has another token at place {at}")


@contextmanager
def recording(engine: Engine, path: str | Path | None) -> Iterator[None]:
    """Write a trace of what an engine does inside the block; None: none."""
    if path is None:
        yield
        return
    with TraceWriter(path, engine.manifest) as writer:
        engine.recorder = writer
        try:
            yield
        finally:
            engine.recorder = None


def _ragged(values: NDArray[Any], counts: NDArray[np.int32]) -> list[list[list[Any]]]:
    """Return the first `counts[l, r]` of `values` [L, R, N] as plain lists."""
    return [
        [row[:count].tolist() for row, count in zip(layer, numbers, strict=True)]
        for layer, numbers in zip(values, counts, strict=True)
    ]
