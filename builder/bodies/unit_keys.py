"""Keys of token units for key-only scorers, cut into chunks so that long sums keep their bits.

Unit j is row j of its slot and the valid units of a row are a prefix. What lies behind them may be
anything, even NaN: it never enters a sum with a valid row, and the scores there are replaced.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from kvsift.builder.bodies.rows import slot_count
from kvsift.builder.bodies.tools import Body, Dims, index

FLOAT = ir.DataType.FLOAT
INT32 = ir.DataType.INT32
#: Tokens of a chunk where nothing else sets it: short enough to sum exactly, few enough products.
CHUNK = 64
#: Added to the mean square of a vector before it is scaled to length 1: zero stays zero.
TINY = 1e-20


def valid_counts(b: Body) -> ir.Value:
    """Return the number of valid units of each row, int32 [E,R,1]."""
    valid = b.op("GreaterOrEqual", b.input("unit_ids"), b.i32(0))
    return b.reduce("Sum", b.cast(valid, INT32), 2, keep=True)


def chunk_count(b: Body, chunk: int) -> ir.Value:
    """Return the number of chunks that hold N units, int64 [1]."""
    units = b.size(b.input("unit_ids"), 2)
    return b.op("Div", b.op("Add", units, b.i64(chunk - 1)), b.i64(chunk))


def unit(b: Body, vectors: ir.Value, width: int) -> ir.Value:
    """Return vectors of `width` numbers scaled to length 1, in one pass; zero stays zero."""
    scale = b.const(np.full(width, width**-0.5), np.float32)
    return b.op("RMSNormalization", vectors, scale, axis=-1, epsilon=TINY)


def on_chunks(b: Body, dims: Dims, chunk: int, use: Callable[[ir.Value], ir.Value]) -> ir.Value:
    """Return `use` of the keys, fp32 [E,Hkv,chunks,chunk,D].

    Where one slot is the whole cache and fills its chunks, as a prompt's scratch often is, the
    keys are read in place; else they are gathered.
    """
    keys, ids = b.input("keys"), b.input("unit_ids")
    count = chunk_count(b, chunk)
    padded = b.op("Mul", count, b.i64(chunk))
    sizes = b.op("Concat", b.size(keys, 0), b.size(ids, 0), b.size(keys, 2), axis=0)
    wanted = b.op("Concat", b.i64(1, 1), padded, axis=0)
    off = b.op("ReduceMax", b.op("Abs", b.op("Sub", sizes, wanted)), keepdims=0)

    def chunks(rows: ir.Value) -> ir.Value:
        shape = (slot_count(b), dims.num_kv_heads, count, chunk, dims.head_dim)
        return use(b.cast(b.reshape(rows, *shape), FLOAT))

    def gathered() -> ir.Value:
        # Behind the last unit any row will do: the last of the cache.
        last = b.cast(b.op("Sub", b.size(keys, 2), b.i64(1)), INT32)
        row = b.op("Min", _range(b, padded), last)  # [N padded]
        slots = b.reshape(b.op("Max", b.input("evict_slots"), b.i32(0)), -1, 1)
        head = b.op("Mul", slots, b.i32(dims.num_kv_heads))
        head = b.op("Add", head, b.const(np.arange(dims.num_kv_heads), np.int32))  # [E, Hkv]
        first = b.op("Mul", head, b.cast(b.size(keys, 2), INT32))
        flat = b.reshape(keys, -1, dims.head_dim)
        return chunks(b.op("Gather", flat, b.op("Add", b.unsqueeze(first, 2), row), axis=0))

    return b.branch(b.op("Equal", off, b.const(0, np.int64)), lambda: chunks(keys), gathered)


def chunk_sums(b: Body, dims: Dims, chunk: int, keys: ir.Value, counts: ir.Value) -> ir.Value:
    """Return the sum over the valid rows of each chunk, [E,Hkv,chunks,D].

    `keys` [E,Hkv,chunks,chunk,D]; `counts` [E,Hkv,1]. The one chunk that may hold valid and other
    rows is summed apart, after its other rows became 0.
    """
    ones = b.const(np.ones((1, chunk)), np.float32)
    sums = b.op("Squeeze", b.op("MatMul", ones, keys), b.i64(3))
    chunks = b.cast(b.size(keys, 2), INT32)
    partial = b.op("Div", counts, b.i32(chunk))
    partial = b.op("Min", partial, b.op("Sub", chunks, b.i32(1)))  # [E, Hkv, 1]
    rows = b.op("Sub", counts, b.op("Mul", partial, b.i32(chunk)))
    flat = flatten(b, dims, keys, 2, chunk * dims.head_dim)
    tail = b.op("Gather", flat, row_index(b, dims, partial, chunks), axis=0)  # [E, Hkv, 1, w*D]
    tail = b.reshape(tail, slot_count(b), 0, chunk, dims.head_dim)
    row = b.const(np.arange(chunk).reshape(-1, 1), np.int32)
    tail = b.op("Where", b.op("Less", row, b.unsqueeze(rows, 3)), tail, b.f32(0.0))
    tail = b.op("MatMul", ones, tail)  # [E, Hkv, 1, D]
    at, partial = b.unsqueeze(index(b, keys, 2), 1), b.unsqueeze(partial, 3)
    rest = b.op("Where", b.op("Equal", at, partial), tail, b.f32(0.0))
    return b.op("Where", b.op("Less", at, partial), sums, rest)


def flatten(b: Body, dims: Dims, x: ir.Value, axis: int, width: int) -> ir.Value:
    """Return x [E,Hkv,...] as rows of `width` numbers, the axes up to `axis` merged."""
    sizes = [b.size(x, a) for a in range(axis + 1)]
    rows = sizes[0]
    for size in sizes[1:]:
        rows = b.op("Mul", rows, size)
    return b.reshape(x, rows, width)


def row_index(b: Body, dims: Dims, at: ir.Value, size: ir.Value) -> ir.Value:
    """Return where row `at` int32 [E,Hkv,...3-D] of each (slot, head) is in flattened rows."""
    heads = b.op("Mul", slot_count(b), b.i64(dims.num_kv_heads))
    pair = b.reshape(_range(b, heads), slot_count(b), dims.num_kv_heads, 1)
    return b.op("Add", at, b.op("Mul", pair, size))


def masked_score(b: Body, score: ir.Value) -> ir.Value:
    """Return the score [E,R,N] with -inf at padding."""
    valid = b.op("GreaterOrEqual", b.input("unit_ids"), b.i32(0))
    return b.op("Where", valid, score, b.f32(-np.inf))


def units_only(b: Body, x: ir.Value, axis: int) -> ir.Value:
    """Return x without the rows that pad the last chunk."""
    return b.op("Slice", x, b.i64(0), b.size(b.input("unit_ids"), 2), b.i64(axis))


def _range(b: Body, size: ir.Value) -> ir.Value:
    """Return 0 .. size-1 as int32, `size` int64 [1]."""
    end = b.cast(b.op("Squeeze", size), INT32)
    return b.op("Range", b.i32(0), end, b.i32(1))
