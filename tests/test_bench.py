"""The benchmarks on a tiny model: what they measure and report, not how fast it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from kvsift.builder.families import tensor_shapes
from kvsift.builder.policies import resolve
from kvsift.builder.weights import open_model
from kvsift.runtime.bench import __main__ as program
from kvsift.runtime.bench import decode, profile, report, steps, text
from kvsift.runtime.bench.bandwidth import Bandwidth
from kvsift.runtime.bench.timing import Series, interleave, spread_of
from kvsift.runtime.bench.transformers_peer import CACHES, Peer
from kvsift.runtime.engine import Engine

CONTEXT, DENSITY = 1024, 0.3
#: 2 (K and V) x 4 bytes x layers x KV heads x head size of the tiny model.
KV_PER_TOKEN = 2 * 4 * 2 * 2 * 16
ROW_KEYS = {
    "batch", "dense_ms", "evicted_ms", "transformers_ms", "weight_bytes", "kv_bytes_dense",
    "kv_bytes_evicted", "bandwidth_gb_s", "floor_dense_ms", "floor_evicted_ms", "quantize",
    "eviction_ms", "eviction_share_decode", "spread",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bench") / "model"
    return tiny.write_hf(directory, tied=True, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def built(model: Path) -> Path:
    return model.parent / "engines"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvsift.runtime.bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def record(model: Path, built: Path) -> tuple[dict[str, Any], str]:
    """The JSON and the output of a whole run from the command line."""
    file = model.parent / "out.json"
    done = run(
        *("decode", "--context", str(CONTEXT), "--json", str(file), "--model", str(model)),
        *("--density", str(DENSITY), "--batch", "1,3", "--rounds", "2", "--no-peer"),
        *("--prefill-rounds", "1", "--engines", str(built), "--bandwidth-mib", "8"),
    )
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text()), done.stdout


def pair(model: Path, built: Path, batch: int, quantize: Any = "none") -> decode.Pair:
    source = open_model(model)
    settings = decode.Settings([batch], 1, 1)
    limits = program.limits_for(source, CONTEXT, DENSITY, batch)
    paths = [
        program.obtain(source, policy, quantize, limits, built)
        for policy in (program.DENSE, program.EVICTED)
    ]
    return decode.load_pair(paths[0], paths[1], settings)


def test_rows_hold_what_the_floor_needs(record: tuple[dict[str, Any], str]) -> None:
    rows = record[0]["rows"]
    assert [(r["batch"], r["quantize"]) for r in rows] == [
        (b, q) for b in (1, 3) for q in ("none", "int8")
    ]
    for row in rows:
        assert row.keys() >= ROW_KEYS
        assert row["transformers_ms"] is None
        assert row["kv_bytes_dense"] == row["batch"] * CONTEXT * KV_PER_TOKEN
        # floor(0.3 * 32 blocks) = 9 blocks, then 1 to 32 more rows before the next eviction.
        low, high = (row["batch"] * n * KV_PER_TOKEN for n in (9 * 32 + 1, 10 * 32))
        assert low < row["kv_bytes_evicted"] < high
        for kind in ("dense", "evicted"):
            read = row["weight_bytes"] + row[f"kv_bytes_{kind}"]
            assert row[f"floor_{kind}_ms"] == pytest.approx(read / row["bandwidth_gb_s"] / 1e6)
        # Two intervals of 32 steps, and one eviction of every sequence in each.
        assert row["steps"] == 64
        assert row["eviction_steps"] == 2 * row["batch"]
        rate = row["eviction_steps"] / row["steps"]
        whole = row["evicted_ms"] + rate * row["eviction_ms"]
        assert row["evicted_amortised_ms"] == pytest.approx(whole)
        assert row["eviction_share_decode"] == pytest.approx(rate * row["eviction_ms"] / whole)
        assert row["evicted_ms"] > 0
        assert row["dense_ms"] > 0


def test_output_says_what_was_left_out(record: tuple[dict[str, Any], str]) -> None:
    data, printed = record
    assert data.keys() >= {"rows", "prefill", "machine", "versions", "date"}
    assert "transformers took no part" in printed
    assert "GB/s" in printed
    assert printed.count("| evicted |") == len(data["rows"])
    assert [r["quantize"] for r in data["prefill"]["rows"]] == ["none", "int8"]
    assert all(r["tok_s"] > 0 for r in data["prefill"]["rows"])
    assert data["prefill"]["transformers_tok_s"] is None


def test_weight_bytes_count_the_tied_embedding_once(
    record: tuple[dict[str, Any], str], model: Path
) -> None:
    shapes = tensor_shapes(open_model(model).config)
    numbers = sum(int(np.prod(s)) for s in shapes.values())
    matrices = sum(int(np.prod(s)) for n, s in shapes.items() if len(s) == 2)
    float_row, int8_row = record[0]["rows"][:2]
    # Constants of the graph come on top: a few hundred bytes.
    assert 0 <= float_row["weight_bytes"] - 4 * numbers < 2000
    # int8: one byte per weight and a scale per 32; the embedding is only looked up.
    expected = matrices * (1 + 4 / 32) + 4 * (numbers - matrices)
    assert 0 <= int8_row["weight_bytes"] - expected < 2000


def test_engines_are_reused_only_when_they_fit(
    record: tuple[dict[str, Any], str], model: Path, built: Path
) -> None:
    source, names = open_model(model), []
    limits = program.limits_for(source, CONTEXT, DENSITY, 3)
    program.obtain(source, "nexus", "none", limits, built, names.append)
    assert not names
    other = limits.model_copy(update={"density": 0.5, "max_density": 0.5})
    program.obtain(source, "nexus", "none", other, built / "other", names.append)
    program.obtain(source, "nexus", "none", limits, built / "other", names.append)
    assert names == ["nexus-none", "nexus-none"]


def test_dense_step_equals_the_last_token_of_the_prompt(model: Path, built: Path) -> None:
    both = pair(model, built / "equal", 3)
    prompt = text.prompt(both.dense.tokenizer, CONTEXT)
    both.read(prompt)
    step = steps.DenseSteps(both.dense, prompt, CONTEXT, 3)
    step.step()
    # Prefilled by the dense engine itself, in one chunk; the two differ in the order of sums only.
    expected = Engine(both.dense.directory).prefill(steps.prepare(both.dense, prompt), 0)
    for row in step.logits():
        np.testing.assert_allclose(row, expected, atol=2e-3)
    assert [s.slot.length for s in step.sequences] == [CONTEXT - 1] * 3


@pytest.mark.parity
@pytest.mark.parametrize("cache", CACHES)
def test_transformers_step_equals_the_dense_step(model: Path, built: Path, cache: str) -> None:
    both = pair(model, built / "equal", 3)
    source = open_model(model)
    tensors = {name: source.tensor(name) for name in tensor_shapes(source.config)}
    peer = Peer(both.dense.manifest, tensors, 2)
    prompt = text.prompt(both.dense.tokenizer, CONTEXT)
    both.read(prompt)
    held = both.dense.cache
    theirs = peer.steps(held.keys, held.values, CONTEXT, cache)
    theirs.set_tokens([prompt[-1]] * 3)
    ours = steps.DenseSteps(both.dense, prompt, CONTEXT, 3).logits()
    for _ in range(2):  # the step takes itself back
        np.testing.assert_allclose(theirs.logits(), ours, atol=2e-3)
    for chunk in (CONTEXT, 100):
        np.testing.assert_allclose(peer.prefill(prompt, chunk)[1], ours[0], atol=2e-3)


def test_batched_evictions_fall_on_different_steps(model: Path, built: Path) -> None:
    both = pair(model, built / "equal", 3)
    prompt = text.prompt(both.dense.tokenizer, CONTEXT)
    run = steps.EvictedSteps(both.evicted, steps.prefill(both.evicted, prompt), 3)
    for _ in range(2 * run.interval):
        run.step()
    assert max(run.evictions) == 1
    assert sum(run.evictions) == 6
    assert {s.slot.steps for s in run.sequences} == {3}  # the prompt's and two of decode


def test_context_that_evicts_nothing_is_refused(model: Path, built: Path) -> None:
    done = run(
        *("decode", "--context", "256", "--model", str(model), "--no-peer", "--rounds", "2"),
        *("--quantize", "none", "--bandwidth-mib", "8", "--engines", str(built / "short")),
    )
    assert done.returncode == 2
    assert "evict nothing" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("decode", "--batch", "1,x"), "--batch"),
        (("decode", "--quantize", "int9"), "unknown precision 'int9'"),
        (("decode", "--context", "9999999"), "context must be in"),
        (("profile", "--engine", "nowhere"), "nowhere is no engine"),
    ],
)
def test_bad_options_are_one_line(arguments: tuple[str, ...], message: str, model: Path) -> None:
    extra = ("--model", str(model)) if arguments[0] == "decode" else ()
    done = run(*arguments, *extra)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("policy", ["full", "nexus"])
def test_profile_accounts_for_the_run(
    record: tuple[dict[str, Any], str], built: Path, policy: str
) -> None:
    directory = built / f"{policy}-none"
    prompt = text.prompt_of(directory, CONTEXT)
    found = profile.profile(directory, prompt, 1, 16, 1)
    ops = {op: (nodes, ms) for op, nodes, ms in found.ops}
    layers = 2
    assert ops["GroupQueryAttention"][0] == layers
    assert ops["MatMul"][0] + ops.get("Gemm", (0, 0))[0] >= 4 * layers
    assert sum(ms for _, ms in ops.values()) < 2 * found.run_ms * 16
    assert 0 < found.run_ms <= found.step_ms * 1.5
    lines = report.profile_lines(found)
    assert lines[-1][0] == "outside ONNX Runtime"
    assert len(lines) <= report_lines_limit()


def report_lines_limit() -> int:
    return profile.TOP + 3


def test_summary_skips_warm_up_runs() -> None:
    def node(ts: int, dur: int, op: str) -> dict[str, Any]:
        return {"name": f"{op}_kernel_time", "ts": ts, "dur": dur, "args": {"op_name": op}}

    events = [
        {"name": "model_run", "ts": 0, "dur": 9000},
        node(1, 8000, "MatMul"),
        {"name": "model_run", "ts": 10000, "dur": 3000},
        node(10001, 2000, "MatMul"),
        node(12002, 500, "Add"),
        {"name": "model_run", "ts": 20000, "dur": 5000},
        node(20001, 4000, "MatMul"),
    ]
    run_ms, ops = profile.summarise(events, 2)
    assert run_ms == 4.0
    assert ops == (("MatMul", 1.0, 3.0), ("Add", 0.5, 0.25))


def test_interleaving_takes_turns_and_skips_warm_up() -> None:
    order: list[str] = []
    series = [Series(n, lambda n=n: order.append(n), steps=2) for n in "ab"]  # type: ignore[misc]
    interleave(series, 2)
    assert "".join(order) == "aaabbbaaabbb"
    assert [len(s.times) for s in series] == [4, 4]
    assert spread_of([2.0, 2.0]) == 0
    assert spread_of([1.0, 2.0, 4.0]) == 1.5


def test_bandwidth_is_that_of_the_faster_read() -> None:
    probe = Bandwidth(1, 4)
    interleave(probe.series, 2)
    gb_s, how = probe.gb_s()
    probe.close()
    best = min(s.median_ms for s in probe.series)
    assert gb_s == pytest.approx(4 * 2**20 / best / 1e6)
    assert how in {s.name for s in probe.series}


def test_policies_under_test_exist() -> None:
    assert not resolve(program.DENSE).evicts
    assert resolve(program.EVICTED).in_decode
