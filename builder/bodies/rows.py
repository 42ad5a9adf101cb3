"""Rows of the cache that a body reads: which are valid, where they lie, and their contents.

Where a cache of one slot is full, as a prompt's scratch often is, its rows are read in place. Else
they are gathered row by row and laid out unit after unit, so that ragged capacities need no
padding, and rows that are not valid, which may hold anything, are replaced by a valid row before
they can turn a product into NaN.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from kvsift.builder.bodies.tools import FAR, Body, Dims, index

FLOAT = ir.DataType.FLOAT


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


def gathered(b: Body, cache: str, rows: ir.Value, dims: Dims) -> ir.Value:
    """Return rows (of `key_rows`) of the input `cache`, [.., D]."""
    return b.op("Gather", b.reshape(b.input(cache), -1, dims.head_dim), rows, axis=0)
