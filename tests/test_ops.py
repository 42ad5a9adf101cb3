"""Every op, in every implementation, against the float64 oracle on generated inputs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from cases import Case, Scene
from near_ties import near_ties
from reference import PRIORITY, REFERENCE
from runners import IMPLEMENTATIONS, one_op_model
from step_scene import cases_of, scene_of

from kvsift.builder import ops, schema
from kvsift.builder.bodies import BODIES, Dims, body
from kvsift.builder.errors import UsageError

ROOT = Path(__file__).parents[1]
CASES = [case for op in ops.OPS for case in cases_of(op)]
DIMS = Dims(4, 2, 8, 6)
TYPES = {"float32": np.float32, "int32": np.int32}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_op_matches_oracle(implementation: str, case: Case) -> None:
    scene = scene_of(case)
    inputs = scene.inputs()
    got = IMPLEMENTATIONS[implementation](case.op, case.attrs, scene.dims(), inputs)
    with np.errstate(invalid="ignore"):
        want = REFERENCE[case.op](case.attrs, inputs)
    for spec, ours, theirs in zip(ops.TABLE[case.op].outputs, got, want, strict=True):
        assert ours.dtype == TYPES[spec.dtype], spec.name
        assert ours.shape == theirs.shape == scene.shape(spec), spec.name
    if case.op in PRIORITY:
        keep, keep_len, coverage = got
        assert np.array_equal(keep_len, want[1])
        kept = [row[row >= 0] for row in keep.reshape(-1, keep.shape[-1])]
        assert all((np.diff(row) > 0).all() for row in kept)
        valid_prefix = np.arange(keep.shape[-1]) < keep_len[..., None]
        assert np.array_equal(keep >= 0, valid_prefix)
        # These inputs have no near ties, so the sets must be equal.
        assert near_ties(keep, want[0], PRIORITY[case.op](case.attrs, inputs)) == 0
        np.testing.assert_allclose(coverage, want[2], rtol=1e-5)
    elif case.op == "PhiloxUniform":
        assert np.array_equal(got[0], want[0])  # exact in fp32
    else:
        for ours, theirs in zip(got, want, strict=True):
            defined = ~np.isnan(theirs)
            # Sums that cancel are as exact as their terms.
            scale = np.abs(theirs[np.isfinite(theirs)]).max(initial=1.0)
            np.testing.assert_allclose(ours[defined], theirs[defined], rtol=1e-5, atol=1e-6 * scale)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("seed", range(20))
def test_reservoir_sets_at_size(implementation: str, seed: int) -> None:
    """Many units and draws: sets equal the oracle's but for counted near ties."""
    attrs = ops.TABLE["ReservoirSelect"].defaults() | {"block_size": 4, "normalize": seed % 2}
    sizes = {"N": 512, "L": 3, "E": 2}
    scene = Scene(
        Case("ReservoirSelect", "size", attrs, sizes, lens=(2048,), budget=100, seed=seed)
    )
    inputs = scene.inputs()
    got = IMPLEMENTATIONS[implementation]("ReservoirSelect", attrs, scene.dims(), inputs)
    want = REFERENCE["ReservoirSelect"](attrs, inputs)
    assert near_ties(got[0], want[0], PRIORITY["ReservoirSelect"](attrs, inputs)) <= 1


def test_near_ties_tells_ties_from_errors() -> None:
    key = np.array([[-5.0, -5.00001, -7.0, -9.0]])
    right = np.array([[0, 2, -1, -1]])
    assert near_ties(right, right, key) == 0
    assert near_ties(np.array([[1, 2, -1, -1]]), right, key) == 1
    with pytest.raises(AssertionError, match="kept unit 3"):
        near_ties(np.array([[0, 3, -1, -1]]), right, key)
    with pytest.raises(AssertionError, match="kept 1, expected 2"):
        near_ties(np.array([[0, -1, -1, -1]]), right, key)


def test_every_op_is_complete() -> None:
    names = [op.name for op in ops.OPS]
    assert sorted(BODIES) == sorted(REFERENCE) == sorted(names) == sorted(set(names))
    for op in ops.OPS:
        for attr in op.attrs:
            assert attr.low <= attr.default <= attr.high, f"{op.name}.{attr.name}"


@pytest.mark.parametrize("name", ops.TABLE)
def test_body_is_standard(name: str) -> None:
    """A body uses standard nodes only, names every value, and a model of it passes the checker."""
    attrs = ops.TABLE[name].defaults()
    function = body(name, attrs, DIMS)
    assert {node.domain for node in function} == {""}
    assert [v.name for v in function.inputs] == [t.name for t in ops.TABLE[name].inputs]
    assert [v.name for v in function.outputs] == [t.name for t in ops.TABLE[name].outputs]
    assert sorted(function.attributes) == sorted(attrs)
    model = ir.to_proto(one_op_model(name, attrs, DIMS, ir.DataType.FLOAT))
    onnx.checker.check_model(model, full_check=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 0}, r"TopKSelect.block_size is 0; it must be an integer in \[1, 4096\]"),
        ({"block_size": 1.5}, "must be an integer"),
        ({"blocksize": 4}, "did you mean 'block_size'"),
        ({"sink_units": None}, "needs the attribute 'sink_units'"),
    ],
)
def test_bad_attributes_are_refused(change: dict[str, float | None], message: str) -> None:
    merged = ops.TABLE["TopKSelect"].defaults() | change
    with pytest.raises(UsageError, match=message):
        body("TopKSelect", {k: v for k, v in merged.items() if v is not None}, DIMS)


def test_unknown_op_and_missing_heads_are_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'TopKSelect'"):
        body("TopkSelect", {}, DIMS)
    with pytest.raises(UsageError, match="needs the window of every query head"):
        body("WindowMass", ops.TABLE["WindowMass"].defaults(), Dims(1, 2, 8, 6))


def test_schemas_infer_shapes() -> None:
    schema.register()
    schema.register()  # twice is fine
    for op in ops.OPS:
        model = ir.to_proto(one_op_model(op.name, op.defaults(), DIMS, ir.DataType.FLOAT))
        del model.functions[:]
        del model.graph.output[:]
        onnx.checker.check_model(model, full_check=False)
        found = {v.name: v for v in onnx.shape_inference.infer_shapes(model).graph.value_info}
        for spec in op.outputs:
            dims = [d.dim_param for d in found[spec.name].type.tensor_type.shape.dim]
            known = {"n"} if op.name == "PhiloxUniform" else set()
            assert [d for d in dims if d] == [d for d in spec.shape if d not in known], op.name


def test_generated_files_are_fresh(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "scripts/gen_ops.py")]
    fresh = subprocess.run([*script, "--check"], capture_output=True, text=True, check=False)
    assert fresh.returncode == 0, fresh.stdout + fresh.stderr
    subprocess.run([*script, "--root", str(tmp_path)], check=True, capture_output=True)
    header = tmp_path / "plugins/ops.gen.h"
    header.write_text(header.read_text().replace("32", "33", 1))
    stale = subprocess.run(
        [*script, "--check", "--root", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert stale.returncode == 1
    assert "ops.gen.h is stale" in stale.stderr + stale.stdout
