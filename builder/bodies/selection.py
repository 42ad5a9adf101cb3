"""What every selector shares: the forced units, and the choice of the best of the others."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from kvsift.builder import ops
from kvsift.builder.bodies.tools import FAR, FLOAT_MAX, Body

INT32 = ir.DataType.INT32


def valid_units(b: Body) -> ir.Value:
    """Return which units are no padding, bool [L,E,R,N]."""
    return b.op("GreaterOrEqual", b.input("unit_ids"), b.i32(0))


def forced_units(b: Body, attrs: Mapping[str, ops.Value], valid: ir.Value) -> ir.Value:
    """Return which units must stay, bool [L,E,R,N]: sinks, the recent ones, pinned spans."""
    ids = b.input("unit_ids")
    block = b.i32(int(attrs["block_size"]))
    seen = b.reshape(b.input("tokens_seen"), 1, -1, 1, 1)
    oldest = b.op("Sub", b.op("Div", seen, block), b.i32(int(attrs["recent_units"])))
    sink = b.op("Less", ids, b.i32(int(attrs["sink_units"])))
    forced = b.op("Or", sink, b.op("GreaterOrEqual", ids, oldest))
    return b.op("And", valid, b.op("Or", forced, pinned_units(b, block)))


def pinned_units(b: Body, block: ir.Value) -> ir.Value:
    """Return which units a pinned span [start, end) meets, bool [L,E,R,N]; 0, 0 meets none."""
    start, end = b.multi("Split", 2, b.input("pin_spans"), axis=2, num_outputs=2)  # [E, P, 1]
    axes = b.i64(0, 2, 3)
    start, end = (b.op("Unsqueeze", b.op("Squeeze", x, b.i64(2)), axes) for x in (start, end))
    first = b.op("Mul", b.unsqueeze(b.input("unit_ids"), 4), block)  # [L, E, R, N, 1]
    meets = b.op("And", b.op("Less", first, end), b.op("Less", start, b.op("Add", first, block)))
    meets = b.op("And", meets, b.op("Less", start, end))  # [L, E, R, N, P]
    # A sum, because P may be 0.
    return b.op("Greater", b.reduce("Sum", b.cast(meets, INT32), 4), b.i32(0))


def ranked_key(b: Body, key: ir.Value, valid: ir.Value, forced: ir.Value) -> ir.Value:
    """Return the key [L,E,R,N] in the order of choice: forced units first, padding last.

    The key is clamped to finite values and NaN is the lowest of them, so that +inf and -inf are
    free for forced units and padding; equal keys go to the lower index, as TopK does.
    """
    finite = b.op("Clip", key, b.f32(-FLOAT_MAX), b.f32(FLOAT_MAX))
    finite = b.op("Where", b.op("IsNaN", key), b.f32(-FLOAT_MAX), finite)
    ranked = b.op("Where", valid, finite, b.f32(-np.inf))
    return b.op("Where", forced, b.f32(np.inf), ranked)


def number(b: Body, units: ir.Value) -> ir.Value:
    """Return how many units [L,E,R,N] are true, int32 [L,E,R]."""
    return b.reduce("Sum", b.cast(units, INT32), 3)


def largest(b: Body, counts: ir.Value) -> ir.Value:
    """Return the largest count, int64 [1]; at least one, so that TopK has work.

    In the fixed form it is the number of units.
    """
    if b.fixed:
        return b.size(b.input("unit_ids"), 3)
    flat = b.op("Concat", b.reshape(counts, -1), b.const([1], np.int32), axis=0)
    return b.cast(b.reduce("Max", flat, 0, keep=True), ir.DataType.INT64)


def ranks(b: Body, most: ir.Value) -> ir.Value:
    """Return 0 .. most-1 as int32."""
    return b.op("Range", b.i32(0), b.cast(b.op("Squeeze", most), INT32), b.i32(1))


def keep_best(
    b: Body, attrs: Mapping[str, ops.Value], key: ir.Value, valid: ir.Value, forced: ir.Value
) -> list[ir.Value]:
    """Return [keep, keep_len, coverage] of the units with the highest key [L,E,R,N]."""
    need = number(b, forced)
    keep_len = b.op("Min", number(b, valid), b.op("Max", b.input("budget"), need))  # [L, E, R]
    # Only as many as the fullest row keeps are sorted.
    most = largest(b, keep_len)
    _, best = b.multi("TopK", 2, ranked_key(b, key, valid, forced), most, axis=3)
    return kept_units(b, attrs, best, keep_len, valid)


def kept_units(
    b: Body,
    attrs: Mapping[str, ops.Value],
    best: ir.Value,
    keep_len: ir.Value,
    valid: ir.Value,
) -> list[ir.Value]:
    """Return [keep, keep_len, coverage] of the first keep_len of the units `best` [L,E,R,K]."""
    most = b.size(best, 3)
    kept = b.op("Less", ranks(b, most), b.unsqueeze(keep_len, 3))  # [L, E, R, K]
    index = b.op("Where", kept, b.cast(best, INT32), b.i32(FAR))
    ascending, _ = b.multi("TopK", 2, index, most, axis=3, largest=0)
    ascending = b.op("Where", b.op("Less", ascending, b.i32(FAR)), ascending, b.i32(-1))
    rest = b.op("Sub", b.size(valid, 3), most)
    pads = b.op("Concat", b.i64(0, 0, 0, 0, 0, 0, 0), rest, axis=0)
    keep = b.op("Pad", ascending, pads, b.i32(-1))

    if not attrs["score_is_mass"]:
        share = b.op("Expand", b.f32(np.nan), b.op("Shape", keep_len))
        return [keep, keep_len, share]
    score = b.input("score")
    mass = b.op("GatherElements", score, best, axis=3)
    kept_mass = b.total(b.op("Where", kept, mass, b.f32(0.0)), 3)
    total = b.total(b.op("Where", valid, score, b.f32(0.0)), 3)
    # 0 * total is NaN where the total is infinite, and x / inf alone would be 0.
    share = b.op("Add", b.op("Div", kept_mass, total), b.op("Mul", total, b.f32(0.0)))
    return [keep, keep_len, share]
