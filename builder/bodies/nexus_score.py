"""Body of NexusScore."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from kvsift.builder import ops
from kvsift.builder.bodies.tools import FAR, Body, Dims

FLOAT = ir.DataType.FLOAT


def build(b: Body, attrs: Mapping[str, ops.Value], dims: Dims) -> list[ir.Value]:
    """Return [score]: the weight of each unit of all layers, -inf at padding."""
    ids = b.input("unit_ids")
    used = b.op("GreaterOrEqual", ids, b.i32(0))
    oldest = b.reduce("Min", b.op("Where", used, ids, b.i32(FAR)), 3, keep=True)  # [L, E, R, 1]

    # The row of a query that sees no key, as before the sequence's start, is arbitrary: drop it.
    newest = b.reshape(b.input("tokens_seen"), 1, -1, 1, 1)
    here = b.op("Add", newest, b.const(np.arange(-dims.window, 0), np.int32))  # [1, E, 1, W]
    block = int(attrs["block_size"])
    # Rounded down below 0 too, where integers divide towards 0.
    unit = b.op("Sub", b.op("Div", b.op("Add", here, b.i32(block)), b.i32(block)), b.i32(1))
    has_key = b.unsqueeze(b.op("LessOrEqual", oldest, unit), 4)  # [L, E, R, W, 1]
    rows = b.op("Where", has_key, b.input("mass"), b.f32(0.0))
    has_key = b.cast(has_key, FLOAT)
    ones = b.const(np.ones((1, dims.window)), np.float32)
    count = b.op("Max", row_sum(b, ones, has_key), b.f32(1.0))  # [L, E, R, 1]
    weight = b.op("Div", row_sum(b, ones, rows), count)  # a
    if attrs["walk_steps"] and attrs["walk_lambda"]:
        walked = walk(b, rows, has_key, walk_rows(attrs, dims.window))
        weight = b.op("Add", weight, b.op("Mul", walked, b.f32(attrs["walk_lambda"])))
    if attrs["tie_eps"]:
        weight = b.op("Add", weight, b.op("Mul", ramp(b, ids, oldest), b.f32(attrs["tie_eps"])))
    return [b.op("Where", used, weight, b.f32(-np.inf))]


def row_sum(b: Body, factors: ir.Value, rows: ir.Value) -> ir.Value:
    """Return the sum of factor times row: [.., 1, K] and [L,E,R,K,N] give [L,E,R,N]."""
    return b.op("Squeeze", b.op("MatMul", factors, rows), b.i64(3))


def walk_rows(attrs: Mapping[str, ops.Value], window: int) -> list[int]:
    """Return the window rows that the walk visits, in its order.

    `chronological` and `newest_first` take the newest H; `strided` takes H rows spread evenly over
    the window, the newest included, in chronological order.
    """
    steps = min(int(attrs["walk_steps"]), window)
    order = ops.WALK_ORDER[int(attrs["walk_order"])]
    if order == "strided":
        return [window - 1 - i * window // steps for i in reversed(range(steps))]
    newest = list(range(window - steps, window))
    return newest[::-1] if order == "newest_first" else newest


def walk(b: Body, rows: ir.Value, sums: ir.Value, visited: list[int]) -> ir.Value:
    """Return c [L,E,R,N] of the walk over the `visited` of the rows [L,E,R,W,N] of given sums.

    C = sum of gamma_i row_i and gamma_i = 1 + sum over j < i of <row_i, row_j> gamma_j, so only
    the H x H inner products are needed, and H - 1 rounds solve the triangular system exactly.
    Gamma is kept as a row: gamma <- 1 + gamma U, U the part of the products above the diagonal.
    """
    steps = len(visited)
    picked = b.op("Gather", rows, b.i64(*visited), axis=3)  # [L, E, R, H, N]
    gram = b.op("MatMul", picked, b.op("Transpose", picked, perm=[0, 1, 2, 4, 3]))
    upper = b.op("Mul", gram, b.const(np.tri(steps, k=-1).T, np.float32))
    gamma, one = b.const(np.ones((1, steps)), np.float32), b.f32(1.0)
    for _ in visited[1:]:
        gamma = b.op("Add", b.op("MatMul", gamma, upper), one)
    # |C|_1 from the sums of the rows; no row at all gives 0 / 1 = 0.
    norm = row_sum(b, gamma, b.op("Gather", sums, b.i64(*visited), axis=3))
    return b.op("Div", row_sum(b, gamma, picked), b.op("Max", norm, b.f32(1.0)))


def ramp(b: Body, ids: ir.Value, low: ir.Value) -> ir.Value:
    """Return r [L,E,R,N]: 0 at the lowest id of a row, 1 at the highest, 0 if there is one unit."""
    high = b.reduce("Max", ids, 3, keep=True)
    span = b.op("Max", b.op("Sub", high, low), b.i32(1))
    return b.op("Div", b.cast(b.op("Sub", ids, low), FLOAT), b.cast(span, FLOAT))
