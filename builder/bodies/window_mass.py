"""Body of WindowMass: attention of the window's queries over the keys of the evicting slots."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from kvsift.builder import ops
from kvsift.builder.bodies.attention import (
    causal_bias,
    check_heads,
    head_logits,
    product,
    window_queries,
)
from kvsift.builder.bodies.rows import gathered, key_positions, key_rows, slot_count
from kvsift.builder.bodies.tools import Body, Dims


def build(b: Body, attrs: Mapping[str, ops.Value], dims: Dims) -> list[ir.Value]:
    """Return [mass]: every head's row sums to 1, and so does their mean."""
    mode = ops.HEAD_REDUCE[int(attrs["head_reduce"])]
    if mode != "mean_qk":
        check_heads(f"head_reduce {mode!r}", dims, "; average fewer or use 'mean_qk'")
    block = int(attrs["block_size"])
    position = key_positions(b, block)
    slot, units = slot_count(b), b.size(b.input("unit_ids"), 2)
    rows = dims.num_kv_heads if mode == "per_head" else 1
    heads = 1 if mode == "mean_qk" else dims.window_heads // rows
    if mode == "mean_qk":
        logits = mean_logits(b, position, dims)
    else:
        logits = head_logits(b, window_queries(b, dims), position, dims, rows)
    probs = b.op("Softmax", logits, axis=-1)
    if heads > 1:  # averaged before the sums over units, which then have a row of heads less to do
        width = b.op("Mul", b.size(position, 2), b.i64(dims.window))
        probs = b.reshape(probs, slot, rows, heads, width)
        probs = b.op("MatMul", b.const(np.full((1, heads), 1.0 / heads), np.float32), probs)
    probs = b.reshape(probs, slot, rows, dims.window, units, block)
    mass = b.op("MatMul", probs, b.const(np.ones((block, 1)), np.float32))
    return [b.op("Squeeze", mass, b.i64(4))]


def mean_logits(b: Body, position: ir.Value, dims: Dims) -> ir.Value:
    """Return the masked logits of the mean query and the mean key, fp32 [E,1,W,N*b]."""
    # <q, mean of k> over heads side by side: the product sums the heads, no pass of its own.
    heads = dims.num_kv_heads
    scale = dims.head_dim**-0.5 / (dims.window_heads * heads)
    mean = b.const(np.full((1, dims.window_heads), scale), np.float32)
    query = b.op("MatMul", mean, window_queries(b, dims))  # [E, W, 1, D]
    query = b.op("Transpose", b.op("Concat", *[query] * heads, axis=3), perm=[0, 2, 1, 3])
    logits = product(b, query, side_by_side(b, position, dims))
    return b.op("Add", logits, causal_bias(b, position, dims))


def side_by_side(b: Body, position: ir.Value, dims: Dims) -> ir.Value:
    """Return the keys of all heads side by side, [E,1,N*b,Hkv*D]."""
    rows = b.op("Transpose", key_rows(b, position, dims), perm=[0, 2, 1])
    width = dims.num_kv_heads * dims.head_dim
    keys = gathered(b, "keys", rows, dims)
    return b.reshape(keys, slot_count(b), 1, b.size(position, 2), width)
