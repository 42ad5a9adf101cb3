"""The formulas of workspaces in docs/ops.md are what the kernels ask for, and never shrink."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_cases import DTYPES
from runners import cpu_kernels

from kvsift.builder import ops
from kvsift.builder.native_ops import NATIVE_OPS
from kvsift.builder.workspaces import WORKSPACES, workspace_bytes

ALL_OPS = (*ops.OPS, *NATIVE_OPS)


def random_values(op: ops.Op, rng: np.random.Generator) -> tuple[dict[str, int], dict[str, float]]:
    """Sizes and attributes, around the places where formulas change."""
    symbols = [s[0] for s in cpu_kernels().ops[op.name].sizes]
    sizes = {s: int(rng.integers(0, 9)) for s in symbols} | {"D": int(rng.choice([8, 64, 128]))}
    for symbol, many in {"N": 20000, "C": 20000, "W": 70, "S": 70}.items():
        if symbol in sizes:
            sizes[symbol] = int(rng.integers(0, many))
    if "Hq" in sizes and "Hkv" in sizes:
        sizes["Hkv"] = int(rng.integers(1, 5))
        sizes["Hq"] = sizes["Hkv"] * int(rng.integers(1, 9))
    attrs: dict[str, float] = {}
    for a in op.attrs:
        high = min(a.high, a.low + 300)
        value = rng.choice([a.default, a.low, rng.uniform(a.low, high)])
        attrs[a.name] = int(value) if a.is_int else float(np.float32(value))
        if a.symbol:
            attrs[a.name] = sizes[a.symbol] = max(int(a.low), sizes[a.symbol])
    return {s: sizes[s] for s in symbols}, attrs


@pytest.mark.parametrize("op", ALL_OPS, ids=lambda op: op.name)
def test_the_formula_is_what_the_kernel_asks_for(op: ops.Op) -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        sizes, attrs = random_values(op, rng)
        for dtype, numbers in DTYPES.items():
            told = cpu_kernels().workspace(op.name, attrs, dtype, sizes)
            width = np.dtype(numbers).itemsize
            assert told == workspace_bytes(op.name, {**sizes, **attrs}, width), (sizes, attrs)


@pytest.mark.parametrize("op", ALL_OPS, ids=lambda op: op.name)
def test_no_workspace_shrinks_when_a_size_grows(op: ops.Op) -> None:
    """TensorRT asks once, for the largest shapes of a profile."""
    rng = np.random.default_rng(1)
    for _ in range(300):
        sizes, attrs = random_values(op, rng)
        grows = [s for s in sizes if s not in ("D", "Dh", "Hq", "Hkv", "R")]
        symbol = str(rng.choice(grows))
        more = sizes | {symbol: sizes[symbol] + int(rng.integers(1, 100))}
        for dtype in DTYPES:
            small = cpu_kernels().workspace(op.name, attrs, dtype, sizes)
            large = cpu_kernels().workspace(op.name, attrs, dtype, more)
            assert small <= large, (symbol, sizes, attrs)


def test_every_op_has_a_formula() -> None:
    assert set(WORKSPACES) == {op.name for op in ALL_OPS}
