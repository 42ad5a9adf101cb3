"""Body of HeadTopKSelect: a row's order first, then how far down it each row may go.

A row keeps the first units of its own order, so only the number is open: its safe share, then one
more for each of its next units that is among the best of the layer.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from kvsift.builder import ops
from kvsift.builder.bodies.selection import (
    forced_units,
    kept_units,
    largest,
    number,
    ranked_key,
    ranks,
    valid_units,
)
from kvsift.builder.bodies.tools import FAR, MOST_FIXED_UNITS, Body, Dims

INT32 = ir.DataType.INT32
#: Added before a share of a budget is rounded down, so that fp32 and fp64 agree on 0.1 * 30.
ROUND_UP = 1e-3


def build(b: Body, attrs: Mapping[str, ops.Value], dims: Dims) -> list[ir.Value]:
    """Return [keep, keep_len, coverage]."""
    del dims
    valid = valid_units(b)
    forced = forced_units(b, attrs, valid)
    ranked = ranked_key(b, b.input("score"), valid, forced)
    budget = b.op("Max", b.input("budget"), b.i32(0))
    need, cap = number(b, forced), number(b, valid)  # [L, E, R]
    if attrs["max_head_ratio"]:
        cap = b.op("Min", cap, b.op("Max", share(b, budget, attrs["max_head_ratio"]), need))
    safe = b.op("Min", cap, b.op("Max", share(b, budget, attrs["safeguard"]), need))

    most = largest(b, cap)
    values, best = b.multi("TopK", 2, ranked, most, axis=3)
    places = free_places(b, safe, cap, budget)
    extra = (counted if b.fixed else won)(b, values, most, safe, cap, places)
    return kept_units(b, attrs, best, b.op("Add", safe, extra), valid)


def share(b: Body, budget: ir.Value, ratio: float) -> ir.Value:
    """Return floor(ratio * budget), int32 [L,E,R]."""
    exact = b.op("Mul", b.precise(budget), b.precise_const(ratio))
    exact = b.op("Add", exact, b.precise_const(ROUND_UP))
    return b.cast(b.op("Min", exact, b.precise_const(FAR)), INT32)


def free_places(b: Body, safe: ir.Value, cap: ir.Value, budget: ir.Value) -> ir.Value:
    """Return how many units a layer may keep beyond the safe ones of its rows, int32 [L,E,1]."""
    free = b.op("Sub", b.reduce("Sum", budget, 2, keep=True), b.reduce("Sum", safe, 2, keep=True))
    room = b.reduce("Sum", b.op("Sub", cap, safe), 2, keep=True)
    return b.op("Min", b.op("Max", free, b.i32(0)), room)


def won(
    b: Body,
    values: ir.Value,
    most: ir.Value,
    safe: ir.Value,
    cap: ir.Value,
    places: ir.Value,
) -> ir.Value:
    """Return how many of the layer's free places each row wins, int32 [L,E,R].

    `values` [L,E,R,most] are each row's keys in its order; those at ranks safe .. cap-1 compete.
    Side by side they lie in the order of rows, then ranks, which is how ties shall go.
    """
    rank = ranks(b, most)
    open_ = b.op("GreaterOrEqual", rank, b.unsqueeze(safe, 3))
    open_ = b.op("And", open_, b.op("Less", rank, b.unsqueeze(cap, 3)))
    rivals = b.op("Where", open_, values, b.f32(-np.inf))
    pairs = b.op("Mul", b.size(values, 2), most)
    rivals = b.reshape(rivals, b.size(values, 0), b.size(values, 1), pairs)

    count = largest(b, places)
    _, winner = b.multi("TopK", 2, rivals, count, axis=2)  # [L, E, count]
    row = b.op("Div", b.cast(winner, INT32), b.cast(most, INT32))
    row = b.op("Where", b.op("Less", ranks(b, count), places), row, b.i32(-1))
    rows = b.op("Range", b.i32(0), b.cast(b.op("Squeeze", b.size(values, 2)), INT32), b.i32(1))
    mine = b.op("Equal", b.unsqueeze(row, 2), b.unsqueeze(rows, 1))  # [L, E, R, count]
    return number(b, mine)


def counted(
    b: Body,
    values: ir.Value,
    most: ir.Value,
    safe: ir.Value,
    cap: ir.Value,
    places: ir.Value,
) -> ir.Value:
    """Return the same as `won` without a TopK over all rows, which TensorRT ends at 3840 values.

    A row's keys fall, so whether its m-th rival wins is a matter of counting who beats it, and the
    largest m that does is found by halving.
    """
    rank = ranks(b, most)
    open_ = b.op("GreaterOrEqual", rank, b.unsqueeze(safe, 3))
    open_ = b.unsqueeze(b.op("And", open_, b.op("Less", rank, b.unsqueeze(cap, 3))), 2)
    rows = b.op("Range", b.i32(0), b.cast(b.op("Squeeze", b.size(values, 2)), INT32), b.i32(1))
    row, other = b.reshape(rows, -1, 1, 1), b.reshape(rows, -1, 1)
    rivals = b.unsqueeze(values, 2)  # [L, E, 1, R, most]
    low = b.op("Mul", safe, b.i32(0))  # so many win for sure
    high = b.op("Sub", cap, safe)
    for _ in range(MOST_FIXED_UNITS.bit_length()):
        middle = b.op("Div", b.op("Add", b.op("Add", low, high), b.i32(1)), b.i32(2))
        at = b.op("Max", b.op("Sub", b.op("Add", safe, middle), b.i32(1)), b.i32(0))
        at = b.op("Min", at, b.cast(b.op("Sub", most, b.i64(1)), INT32))
        mine = b.op("GatherElements", values, b.unsqueeze(at, 3), axis=3)  # [L, E, R, 1]
        mine, at = b.unsqueeze(mine, 4), b.unsqueeze(at, 3, 4)
        before = b.op(
            "Or",
            b.op("Less", other, row),
            b.op("And", b.op("Equal", other, row), b.op("Less", rank, at)),
        )
        beats = b.op(
            "Or", b.op("Greater", rivals, mine), b.op("And", b.op("Equal", rivals, mine), before)
        )
        beats = b.cast(b.op("And", beats, open_), INT32)  # [L, E, R, R, most]
        wins = b.op("Less", b.reduce("Sum", beats, 3, 4), places)
        low = b.op("Where", wins, middle, low)
        high = b.op("Where", wins, high, b.op("Max", b.op("Sub", middle, b.i32(1)), low))
    return low
