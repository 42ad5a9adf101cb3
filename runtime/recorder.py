"""Recorders: what an engine tells of its evictions while it runs, to a file or to `replay.py`.

An engine without a recorder pays one comparison with None per eviction.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TextIO
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from kvsift.builder.errors import EngineError, UsageError
from kvsift.builder.package import Manifest
from kvsift.runtime.paths import user_path
from kvsift.runtime.results import plain
from kvsift.runtime.sequence import Sequence
from kvsift.runtime.sessions import Kept
from kvsift.runtime.slots import Slot
from kvsift.runtime.trace import (
    Ending,
    Eviction,
    Header,
    Phase,
    TracedRequest,
    header_of,
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


class Numbered:
    """Numbers requests in the order in which they begin, whatever their callers call them."""

    def __init__(self, manifest: Manifest) -> None:
        self.header = header_of(manifest)
        self._begun = 0
        # A request that fails does not end here, but goes.
        self._numbers: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()

    def enter(self, sequence: Sequence) -> TracedRequest:
        """Give a request its number and return what it starts with."""
        number = self._numbers[sequence] = self._begun
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

    def eviction(
        self, sequence: Sequence, slot: Slot, kept: Kept, e: int, phase: Phase
    ) -> Eviction | None:
        """Return an eviction as traces hold it, None if the request began before the trace."""
        number = self._numbers.get(sequence)
        if number is None:
            return None
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
            request=number,
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

    def leave(self, sequence: Sequence) -> Ending | None:
        """Return how a request ended, None if it never began, or before the trace."""
        number = self._numbers.pop(sequence, None)
        if number is None:
            return None
        return Ending(number, sequence.finish_reason, list(sequence.tokens))


class TraceWriter(Numbered):
    """Writes a trace to a file; an older one gives way to it as soon as a request begins.

    `manifest` is that of the engine. Raises UsageError if the file cannot be opened. What cannot be
    written later fails no request: `close` raises EngineError then. Close it, or use it as a
    context; what comes after that is not written. Any thread may call any method.
    """

    def __init__(self, path: str | Path, manifest: Manifest) -> None:
        super().__init__(manifest)
        self.path = user_path("the trace", path)
        self._lock = threading.Lock()
        self._failure: OSError | None = None
        self._started = False
        self._is_new = not self.path.exists()
        try:
            self._file: TextIO = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"cannot write the trace {self.path}: {error.strerror}; choose another file"
            ) from None

    def begin(self, sequence: Sequence) -> None:
        """Write the request's parameters and seeds."""
        self._write("request", self.enter(sequence))

    def evict(self, sequence: Sequence, slot: Slot, kept: Kept, e: int, phase: Phase) -> None:
        """Write one eviction."""
        if (eviction := self.eviction(sequence, slot, kept, e, phase)) is not None:
            self._write("eviction", eviction)

    def end(self, sequence: Sequence) -> None:
        """Write the request's tokens, and everything so far to the disk."""
        if (ending := self.leave(sequence)) is not None:
            self._write("end", ending, flush=True)

    def close(self) -> None:
        """Close the file; EngineError if not everything could be written."""
        with self._lock:
            try:
                if not self._file.closed:
                    self._start()
                self._file.close()
            except OSError as error:
                self._failure = self._failure or error
        if self._failure is not None:
            raise EngineError(
                f"cannot write the trace {self.path}: {self._failure.strerror}; it ends too early"
            )

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if error is not None and not self._started:  # a request was refused: nothing to tell
            self._file.close()
            if self._is_new:
                self.path.unlink(missing_ok=True)
            return
        try:
            self.close()
        except EngineError:
            if error is None:  # else that one counts
                raise

    def _start(self) -> None:
        """Empty the file and describe the engine, once."""
        if self._started:
            return
        self._started = True
        if self._file.tell():
            self._file.truncate(0)
        self._file.write(_line("engine", self.header))

    def _write(
        self,
        event: str,
        record: Header | TracedRequest | Eviction | Ending,
        flush: bool = False,
    ) -> None:
        line = _line(event, record)
        with self._lock:
            if self._file.closed or self._failure is not None:
                return
            try:
                self._start()
                self._file.write(line)
                if flush:
                    self._file.flush()
            except OSError as error:
                self._failure = error


def _line(event: str, record: Header | TracedRequest | Eviction | Ending) -> str:
    values = {k: v for k, v in asdict(record).items() if v is not None}
    return json.dumps({"event": event, **values}, separators=(",", ":"), allow_nan=False) + "\n"


@contextmanager
def recording(engine: Engine, path: str | Path | None) -> Iterator[None]:
    """Write a trace of the requests that begin inside the block; None: none."""
    if path is None:
        yield
        return
    _check_silent(engine)  # before the file that it may be writing is emptied
    with TraceWriter(path, engine.manifest) as writer, listening(engine, writer):
        yield


@contextmanager
def listening(engine: Engine, recorder: Recorder) -> Iterator[None]:
    """Tell a recorder what an engine does inside the block; EngineError if it has one already."""
    _check_silent(engine)
    engine.recorder = recorder
    try:
        yield
    finally:
        engine.recorder = None


def _check_silent(engine: Engine) -> None:
    if engine.recorder is not None:
        raise EngineError("the engine is being traced already; end that trace first")


def _ragged(values: NDArray[Any], counts: NDArray[np.int32]) -> list[list[list[Any]]]:
    """Return the first `counts[l, r]` of `values` [L, R, N] as plain lists."""
    return [
        [row[:count].tolist() for row, count in zip(layer, numbers, strict=True)]
        for layer, numbers in zip(values, counts, strict=True)
    ]
