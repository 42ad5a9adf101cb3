"""Body of NestedKVScore: anomaly against three memories, blended and routed.

Keys of length 1 are cut into chunks of one window. A sum over the last `window` tokens is the sum
of a chunk so far and of what the chunk before has behind the same place, so no long prefix sums
are subtracted and no bit is lost. A chunk meets few episodic blocks, so each chunk is multiplied
with the means of those alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from kvsift.builder import ops
from kvsift.builder.bodies import keydiff_score
from kvsift.builder.bodies.nestedkv_blend import blended
from kvsift.builder.bodies.rows import slot_count
from kvsift.builder.bodies.tools import Body, Dims, index
from kvsift.builder.bodies.unit_keys import (
    chunk_sums,
    flatten,
    masked_score,
    on_chunks,
    row_index,
    unit,
    units_only,
    valid_counts,
)

FLOAT = ir.DataType.FLOAT
INT32 = ir.DataType.INT32


def build(b: Body, attrs: Mapping[str, ops.Value], dims: Dims) -> list[ir.Value]:
    """Return [score], -inf at padding."""
    if not attrs["continuum"]:
        return keydiff_score.build(b, attrs, dims)
    window = int(attrs["window"])
    counts = valid_counts(b)
    keys = on_chunks(b, dims, window, lambda keys: unit(b, keys, dims.head_dim))
    so_far = b.op("CumSum", keys, b.const(3, np.int64))  # [E, Hkv, chunks, window, D]
    sums = chunk_sums(b, dims, window, keys, counts)
    stable = keydiff_score.mean_direction(b, dims, sums)
    length = block_length(b, attrs, counts)
    shortest = min(int(attrs["block_min"]), int(attrs["block_max"]))
    blocks = block_directions(b, dims, window, shortest, so_far, sums, length, counts)
    slow = slow_cosines(b, dims, window, shortest, keys, stable, blocks, length)
    cosines = b.op("Concat", slow, current_cosine(b, dims, keys, so_far), axis=4)
    padded = b.op("Mul", b.size(keys, 2), b.i64(window))
    cosines = b.reshape(cosines, slot_count(b), dims.num_kv_heads, padded, 3)
    cosines = units_only(b, b.op("Transpose", cosines, perm=[0, 1, 3, 2]), 3)
    return [masked_score(b, blended(b, attrs, cosines, counts))]


def current_cosine(b: Body, dims: Dims, keys: ir.Value, so_far: ir.Value) -> ir.Value:
    """Return the cosine of each key with the sum of its window, [E,Hkv,chunks,window,1]."""
    behind = b.op("CumSum", keys, b.const(3, np.int64), exclusive=1, reverse=1)
    before = b.op("Pad", behind, b.i64(0, 0, 1, 0, 0, 0, 0, -1, 0, 0))
    memory = unit(b, b.op("Add", so_far, before), dims.head_dim)
    ones = b.const(np.ones((dims.head_dim, 1)), np.float32)
    return b.op("MatMul", b.op("Mul", keys, memory), ones)


def block_length(b: Body, attrs: Mapping[str, ops.Value], counts: ir.Value) -> ir.Value:
    """Return the tokens of an episodic block of each row, int32 [E,Hkv,1]."""
    length = b.op("Div", counts, b.i32(int(attrs["block_div"])))
    length = b.op("Max", length, b.i32(int(attrs["block_min"])))
    return b.op("Min", length, b.i32(int(attrs["block_max"])))


def block_directions(
    b: Body,
    dims: Dims,
    chunk: int,
    shortest: int,
    so_far: ir.Value,
    sums: ir.Value,
    length: ir.Value,
    counts: ir.Value,
) -> ir.Value:
    """Return the direction of the sum of each episodic block, [E,Hkv,blocks,D].

    A block is the chunks from its first token's to before its last token's, plus its last token's
    chunk so far, less its first token's chunk before it. There is one block more than a row can
    have: a product with a single row adds in another order.
    """
    padded = b.op("Mul", b.size(so_far, 2), b.i64(chunk))
    most = b.op("Add", b.op("Div", padded, b.i64(shortest)), b.i64(2))
    number = b.op("Range", b.i32(0), b.cast(b.op("Squeeze", most), INT32), b.i32(1))
    first = b.op("Min", b.op("Mul", number, length), counts)  # [E, Hkv, blocks]
    last = b.op("Sub", b.op("Min", b.op("Add", first, length), counts), b.i32(1))
    begin, end = (b.unsqueeze(b.op("Div", x, b.i32(chunk)), 3) for x in (first, last))
    at = index(b, sums, 2)
    inside = b.op("And", b.op("GreaterOrEqual", at, begin), b.op("Less", at, end))
    whole = b.op("MatMul", b.cast(inside, FLOAT), sums)

    flat = flatten(b, dims, so_far, 3, dims.head_dim)
    size = b.cast(padded, INT32)

    def prefix(position: ir.Value) -> ir.Value:
        row = row_index(b, dims, b.op("Max", position, b.i32(0)), size)
        return b.op("Gather", flat, row, axis=0)

    at_start = b.op("Equal", b.op("Mod", first, b.i32(chunk)), b.i32(0))
    before = prefix(b.op("Sub", first, b.i32(1)))
    before = b.op("Where", b.unsqueeze(at_start, 3), b.f32(0.0), before)
    return unit(b, b.op("Sub", b.op("Add", whole, prefix(last)), before), dims.head_dim)


def slow_cosines(
    b: Body,
    dims: Dims,
    chunk: int,
    shortest: int,
    keys: ir.Value,
    stable: ir.Value,
    blocks: ir.Value,
    length: ir.Value,
) -> ir.Value:
    """Return the cosines with the stable and the episodic memory, [E,Hkv,chunks,chunk,2].

    `stable` [E,Hkv,1,D] and `blocks` [E,Hkv,blocks,D] have length 1.
    """
    heads, width, count = dims.num_kv_heads, dims.head_dim, b.size(keys, 2)
    met = (chunk - 1) // shortest + 2  # blocks that a chunk can meet
    starts = b.op("Mul", index(b, keys, 2), b.i32(chunk))
    first = b.op("Div", starts, length)  # [E, Hkv, chunks]
    some = b.op("Add", b.unsqueeze(first, 3), b.const(np.arange(met), np.int32))
    known = b.cast(b.size(blocks, 2), INT32)
    some = b.op("Min", some, b.op("Sub", known, b.i32(1)))
    some = b.reshape(some, slot_count(b), heads, b.op("Mul", count, b.i64(met)))
    flat = flatten(b, dims, blocks, 2, width)
    memories = b.op("Gather", flat, row_index(b, dims, some, known), axis=0)
    memories = b.reshape(memories, slot_count(b), heads, count, met, width)
    shape = b.op("Concat", slot_count(b), b.i64(heads), count, b.i64(1, width), axis=0)
    stable = b.op("Expand", b.unsqueeze(stable, 2), shape)
    memories = b.op("Concat", stable, memories, axis=3)
    products = b.op("MatMul", keys, b.op("Transpose", memories, perm=[0, 1, 2, 4, 3]))

    position = b.op("Add", b.unsqueeze(starts, 1), b.const(np.arange(chunk), np.int32))
    block = b.op("Div", position, b.unsqueeze(length, 3))  # [E, Hkv, chunks, chunk]
    column = b.op("Add", b.op("Sub", block, b.unsqueeze(first, 3)), b.i32(1))
    column = b.op("Min", b.unsqueeze(column, 4), b.i32(met))
    column = b.op("Concat", b.op("Mul", column, b.i32(0)), column, axis=4)
    return b.op("GatherElements", products, column, axis=4)
