"""Body of QueryStatsUpdate: the statistics of a step's queries merged into those so far."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from kvsift.builder import ops
from kvsift.builder.bodies.rows import FLOAT
from kvsift.builder.bodies.tools import Body, Dims, index

INT32 = ir.DataType.INT32


def build(b: Body, attrs: Mapping[str, ops.Value], dims: Dims) -> list[ir.Value]:
    """Return [mean_out, moment_out].

    The step's own moment and the term of the two means' distance are one product of rows:
    sum (q - m)(q - m)^T + f (m - mean)(m - mean)^T, f = n_old n_step / n.
    """
    first, new = (b.reshape(b.input(name), -1, 1) for name in ("first_position", "n_new"))
    sinks, zero = b.i32(int(attrs["sink_tokens"])), b.i32(0)
    before = b.op("Max", b.op("Sub", first, sinks), zero)  # [B, 1]
    after = b.op("Max", b.op("Sub", b.op("Add", first, new), sinks), zero)
    step = index(b, b.input("queries"), 1)
    late = b.op("GreaterOrEqual", b.op("Add", step, first), sinks)
    counts = b.op("And", b.op("Less", step, new), late)  # [B, S]

    query = b.reshape(b.cast(b.input("queries"), FLOAT), 0, 0, dims.window_heads, dims.head_dim)
    query = b.op("Where", b.unsqueeze(counts, 2, 3), query, b.f32(0.0))
    query = b.op("Transpose", query, perm=[0, 2, 1, 3])  # [B, Hq, S, D]
    old, added, total = (
        b.unsqueeze(b.cast(x, FLOAT), 2, 3) for x in (before, b.op("Sub", after, before), after)
    )
    weight = b.unsqueeze(b.cast(counts, FLOAT), 1, 2)  # [B, 1, 1, S]
    one = b.f32(1.0)
    here = b.op("Div", b.op("MatMul", weight, query), b.op("Max", added, one))  # [B, Hq, 1, D]

    # Before its first counted token a slot may hold another sequence's statistics.
    fresh = b.op("And", b.op("Equal", before, zero), b.op("Greater", new, zero))  # [B, 1]
    mean = b.unsqueeze(b.input("mean"), 2)
    mean = b.op("Where", b.unsqueeze(fresh, 2, 3), b.f32(0.0), mean)  # [B, Hq, 1, D]
    gap = b.op("Sub", here, mean)
    share = b.op("Div", added, b.op("Max", total, one))
    mean_out = b.op("Squeeze", b.op("Add", mean, b.op("Mul", gap, share)), b.i64(2))

    spread = b.op("Sub", query, here)
    spread = b.op("Mul", spread, b.op("Transpose", weight, perm=[0, 1, 3, 2]))
    apart = b.op("Mul", gap, b.op("Sqrt", b.op("Mul", old, share)))
    rows = b.op("Concat", spread, apart, axis=2)  # [B, Hq, S + 1, D]
    more = b.op("MatMul", b.op("Transpose", rows, perm=[0, 1, 3, 2]), rows)
    moment = b.input("moment")
    # A Where costs more than all the rest of a decode step, so it runs for first tokens alone.
    moment_out = b.branch(
        b.op("Equal", b.op("ReduceMax", b.cast(fresh, INT32), keepdims=0), zero),
        lambda: b.op("Add", moment, more),
        lambda: b.op("Add", b.op("Where", b.unsqueeze(fresh, 2, 3), b.f32(0.0), moment), more),
    )
    return [mean_out, moment_out]
