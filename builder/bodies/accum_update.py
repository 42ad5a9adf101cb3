"""Body of AccumUpdate: the attention that a step's queries pay, added up per row of the cache.

As costly as the step's attention, so the logits are passed over as rarely as can be: the product,
the mask, the softmax, and one product with ones that sums queries and heads.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from kvsift.builder import ops
from kvsift.builder.bodies.attention import MASK_SLOPE, check_heads, product
from kvsift.builder.bodies.rows import FLOAT
from kvsift.builder.bodies.tools import FLOAT_MAX, Body, Dims, index

#: Queries of a step that attend at a time: bounds the memory of the logits.
BLOCK = 128


def build(b: Body, attrs: Mapping[str, ops.Value], dims: Dims) -> list[ir.Value]:
    """Return [accum_out]."""
    del attrs
    check_heads("AccumUpdate", dims)
    step = index(b, b.input("queries"), 1)  # [S]
    row = index(b, b.input("keys"), 2)  # [C]
    past = b.unsqueeze(b.input("past_lens"), 2)  # [B, Rl, 1]
    new = b.reshape(b.input("n_new"), -1, 1)
    # Tokens that pad the step count for nothing and see what the last real one sees.
    real = b.op("Less", step, new)  # [B, S]
    back = b.op("Min", step, b.op("Sub", new, b.i32(1)))
    newest = b.unsqueeze(b.op("Add", past, b.unsqueeze(back, 1)), 3)  # [B, Rl, S, 1]
    query = step_queries(b, real, dims)  # [B, Hkv, G, S, D]
    group = dims.window_heads // dims.num_kv_heads
    weight = b.unsqueeze(b.op("Concat", *[b.unsqueeze(b.cast(real, FLOAT), 1)] * group, axis=1), 1)
    received = b.branch(
        b.op("Equal", b.op("Squeeze", b.size(step, 0)), b.const(1, np.int64)),
        lambda: paid(b, decode_attention(b, query, newest, row, dims), weight),
        lambda: by_blocks(b, query, newest, row, weight, dims),
    )

    old = b.op("Less", row, past)  # [B, Rl, C]
    valid = b.op("Less", row, b.op("Add", past, b.unsqueeze(new, 2)))
    before = b.op("Where", old, b.input("accum"), b.f32(0.0))
    return [b.op("Add", before, b.op("Where", valid, received, b.f32(0.0)))]


def step_queries(b: Body, real: ir.Value, dims: Dims) -> ir.Value:
    """Return the step's scaled queries by KV head, fp32 [B,Hkv,G,S,D], 0 where they pad."""
    group = dims.window_heads // dims.num_kv_heads
    shape = (0, 0, dims.num_kv_heads, group, dims.head_dim)
    query = b.reshape(b.cast(b.input("queries"), FLOAT), *shape)
    query = b.op("Where", b.unsqueeze(real, 2, 3, 4), query, b.f32(0.0))
    query = b.op("Mul", query, b.f32(dims.head_dim**-0.5))
    return b.op("Transpose", query, perm=[0, 2, 3, 1, 4])


def paid(b: Body, probs: ir.Value, weight: ir.Value) -> ir.Value:
    """Return [B,Hkv,C]: the attention [B,Hkv,G*S,C] of the queries of weight [B,1,G,S]."""
    weight = b.unsqueeze(b.reshape(weight, 0, 1, -1), 2)
    return b.op("Squeeze", b.op("MatMul", weight, probs), b.i64(2))


def decode_attention(
    b: Body, query: ir.Value, newest: ir.Value, row: ir.Value, dims: Dims
) -> ir.Value:
    """Return the attention of a step of one token, [B,Hkv,G,C].

    The logits are few beside the keys: what a row that is not valid made of them is replaced.
    """
    visible = b.op("LessOrEqual", row, newest)  # [B, Rl, 1, C]
    query = b.reshape(query, 0, dims.num_kv_heads, -1, dims.head_dim)
    logits = product(b, query, b.input("keys"))
    return b.op("Softmax", b.op("Where", visible, logits, b.f32(-FLOAT_MAX)), axis=-1)


def by_blocks(
    b: Body, query: ir.Value, newest: ir.Value, row: ir.Value, weight: ir.Value, dims: Dims
) -> ir.Value:
    """Return what a step of many tokens pays, [B,Hkv,C], a block of its queries after the other."""
    keys = valid_keys(b, newest, row, dims)
    steps = b.op("Squeeze", b.size(newest, 2))
    size, last = b.const(BLOCK, np.int64), b.const(BLOCK - 1, np.int64)
    count = b.op("Div", b.op("Add", steps, last), size)

    def add(i: ir.Value, total: ir.Value) -> ir.Value:
        start = b.unsqueeze(b.op("Mul", i, size), 0)
        end = b.op("Add", start, b.i64(BLOCK))
        some, here, counted = (
            b.op("Slice", x, start, end, b.i64(axis))
            for x, axis in ((query, 3), (newest, 2), (weight, 3))
        )
        return b.op("Add", total, paid(b, chunk_attention(b, some, here, row, keys, dims), counted))

    nothing = b.op("Expand", b.f32(0.0), b.op("Shape", b.input("accum")))
    return b.loop(count, nothing, add)


def chunk_attention(
    b: Body, query: ir.Value, newest: ir.Value, row: ir.Value, keys: ir.Value, dims: Dims
) -> ir.Value:
    """Return the attention of a block of queries, [B,Hkv,G*S,C].

    The keys are few beside the logits: they hold no row that is not valid, and the mask is added,
    one pass where a Where would take seven.
    """
    group = dims.window_heads // dims.num_kv_heads
    steps, rows = b.size(newest, 2), b.size(row, 0)
    query = b.reshape(query, 0, dims.num_kv_heads, -1, dims.head_dim)
    logits = product(b, query, keys)
    shape = b.op("Shape", logits)
    distance = b.op("Min", b.op("Sub", newest, row), b.i32(0))  # [B, Rl, S, C]
    bias = b.op("Mul", b.cast(distance, FLOAT), b.f32(MASK_SLOPE))
    logits = b.reshape(logits, 0, dims.num_kv_heads, group, steps, rows)
    logits = b.op("Add", logits, b.unsqueeze(bias, 2))
    return b.op("Reshape", b.op("Softmax", logits, axis=-1), shape)


def valid_keys(b: Body, newest: ir.Value, row: ir.Value, dims: Dims) -> ir.Value:
    """Return the keys [B,Hkv,C,D], the newest row of a slot in place of all that are not valid."""
    last = b.reduce("Max", newest, 2)  # [B, Rl, 1]
    at = b.op("Max", b.op("Min", row, last), b.i32(0))  # [B, Rl, C]
    keys = b.input("keys")
    slots = b.op("Mul", index(b, keys, 0), b.i32(dims.num_kv_heads))
    head = b.op("Add", b.unsqueeze(slots, 1), b.const(np.arange(dims.num_kv_heads), np.int32))
    capacity = b.cast(b.size(keys, 2), ir.DataType.INT32)
    at = b.op("Add", at, b.unsqueeze(b.op("Mul", head, capacity), 2))  # [B, Hkv, C]
    return b.op("Gather", b.reshape(keys, -1, dims.head_dim), at, axis=0)
