"""A server's hour in a minute: many callers, cancellations and bad inputs on four slots."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import Engines, probed, prompt, request, run_and_inspect
from kept import engine_of, same

from kvsift.builder.errors import UsageError
from kvsift.runtime.engine import Engine, Request
from kvsift.runtime.results import GenerationResult
from kvsift.runtime.scheduler import Scheduler

WAIT = 300  # seconds that nothing here takes
COUNT, SLOTS, CALLERS = 64, 4, 12
#: No tokenizer piece and no chance of 2000 random tokens makes one of these.
CANARIES = [f"qz{i:02d}xjv" for i in range(COUNT)]
BAD: list[Any] = [
    request("", 5), request([], 5), request([5, 512], 5), request(601, 5), request([5.5], 5),
    request(20, 5, pin=[(0, 21)]), request("half \ud800", 5),
    Request(None),  # type: ignore[arg-type]
]  # fmt: skip
#: Growth of the process that is not a leak: arenas and caches of ONNX Runtime and of Python.
SLACK_RSS, SLACK_TRACED = 8 << 20, 1 << 18


@dataclass
class Job:
    """A request, when to cancel it (after so many updates; None: never), and its solo run."""

    request: Request
    cancel_after: int | None
    solo: GenerationResult


@pytest.fixture(scope="module")
def engine(engines: Engines) -> Engine:
    return engine_of(engines, "nexus", max_batch=SLOTS)


def make_jobs(engine: Engine) -> list[Job]:
    """Mixed lengths, sampling and budgets; every prompt holds a canary of its own."""
    draw = random.Random(7)
    made = []
    for i in range(COUNT):
        length = draw.choice([1, 7, 8, 9, 60, 127, 128, 129, 300, 480])
        ids = prompt(length, seed=i) + engine.tokenizer.encode(f" {CANARIES[i]} ").ids
        one = request(
            ids + prompt(draw.randrange(40), seed=-i % 1000),
            draw.choice([0, 1, 2, 30, 70, 130]),
            seed=i,
            temperature=draw.choice([0.0, 0.0, 1.0]),
            density=draw.choice([0.1, 0.3, 0.6, 1.0]),
            logprobs=draw.choice([None, 2]),
        )
        cancel_after = draw.choice([0, 1, 5, 20]) if draw.random() < 0.3 else None
        made.append(Job(one, cancel_after, engine.generate([one])[0]))
    assert sum(job.solo.evictions for job in made) > COUNT
    engine.generate([request(600, 1)])  # the scratch grows to the longest prompt
    return made


def figures(result: GenerationResult) -> dict[str, Any]:
    """Return all of a result but its clock, and the size of a slot, which grows for all."""
    values = result.to_dict()
    return {k: v for k, v in values.items() if k not in ("timings", "kv_bytes_allocated")}


def check(index: int, job: Job, result: GenerationResult, text: str) -> None:
    assert result.text == text
    if result.finish_reason == "cancelled":
        assert job.cancel_after is not None
        assert result.token_ids == job.solo.token_ids[: len(result.token_ids)]
    else:
        assert figures(result) == figures(job.solo)
    assert not any(word in result.text for i, word in enumerate(CANARIES) if i != index)


def call(scheduler: Scheduler, index: int, job: Job) -> None:
    """Run a job as a thread does."""
    ticket = scheduler.submit(job.request)
    pieces = []
    if job.cancel_after == 0:
        ticket.cancel()
    for count, update in enumerate(ticket, 1):
        pieces.append(update.text)
        if count == job.cancel_after:
            ticket.cancel()
    check(index, job, ticket.result(WAIT), "".join(pieces))


async def acall(scheduler: Scheduler, index: int, job: Job) -> None:
    """Run a job as a coroutine does."""
    ticket = scheduler.submit(job.request)
    pieces = []
    if job.cancel_after == 0:
        ticket.cancel()
    async for update in ticket:
        pieces.append(update.text)
        if len(pieces) == job.cancel_after:
            ticket.cancel()
    check(index, job, await ticket, "".join(pieces))


def soak(scheduler: Scheduler, jobs: list[Job], seed: int) -> None:
    """Run all jobs in a random order, three quarters from threads, one from an event loop."""
    order = random.Random(seed).sample(range(len(jobs)), len(jobs))
    on_loop, on_threads = order[::4], [i for i in order if i not in order[::4]]

    async def coroutines() -> None:
        await asyncio.gather(*(acall(scheduler, i, jobs[i]) for i in on_loop))

    def refused(bad: Request) -> None:
        with pytest.raises(UsageError):
            scheduler.submit(bad)

    with ThreadPoolExecutor(CALLERS + 1) as pool:
        ends = [pool.submit(asyncio.run, asyncio.wait_for(coroutines(), WAIT))]
        for count, i in enumerate(on_threads):
            ends.append(pool.submit(call, scheduler, i, jobs[i]))
            if count % 4 == 0:
                ends.append(pool.submit(refused, BAD[count // 4 % len(BAD)]))
        for end in ends:
            end.result(WAIT)


def no_slot_is_lost(scheduler: Scheduler) -> None:
    """Assert that nothing runs, and that every slot can run something at once."""
    stats = scheduler.stats()
    assert (stats.running, stats.queued, stats.failed, stats.kv_bytes_used) == (0, 0, 0, 0)
    endless = [scheduler.submit(request(5, 1 << 40)) for _ in range(SLOTS)]
    try:
        assert all(next(iter(ticket)) for ticket in endless)
        assert scheduler.stats().running == SLOTS
    finally:
        for ticket in endless:
            ticket.cancel()
    assert {t.result(WAIT).finish_reason for t in endless} == {"cancelled"}


def memory() -> tuple[int, int]:
    """Return what Python and numpy have allocated, and the process's resident bytes."""
    gc.collect()
    statm = Path("/proc/self/statm")
    resident = int(statm.read_text().split()[1]) * 4096 if statm.exists() else 0
    return tracemalloc.get_traced_memory()[0], resident


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nexus", "nestedkv-both"])  # even rows, and heads of their own
def test_soak(engines: Engines, name: str) -> None:
    engine = engine_of(engines, name, max_batch=SLOTS)
    jobs = make_jobs(engine)
    sizes = engine.cache.nbytes, engine.scratch.nbytes
    tracemalloc.start()
    try:
        with Scheduler(engine, max_queue=COUNT) as scheduler:
            soak(scheduler, jobs, 0)
            traced, resident = memory()
            for seed in (1, 2):
                soak(scheduler, jobs, seed)
            engine.cache.poison = engine.scratch.poison = True  # stale rows are NaN from here
            soak(scheduler, jobs, 3)
            no_slot_is_lost(scheduler)
            later = memory()
            stats = scheduler.stats()
    finally:
        engine.cache.poison = engine.scratch.poison = False
        tracemalloc.stop()
    assert stats.submitted == 4 * COUNT + SLOTS
    assert stats.finished + stats.cancelled == stats.submitted
    assert stats.cancelled > 4 * 4
    assert (engine.cache.nbytes, engine.scratch.nbytes) == sizes
    assert later[0] - traced < SLACK_TRACED
    assert later[1] - resident < SLACK_RSS
    assert threading.active_count() < CALLERS


def test_fifty_repeats_among_others_are_bitwise_equal(engine: Engine) -> None:
    one = request(300, 40, seed=3, density=0.3)
    draw = random.Random(1)
    with probed(engine) as probe, Scheduler(engine) as scheduler:
        repeats = []
        for _ in range(50):
            for _ in range(draw.randrange(3)):
                scheduler.submit(request(draw.randrange(1, 400), draw.randrange(90)))
            repeats.append(scheduler.submit(one))
        for ticket in repeats:
            ticket.result(WAIT)
        scheduler.close(drain=True)
    traces = [probe.traces[ticket.index] for ticket in repeats]
    assert {trace.slot for trace in traces} == set(range(SLOTS))
    assert len(traces[0].kept) > 3
    for trace in traces:
        assert trace.wrong_rows == 0
        assert trace.kept_sets() == traces[0].kept_sets()
        assert np.array_equal(trace.logits, traces[0].logits)


@pytest.mark.parametrize("name", ["nexus", "nexus-heads", "snapkv-both", "h2o", "nestedkv-both"])
def test_order_batch_and_slot_do_not_change_the_kept_sets(engines: Engines, name: str) -> None:
    engine = engine_of(engines, name, max_batch=3)
    requests = [request(60 + 80 * i, 50, seed=i, density=0.2) for i in range(6)]
    alone = [run_and_inspect(engine, [one])[0] for one in requests]
    assert all(trace.kept for trace in alone)
    slots: set[tuple[int, int]] = set()
    for seed in range(3):
        order = random.Random(seed).sample(range(6), 6)
        with probed(engine) as probe, Scheduler(engine) as scheduler:
            tickets = {i: scheduler.submit(requests[i]) for i in order}
            scheduler.close(drain=True)
        for i, ticket in tickets.items():
            trace = probe.traces[ticket.index]
            assert trace.wrong_rows == 0
            same(alone[i], trace)
            slots.add((i, trace.slot))
    assert len(slots) > len(requests) + 2
