"""The outer half of NestedKVScore: scale the anomalies, weigh them, route by disagreement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from kvsift.builder import ops
from kvsift.builder.bodies.tools import Body
from kvsift.builder.errors import UsageError

INT32 = ir.DataType.INT32
FLOAT = ir.DataType.FLOAT
#: A span below this is rounding: the row counts as constant and is 0 after scaling.
FLAT = 1e-5
#: Added before a share of tokens is rounded down, so that fp32 and fp64 agree on 0.1 * 30.
ROUND_UP = 1e-3


def blended(
    b: Body, attrs: Mapping[str, ops.Value], cosines: ir.Value, counts: ir.Value
) -> ir.Value:
    """Return the score [E,Hkv,N] in [0, 1] of valid units.

    `cosines` [E,Hkv,3,N] with the stable, episodic and current memory; `counts` int32 [E,Hkv,1]
    valid units. What stands behind the valid units may be anything.
    """
    ids = b.input("unit_ids")
    valid = b.unsqueeze(b.op("GreaterOrEqual", ids, b.i32(0)), 2)  # [E, Hkv, 1, N]
    scales = unit_range(b, b.op("Neg", cosines), valid)
    prior = prior_weights(attrs)
    if attrs["adaptive"] and attrs["beta"]:
        weights = adapted(b, attrs, prior, scales, valid, counts)
    else:
        weights = b.const(prior[:, None], np.float32)
    weighted = b.multi("Split", 3, b.op("Mul", weights, scales), axis=2, num_outputs=3)
    score = b.op("Add", b.op("Add", weighted[0], weighted[1]), weighted[2])  # [E, Hkv, 1, N]
    if attrs["gate"]:
        parts = b.multi("Split", 3, scales, axis=2, num_outputs=3)
        best = b.op("Max", *parts)
        alpha = gate(b, attrs, surprise(b, parts), valid, counts)
        score = b.op("Add", score, b.op("Mul", alpha, b.op("Sub", best, score)))
    return b.op("Squeeze", b.op("Clip", score, b.f32(0.0), b.f32(1.0)), b.i64(2))


def unit_range(b: Body, x: ir.Value, valid: ir.Value) -> ir.Value:
    """Return x [E,Hkv,K,N] min-max scaled over each row's valid units, 0 elsewhere."""
    low = b.reduce("Min", b.op("Where", valid, x, b.f32(np.inf)), 3, keep=True)
    high = b.reduce("Max", b.op("Where", valid, x, b.f32(-np.inf)), 3, keep=True)
    span = b.op("Sub", high, low)
    varies = b.op("GreaterOrEqual", span, b.f32(FLAT))
    factor = b.op("Where", varies, b.op("Reciprocal", span), b.f32(0.0))
    return b.op("Where", valid, b.op("Mul", b.op("Sub", x, low), factor), b.f32(0.0))


def prior_weights(attrs: Mapping[str, ops.Value]) -> NDArray[np.float64]:
    """Return the prior weights with sum 1, float64 [3]; UsageError if all are 0."""
    names = ("prior_stable", "prior_episodic", "prior_current")
    total = sum(attrs[name] for name in names)
    if not total:
        raise UsageError("NestedKVScore: the three priors are 0; one at least must be above 0")
    return np.array([attrs[name] / total for name in names])


def adapted(
    b: Body,
    attrs: Mapping[str, ops.Value],
    prior: NDArray[np.float64],
    scales: ir.Value,
    valid: ir.Value,
    counts: ir.Value,
) -> ir.Value:
    """Return the blend's weights [E,Hkv,3,1]: the prior moved by how far a scale's ends lie apart.

    The means of the highest and lowest values come from one sorted choice over both signs.
    """
    share = b.op("Mul", b.precise(counts), b.precise_const(attrs["tail"]))
    tail = b.cast(b.op("Add", share, b.precise_const(ROUND_UP)), INT32)
    tail = b.op("Max", tail, b.i32(1))  # [E, Hkv, 1]
    # A most of all rows needs one row at least.
    sizes = b.op("Concat", b.reshape(tail, -1), b.const([1], np.int32), axis=0)
    most = b.reduce("Max", sizes, 0, keep=True)
    if b.fixed:
        most = b.cast(b.size(b.input("unit_ids"), 2), INT32)
    both = b.op("Concat", scales, b.op("Neg", scales), axis=2)
    both = b.op("Where", valid, both, b.f32(-2.0))
    ends, _ = b.multi("TopK", 2, both, b.cast(most, ir.DataType.INT64), axis=3)
    rank = b.op("Range", b.i32(0), b.op("Squeeze", most), b.i32(1))
    counted = b.unsqueeze(b.op("Less", rank, tail), 2)  # [E, Hkv, 1, most]
    sums = exact_total(b, b.op("Where", counted, ends, b.f32(0.0)))
    means = b.op("Div", sums, b.cast(tail, FLOAT))  # [E, Hkv, 6]
    gap = b.op("Add", *b.multi("Split", 2, means, axis=2, num_outputs=2))  # [E, Hkv, 3]
    # A prior of 0 stays 0 at any gap.
    with np.errstate(divide="ignore"):
        logs = b.const(np.maximum(np.log(prior), -1e30), np.float32)
    moved = b.op("Add", b.op("Mul", gap, b.f32(attrs["beta"])), logs)
    return b.unsqueeze(b.op("Softmax", moved, axis=-1), 3)


def exact_total(b: Body, x: ir.Value) -> ir.Value:
    """Return the sum of x [E,Hkv,K,n] over its long last axis, [E,Hkv,K]; zeros change no bit."""
    return b.cast(b.total(b.precise(x), 3), FLOAT)


def surprise(b: Body, parts: Sequence[ir.Value]) -> ir.Value:
    """Return the population standard deviation of three values, exactly 0 where they are equal."""
    x, y, z = parts
    squares = [b.op("Mul", d, d) for d in (b.op("Sub", *p) for p in ((x, y), (y, z), (z, x)))]
    total = b.op("Add", b.op("Add", squares[0], squares[1]), squares[2])
    return b.op("Div", b.op("Sqrt", total), b.f32(3.0))


def gate(
    b: Body,
    attrs: Mapping[str, ops.Value],
    disagreement: ir.Value,
    valid: ir.Value,
    counts: ir.Value,
) -> ir.Value:
    """Return alpha [E,Hkv,1,N], how far the strongest memory replaces the blend."""
    scaled = unit_range(b, disagreement, valid)
    count = b.cast(b.op("Max", counts, b.i32(1)), FLOAT)
    mean = b.unsqueeze(b.op("Div", exact_total(b, scaled), count), 3)
    above = b.op("Sub", scaled, mean)
    above = b.op("Sub", b.op("Max", above, b.f32(0.0)), b.f32(attrs["tau"]))
    return b.op("Sigmoid", b.op("Mul", above, b.f32(attrs["kappa"])))
