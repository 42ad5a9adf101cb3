"""Continuous batching: one thread drives the engine, any number of callers submit requests."""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Iterable
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from kvsift.builder.errors import EngineError, KvsiftError, QueueFullError
from kvsift.runtime.engine import Engine
from kvsift.runtime.params import check_integer
from kvsift.runtime.prefill import Prefill
from kvsift.runtime.request import Request, Update
from kvsift.runtime.sequence import Sequence
from kvsift.runtime.slots import Slot
from kvsift.runtime.stats import SchedulerStats
from kvsift.runtime.ticket import Ticket

Entry = tuple[Ticket, Sequence]


class Scheduler:
    """Runs requests on an engine as they come: they join and leave a running batch.

    First come, first served; no request holds more than one slot, however long its answer. A
    prompt is read in chunks, with a decode step of all running requests after every
    `prefill_chunks` of them, so decoding never stalls for longer. `max_queue` requests may wait
    while no slot is free. Any thread may call any method. The engine is its own until `close`.
    """

    def __init__(self, engine: Engine, *, max_queue: int = 256, prefill_chunks: int = 1) -> None:
        fix = "it is the requests that may wait while no slot is free"
        self.max_queue = check_integer("max_queue", max_queue, 0, fix)
        fix = "it is the chunks of prompts between two decode steps"
        self.prefill_chunks = check_integer("prefill_chunks", prefill_chunks, 1, fix)
        engine.claim("the requests of a scheduler", "submit to that one")
        self.engine = engine
        # Reentrant: garbage collection may close a scheduler in a thread that is in here.
        self._changed = threading.Condition(threading.RLock())
        self._queue: deque[Entry] = deque()
        self._reading: tuple[Ticket, Prefill] | None = None
        self._running: dict[int, Entry] = {}
        self._count = SchedulerStats(slots=engine.max_batch)
        self._closed: str | None = None
        self._thread = threading.Thread(target=self._work, name="kvsift-scheduler", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def submit(self, request: Request) -> Ticket:
        """Queue a request and return its ticket at once.

        Raises the KvsiftError of a bad request, QueueFullError when `max_queue` requests wait, and
        EngineError after `close`; nothing is queued then.
        """
        return self.submit_all([request])[0]

    def submit_all(self, requests: Iterable[Request], *, unlimited: bool = False) -> list[Ticket]:
        """Queue all of the requests, in their order, or none; errors as of `submit`.

        With `unlimited` they are never too many, for a caller who waits for all of them.
        """
        asked = list(requests)
        prepared = self.engine.prepare_all((0, request) for request in asked)
        made: list[Entry] = [
            (Ticket(0, request, sequence.prompt), sequence)
            for request, sequence in zip(asked, prepared, strict=True)
        ]
        with self._changed:
            try:
                if self._closed is not None:
                    raise EngineError(self._closed)
                if not unlimited:
                    self._check_queue(len(made))
            except KvsiftError:
                for sequence in prepared:
                    self.engine.leave(sequence)
                raise
            for ticket, sequence in made:
                ticket.index = sequence.index = self._count.submitted
                ticket.on_cancel(self._cancel)
                self._count.submitted += 1
                self._queue.append((ticket, sequence))
            self._changed.notify_all()
        return [ticket for ticket, _ in made]

    def stats(self) -> SchedulerStats:
        """Return the numbers of this moment."""
        with self._changed:
            count = self._count.copy()
            count.queued = len(self._queue)
            count.running = self._slots_taken()
            rows = sum(sequence.slot.rows_held for _, sequence in self._running.values())
        count.kv_bytes_used = round(rows * self.engine.kv_bytes_per_token)
        count.kv_bytes_capacity = self.engine.cache.nbytes
        count.scratch_bytes = self.engine.scratch.nbytes
        return count

    def close(self, drain: bool = False) -> None:
        """Take no more requests, cancel the open ones (with `drain`: finish them), and stop."""
        self.stop(drain)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        atexit.unregister(self.close)

    def stop(self, drain: bool = False) -> None:
        """Close without waiting for the engine's thread to end."""
        with self._changed:
            self._closed = self._closed or "the scheduler is closed; make a new one"
            if not drain:
                for ticket in self._open_tickets():
                    ticket.cancel()
            self._changed.notify_all()

    def _check_queue(self, count: int) -> None:
        """Raise QueueFullError if `count` more requests would be too many."""
        free = self.engine.max_batch - self._slots_taken()
        waiting = max(0, len(self._queue) - free)
        if len(self._queue) + count - free > self.max_queue:
            self._count.refused += count
            raise QueueFullError(
                f"{waiting} requests wait for a slot and max_queue allows {self.max_queue}; "
                "try again later, or raise max_queue"
            )

    def _slots_taken(self) -> int:
        return len(self._running) + (self._reading is not None)

    def _open_tickets(self) -> list[Ticket]:
        tickets = [ticket for ticket, _ in (*self._queue, *self._running.values())]
        return tickets if self._reading is None else [*tickets, self._reading[0]]

    def _cancel(self, ticket: Ticket) -> None:
        """End a waiting request at once; the engine's thread looks after the others."""
        with self._changed:
            for entry in self._queue:
                if entry[0] is ticket:
                    self._queue.remove(entry)
                    self._end_cancelled(*entry)
                    return

    # What follows runs in the engine's thread.

    def _work(self) -> None:
        try:
            while self._wait():
                self._drop_cancelled()
                for _ in range(self.prefill_chunks):
                    self._read()
                self._decode()
        except BaseException as error:  # a fault in here: nobody may wait for ever
            self._closed = f"the scheduler failed: {_said(error)}; make a new one"
            self._fail_all(error)
        finally:
            self.engine.release()
            atexit.unregister(self.close)

    def _wait(self) -> bool:
        """Wait for something to do; False when there will be nothing any more."""
        with self._changed:
            while not (self._queue or self._slots_taken()):
                if self._closed is not None:
                    return False
                self._changed.wait()
        return True

    def _drop_cancelled(self) -> None:
        """End what was cancelled since the last turn; its slot is free then."""
        with self._changed:
            if self._reading is not None and self._reading[0].cancelled:
                (ticket, prefill), self._reading = self._reading, None
                self._end_cancelled(ticket, prefill.sequence)
            for index, (ticket, sequence) in list(self._running.items()):
                if ticket.cancelled:
                    del self._running[index]
                    self._end_cancelled(ticket, sequence)

    def _end_cancelled(self, ticket: Ticket, sequence: Sequence) -> None:
        try:
            text = sequence.cancel()
            result = self.engine.result(sequence)
        except Exception as error:
            self._fail(ticket, error)
            return
        self._count.count_end(result)
        ticket.push(Update(ticket.index, text, result))

    def _read(self) -> None:
        """Read one chunk of the oldest prompt, if it has a slot."""
        reading = self._reading or self._admit()
        if reading is None:
            return
        ticket, prefill = reading
        sequence, before = prefill.sequence, _marks([prefill.source])
        unread, began = prefill.unread, time.perf_counter()
        try:
            logits = prefill.step()
        except Exception as error:  # what it wrote to its slot is never read
            with self._changed:
                self._reading = None
                self._fail(ticket, error)
            return
        self._count.prefill_s += time.perf_counter() - began
        self._count.prefill_chunks += 1
        self._count.prompt_tokens += unread - prefill.unread
        self._count_evictions(before, [prefill.source if logits is None else sequence.slot])
        if logits is not None:
            with self._changed:
                self._reading = None
                self._running[prefill.index] = ticket, sequence
            self._advance(prefill.index, logits)

    def _admit(self) -> tuple[Ticket, Prefill] | None:
        """Give the oldest waiting request the lowest free slot."""
        with self._changed:
            if not self._queue or len(self._running) == self.engine.max_batch:
                return None
            ticket, sequence = self._queue.popleft()
            index = next(i for i in range(self.engine.max_batch) if i not in self._running)
            try:
                self._reading = ticket, self.engine.begin(sequence, index)
            except Exception as error:
                self._fail(ticket, error)
            return self._reading

    def _decode(self) -> None:
        """Run one token of every running request."""
        sequences = [sequence for _, sequence in self._running.values()]
        if not sequences:
            return
        slots = [sequence.slot for sequence in sequences]
        before, began = _marks(slots), time.perf_counter()
        try:
            logits = self.engine.decode(sequences)
        except Exception as error:  # what the slots hold now is not known
            self._count.engine_failures += 1
            self._fail_all(error)
            return
        self._count.decode_s += time.perf_counter() - began
        self._count.decode_steps += 1
        self._count.decoded_tokens += len(slots)
        self._count_evictions(before, slots)
        for index in list(self._running):
            self._advance(index, logits[index])

    def _advance(self, index: int, logits: NDArray[np.float32]) -> None:
        """Choose the next token of the request in a slot and hand it out."""
        ticket, sequence = self._running[index]
        try:
            update = self.engine.advance(sequence, logits)
        except Exception as error:
            with self._changed:
                del self._running[index]
                self._fail(ticket, error)
            return
        with self._changed:
            self._count.count_tokens(sequence, len(update.token_ids))
            if update.result is not None:
                del self._running[index]
                self._count.count_end(update.result)
        ticket.push(update)

    def _count_evictions(self, before: tuple[int, float], slots: list[Slot]) -> None:
        steps, dropped = _marks(slots)
        self._count.evictions += steps - before[0]
        self._count.evicted_tokens += dropped - before[1]

    def _fail(self, ticket: Ticket, error: BaseException) -> None:
        """End one request with an error of its own."""
        self._count.failed += 1
        if ticket.request.session_id is not None:  # it stays as it was
            self.engine.conversations.release(ticket.request.session_id)
        if not isinstance(error, KvsiftError):
            cause, error = error, EngineError(f"request {ticket.index} failed: {_said(error)}")
            error.__cause__ = cause
        ticket.fail(error)

    def _fail_all(self, cause: BaseException) -> None:
        """End every open request with the engine's error."""
        with self._changed:
            tickets = self._open_tickets()
            self._queue.clear()
            self._running.clear()
            self._reading = None
            for ticket in tickets:
                error = EngineError(
                    f"the engine failed while it ran request {ticket.index} and "
                    f"{len(tickets) - 1} others: {_said(cause)}"
                )
                error.__cause__ = cause
                self._fail(ticket, error)


def _marks(slots: list[Slot]) -> tuple[int, float]:
    """Return how often slots have evicted, and how many tokens."""
    return sum(slot.steps for slot in slots), sum(slot.dropped for slot in slots)


def _said(error: BaseException) -> str:
    """Return an error's message on one line."""
    lines = str(error).splitlines()
    return (
        lines[0]
        if lines and isinstance(error, KvsiftError)
        else (f"{type(error).__name__}{': ' + lines[0] if lines else ''}")
    )
