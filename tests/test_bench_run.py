"""`kvsift bench run` and `paper` on a tiny model: what they measure, not how fast it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny
from engines import Engines
from typer.testing import CliRunner

from kvsift.builder.errors import EngineError, UsageError
from kvsift.runtime.bench import paper, regguf, sweep_report
from kvsift.runtime.bench.__main__ import app
from kvsift.runtime.bench.contestants import Ours
from kvsift.runtime.bench.openvino_peer import OpenVino
from kvsift.runtime.bench.openvino_worker import BLOCK
from kvsift.runtime.bench.peak import peak_bytes
from kvsift.runtime.engine import Engine
from kvsift.runtime.params import EvictionParams, SamplingParams
from kvsift.runtime.request import Request

#: 2 (K and V) x 4 bytes x layers x KV heads x head size of the tiny model.
KV_PER_TOKEN = 2 * 4 * 2 * 2 * 16
CONTEXT, OUTPUT, PNG = 1024, 40, b"\x89PNG"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def record(out: Path) -> tuple[dict[str, Any], str]:
    model = tiny.write_hf(out / "model", tied=True, max_position_embeddings=2048)
    arguments = ["run", "--model", str(model), "--out", str(out), "--context", str(CONTEXT)]
    arguments += ["--output", str(OUTPUT), "--batch", "1", "--batch", "2", "--rounds", "2"]
    arguments += ["--density", "0.5", "--density", "0.3", "--policy", "nexus", "--policy", "snapkv"]
    arguments += [
        "--quantize",
        "none",
        "--peer",
        "openvino",
        "--threads",
        "1",
        "--bandwidth-mib",
        "8",
    ]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads((out / "bench.json").read_text()), done.output


def test_rows_hold_speed_memory_and_floor(record: tuple[dict[str, Any], str]) -> None:
    rows = record[0]["rows"]
    names = [
        (r["engine"], r["density"]) for r in rows if r["weights"] == "fp32" and r["batch"] == 1
    ]
    assert names == [
        ("full", 1.0),
        ("nexus", 0.5),
        ("nexus", 0.3),
        ("snapkv", 0.5),
        ("snapkv", 0.3),
    ]
    assert len(rows) == 2 * len(names)
    for row in rows:
        assert row["ttft_ms"] > row["itl_ms"] > 0
        assert row["itl_p95_ms"] >= row["itl_ms"] * 0.9
        assert row["tokens_s"] == pytest.approx(1e3 * row["batch"] / row["itl_mean_ms"])
        read = row["weight_bytes"] + row["kv_bytes_read"]
        assert row["floor_ms"] == pytest.approx(read / row["bandwidth_gb_s"] / 1e6)
        assert row["kv_share"] == pytest.approx(row["kv_bytes_read"] / read, rel=1e-5)
        assert row["kv_bytes_read"] == pytest.approx(row["batch"] * row["kv_bytes_used"], abs=8)
        assert row["kv_bytes_used"] <= row["kv_bytes_allocated"]
        assert row["sequences_that_fit"] > 100
        assert row["peak_rss_bytes"] > 50 << 20


def test_the_peak_is_that_of_the_process_alone(out: Path, record: Any) -> None:
    """Not of the one that starts it, whose memory counts in ru_maxrss after fork and exec."""
    mine = np.ones(768 << 20, np.uint8)
    peak = peak_bytes(out / "engines" / "full-none", 100, 2, 1, 1.0, 1)
    assert 50 << 20 < peak < mine.nbytes


def test_less_density_reads_and_holds_less(record: tuple[dict[str, Any], str]) -> None:
    rows = {
        (r["engine"], r["density"]): r
        for r in record[0]["rows"]
        if r["batch"] == 1 and r["weights"] == "fp32"
    }
    # The prompt and half of the answer; what the budget keeps, and half of an interval or answer.
    assert rows["full", 1.0]["cached_tokens"] == pytest.approx(CONTEXT + OUTPUT / 2, abs=1)
    for name in ("nexus", "snapkv"):
        for density in (0.5, 0.3):
            cached = rows[name, density]["cached_tokens"]
            assert density * CONTEXT - 32 <= cached <= density * CONTEXT + 32
        held = [rows[name, d]["kv_bytes_allocated"] for d in (0.3, 0.5)]
        assert held[0] < held[1] < rows["full", 1.0]["kv_bytes_allocated"]
        fit = [rows[name, d]["sequences_that_fit"] for d in (0.3, 0.5)]
        assert fit[0] > fit[1] > rows["full", 1.0]["sequences_that_fit"]


@pytest.mark.parametrize("policy", ["nexus", "snapkv", "h2o", "tova", "pyramidkv", "nestedkv"])
@pytest.mark.parametrize(("prompt", "density"), [(1000, 0.3), (1024, 0.3), (200, 0.3), (400, 1.0)])
def test_rows_and_evictions_are_those_of_the_engine(
    engines: Engines, policy: str, prompt: int, density: float
) -> None:
    scope = None if policy == "nexus" else "both"
    package = engines.package(policy, model="long", scope=scope, limits={"max_input": 1100})
    engine = Engine(package, threads=1)
    ids = [5 + i % 500 for i in range(prompt)]
    ours = Ours(engine, density)
    run = ours.run(ids, 101, 1)
    request = Request(
        ids,
        SamplingParams(max_tokens=1, ignore_eos=True, seed=1),
        EvictionParams(density=density, eviction_seed=0),
    )
    sequence = engine.prepare(0, request)
    sequence.tokens.append(int(engine.prefill(sequence, 0).argmax()))
    assert run.cuts == (sequence.slot.steps > 0) == (prompt * density >= 256 and density < 1)
    assert ours.kept(prompt) == sequence.slot.rows_held
    rows, found = [], []
    for _ in range(100):
        before = sequence.slot.steps
        rows.append(sequence.slot.rows_held + 1)
        sequence.tokens.append(int(engine.decode([sequence])[0].argmax()))
        found.append(sequence.slot.steps > before)
    assert run.rows == pytest.approx(np.mean(rows))
    assert run.evicts == (found if any(found) else [])


def test_memory_is_that_of_an_engine_for_the_row(record: Any, out: Path) -> None:
    row = next(r for r in record[0]["rows"] if (r["engine"], r["density"]) == ("nexus", 0.3))
    engine = Engine(out / "engines" / "nexus-none", threads=1)
    window = (16 + 1) * 2 * 4 * 16 * 4
    # Budget of floor(0.3 * 32) blocks, one more to fill; the window of all heads beside.
    held = (9 + 1) * 32 * KV_PER_TOKEN + window
    assert row["kv_bytes_allocated"] == held
    short = Ours(engine, 0.3).sizes(512, 40)
    assert short.slot < held  # at least 256 tokens
    assert short.slot == (8 + 1) * 32 * KV_PER_TOKEN + window
    weights = (out / "engines" / "nexus-none" / "model.data").stat().st_size
    left = (8 << 30) - weights - row["scratch_bytes"]
    assert row["sequences_that_fit"] == left // held


def test_evictions_are_in_the_rows(record: Any) -> None:
    rows = {r["engine"]: r for r in record[0]["rows"] if r["density"] in (0.3, 1.0)}
    assert rows["nexus"].keys() >= {"eviction_ms", "eviction_share"}
    assert "eviction_ms" not in rows["snapkv"].keys() | rows["full"].keys()
    for name in ("nexus", "snapkv"):
        ms, share = rows[name]["prompt_eviction_ms"], rows[name]["prompt_eviction_share"]
        assert share == pytest.approx(ms / rows[name]["ttft_ms"])
    assert "prompt_eviction_ms" not in rows["full"]


def test_output_says_who_took_no_part(record: tuple[dict[str, Any], str], out: Path) -> None:
    data, printed = record
    assert data["absent"] == {"openvino": "it reads GGUF files here"}
    assert "openvino took no part" in printed
    assert "GB/s" in printed
    assert "the least budget" not in printed
    for line in (out / "bench.md").read_text().splitlines():
        assert line in printed
    assert (out / "bench.png").read_bytes()[:4] == PNG


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "2040", "--output", "64"], "2104 tokens together"),
        (["--quantize", "fp7"], "--quantize must be"),
        (["--peer", "vllm"], "unknown peer 'vllm'"),
        (["--memory", "much"], "memory must be a size"),
        (["--policy", "nexsus"], "did you mean 'nexus'"),
        (["--policy", "full"], "policy 'full' evicts nothing"),
        (["--density", "nan"], "density must be in .0, 1., got nan"),
        (["--density", "0"], "density must be in .0, 1., got 0"),
        (["--density", "0.5", "--density", "0.5"], "give each one once"),
        (["--batch", "2", "--batch", "2"], "batch 2, 2: give each one once"),
        (["--name", "a/b"], "name must be that of a file"),
        (["--openvino-python", "no/python"], "no/python is no program"),
    ],
)
def test_bad_options_are_named(
    record: tuple[dict[str, Any], str], out: Path, arguments: list[str], message: str
) -> None:
    common = ["run", "--model", str(out / "model"), "--out", str(out / "bad"), "--no-peak"]
    common += ["--context", "1024"]
    with pytest.raises(UsageError, match=message):
        CliRunner().invoke(app, [*common, *arguments], catch_exceptions=False)


def test_the_papers_tables(record: tuple[dict[str, Any], str], out: Path) -> None:
    arguments = ["paper", "--model", str(out / "model"), "--out", str(out), "--context", "1024"]
    arguments += ["--rounds", "1", "--threads", "1"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = json.loads((out / "paper.json").read_text())
    assert [r["answer"] for r in found["throughput"]] == list(paper.DECODE)
    assert [r["answer"] for r in found["memory"]] == list(paper.MEMORY)
    for row in found["throughput"]:
        assert row["speedup"] == pytest.approx(row["ms"]["dense"] / row["ms"]["nexus"])
        assert row["tokens_s"]["nexus"] == pytest.approx(1e3 / row["ms"]["nexus"])
    for row in found["memory"]:
        assert row["dense"] == (1024 + row["answer"]) * KV_PER_TOKEN
        assert row["nexus"] <= row["nexus allocated"] < row["prefill-only"] < row["dense"]
    assert found["memory"][0]["nexus"] == found["memory"][-1]["nexus"]
    assert "not comparable" in done.output
    assert (out / "paper.png").read_bytes()[:4] == PNG


def test_a_mean_over_an_answer_is_the_integral_of_its_steps() -> None:
    rows, ms = [100, 200, 300, 500], [1.0, 2.0, 3.0, 5.0]
    assert paper._mean(rows, ms, 100) == pytest.approx(1.5)
    assert paper._mean(rows, ms, 400) == pytest.approx(3.0)


def test_a_gguf_is_rewritten_in_another_precision(tmp_path: Path) -> None:
    source = tiny.write_gguf(tmp_path / "model.gguf")
    for weights, tolerance in (("fp16", 1e-3), ("int8", 2e-2)):
        made = gguf.GGUFReader(str(regguf.rewrite(source, tmp_path / f"{weights}.gguf", weights)))
        kinds = {t.tensor_type for t in made.tensors if len(t.shape) > 1}
        assert kinds == {regguf.TYPES[weights]}
        before = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in
                  gguf.GGUFReader(str(source)).tensors}  # fmt: skip
        assert {t.name for t in made.tensors} == before.keys()
        for tensor in made.tensors:
            value = gguf.dequantize(tensor.data, tensor.tensor_type)
            largest = np.abs(before[tensor.name]).max()
            np.testing.assert_allclose(value, before[tensor.name], atol=tolerance * largest)
        fields = gguf.GGUFReader(str(source)).fields.keys()
        assert made.fields.keys() == fields


FAKE = """
import types
class SchedulerConfig: pass
class GenerationConfig: pass
class AggregationMode: SUM = 0
class CacheEvictionConfig:
    def __init__(self, **kw): self.kw = kw
class LLMPipeline:
    def __init__(self, model, device, scheduler_config, **properties):
        self.kept = getattr(scheduler_config, "cache_eviction_config", None)
        assert properties["INFERENCE_NUM_THREADS"] == 3
    def generate(self, ids, config):
        size = self.kept.kw["max_cache_size"] if self.kept else 0
        raw = types.SimpleNamespace(m_durations=[9e9] + [1e3 * size] * (config.max_new_tokens - 1))
        metrics = types.SimpleNamespace(
            raw_metrics=raw, get_ttft=lambda: types.SimpleNamespace(mean=len(ids.data[0])))
        return types.SimpleNamespace(perf_metrics=metrics)
def get_version(): return "0"
"""


def test_openvino_runs_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "openvino_genai.py").write_text(FAKE)
    (tmp_path / "openvino.py").write_text(
        "class Tensor:\n    def __init__(self, d): self.data = d\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    python = Path(sys.executable)
    dense = OpenVino(python, tmp_path / "m.gguf", 3, "fp16", 1.0, lambda n: n)
    assert dense.run(range(100), 5, 1).ttft_s == pytest.approx(0.1)
    dense.close()
    evicted = OpenVino(python, tmp_path / "m.gguf", 3, "int8", 0.75, lambda n: n - 25)
    run = evicted.run(range(100), 5, 1)
    assert run.rows == 75 // BLOCK * BLOCK
    assert run.itl_s == pytest.approx([64e-3] * 4)
    longer = evicted.run(range(200), 5, 1)
    assert longer.rows == 175 // BLOCK * BLOCK
    assert longer.itl_s == pytest.approx([160e-3] * 4)
    evicted.close()
    (tmp_path / "openvino_genai.py").write_text("raise ImportError('not here')")
    with pytest.raises(EngineError, match="cannot run OpenVINO GenAI"):
        evicted.run(range(100), 5, 1)


def test_the_memory_table_has_no_row_twice(record: tuple[dict[str, Any], str]) -> None:
    lines = sweep_report.memory(record[0]["rows"]).splitlines()
    assert len(lines) == len(set(lines)) == 2 + 2 * 5
