"""The CUDA kernels, compiled for the CPU: float types, thread schedules, neighbours, limits.

That every generated case equals the oracle is tested in test_ops.py (implementation cpu-cuda).
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import kernel_builds
import numpy as np
import pytest
from cases import Case
from kernel_cases import (
    DTYPES,
    LONG,
    SCHEDULES,
    Hooks,
    has_floats,
    inputs_of,
    run_and_check,
    several_tiles,
    small_cases,
)
from kv_moves import check_moves
from runners import cpu_kernels, run_kernel

from kvsift.builder import ops
from kvsift.builder.errors import UsageError
from kvsift.runtime.kernels import FLOAT_TYPES, KernelError, Kernels

OPS = list(ops.TABLE)
SMALL = [case for op in OPS for case in small_cases(op)]


@functools.cache
def hooks() -> Hooks:
    return Hooks(kernel_builds.library("plain"))


def evicts(op: ops.Op) -> bool:
    """Whether an op works on evicting slots."""
    return any("E" in t.shape for t in op.inputs)


def bits(outputs: list[Any]) -> list[bytes]:
    return [a.tobytes() for a in outputs]


@pytest.mark.parametrize("case", [c for c in SMALL if has_floats(c.op)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_equal_the_oracle(case: Case, dtype: str) -> None:
    run_and_check(cpu_kernels(), case, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", LONG)
def test_rows_of_several_tiles_equal_the_oracle(op: str, dtype: str) -> None:
    run_and_check(cpu_kernels(), several_tiles(op), dtype)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_no_bit_depends_on_the_schedule(case: Case) -> None:
    inputs = inputs_of(case, "float32")
    try:
        runs = []
        for seed in SCHEDULES:
            hooks().schedule(seed)
            runs.append(bits(run_kernel(cpu_kernels(), case.op, case.attrs, inputs)))
    finally:
        hooks().schedule(0)
    assert all(run == runs[0] for run in runs)


def alone(case: Case, inputs: dict[str, Any], e: int) -> dict[str, Any]:
    """The inputs of request e by itself, in a slot of its own."""
    op, out = ops.TABLE[case.op], {}
    slots = inputs.get("evict_slots")
    for t in op.inputs:
        array = inputs[t.name]
        if "E" in t.shape:
            array = np.take(array, [e], axis=t.shape.index("E"))
        elif "B" in t.shape:
            at = e if slots is None else max(0, int(slots[e]))
            array = np.take(array, [at], axis=t.shape.index("B"))
        out[t.name] = array
    if slots is not None:
        out["evict_slots"] = np.minimum(out["evict_slots"], 0)
    return out


@pytest.mark.parametrize("op", OPS)
def test_no_bit_depends_on_the_neighbours(op: str) -> None:
    for case in small_cases(op):
        inputs = inputs_of(case, "float32")
        together = run_kernel(cpu_kernels(), op, case.attrs, inputs)
        skipped = inputs.get("evict_slots", np.zeros(99)) < 0
        spec = ops.TABLE[op].outputs
        axes = [t.shape.index("E" if "E" in t.shape else "B") for t in spec]
        for e in range(together[0].shape[axes[0]]):
            if skipped[e]:
                continue
            solo = run_kernel(cpu_kernels(), op, case.attrs, alone(case, inputs, e))
            for ours, theirs, axis in zip(solo, together, axes, strict=True):
                assert ours.tobytes() == np.take(theirs, [e], axis=axis).tobytes(), str(case)


@pytest.mark.parametrize(
    "op", [n for n in OPS if "E" in {d for t in ops.TABLE[n].inputs for d in t.shape}]
)
def test_nothing_is_launched_without_slots(op: str) -> None:
    case = Case(op, "no-slot", next(iter(small_cases(op))).attrs, sizes={"E": 0})
    before = hooks().launches()
    run_kernel(cpu_kernels(), op, case.attrs, inputs_of(case, "float32"))
    assert hooks().launches() == before


def test_the_library_describes_the_op_table() -> None:
    kernels = cpu_kernels()
    assert kernels.version == ops.OPS_VERSION
    assert set(kernels.ops) == {*OPS, "KvAppend"}
    for name, op in ops.TABLE.items():
        told = kernels.ops[name]
        for tensors, ours in ((op.inputs, told.inputs), (op.outputs, told.outputs)):
            assert [(t.name, t.dtype, ",".join(t.shape)) for t in tensors] == list(ours)
        assert told.attributes == tuple(a.name for a in op.attrs)


def knorm(width: int = 8, **attrs: Any) -> list[Any]:
    keys = np.zeros((1, 1, 4, width), np.float32)
    inputs = {
        "keys": keys,
        "unit_ids": np.zeros((1, 1, 4), np.int32),
        "evict_slots": np.zeros(1, np.int32),
    }
    return run_kernel(cpu_kernels(), "KNormScore", attrs, inputs)


def test_bad_calls_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match="KNormScore failed: invalid argument"):
        knorm(width=6)  # no whole number of 16-byte loads
    assert len(knorm()) == 1  # and the next call is right again
    kernels = cpu_kernels()
    case = small_cases("TopKSelect")[0]
    inputs = inputs_of(case, "float32")
    with pytest.raises(KernelError, match="TopKSelect failed: invalid argument"):
        run_kernel(kernels, "TopKSelect", dict(case.attrs) | {"block_size": 0}, inputs)
    with pytest.raises(UsageError, match="needs the attribute 'block_size'"):
        run_kernel(kernels, "TopKSelect", {}, inputs)
    with pytest.raises(UsageError, match="unknown op 'TopK'"):
        kernels.sizes("TopK", {}, [])
    with pytest.raises(UsageError, match="unknown float type 'float8'"):
        kernels.workspace("KNormScore", {}, "float8", {})
    with pytest.raises(KernelError, match="cannot load the kernels"):
        Kernels(tmp_path / "libabsent.so")


def test_rows_move_as_in_numpy() -> None:
    check_moves(cpu_kernels())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "sizes"), [("WindowScore", {"W": 1}), ("AccumUpdate", {"S": 1})])
def test_few_logits_are_kept_instead_of_made_twice(
    op: str, sizes: dict[str, int], dtype: str
) -> None:
    """Where a token's logits take less than its key, which the workspace shows."""
    case = small_cases(op)[0].but(sizes=sizes | {"D": 64})
    scene, kernels = inputs_of(case, dtype), cpu_kernels()
    run_and_check(kernels, case, dtype)
    shapes = [scene[t.name].shape for t in ops.TABLE[op].inputs]
    size = kernels.sizes(op, case.attrs, shapes)
    few = kernels.workspace(op, case.attrs, dtype, size)
    more = kernels.workspace(op, case.attrs, dtype, size | {"Hq": 64 * size["Hkv"]})
    assert few / size["Hq"] > more / (64 * size["Hkv"])


@pytest.mark.parametrize("width", [320, 512])
@pytest.mark.parametrize("op", ["WindowMass", "WindowScore", "AccumUpdate"])
def test_long_heads_take_half_a_tile(op: str, width: int) -> None:
    for name in ("typical", "typical-per_head", "attrs0"):
        for case in (c for c in small_cases(op) if c.name == name):
            run_and_check(cpu_kernels(), case.but(sizes={"D": width, "W": 9, "S": 9}), "float16")
    too_long = small_cases(op)[0].but(sizes={"D": 520})
    with pytest.raises(KernelError, match="invalid argument"):
        run_and_check(cpu_kernels(), too_long, "float16")


@pytest.mark.parametrize(("dtype", "width"), [("float32", 256), ("float16", 512)])
@pytest.mark.parametrize("op", ["NestedKVScore", "ExpectedAttentionScore", "KeyDiffScore"])
def test_the_longest_heads_equal_the_oracle(op: str, dtype: str, width: int) -> None:
    """NestedKV's window then does not fit into shared memory."""
    case = next(c for c in small_cases(op) if c.name == "typical")
    one = {"B": 1, "E": 1, "Hq": 1, "Hkv": 1, "R": 1}
    run_and_check(cpu_kernels(), case.but(sizes=one | {"D": width, "Dh": width // 2}), dtype)


@pytest.mark.parametrize("window", [1, 3, 64, 300, 700])
def test_nestedkv_windows_of_every_length(window: int) -> None:
    """Shorter than a step, longer than a span, kept in shared memory and not."""
    attrs = ops.TABLE["NestedKVScore"].defaults() | {"window": window}
    sizes = {"B": 1, "E": 1, "Hq": 2, "Hkv": 2, "R": 2, "N": 1200, "C": 1200, "D": 64}
    case = Case("NestedKVScore", "window", attrs, sizes, lens=(1190,), seen=(1500,))
    run_and_check(cpu_kernels(), case, "float16")


def test_every_float_type_has_a_number() -> None:
    assert sorted(FLOAT_TYPES) == sorted(DTYPES)
