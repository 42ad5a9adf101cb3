"""Attention of the window's queries over the cached keys of the evicting slots.

The keys are gathered row by row and laid out unit after unit, so that ragged capacities need no
padding, and rows beyond the length, which may hold anything, are replaced by a valid row before
they can turn a product into NaN. No bit may depend on which slots evict together: sums are matrix
products, since the order within a Reduce follows a row's alignment in memory.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from kvsift.builder.bodies.tools import FAR, Body, Dims, index

FLOAT = ir.DataType.FLOAT
#: Times a distance of at least one position: far below every logit, and finite up to FAR.
MASK_SLOPE = 1e20


def slot_count(b: Body) -> ir.Value:
    """Return E as int64 [1], for reshapes.

    ONNX Runtime rewrites a reshape with one unknown size to -1, which fails where E is 0; a
    second unknown keeps it from that.
    """
    return b.size(b.input("evict_slots"), 0)


def key_positions(b: Body, block: int) -> tuple[ir.Value, ir.Value]:
    """Return (position of each key [E,R,N*b], FAR where invalid; the least of a row [E,R,1,1])."""
    ids = b.input("unit_ids")
    start = b.op("Mul", b.unsqueeze(ids, 3), b.i32(block))
    inside = b.const(np.arange(block), np.int32)
    row = b.op("Add", b.op("Mul", b.reshape(index(b, ids, 2), -1, 1), b.i32(block)), inside)
    valid = b.op("Less", row, b.reshape(b.input("lens"), -1, 1, 1, 1))  # [E, 1, N, b]
    valid = b.op("And", valid, b.op("GreaterOrEqual", start, b.i32(0)))
    position = b.op("Where", valid, b.op("Add", start, inside), b.i32(FAR))  # [E, R, N, b]
    position = b.reshape(position, slot_count(b), 0, b.op("Mul", b.size(ids, 2), b.i64(block)))
    return position, b.unsqueeze(b.reduce("Min", position, 2, keep=True), 3)


def query_positions(b: Body, window: int) -> ir.Value:
    """Return the position of each window query as int32 [E,1,W,1]; negative before the start."""
    newest = b.reshape(b.input("tokens_seen"), -1, 1, 1, 1)
    return b.op("Add", newest, b.const(np.arange(-window, 0).reshape(-1, 1), np.int32))


def query_rows(b: Body, slots: ir.Value, dims: Dims) -> ir.Value:
    """Return the slots' window queries as fp32 [E,W,Hq,D], scaled by 1 / sqrt(D)."""
    query = b.cast(b.op("Gather", b.input("q_window"), slots, axis=0), FLOAT)
    query = b.reshape(query, 0, 0, dims.window_heads, dims.head_dim)
    return b.op("Mul", query, b.f32(dims.head_dim**-0.5))


def key_rows(b: Body, slots: ir.Value, position: ir.Value, dims: Dims) -> ir.Value:
    """Return which rows of the flattened cache [B*Hkv*C,D] to read, int32 [E,Hkv,N*b].

    An invalid row is replaced by the slot's oldest one, if it has any.
    """
    capacity = b.cast(b.size(b.input("keys"), 2), ir.DataType.INT32)
    oldest = b.cast(b.op("ArgMin", position, axis=2, keepdims=1), ir.DataType.INT32)
    valid = b.op("Less", position, b.i32(FAR))
    row = b.op("Where", valid, index(b, position, 2), oldest)  # [E, R, N*b]
    head = b.op("Mul", b.reshape(slots, -1, 1), b.i32(dims.num_kv_heads))
    head = b.op("Add", head, b.const(np.arange(dims.num_kv_heads), np.int32))  # [E, Hkv]
    return b.op("Add", row, b.unsqueeze(b.op("Mul", head, capacity), 2))


def attention(b: Body, mode: str, position: ir.Value, dims: Dims) -> ir.Value:
    """Return the causal attention of the window, fp32 [E,heads,W,N*b]; heads is 1 for mean_qk.

    The mask is added: (query - key) * MASK_SLOPE where the key is newer, which costs one pass over
    the logits where a Where would cost seven. The row of a query that sees no key is arbitrary.
    """
    slots = b.op("Max", b.input("evict_slots"), b.i32(0))
    query = query_rows(b, slots, dims)
    rows = key_rows(b, slots, position, dims)
    flat = b.reshape(b.input("keys"), -1, dims.head_dim)
    distance = b.op("Sub", query_positions(b, dims.window), b.unsqueeze(position, 2))
    bias = b.cast(b.op("Min", distance, b.i32(0)), FLOAT)
    bias = b.op("Mul", bias, b.f32(MASK_SLOPE))  # [E, R, W, N*b]
    slot, count = slot_count(b), b.size(position, 2)
    if mode == "mean_qk":
        # <q, mean of k> over heads side by side: the product sums the heads, no pass of its own.
        heads = dims.num_kv_heads
        keys = b.cast(b.op("Gather", flat, b.op("Transpose", rows, perm=[0, 2, 1]), axis=0), FLOAT)
        keys = b.reshape(keys, slot, 1, count, heads * dims.head_dim)
        mean = np.full((1, dims.window_heads), 1.0 / (dims.window_heads * heads))
        query = b.op("MatMul", b.const(mean, np.float32), query)  # [E, W, 1, D]
        query = b.op("Transpose", b.op("Concat", *[query] * heads, axis=3), perm=[0, 2, 1, 3])
        return b.op("Softmax", b.op("Add", product(b, query, keys), bias), axis=-1)
    keys = b.cast(b.op("Gather", flat, rows, axis=0), FLOAT)  # [E, Hkv, N*b, D]
    query = b.op("Transpose", query, perm=[0, 2, 1, 3])
    group = dims.window_heads // dims.num_kv_heads
    query = b.reshape(query, 0, dims.num_kv_heads, group * dims.window, dims.head_dim)
    logits = product(b, query, keys)
    if mode == "per_head":
        logits = b.reshape(logits, slot, dims.num_kv_heads, group, dims.window, count)
        logits = b.op("Add", logits, b.unsqueeze(bias, 2))
        logits = b.reshape(logits, slot, dims.window_heads, dims.window, count)
    else:
        logits = b.reshape(logits, slot, dims.window_heads, dims.window, count)
        logits = b.op("Add", logits, bias)
    return b.op("Softmax", logits, axis=-1)


def product(b: Body, query: ir.Value, keys: ir.Value) -> ir.Value:
    """Return Q K^T."""
    return b.op("MatMul", query, b.op("Transpose", keys, perm=[0, 1, 3, 2]))
