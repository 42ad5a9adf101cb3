"""The GPU check's PyTorch versions calculate what the ops do, so that the comparison is fair."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import Case
from kernel_cases import inputs_of
from reference import REFERENCE

from kvsift.builder import ops

pytestmark = pytest.mark.parity
SCRIPTS = Path(__file__).parents[1] / "scripts"
#: One full slot, as the check measures.
SIZES = {"B": 1, "E": 1, "L": 1, "C": 28, "N": 28}


CASES = [("WindowMass", mode) for mode in range(3)]
CASES += [(op, 0) for op in ("NexusScore", "KNormScore", "KeyDiffScore", "TopKSelect")]
CASES += [(op, 0) for op in ("ReservoirSelect", "PhiloxUniform")]


def test_every_version_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    assert {op for op, _ in CASES} == set(importlib.import_module("gpu_torch").VERSIONS)


@pytest.mark.parametrize(("op", "mode"), CASES)
def test_torch_versions(op: str, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    versions = importlib.import_module("gpu_torch").VERSIONS
    attrs: dict[str, Any] = ops.TABLE[op].defaults()
    small = {"block_size": 4, "head_reduce": mode} if op == "WindowMass" else {"block_size": 1}
    small |= {"sink_units": 0, "recent_units": 0}
    attrs |= {k: v for k, v in small.items() if k in attrs}
    sizes = SIZES | {"N": 28 // small["block_size"]}
    case = Case(op, "full", attrs, sizes, lens=(28,), seen=(28,), budget=14)
    if op in ("TopKSelect", "ReservoirSelect"):
        case = case.but(sizes=sizes | {"P": 0, "R": 2})
    inputs = inputs_of(case, "float32")
    if "unit_ids" in inputs:  # rows in order, as the torch version takes them
        inputs["unit_ids"] = np.sort(inputs["unit_ids"], axis=-1)
    got = versions[op](torch, {k: torch.tensor(v) for k, v in inputs.items()}, attrs).numpy()
    want = REFERENCE[op](attrs, inputs)[0]
    if op == "PhiloxUniform":
        assert got.shape == want.shape
        assert ((got >= 0) & (got < 1)).all()
    elif op.endswith("Select"):
        assert np.array_equal(got, want[..., :14])
        assert (want[..., 14:] == -1).all()
    else:
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
