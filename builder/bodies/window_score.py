"""Body of WindowScore: what the newest queries pay to each token, pooled over its neighbours."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from kvsift.builder import ops
from kvsift.builder.bodies.attention import (
    check_heads,
    head_logits,
    window_queries,
)
from kvsift.builder.bodies.rows import key_positions, slot_count
from kvsift.builder.bodies.tools import FAR, Body, Dims
from kvsift.builder.errors import UsageError


def build(b: Body, attrs: Mapping[str, ops.Value], dims: Dims) -> list[ir.Value]:
    """Return [score]."""
    check_heads("WindowScore", dims)
    rows = 1 if attrs["shared"] else dims.num_kv_heads
    position = key_positions(b, 1)  # [E, R, N]
    logits = head_logits(b, window_queries(b, dims), position, dims, rows)
    probs = b.op("Softmax", logits, axis=-1)  # [E, Hq, W, N]
    score = over_window(b, ops.REDUCE[int(attrs["window_reduce"])], probs, dims)
    slot, units = slot_count(b), b.size(position, 2)
    score = b.reshape(score, slot, rows, dims.window_heads // rows, units)

    # A token older than the window is seen by all queries, so none of them lacks a key where the
    # score counts; what the others get, rows of a window that is not full included, ends here.
    start = b.op("Sub", b.reshape(b.input("tokens_seen"), -1, 1, 1), b.i32(dims.window))
    older = b.unsqueeze(b.op("Less", position, start), 2)
    score = b.op("Where", older, score, b.f32(0.0))
    score = pooled(b, score, int(attrs["pool_size"]), dims)
    score = over_group(b, ops.REDUCE[int(attrs["group_reduce"])], score, dims.window_heads // rows)
    score = b.reshape(score, slot, rows, units)
    return [b.op("Where", b.op("Less", position, b.i32(FAR)), score, b.f32(-np.inf))]


def over_window(b: Body, kind: str, probs: ir.Value, dims: Dims) -> ir.Value:
    """Reduce [E,Hq,W,N] over the queries, to [E,Hq,1,N] or [E,Hq,N]."""
    if kind == "max":
        return b.reduce("Max", probs, 2)
    weight = 1.0 / dims.window if kind == "mean" else 1.0
    return b.op("MatMul", b.const(np.full((1, dims.window), weight), np.float32), probs)


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
