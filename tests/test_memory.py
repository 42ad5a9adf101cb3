"""Memory: what caches take is what was told, and --kv-memory is never exceeded."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from engines import Engines, request
from kept import POLICIES, engine_of
from typer.testing import CliRunner

from kvsift import LLM, SamplingParams
from kvsift.builder.errors import CapacityError, UsageError
from kvsift.cli import app
from kvsift.runtime.engine import Engine
from kvsift.runtime.host_cache import HostCache
from kvsift.runtime.sizes import cache_bytes, row_tokens, scratch_tokens, sizes

UNEVEN = ["adakv-both", "nestedkv-both", "nexus-heads", "pyramidkv-both", "nexus-layers", "adakv"]


def taken(cache: Any) -> int:
    """Return the bytes of all arrays of a cache."""
    assert isinstance(cache, HostCache)
    arrays = [*cache.keys, *cache.values, *(a for s in cache.states.values() for a in s)]
    return sum(a.nbytes for a in arrays) + (0 if cache.ring is None else cache.ring.nbytes)


@pytest.mark.parametrize(
    "name", ["nexus", "nexus-per_head", "snapkv", "h2o", "expected_attention", "random", *UNEVEN]
)
def test_the_bytes_are_those_of_the_arrays(engines: Engines, name: str) -> None:
    manifest = engine_of(engines, name).manifest
    rows, told = row_tokens(manifest), sizes(manifest)
    assert taken(HostCache(manifest, 1, rows)) == told.slot == cache_bytes(manifest, rows)
    assert taken(HostCache(manifest, 3, rows)) == 3 * told.slot
    assert taken(HostCache(manifest, 1, scratch_tokens(manifest))) == told.scratch
    assert told.slot <= told.dense


@pytest.mark.parametrize("name", ["nexus", "h2o", "expected_attention"])
def test_memory_decides_the_slots(engines: Engines, name: str) -> None:
    package = engines.package(name, **POLICIES[name])
    told = sizes(Engine(package, max_batch=1, threads=1).manifest)
    for slots in (1, 2, 7):
        for more in (0, told.slot - 1):
            memory = told.scratch + slots * told.slot + more
            engine = Engine(package, kv_memory=memory, threads=1)
            assert engine.max_batch == slots
            requests = [request(200 + 57 * i, 300, stop_token_ids=[1]) for i in range(slots + 1)]
            engine.generate([*requests, request(600, 1)])
            assert taken(engine.cache) == slots * told.slot
            assert taken(engine.scratch) == told.scratch
    assert Engine(package, kv_memory=memory, max_batch=3, threads=1).max_batch == 3
    need = told.scratch + told.slot
    with pytest.raises(CapacityError, match=f"one sequence needs {need}: {told.slot} for its slot"):
        Engine(package, kv_memory=need - 1, threads=1)


@pytest.mark.parametrize("name", ["nexus", "nexus-prefill"])
def test_later_turns_stay_within_the_memory(engines: Engines, name: str) -> None:
    package = engines.package(name.split("-")[0], **POLICIES[name])
    told = sizes(Engine(package, max_batch=1, threads=1).manifest)
    engine = Engine(package, kv_memory=told.scratch + told.slot, threads=1)
    for tokens, new in ((500, 90), (150, 40), (100, 10)):
        engine.generate([dataclasses.replace(request(tokens, new), session_id="s")])
    assert taken(engine.cache) == told.slot
    assert taken(engine.scratch) <= told.scratch


@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_rows_stay_within_the_memory(engines: Engines, name: str) -> None:
    policy = POLICIES[name]
    options = policy.get("options", {}) | {"min_budget_tokens": 0}
    parts = policy | {"options": options}
    package = engines.package(name.split("-")[0], limits={"max_density": 0.4}, **parts)
    told = sizes(Engine(package, max_batch=1, threads=1).manifest)
    memory = told.scratch + 2 * told.slot + 5
    engine = Engine(package, kv_memory=memory, threads=1)
    assert engine.max_batch == 2
    draw = np.random.default_rng(0)
    for density in (0.4, 0.1, 0.4):
        for _ in range(3):
            sizes_ = draw.integers(50, 600, 3)
            engine.generate([request(int(n), 120, density=density) for n in sizes_])
    assert taken(engine.cache) + taken(engine.scratch) <= memory
    assert max(engine.cache.capacities) > min(row_tokens(engine.manifest)) / 4


def test_layers_of_a_request_stay_within_the_memory(engines: Engines) -> None:
    options = {"block_size": 8, "row_lengths": "layer", "min_budget_tokens": 0}
    package = engines.package("nexus", limits={"max_density": 0.4}, options=options)
    told = sizes(Engine(package, max_batch=1, threads=1).manifest)
    engine = Engine(package, kv_memory=told.scratch + 2 * told.slot, threads=1)
    wide = request(600, 50, density=0.4, layer_budgets=(3.0, 1.0))
    with pytest.raises(CapacityError, match="layer_budgets give layer 0 360 tokens, but kv_memory"):
        engine.prepare(0, wide)
    narrow = request(600, 50, density=0.2, layer_budgets=(3.0, 1.0))
    engine.generate([narrow, request(600, 50, density=0.4)])
    assert taken(engine.cache) <= 2 * told.slot
    Engine(package, max_batch=2, threads=1).generate([wide])  # grows as it must


def test_a_budget_beyond_the_slot_names_the_largest(engines: Engines) -> None:
    options = {"block_size": 8, "min_budget_tokens": 0}
    engine = engines("nexus", options=options, limits={"max_density": 0.4})
    for asked in ({"density": 0.9}, {"budget_tokens": 590}):
        with pytest.raises(CapacityError, match="keeps at most 240 when 200 follow; lower density"):
            engine.prepare(0, request(600, 200, **asked))
    engine.prepare(0, request(600, 200, budget_tokens=240))


def test_sizes_are_bytes_or_text(engines: Engines) -> None:
    package = engines.package("nexus")
    with LLM(package, kv_memory="8MiB", threads=1) as llm:
        assert llm.engine.max_batch == Engine(package, kv_memory=8 << 20).max_batch > 4
        assert llm.generate("a", SamplingParams(max_tokens=2))
    for wrong, words in ((0, "kv_memory"), ("lots", "8GiB"), (2.5, "kv_memory"), ("1KiB", "needs")):
        with pytest.raises(UsageError, match=words):
            LLM(package, kv_memory=wrong, threads=1)  # type: ignore[arg-type]


def test_the_command_line_refuses_too_little(engines: Engines) -> None:
    package = str(engines.package("nexus"))
    few = ["generate", package, "--prompt", "a", "--max-tokens", "1", "--kv-memory"]
    assert CliRunner().invoke(app, [*few, "1GiB"]).exit_code == 0
    done = CliRunner().invoke(app, [*few, "1KiB"])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "kv_memory is 1024 bytes, but one sequence needs" in done.stderr
