"""Body of ReservoirSelect."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from kvsift.builder import ops
from kvsift.builder.bodies.selection import forced_units, keep_best, valid_units
from kvsift.builder.bodies.tools import FLOAT_MAX, Body, Dims

#: Least weight: keeps ln(u) / w finite in fp32.
WEIGHT_FLOOR = 1e-20
#: What normalised weights of a row sum to: the sum of Nexus' own (a and half of c).
WEIGHT_SUM = 1.5


def build(b: Body, attrs: Mapping[str, ops.Value], dims: Dims) -> list[ir.Value]:
    """Return [keep, keep_len, coverage].

    Priorities stay in the log domain: u^(1/w) underflows fp32 for most units of a long context,
    and a choice among zeros is no sampling.
    """
    del dims
    valid = valid_units(b)
    score = b.input("score")
    weight = normalized(b, score, valid) if attrs["normalize"] else score
    floored = b.op("Max", weight, b.f32(WEIGHT_FLOOR))
    draws = b.op("Div", b.op("Log", b.input("u")), b.unsqueeze(floored, 3))  # [L, E, R, n, N]
    mean = b.reduce("LogSumExp", draws, 3)
    # n is the size of u's axis; subtracting ln n changes no choice, but keeps pi what it says.
    count = b.cast(b.op("Squeeze", b.size(b.input("u"), 3)), ir.DataType.FLOAT)
    priority = b.op("Sub", mean, b.op("Log", count))
    # Max may or may not hand NaN on; say it.
    priority = b.op("Where", b.op("IsNaN", score), b.f32(-FLOAT_MAX), priority)
    return keep_best(b, attrs, priority, valid, forced_units(b, attrs, valid))


def normalized(b: Body, score: ir.Value, valid: ir.Value) -> ir.Value:
    """Return the score scaled so that a row's finite positive weights sum to WEIGHT_SUM."""
    bad = b.op("Or", b.op("IsNaN", score), b.op("IsInf", score))
    usable = b.op("And", valid, b.op("Not", bad))
    positive = b.op("Where", usable, b.op("Max", score, b.f32(0.0)), b.f32(0.0))
    total = b.op("Max", b.unsqueeze(b.total(positive, 3), 3), b.f32(WEIGHT_FLOOR))
    return b.op("Mul", score, b.op("Div", b.f32(WEIGHT_SUM), total))
