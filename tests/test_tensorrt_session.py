"""The TensorRT session on a device that is the host, against ONNX Runtime's session."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_device import CpuDevice, view
from device_engines import cpu_device, on_cpu, package
from engines import Engines, Trace, request, run_and_inspect
from kept import POLICIES

from kvsift.builder.errors import CapacityError, EngineError
from kvsift.builder.package import PLAN, Manifest, TensorRTBuild, load_manifest
from kvsift.runtime.cache import KEY, VALUE
from kvsift.runtime.engine import Engine, Request
from kvsift.runtime.scheduler import Scheduler
from kvsift.runtime.sessions import Evictions, Step
from kvsift.runtime.sessions import tensorrt as sessions
from kvsift.runtime.sessions.choice import open_session
from kvsift.runtime.sessions.profiles import fit

BLOCKS = {"options": {"block_size": 8}}


@pytest.fixture(scope="module")
def nexus(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package(engines, tmp_path_factory.mktemp("device") / "nexus", "nexus", **BLOCKS)


def same(got: list[Trace], want: list[Trace]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.kept_sets() == theirs.kept_sets()
        np.testing.assert_allclose(np.array(ours.logits), np.array(theirs.logits), atol=2e-4)


def mixed() -> list[Request]:
    """More than there are slots, of many lengths, one with a pinned span."""
    return [
        request(300, 60, seed=7),
        request(90, 40, seed=2, pin=[(50, 60)], density=0.7),
        request(200, 50),
        request(1, 30),
        request(257, 20, density=0.5),
        request(128, 40),
    ]


@pytest.mark.parametrize("name", ["full", *POLICIES])
def test_tokens_and_kept_sets_equal_onnx_runtime(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    policy, options = name.split("-")[0], POLICIES.get(name, {})
    requests = mixed()
    if name == "full":
        requests = [request(300, 60), request(90, 40), request(1, 30)]
    want = run_and_inspect(engines(policy, **options), requests)
    directory = package(engines, tmp_path / "engine", policy, **options)
    with on_cpu(directory, monkeypatch) as (engine, device):
        same(run_and_inspect(engine, requests), want)
        assert any(t.kept for t in want) == (name != "full")
        # Most decode steps are recorded ones.
        assert device.replays > len(device.ran) / 2
        moved = set(device.launches)
        blocks = engine.manifest.policy.block_size > 1 and engine.manifest.policy.in_decode
        assert ("kv_fill_holes" in moved) == blocks
        assert "kv_gather" in moved


def test_each_number_of_evicting_slots_is_recorded_once(
    engines: Engines, nexus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three sequences in step evict together: E is padded to four, then replayed."""
    requests = [request(300, 80, seed=s) for s in range(3)]
    with on_cpu(nexus, monkeypatch) as (engine, device):
        got = run_and_inspect(engine, requests)
        recorded = [c for c in device.contexts if c.recorded]
        shapes = {
            (c.bound["input_ids"][1], c.bound["evict_slots"][1], c.bound["unit_ids"][1][-1])
            for c in recorded
        }
        units = engine.cache.capacity // 8
        assert shapes == {((4, 1), (0,), units), ((4, 1), (4,), units)}
        assert len(recorded) == len(shapes)
        (evicting,) = (c for c in recorded if c.bound["evict_slots"][1] == (4,))
        # Kernels skip a slot of -1.
        assert view(evicting.bound["evict_slots"][0], 16).view(np.int32).tolist() == [0, 1, 2, -1]
        steps, launches = device.replays, len(device.contexts)
        same(run_and_inspect(engine, requests), got)
        assert len(device.contexts) == launches
        assert device.replays - steps > 78  # every decode step of the second run
    same(got, run_and_inspect(engines("nexus", **BLOCKS), requests))


def test_chunks_of_prompts_between_decode_steps(
    engines: Engines, nexus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the scheduler prompts of five chunks are read while others decode."""
    requests = [request(50 + 90 * i, 30 + 9 * (i % 3), seed=i) for i in range(7)]
    want = engines("nexus", **BLOCKS).generate(requests)
    with on_cpu(nexus, monkeypatch) as (engine, device):
        with Scheduler(engine) as scheduler:
            tickets = [scheduler.submit(one) for one in requests]
            scheduler.submit(request(400, 300)).cancel()
            got = [ticket.result(120.0) for ticket in tickets]
        assert [r.token_ids for r in got] == [r.token_ids for r in want]
        assert [r.kept_tokens for r in got] == [r.kept_tokens for r in want]
        assert device.replays


def test_a_long_prompt_leaves_no_long_scratch(nexus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention pays for the capacity, so a short prompt must not get that of the one before."""
    with on_cpu(nexus, monkeypatch) as (engine, device):
        engine.generate([request(40, 1)])
        before = device.bytes_now
        engine.generate([request(600, 1)])
        assert engine.scratch.capacity == 640
        engine.generate([request(40, 1)])
        assert engine.scratch.capacity == 128
        device.synchronize()
        assert device.bytes_now - before < engine.scratch.nbytes  # a larger block for unit ids


def test_nothing_of_an_earlier_request_reaches_a_later_one(
    nexus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in every row of the slots and the scratch changes nothing of what comes."""
    requests = [request(300, 60, seed=7), request(1, 20)]
    with on_cpu(nexus, monkeypatch) as (engine, _):
        want = run_and_inspect(engine, requests)
        for cache in (engine.cache, engine.scratch):
            for slot, layer in np.ndindex(cache.slots, 2):
                rows = {n: np.full_like(cache.read(slot, layer)[n], np.nan) for n in (KEY, VALUE)}
                cache.write(slot, layer, rows)
                ring = cache.read_queries(slot)
                assert ring is not None
                cache.write_queries(slot, np.full_like(ring, np.nan))
        same(run_and_inspect(engine, requests), want)


def test_half_precision_halves_the_cache(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (want,) = run_and_inspect(engines("nexus", **BLOCKS), [request(300, 1)])
    half = {"build_options": {"dtype": "float16"}, **BLOCKS}
    directory = package(engines, tmp_path / "engine", "nexus", **half)
    with on_cpu(directory, monkeypatch) as (engine, _):
        (got,) = run_and_inspect(engine, [request(300, 40)])
        assert got.keys[0].dtype == np.float16
        assert engine.cache.nbytes * 2 == engines("nexus", **BLOCKS).cache.nbytes
        assert got.result is not None
        assert want.result is not None
        assert got.result.kv_bytes_allocated * 2 == want.result.kv_bytes_allocated
        assert got.result.kv_bytes == got.result.kept_tokens * engine.kv_bytes_per_token
        assert engine.kv_bytes_per_token == 2 * 2 * 2 * 2 * 16
        a, b = got.logits[0], want.logits[0]
        assert (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b) > 0.999
        assert len(got.tokens) == 40


def test_scores_are_traced(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of real units only, whatever the step was padded to."""
    options = {"build_options": {"trace_scores": True}, **BLOCKS}
    directory = package(engines, tmp_path / "engine", "nexus", **options)
    want = traced_scores(engines("nexus", **options))
    with on_cpu(directory, monkeypatch) as (engine, _):
        got = traced_scores(engine)
    assert len(got) == len(want) > 3
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)


def traced_scores(engine: Engine) -> list[Any]:
    kept: list[Any] = []
    run_and_inspect(engine, [request(300, 40)], watch=lambda cache, step, o: kept.append(o.kept))
    return [k.scores for k in kept if k is not None]


def loaded(directory: Path, manifest: Manifest, device: CpuDevice) -> None:
    sessions.TensorRTSession(directory, manifest, device)


def built(directory: Path, **told: Any) -> Manifest:
    """The package's manifest as another machine would have written it."""
    manifest = load_manifest(directory)
    assert isinstance(manifest.tensorrt, TensorRTBuild)
    made = manifest.tensorrt.model_copy(update=told)
    return manifest.model_copy(update={"tensorrt": made})


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"version": "10.13.0"}, "made by TensorRT 10.13.0 and this machine has 0; pip install"),
        ({"gpu": "NVIDIA L4 (8.9)"}, "for NVIDIA L4 .8.9. and this machine has host memory; reb"),
    ],
)
def test_an_engine_of_another_machine_is_refused(
    nexus: Path, told: dict[str, Any], words: str
) -> None:
    device = cpu_device()
    with pytest.raises(EngineError, match=words):
        loaded(nexus, built(nexus, **told), device)
    assert device.released  # nothing stays behind


def test_an_engine_of_this_machine_is_taken(nexus: Path) -> None:
    device = cpu_device()
    loaded(nexus, built(nexus, version="0", gpu="host memory"), device)
    assert not device.released


def test_more_slots_than_the_engine_was_built_for(
    nexus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = cpu_device()
    monkeypatch.setattr(sessions, "open_device", lambda directory: device)
    with pytest.raises(CapacityError, match=r"max_batch is 8 and the engine .* --max-batch 4; low"):
        Engine(nexus, max_batch=8)


def step_of(batch: int, tokens: int, units: int, pins: int) -> Step:
    """A step in which one slot evicts from `units` units."""
    one = np.zeros(1, np.int32)
    ids = np.zeros((batch, tokens), np.int64)
    shapes = {"unit_ids": (2, 1, 1, units), "budget": (2, 1, 1), "pin_spans": (1, pins, 2)}
    arrays = {name: np.zeros(shape, np.int32) for name, shape in shapes.items()}
    seed = np.zeros((1, 2), np.int32)
    x = Evictions(slots=one, tokens_seen=one, seed=seed, step=one, prompt_end=one, **arrays)
    return Step(ids, ids, np.zeros(batch, np.int32), np.zeros((1, batch), np.int32), x)


@pytest.mark.parametrize(
    ("batch", "tokens", "capacity", "units", "pins", "wrong"),
    [
        (4, 1, 905, 9, 1, r"C = 905, .*'generation' takes 1 to 904; .*--max-input"),
        (4, 1, 904, 9, 65, r"P = 128, .*'generation' takes 1 to 64; .*another limit"),
        (1, 129, 1024, 9, 1, r"S = 129, .*'context' takes 1 to 128; .*another limit"),
        (1, 128, 1025, 9, 1, r"C = 1025, .*'context' takes 1 to 1024"),
        (1, 128, 1024, 129, 1, r"N = 129, .*'context' takes 0 to 128"),
    ],
)
def test_a_step_beyond_the_profiles_names_the_size(
    nexus: Path, batch: int, tokens: int, capacity: int, units: int, pins: int, wrong: str
) -> None:
    with pytest.raises(CapacityError, match=wrong):
        fit(load_manifest(nexus), [capacity] * 2, 4, step_of(batch, tokens, units, pins))


def test_decode_steps_are_padded_to_few_sizes(nexus: Path) -> None:
    manifest = load_manifest(nexus)
    found = {fit(manifest, [900] * 2, 4, step_of(b, 1, 9, 1)) for b in (3, 4)}
    (one,) = found
    assert one.is_generation
    sizes = dict(one.sizes)
    assert [sizes[n] for n in "BRSENP"] == [4, 8, 1, 1, 113, 1]
    chunk = fit(manifest, [256] * 2, 1, step_of(1, 77, 9, 3))
    assert not chunk.is_generation
    assert [dict(chunk.sizes)[n] for n in "BSENP"] == [1, 77, 1, 9, 3]


def test_a_package_without_an_engine_says_how_to_make_it(nexus: Path) -> None:
    with pytest.raises(EngineError, match=r"no engine.plan .*--onnx-only.*sh trtexec.sh"):
        Engine(nexus)


def test_a_machine_without_tensorrt_says_what_is_missing(nexus: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(nexus, tmp_path / "engine")
    (directory / PLAN).touch()
    with pytest.raises(EngineError, match="needs TensorRT, cuda-python and an NVIDIA GPU"):
        Engine(directory)


def test_an_output_that_is_not_written_in_place_is_refused(nexus: Path) -> None:
    manifest = load_manifest(nexus)
    assert manifest.tensorrt is not None
    pairs = [p for p in manifest.tensorrt.aliased if p[1] != "present_value.1"]
    device = cpu_device()
    with pytest.raises(EngineError, match=r"does not write 'present_value.1' in place; rebuild"):
        loaded(nexus, built(nexus, aliased=tuple(pairs)), device)


def test_an_engine_of_rtx_is_not_run(nexus: Path) -> None:
    manifest = load_manifest(nexus).model_copy(update={"target": "tensorrt-rtx"})
    with pytest.raises(EngineError, match="not to be run; rebuild it with --target"):
        open_session(nexus, manifest)
