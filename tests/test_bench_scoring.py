"""The scoring benchmark runs what the engines run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import onnx_ir as ir
import pytest
import tiny

from kvsift.builder.eviction_model import eviction_model
from kvsift.builder.package import Limits
from kvsift.builder.policies import PRESETS, resolve
from kvsift.builder.targets.ort import build
from kvsift.builder.weights import open_model
from kvsift.runtime.bench import scoring, steps
from kvsift.runtime.engine import Engine

EVICTING = sorted(name for name, preset in PRESETS.items() if preset.scope != "none")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_hf(tmp_path_factory.mktemp("scoring") / "model")


@pytest.mark.parametrize("name", EVICTING)
def test_every_policy_keeps_its_budget(model: Path, name: str) -> None:
    source = open_model(model)
    limits = Limits(max_input=400, max_output=8, max_batch=1, density=1.0, max_density=1.0)
    directory = model.parent / "full"
    if not directory.exists():
        build(source, resolve("full"), limits, directory)
    engine = Engine(directory, threads=1)
    prompt = [3 + i % 500 for i in range(400)]
    steps.prefill(engine, prompt)
    policy = resolve(name)
    nodes = ir.serde.serialize_model(eviction_model(source.config, policy)).SerializeToString()
    keep, keep_len = scoring._runner(engine, policy, nodes, 400, 0.3, 1)()
    assert keep.shape[:2] == (2, 1)
    units = max(
        policy.sink_units + policy.recent_units + 1, int(0.3 * -(-400 // policy.block_size))
    )
    assert keep_len.sum() == units * keep_len.size


def test_the_command_prints_policies_side_by_side(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "kvsift.runtime.bench", "scoring", "--model", str(model)),
            *("--context", "400", "--rounds", "1", "--policies", "keydiff,nestedkv"),
            *("--json", str(file)),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "nestedkv" in done.stdout
    found = json.loads(file.read_text())
    assert [row["policy"] for row in found["rows"]] == ["keydiff", "nestedkv"]
    for row in found["rows"]:
        assert row["share"] == pytest.approx(row["ms"] / found["prefill_ms"])
