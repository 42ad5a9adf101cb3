"""How requests and schedulers end: errors, waiting, closing; and who is told."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from engines import Engines, request

from kvsift.builder.errors import CapacityError, EngineError, UsageError
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


def test_a_bad_request_is_refused_at_once_and_queues_nothing(scheduler: Scheduler) -> None:
    for bad, kind in (
        (request("", 5), UsageError),
        (request([512], 5), UsageError),
        (request(601, 5), CapacityError),
        (request(20, 5, pin=[(0, 21)]), UsageError),
    ):
        with pytest.raises(kind):
            scheduler.submit(bad)
        with pytest.raises(kind):
            scheduler.submit_all([request(20, 5), bad])
    assert scheduler.stats().submitted == 0
    assert scheduler.submit(request(20, 5)).result(WAIT).finish_reason == "length"


@pytest.mark.parametrize("where", ["begin", "advance"])
def test_an_error_in_one_request_ends_that_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    right = getattr(engine, where)
    calls = []

    def wrong(sequence: Sequence, *rest: Any) -> Any:
        if sequence.index == 1:
            calls.append(1)
            if where == "begin" or len(calls) > 3:
                raise ValueError("a fault\nof this request")
        return right(sequence, *rest)

    requests = [request(60 + i, 12, seed=i) for i in range(4)]
    alone = [engine.generate([one])[0].token_ids for one in requests]
    monkeypatch.setattr(engine, where, wrong, raising=False)
    with Scheduler(engine) as scheduler:
        tickets = [scheduler.submit(one) for one in requests]
        for i in (0, 2, 3):
            assert tickets[i].result(WAIT).token_ids == alone[i]
        with pytest.raises(EngineError, match=r"^request 1 failed: ValueError: a fault$"):
            tickets[1].result(WAIT)
        updates = []
        with pytest.raises(EngineError, match="a fault"):
            updates.extend(tickets[1])
        assert scheduler.stats().failed == 1
        assert scheduler.stats().running == 0


def test_a_failing_chunk_ends_that_request_only(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Prefill.step

    def wrong(self: Prefill) -> Any:
        if self.sequence.index == 1 and self.source.seen:
            raise MemoryError
        return step(self)

    monkeypatch.setattr(Prefill, "step", wrong)
    requests = [request(300, 12, seed=i) for i in range(3)]
    with Scheduler(engine) as scheduler:
        tickets = [scheduler.submit(one) for one in requests]
        with pytest.raises(EngineError, match=r"^request 1 failed: MemoryError$"):
            tickets[1].result(WAIT)
        tokens = [tickets[i].result(WAIT).token_ids for i in (0, 2)]
    assert tokens == [engine.generate([requests[i]])[0].token_ids for i in (0, 2)]


def test_an_engine_failure_ends_every_open_request_and_no_later_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, broken = engine.decode, threading.Event()

    def wrong(sequences: list[Sequence]) -> Any:
        if broken.is_set():
            raise EngineError("the step failed: out of luck")
        return decode(sequences)

    monkeypatch.setattr(engine, "decode", wrong, raising=False)
    with Scheduler(engine) as scheduler:
        tickets = [scheduler.submit(request(40 + i, 1 << 30)) for i in range(5)]
        next(iter(tickets[1]))
        broken.set()
        for ticket in tickets:
            with pytest.raises(EngineError, match=r"engine failed .* step failed: out of luck"):
                ticket.result(WAIT)
        broken.clear()
        result = scheduler.submit(request(40, 20)).result(WAIT)
        stats = scheduler.stats()
    assert (stats.failed, stats.finished, stats.engine_failures) == (5, 1, 1)
    assert result.token_ids == engine.generate([request(40, 20)])[0].token_ids


def test_a_fault_of_the_scheduler_itself_leaves_nobody_waiting(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(self: Scheduler) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Scheduler, "_decode", wrong)
    scheduler = Scheduler(engine)
    ticket = scheduler.submit(request(40, 20))
    with pytest.raises(EngineError, match="a bug"):
        ticket.result(WAIT)
    scheduler.close()
    with pytest.raises(EngineError, match="the scheduler failed: RuntimeError: a bug"):
        scheduler.submit(request(40, 20))
    engine.generate([request(40, 2)])  # it gave the engine back


def test_closing_cancels_or_drains(engine: Engine) -> None:
    for drain, reasons in ((False, {"cancelled"}), (True, {"length"})):
        scheduler = Scheduler(engine)
        tickets = [scheduler.submit(request(100, 250, seed=i)) for i in range(4)]
        scheduler.close(drain=drain)
        assert {t.result(0).finish_reason for t in tickets} == reasons
        with pytest.raises(EngineError, match="the scheduler is closed; make a new one"):
            scheduler.submit(request(10, 5))
        scheduler.close()


def test_an_engine_has_one_driver(engine: Engine) -> None:
    with Scheduler(engine):
        with pytest.raises(EngineError, match="answering the requests of a scheduler; submit to"):
            Scheduler(engine)
        with pytest.raises(EngineError, match="the requests of a scheduler"):
            engine.generate([request(10, 5)])
    engine.generate([request(10, 5)])


def test_any_event_loop_and_any_thread_may_wait(scheduler: Scheduler) -> None:
    one = request(100, 40, seed=3)
    want = scheduler.submit(one).result(WAIT)
    got: list[Any] = []

    async def read(index: int) -> None:
        ticket = scheduler.submit(one)
        if index % 2:
            got.append((await ticket).token_ids)
            assert (await ticket.aresult()) is ticket.result(0)
        else:
            got.append(tuple([t async for u in ticket for t in u.token_ids]))

    async def several() -> None:
        await asyncio.wait_for(asyncio.gather(*map(read, range(4))), WAIT)

    threads = [threading.Thread(target=asyncio.run, args=(several(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert got == [want.token_ids] * 12


def test_waiting_has_an_end(scheduler: Scheduler) -> None:
    ticket = scheduler.submit(request(100, 1 << 40))
    with pytest.raises(TimeoutError, match=r"request 0 still runs after 0\.01 s"):
        ticket.result(0.01)

    async def impatient() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(ticket.aresult(), 0.01)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(collect(), 0.01)

    async def collect() -> None:
        async for _ in ticket:
            pass

    asyncio.run(impatient())
    assert len(ticket._end_wakers) == 0
    ticket.cancel()
    assert ticket.result(WAIT).finish_reason == "cancelled"


def test_a_forgotten_scheduler_does_not_keep_a_program_alive(engines: Engines) -> None:
    program = (
        "import sys; from kvsift.runtime.engine import Engine, Request\n"
        "from kvsift.runtime.scheduler import Scheduler\n"
        "from kvsift.runtime.params import SamplingParams\n"
        "s = Scheduler(Engine(sys.argv[1], threads=1))\n"
        "t = s.submit(Request([5, 6], SamplingParams(max_tokens=1 << 40, ignore_eos=True)))\n"
        "next(iter(t)); print('left')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(engines.package("nexus"))],
        capture_output=True, text=True, timeout=WAIT, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "left\n", "")
