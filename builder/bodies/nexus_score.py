"""Body of NexusScore."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from kvsift.builder import ops
from kvsift.builder.bodies.tools import FAR, Body, Dims
from kvsift.builder.bodies.window_attention import (
    attention,
    key_positions,
    query_positions,
    slot_count,
)
from kvsift.builder.errors import UsageError

FLOAT = ir.DataType.FLOAT


def build(b: Body, attrs: Mapping[str, ops.Value], dims: Dims) -> list[ir.Value]:
    """Return [score]: the weight of each unit, -inf at padding and for skipped slots."""
    mode = ops.HEAD_REDUCE[int(attrs["head_reduce"])]
    if mode != "mean_qk" and dims.window_heads % dims.num_kv_heads:
        raise UsageError(
            f"head_reduce {mode!r} needs the window of every query head; got "
            f"{dims.window_heads} for {dims.num_kv_heads} KV heads; average fewer or use 'mean_qk'"
        )
    ids = b.input("unit_ids")
    position, oldest = key_positions(b, int(attrs["block_size"]))
    mass = unit_mass(b, mode, position, int(attrs["block_size"]), dims)

    # The row of a query that sees no key, as before the sequence's start, is arbitrary: drop it.
    has_key = b.op("LessOrEqual", oldest, query_positions(b, dims.window))  # [E, R, W, 1]
    rows = b.op("Where", has_key, mass, b.f32(0.0))
    count = b.op("Max", b.reduce("Sum", b.cast(has_key, FLOAT), 2), b.f32(1.0))  # [E, R, 1]
    ones = b.const(np.ones((1, dims.window)), np.float32)
    weight = b.op("Div", row_sum(b, ones, rows), count)  # a
    if attrs["walk_steps"] and attrs["walk_lambda"]:
        walked = walk(b, rows, b.cast(has_key, FLOAT), walk_rows(attrs, dims.window))
        weight = b.op("Add", weight, b.op("Mul", walked, b.f32(attrs["walk_lambda"])))
    if attrs["tie_eps"]:
        weight = b.op("Add", weight, b.op("Mul", ramp(b, ids), b.f32(attrs["tie_eps"])))
    used = b.op("GreaterOrEqual", b.reshape(b.input("evict_slots"), -1, 1, 1), b.i32(0))
    used = b.op("And", used, b.op("GreaterOrEqual", ids, b.i32(0)))
    return [b.op("Where", used, weight, b.f32(-np.inf))]


def unit_mass(b: Body, mode: str, position: ir.Value, block: int, dims: Dims) -> ir.Value:
    """Return S [E,R,W,N]: the share of each query's attention that each unit has.

    Every head's row sums to 1, and so does their mean: nothing is left to normalise.
    """
    slot, units = slot_count(b), b.size(b.input("unit_ids"), 2)
    rows = dims.num_kv_heads if mode == "per_head" else 1
    heads = 1 if mode == "mean_qk" else dims.window_heads // rows
    probs = b.reshape(attention(b, mode, position, dims), slot, 0, 0, units, block)
    mass = b.op("MatMul", probs, b.const(np.ones((block, 1)), np.float32))
    mass = b.reshape(mass, slot, rows, heads, b.op("Mul", units, b.i64(dims.window)))
    mean = b.const(np.full((1, heads), 1.0 / heads), np.float32)
    return b.reshape(b.op("MatMul", mean, mass), slot, rows, dims.window, units)


def row_sum(b: Body, factors: ir.Value, rows: ir.Value) -> ir.Value:
    """Return the sum of factor times row: [.., 1, K] and [E,R,K,N] give [E,R,N]."""
    return b.op("Squeeze", b.op("MatMul", factors, rows), b.i64(2))


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
    """Return c [E,R,N] of the walk over the `visited` of the rows [E,R,W,N], whose sums are given.

    C = sum of gamma_i row_i and gamma_i = 1 + sum over j < i of <row_i, row_j> gamma_j, so only
    the H x H inner products are needed, and H - 1 rounds solve the triangular system exactly.
    Gamma is kept as a row: gamma <- 1 + gamma U, U the part of the products above the diagonal.
    """
    steps = len(visited)
    picked = b.op("Gather", rows, b.i64(*visited), axis=2)  # [E, R, H, N]
    gram = b.op("MatMul", picked, b.op("Transpose", picked, perm=[0, 1, 3, 2]))
    upper = b.op("Mul", gram, b.const(np.tri(steps, k=-1).T, np.float32))
    gamma, one = b.const(np.ones((1, steps)), np.float32), b.f32(1.0)
    for _ in visited[1:]:
        gamma = b.op("Add", b.op("MatMul", gamma, upper), one)
    # |C|_1 from the sums of the rows; no row at all gives 0 / 1 = 0.
    norm = row_sum(b, gamma, b.op("Gather", sums, b.i64(*visited), axis=2))
    return b.op("Div", row_sum(b, gamma, picked), b.op("Max", norm, b.f32(1.0)))


def ramp(b: Body, ids: ir.Value) -> ir.Value:
    """Return r [E,R,N]: 0 at the lowest id of a row, 1 at the highest, 0 if there is one unit."""
    pad = b.op("Less", ids, b.i32(0))
    high = b.reduce("Max", ids, 2, keep=True)
    low = b.reduce("Min", b.op("Where", pad, b.i32(FAR), ids), 2, keep=True)
    span = b.op("Max", b.op("Sub", high, low), b.i32(1))
    return b.op("Div", b.cast(b.op("Sub", ids, low), FLOAT), b.cast(span, FLOAT))
