"""Prompts longer than the scratch: evicted at chunk boundaries, within a fixed memory."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from commands import build, is_error
from engines import Engines, prompt, request, run_and_inspect
from kept import POLICIES, forced_ids, same

from kvsift.builder.errors import CapacityError
from kvsift.runtime.engine import Engine
from kvsift.runtime.recorder import recording
from kvsift.runtime.scheduler import Scheduler
from kvsift.runtime.trace import read_trace

SHORT = {"max_scratch": 256}
STREAMED = [n for n in POLICIES if n != "nexus-decode"]


def engine_of(engines: Engines, name: str, limits: Any = None) -> Engine:
    return engines(name.split("-")[0], **POLICIES[name], limits=SHORT | (limits or {}))


@pytest.mark.parametrize("name", STREAMED)
def test_a_prompt_streams_through_a_short_scratch(
    engines: Engines, name: str, tmp_path: Any
) -> None:
    engine = engine_of(engines, name)
    ask = request(600, 40, budget_tokens=96)
    with recording(engine, tmp_path / "t.jsonl"):
        (trace,) = run_and_inspect(engine, [ask])
    assert trace.result is not None
    events = read_trace(tmp_path / "t.jsonl").evictions
    # Chunks of 128: the second one fills the scratch, and each later one after an eviction to 96.
    prefill = [e.tokens_seen for e in events if e.phase == "chunk"]
    assert prefill[:1] == [256]
    assert set(prefill) <= {256, 384, 512}
    assert [e.tokens_seen for e in events if e.phase == "prompt"] == [600]
    size = engine.manifest.policy.block_size
    if engine.manifest.policy.shared_lens:
        assert engine.scratch.capacity <= 256
    for event in events:
        forced = forced_ids(engine.manifest, event.tokens_seen)
        for layer in event.kept:
            assert all(forced <= set(row) for row in layer)
        total = sum(len(row) for layer in event.kept for row in layer)
        assert total * size == trace.result.budget_tokens * sum(len(layer) for layer in event.kept)
    (again,) = run_and_inspect(engine, [ask], poison=True)
    same(trace, again)


@pytest.mark.parametrize("name", ["nexus", "h2o", "adakv-both", "expected_attention", "morphkv"])
def test_what_fits_the_scratch_is_not_touched_by_it(engines: Engines, name: str) -> None:
    whole = engines(name.split("-")[0], **POLICIES[name])
    short = engine_of(engines, name)
    for ask in (request(256, 60), request(100, 60)):
        same(run_and_inspect(whole, [ask])[0], run_and_inspect(short, [ask])[0])


def test_a_stream_in_a_batch_equals_itself_alone(engines: Engines) -> None:
    engine = engine_of(engines, "nexus")
    asked = [request(600, 60), request(200, 90), request(550, 30)]
    alone = [engine.generate([r])[0] for r in asked]
    with Scheduler(engine) as scheduler:
        together = [t.result(120) for t in scheduler.submit_all(asked)]
    assert [r.token_ids for r in alone] == [r.token_ids for r in together]
    assert [r.evictions for r in alone] == [r.evictions for r in together]


def test_pins_and_needles_at_the_front_stay_in_a_stream(engines: Engines) -> None:
    engine = engine_of(engines, "nexus")
    (trace,) = run_and_inspect(engine, [request(600, 5, budget_tokens=96, pin=[(40, 60)])])
    assert all({5, 6, 7} <= set(row) for row in trace.ids.reshape(-1, trace.ids.shape[-1]).tolist())


def test_the_guardrail_leaves_room_for_the_next_chunk(engines: Engines) -> None:
    engine = engine_of(engines, "nexus")
    (trace,) = run_and_inspect(engine, [request(600, 5, budget_tokens=64, min_coverage=0.999)])
    assert trace.result is not None
    assert trace.result.guardrail == "exhausted"
    assert trace.result.budget_raised_tokens > 0
    assert len(trace.result.coverages) == 5
    assert engine.scratch.capacity <= 256


def test_a_session_streams_what_its_scratch_cannot_hold(engines: Engines) -> None:
    engine = engine_of(engines, "nexus")
    results = []
    for number in range(3):
        ask = replace(request(prompt(300, number), 20, budget_tokens=96), session_id="long")
        results += engine.generate([ask])
    assert engine.scratch.capacity <= 256
    assert [r.prompt_tokens for r in results] == [300, 620, 940]
    engine.conversations.drop("long")


def test_a_budget_beyond_the_scratch_is_refused(engines: Engines) -> None:
    engine = engine_of(engines, "nexus")
    with pytest.raises(
        CapacityError, match=r"needs 600 rows .* scratch of 256, .* at most 128 tok"
    ):
        engine.generate([request(600, 5, budget_tokens=136)])
    assert engine.generate([request(200, 5, budget_tokens=136)])[0].budget_tokens == 136


def test_a_scratch_in_bounded_memory_does_not_grow(engines: Engines) -> None:
    free = engines("full", limits={"max_input": 128, "max_output": 300})
    bounded = Engine(free.directory, threads=1, kv_memory=1 << 30, max_batch=1)
    asked = [replace(request(100, 20), session_id="g"), replace(request(90, 20), session_id="g")]
    for engine in (free, bounded):
        engine.generate(asked[:1])
    assert free.generate(asked[1:])[0].prompt_tokens == 210
    with pytest.raises(CapacityError, match=r"take a scratch of 338 rows, and kv_memory .* of 128"):
        bounded.generate(asked[1:])
    assert bounded.scratch.capacity == 128
    heads = engine_of(engines, "adakv-both")  # a head may win twice its budget
    tight = Engine(heads.directory, threads=1, kv_memory=1 << 30, max_batch=1)
    ask = request(600, 5, budget_tokens=96)
    assert heads.generate([ask])[0].budget_tokens == 96
    with pytest.raises(CapacityError, match=r"take a scratch of 320 rows"):
        tight.generate([ask])
    assert tight.generate([request(600, 5, budget_tokens=64)])[0].budget_tokens == 64


def test_build_checks_the_scratch(engines: Engines, tmp_path: Any) -> None:
    model = engines.model("tiny")
    small = ("--max-input", "600", "--chunk", "128", "-o", tmp_path / "e")
    options = (*small, "--set", "min_budget_tokens=0", "--set", "block_size=8")
    is_error(
        build(model, *options, "--max-scratch", "200"), 2, "--max-scratch 200 must hold", "give 256"
    )
    is_error(build(model, *options, "--max-scratch", "256", "--scope", "decode"), 2, "scope both")
    done = build(model, *options, "--max-scratch", "300", "--density", "0.2")
    assert done.exit_code == 0, done.output
    engine = Engine(tmp_path / "e", threads=1)
    assert engine.manifest.limits.max_scratch == 256
    assert engine.generate([request(600, 3)])[0].evictions > 2


@pytest.mark.slow
def test_64k_tokens_in_constant_memory(engines: Engines) -> None:
    """A prompt eight times as long takes not a byte of cache more, and hardly one of anything."""
    limits = {"max_input": 65536, "max_output": 64, "chunk": 1024, "max_scratch": 4096,
              "max_batch": 1, "max_density": 0.04, "density": 0.04}  # fmt: skip
    engine = engines("nexus", model="131072", limits=limits)
    peaks = []
    for length in (8192, 65536):
        tracemalloc.start()
        (result,) = engine.generate([request(length, 40, budget_tokens=2048)])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert result.budget_tokens == 2048
        assert len(result.token_ids) == 40
        assert engine.scratch.capacities == [4096, 4096]
        # An eviction to 2048 rows every other chunk, and one at the end.
        assert result.evictions >= length / 2048 - 1
    assert engine.cache.nbytes == engine.cache.capacity * engine.kv_bytes_per_token
    assert peaks[1] < peaks[0] + 16 * 65536  # token ids are all that grows
    assert np.isfinite(peaks).all()
