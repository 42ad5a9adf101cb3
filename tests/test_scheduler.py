"""The scheduler: who runs when, cancelling, limits, errors, and what it counts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from engines import Engines, request

from kvsift.builder.errors import QueueFullError, UsageError
from kvsift.runtime.engine import Engine
from kvsift.runtime.prefill import Prefill
from kvsift.runtime.scheduler import Scheduler
from kvsift.runtime.sequence import Sequence

WAIT = 300  # seconds that nothing here takes


@pytest.fixture
def engine(engines: Engines) -> Engine:
    return engines("nexus", options={"block_size": 8}, max_batch=2)


@pytest.fixture
def scheduler(engine: Engine) -> Iterator[Scheduler]:
    with Scheduler(engine) as made:
        yield made


class Gate:
    """Holds the engine's thread before every step until it is let go."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[str] = []
        self._tokens = threading.Semaphore(0)
        self._arrived = threading.Semaphore(0)
        self._open = False
        monkeypatch.setattr(Prefill, "step", self._held(Prefill.step, "chunk"))
        decode = self._held(engine.decode, "decode")
        monkeypatch.setattr(engine, "decode", decode, raising=False)

    def _held(self, call: Any, name: str) -> Any:
        def held(*args: Any) -> Any:
            self._arrived.release()
            if not self._open:
                assert self._tokens.acquire(timeout=WAIT)
            self.steps.append(name)
            return call(*args)

        return held

    def at_step(self) -> None:
        """Wait until the engine's thread is about to take a step."""
        assert self._arrived.acquire(timeout=WAIT)

    def step(self) -> None:
        """Let it take that one step and wait for the next."""
        self._tokens.release()
        self.at_step()

    def release(self) -> None:
        """Let it go on."""
        self._open = True
        self._tokens.release()


@pytest.fixture
def gate(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(engine, monkeypatch)


def test_results_are_those_of_the_engine(engine: Engine) -> None:
    requests = [request(50 + 70 * i, 30 + 9 * (i % 3), seed=i) for i in range(7)]
    alone = [engine.generate([one])[0] for one in requests]
    with Scheduler(engine) as scheduler:
        tickets = [scheduler.submit(one) for one in requests]
        for ticket, want in zip(tickets, alone, strict=True):
            got = ticket.result(WAIT)
            assert (got.token_ids, got.text, got.kept_tokens) == (
                want.token_ids, want.text, want.kept_tokens
            )  # fmt: skip
            updates = list(ticket)
            assert "".join(u.text for u in updates) == want.text
            assert [t for u in updates for t in u.token_ids] == list(want.token_ids)
            assert [u.result for u in updates][-1] is got
            assert {u.index for u in updates} == {ticket.index}
    assert [t.index for t in tickets] == list(range(7))


def test_chunks_of_a_prompt_and_decode_steps_take_turns(engine: Engine, gate: Gate) -> None:
    with Scheduler(engine) as scheduler:
        first = scheduler.submit(request(10, 40))
        gate.at_step()
        gate.step()
        second = scheduler.submit(request(600, 2))  # five chunks of 128
        gate.release()
        for ticket in (first, second):
            ticket.result(WAIT)
    start = gate.steps.index("chunk", 1)
    assert gate.steps[start : start + 10] == ["chunk", "decode"] * 5


@pytest.mark.parametrize("chunks", [2, 3])
def test_the_bound_on_chunks_can_be_raised(engine: Engine, gate: Gate, chunks: int) -> None:
    with Scheduler(engine, prefill_chunks=chunks) as scheduler:
        first = scheduler.submit(request(10, 40))
        gate.at_step()
        gate.step()
        second = scheduler.submit(request(600, 2))
        gate.release()
        for ticket in (first, second):
            ticket.result(WAIT)
    start = gate.steps.index("chunk", 1)
    assert gate.steps[start : start + chunks + 1] == ["chunk"] * chunks + ["decode"]


def test_a_huge_answer_starves_nobody(scheduler: Scheduler) -> None:
    huge = scheduler.submit(request(20, 1 << 40, seed=1))
    others = [scheduler.submit(request(30 + i, 5, seed=i)) for i in range(8)]
    results = [ticket.result(WAIT) for ticket in others]
    assert all(len(r.token_ids) == 5 for r in results)
    assert not huge.done
    huge.cancel()
    assert huge.result(WAIT).finish_reason == "cancelled"


def test_first_come_first_served(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []
    begin = engine.begin

    def watched(sequence: Sequence, index: int) -> Prefill:
        begun.append(sequence.index)
        return begin(sequence, index)

    monkeypatch.setattr(engine, "begin", watched, raising=False)
    with Scheduler(engine) as scheduler:
        tickets = [scheduler.submit(request(200 - 20 * i, 1 + 5 * (i % 3))) for i in range(9)]
        for ticket in tickets:
            ticket.result(WAIT)
    assert begun == list(range(9))


def test_a_cancelled_request_frees_its_slot(engine: Engine, gate: Gate) -> None:
    alone = request(150, 12, seed=9)
    with Scheduler(engine) as scheduler:
        running = scheduler.submit(request(10, 500))
        gate.at_step()
        gate.step()
        assert not running.done
        reading = scheduler.submit(request(600, 5))
        gate.step()  # the first chunk of five
        gate.step()  # a decode step
        queued = [scheduler.submit(request(40, 5)) for _ in range(2)]
        queued[0].cancel()  # at once, while the engine's thread is in a step
        assert queued[0].result(0).finish_reason == "cancelled"
        assert scheduler.stats().queued == 1
        reading.cancel()
        running.cancel()
        last = scheduler.submit(alone)
        gate.release()
        ended = [t.result(WAIT) for t in (running, reading)]
        assert queued[1].result(WAIT).finish_reason == "length"
        together = last.result(WAIT)
        stats = scheduler.stats()
    assert [r.finish_reason for r in ended] == ["cancelled"] * 2
    assert len(ended[0].token_ids) == len([u for u in running if u.token_ids]) > 1
    assert ended[1].token_ids == ()
    assert (ended[1].kept_tokens, ended[1].kv_bytes, ended[1].evictions) == (0, 0, 0)
    assert (stats.cancelled, stats.finished, stats.running, stats.queued) == (3, 2, 0, 0)
    assert together.token_ids == engine.generate([alone])[0].token_ids
    running.cancel()  # nothing any more
    assert running.result(0) is ended[0]


def test_a_full_queue_refuses(engine: Engine, gate: Gate) -> None:
    with Scheduler(engine, max_queue=1) as scheduler:
        tickets = [scheduler.submit(request(10, 5)) for _ in range(3)]
        with pytest.raises(QueueFullError, match="1 requests wait for a slot and max_queue allows"):
            scheduler.submit(request(10, 5))
        with pytest.raises(QueueFullError, match="max_queue"):
            scheduler.submit_all([request(10, 5)] * 2)
        tickets += scheduler.submit_all([request(10, 5)] * 4, unlimited=True)
        assert scheduler.stats().refused == 3
        gate.release()
        for ticket in tickets:
            ticket.result(WAIT)
        scheduler.submit(request(10, 1)).result(WAIT)
        assert scheduler.stats().submitted == 8


def test_the_numbers_add_up(engine: Engine) -> None:
    with Scheduler(engine) as scheduler:
        start = scheduler.stats()
        tickets = [scheduler.submit(request(n, 50, seed=n)) for n in (20, 300, 450)]
        seen = scheduler.stats()
        assert seen.submitted == seen.finished + seen.running + seen.queued == 3
        results = [ticket.result(WAIT) for ticket in tickets]
        end = scheduler.stats()
    assert (start.submitted, start.ttft.count, start.kv_bytes_used) == (0, 0, 0)
    assert (end.finished, end.queued, end.running, end.slots) == (3, 0, 0, 2)
    assert (end.prompt_tokens, end.generated_tokens) == (770, 150)
    assert (end.decoded_tokens, end.prefill_chunks) == (147, 1 + 3 + 4)
    assert end.evictions == sum(r.evictions for r in results) > 6
    gone = sum(r.prompt_tokens + len(r.token_ids) - 1 - r.kept_tokens for r in results)
    assert round(end.evicted_tokens) == gone > 0
    assert (end.ttft.count, end.itl.count) == (3, 147)
    assert end.ttft.cumulative[-1] == 3
    assert end.ttft.total == pytest.approx(sum(r.timings.ttft_s for r in results))
    assert end.itl.total == pytest.approx(sum(sum(r.timings.itl_s) for r in results))
    assert end.kv_bytes_capacity == engine.cache.nbytes
    assert end.kv_bytes_used == 0
    assert end.decode_s > 0 < end.prefill_s


def test_running_requests_count_their_bytes(engine: Engine, gate: Gate) -> None:
    with Scheduler(engine) as scheduler:
        scheduler.submit(request(100, 500, density=1.0))
        gate.at_step()
        gate.step()
        assert scheduler.stats().kv_bytes_used == 100 * engine.kv_bytes_per_token
        gate.step()
        assert scheduler.stats().kv_bytes_used == 101 * engine.kv_bytes_per_token
        gate.release()


@pytest.mark.parametrize(("name", "value"), [("max_queue", -1), ("prefill_chunks", 0)])
def test_limits_are_checked(engine: Engine, name: str, value: int) -> None:
    with pytest.raises(UsageError, match=name):
        Scheduler(engine, **{name: value})
    engine.generate([request(10, 2)])  # still free
