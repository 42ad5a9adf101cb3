"""Body of WindowMass: attention of the window's queries over the keys of the evicting slots.

Where a cache of one slot is full, as a prompt's scratch often is, the keys are read in place. Else
they are gathered row by row and laid out unit after unit, so that ragged capacities need no
padding, and rows that are not valid, which may hold anything, are replaced by a valid row before
they can turn a product into NaN. No bit may depend on which slots evict together: sums are matrix
products, since the order within a Reduce follows a row's alignment in memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from kvsift.builder import ops
from kvsift.builder.bodies.tools import FAR, Body, Dims, index
from kvsift.builder.errors import UsageError

FLOAT = ir.DataType.FLOAT
#: Times a distance of at least one position: far below every logit, and finite up to FAR.
MASK_SLOPE = 1e20


def build(b: Body, attrs: Mapping[str, ops.Value], dims: Dims) -> list[ir.Value]:
    """Return [mass]: every head's row sums to 1, and so does their mean."""
    mode = ops.HEAD_REDUCE[int(attrs["head_reduce"])]
    if mode != "mean_qk" and dims.window_heads % dims.num_kv_heads:
        raise UsageError(
            f"head_reduce {mode!r} needs the window of every query head; got "
            f"{dims.window_heads} for {dims.num_kv_heads} KV heads; average fewer or use 'mean_qk'"
        )
    block = int(attrs["block_size"])
    position = key_positions(b, block)
    slot, units = slot_count(b), b.size(b.input("unit_ids"), 2)
    rows = dims.num_kv_heads if mode == "per_head" else 1
    heads = 1 if mode == "mean_qk" else dims.window_heads // rows
    probs = b.op("Softmax", masked_logits(b, mode, position, dims), axis=-1)
    probs = b.reshape(probs, slot, 0, 0, units, block)
    mass = b.op("MatMul", probs, b.const(np.ones((block, 1)), np.float32))
    if heads == 1:
        return [b.reshape(mass, slot, rows, dims.window, units)]
    mass = b.reshape(mass, slot, rows, heads, b.op("Mul", units, b.i64(dims.window)))
    mean = b.const(np.full((1, heads), 1.0 / heads), np.float32)
    return [b.reshape(b.op("MatMul", mean, mass), slot, rows, dims.window, units)]


def slot_count(b: Body) -> ir.Value:
    """Return E as int64 [1], for reshapes.

    ONNX Runtime rewrites a reshape with one unknown size to -1, which fails where E is 0; a
    second unknown keeps it from that.
    """
    return b.size(b.input("evict_slots"), 0)


def key_positions(b: Body, block: int) -> ir.Value:
    """Return the position of each key, int32 [E,R,N*b], FAR where the row is not valid."""
    ids = b.input("unit_ids")
    start = b.op("Mul", b.unsqueeze(ids, 3), b.i32(block))
    position = b.op("Add", start, b.const(np.arange(block), np.int32))  # [E, R, N, b]
    newer = b.op("GreaterOrEqual", position, b.reshape(b.input("tokens_seen"), -1, 1, 1, 1))
    invalid = b.op("Or", newer, b.op("Less", start, b.i32(0)))
    position = b.op("Where", invalid, b.i32(FAR), position)
    return b.reshape(position, slot_count(b), 0, b.op("Mul", b.size(ids, 2), b.i64(block)))


def masked_logits(b: Body, mode: str, position: ir.Value, dims: Dims) -> ir.Value:
    """Return the masked logits, fp32 [E,heads,W,N*b]; heads is 1 for mean_qk.

    The mask is added: (query - key) * MASK_SLOPE where the key is newer, which costs one pass over
    the logits where a Where would cost seven. The row of a query that sees no key is arbitrary.
    """
    heads, group = dims.num_kv_heads, dims.window_heads // dims.num_kv_heads
    shape = (0, dims.window, dims.window_heads, dims.head_dim)
    query = b.reshape(b.cast(b.input("q_window"), FLOAT), *shape)
    slot, count = slot_count(b), b.size(position, 2)
    newest = b.reshape(b.input("tokens_seen"), -1, 1, 1, 1)
    here = b.op("Add", newest, b.const(np.arange(-dims.window, 0).reshape(-1, 1), np.int32))
    distance = b.op("Sub", here, b.unsqueeze(position, 2))  # [E, R, W, N*b]
    bias = b.op("Mul", b.cast(b.op("Min", distance, b.i32(0)), FLOAT), b.f32(MASK_SLOPE))
    if mode == "mean_qk":
        # <q, mean of k> over heads side by side: the product sums the heads, no pass of its own.
        scale = dims.head_dim**-0.5 / (dims.window_heads * heads)
        mean = np.full((1, dims.window_heads), scale)
        query = b.op("MatMul", b.const(mean, np.float32), query)  # [E, W, 1, D]
        query = b.op("Transpose", b.op("Concat", *[query] * heads, axis=3), perm=[0, 2, 1, 3])
        return b.op("Add", product(b, query, side_by_side(b, position, dims)), bias)
    query = b.op("Mul", query, b.f32(dims.head_dim**-0.5))
    query = b.op("Transpose", query, perm=[0, 2, 1, 3])
    query = b.reshape(query, 0, heads, group * dims.window, dims.head_dim)
    logits = b.branch(
        whole_cache(b, position),
        lambda: product(b, query, b.input("keys")),
        lambda: product(b, query, gathered_keys(b, position, dims)),
    )
    if mode == "per_head":
        logits = b.reshape(logits, slot, heads, group, dims.window, count)
        logits = b.op("Add", logits, b.unsqueeze(bias, 2))
        return b.reshape(logits, slot, dims.window_heads, dims.window, count)
    return b.op("Add", b.reshape(logits, slot, dims.window_heads, dims.window, count), bias)


def whole_cache(b: Body, position: ir.Value) -> ir.Value:
    """Return whether the units are one slot's whole cache, every row of it valid."""
    keys = b.input("keys")
    sizes = b.op("Concat", b.size(keys, 0), b.size(keys, 2), axis=0)
    wanted = b.op("Concat", b.i64(1), b.size(position, 2), axis=0)
    off = b.op("ReduceMax", b.op("Abs", b.op("Sub", sizes, wanted)), keepdims=0)
    farthest = b.op("ReduceMax", position, keepdims=0)
    same = b.op("Equal", off, b.const(0, np.int64))
    return b.op("And", same, b.op("Less", farthest, b.i32(FAR)))


def key_rows(b: Body, position: ir.Value, dims: Dims) -> ir.Value:
    """Return which rows of the flattened cache [B*Hkv*C,D] to read, int32 [E,Hkv,N*b].

    A row that is not valid is replaced by the slot's oldest one, if it has any.
    """
    slots = b.op("Max", b.input("evict_slots"), b.i32(0))
    capacity = b.cast(b.size(b.input("keys"), 2), ir.DataType.INT32)
    oldest = b.cast(b.op("ArgMin", position, axis=2, keepdims=1), ir.DataType.INT32)
    valid = b.op("Less", position, b.i32(FAR))
    row = b.op("Where", valid, index(b, position, 2), oldest)  # [E, R, N*b]
    head = b.op("Mul", b.reshape(slots, -1, 1), b.i32(dims.num_kv_heads))
    head = b.op("Add", head, b.const(np.arange(dims.num_kv_heads), np.int32))  # [E, Hkv]
    return b.op("Add", row, b.unsqueeze(b.op("Mul", head, capacity), 2))


def gathered_keys(b: Body, position: ir.Value, dims: Dims) -> ir.Value:
    """Return the keys of the slots, [E,Hkv,N*b,D]."""
    flat = b.reshape(b.input("keys"), -1, dims.head_dim)
    return b.op("Gather", flat, key_rows(b, position, dims), axis=0)


def side_by_side(b: Body, position: ir.Value, dims: Dims) -> ir.Value:
    """Return the keys of all heads side by side, [E,1,N*b,Hkv*D]."""
    rows = b.op("Transpose", key_rows(b, position, dims), perm=[0, 2, 1])
    keys = b.op("Gather", b.reshape(b.input("keys"), -1, dims.head_dim), rows, axis=0)
    width = dims.num_kv_heads * dims.head_dim
    return b.reshape(keys, slot_count(b), 1, b.size(position, 2), width)


def product(b: Body, query: ir.Value, keys: ir.Value) -> ir.Value:
    """Return Q K^T."""
    return b.op("MatMul", query, b.op("Transpose", b.cast(keys, FLOAT), perm=[0, 1, 3, 2]))
