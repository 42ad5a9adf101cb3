"""Body of WindowScore: what the newest queries pay to each token, pooled over its neighbours."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from kvsift.builder import ops
from kvsift.builder.bodies.attention import (
    check_heads,
    head_logits,
    query_positions,
    window_queries,
)
from kvsift.builder.bodies.rows import FLOAT, key_positions, slot_count
from kvsift.builder.bodies.tools import FAR, Body, Dims
from kvsift.builder.errors import UsageError


def build(b: Body, attrs: Mapping[str, ops.Value], dims: Dims) -> list[ir.Value]:
    """Return [score]."""
    check_heads("WindowScore", dims)
    rows = 1 if attrs["shared"] else dims.num_kv_heads
    position = key_positions(b, 1)  # [E, R, N]
    oldest = b.unsqueeze(b.reduce("Min", position, 2, keep=True), 3)
    asked = b.op("GreaterOrEqual", query_positions(b, dims), oldest)  # [E, R, W, 1]

    # A query that sees no key, as before the sequence's start, may hold anything.
    first = b.op(
        "Transpose",
        b.reduce("Max", b.cast(asked, ir.DataType.INT32), 1, keep=True),
        perm=[0, 2, 1, 3],
    )
    exists = b.op("Greater", first, b.i32(0))  # [E, W, 1, 1]
    query = b.op("Where", exists, window_queries(b, dims), b.f32(0.0))
    probs = b.op("Softmax", head_logits(b, query, position, dims, rows), axis=-1)
    score = over_window(b, ops.REDUCE[int(attrs["window_reduce"])], probs, asked, dims, rows)

    start = b.op("Sub", b.reshape(b.input("tokens_seen"), -1, 1, 1), b.i32(dims.window))
    older = b.cast(b.op("Less", position, start), FLOAT)  # [E, R, N]
    score = b.op("Mul", score, b.unsqueeze(older, 2))
    score = pooled(b, score, int(attrs["pool_size"]), dims)
    score = over_group(b, ops.REDUCE[int(attrs["group_reduce"])], score, dims.window_heads // rows)
    score = b.reshape(score, slot_count(b), rows, b.size(position, 2))
    return [b.op("Where", b.op("Less", position, b.i32(FAR)), score, b.f32(-np.inf))]


def over_window(
    b: Body, kind: str, probs: ir.Value, asked: ir.Value, dims: Dims, rows: int
) -> ir.Value:
    """Reduce [E,Hq,W,N] over the queries that see a key, to [E,R,Hq/R,N]."""
    slot, units = slot_count(b), b.size(probs, 3)
    used = b.cast(asked, FLOAT)  # [E, R, W, 1]
    probs = b.reshape(probs, slot, rows, dims.window_heads // rows, dims.window, units)
    if kind == "max":
        return b.reduce("Max", b.op("Mul", probs, b.unsqueeze(used, 2)), 3)
    weight = b.op("Transpose", used, perm=[0, 1, 3, 2])  # [E, R, 1, W]
    if kind == "mean":
        count = b.op("MatMul", weight, b.const(np.ones((dims.window, 1)), np.float32))
        weight = b.op("Div", weight, b.op("Max", count, b.f32(1.0)))
    return b.op("Squeeze", b.op("MatMul", b.unsqueeze(weight, 2), probs), b.i64(3))


def pooled(b: Body, score: ir.Value, size: int, dims: Dims) -> ir.Value:
    """Average [.., N] over `size` neighbours, with zeros beyond the ends."""
    if size % 2 == 0:
        raise UsageError(f"WindowScore.pool_size is {size}; it must be odd")
    if size == 1:
        return score
    shape = b.op("Shape", score)
    score = b.reshape(score, slot_count(b), dims.window_heads, b.size(score, 3))
    side = size // 2
    score = b.op("AveragePool", score, kernel_shape=[size], pads=[side, side], count_include_pad=1)
    return b.op("Reshape", score, shape)


def over_group(b: Body, kind: str, score: ir.Value, group: int) -> ir.Value:
    """Reduce [E,R,G,N] over the group's query heads, to [E,R,1,N]."""
    if group == 1:
        return score
    if kind == "max":
        return b.reduce("Max", score, 2, keep=True)
    weight = 1.0 / group if kind == "mean" else 1.0
    return b.op("MatMul", b.const(np.full((1, group), weight), np.float32), score)
