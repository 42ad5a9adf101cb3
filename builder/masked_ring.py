"""The update of the query ring in TensorRT's forms, which have no circular TensorScatter.

A decode step writes the one row that its token has; a longer step writes the whole ring, with what
it held in the rows that the step does not reach. Both are one plain append without a wrap.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from kvsift.builder.graph import INT32, GraphBuilder
from kvsift.builder.policies.nodes import call


def update_ring(
    g: GraphBuilder,
    old: ir.Value,
    queries: ir.Value,
    first: ir.Value,
    new: ir.Value,
    size: int,
    n_new: ir.Value | None,
) -> ir.Value:
    """Append the update of the ring `old` and return `new`, which carries it.

    `queries` [B, S, F] with S <= `size`, the newest of the step; `first` int64 [B] is the row of
    the first. With `n_new` int32 [B] the plugin KvAppend writes in place into [B, 1, size, F], and
    slots without new tokens stay as they are; without it the whole ring [B, size, F] is made anew.
    """
    count = g.op("Cast", g.op("Shape", queries, start=1, end=2), to=INT32)  # [1]
    first = g.op("Unsqueeze", g.op("Cast", first, to=INT32), g.const([1]))  # [B, 1]
    one, all_rows = g.const([1], np.int32), g.const([size], np.int32)
    if n_new is None:
        rows, start = all_rows, first
        ring_row = g.const(np.arange(size)[None], np.int32)
        held = old
    else:
        longer = g.op("Min", g.op("Sub", count, one), one)  # 0 in a decode step, else 1
        rows = g.op("Add", one, g.op("Mul", longer, g.const([size - 1], np.int32)))
        start = g.op("Mul", first, g.op("Sub", one, longer))
        zero = g.const(0, np.int32)
        steps = g.op("Range", zero, g.op("Squeeze", rows, g.const([0])), g.const(1, np.int32))
        ring_row = g.op("Add", start, steps)  # [B, rows]
        held = _rows(g, g.op("Squeeze", old, g.const([1])), ring_row)
    back = g.op("Sub", g.op("Add", ring_row, all_rows), first)
    token = g.op("Mod", back, all_rows)  # [B, rows], the token of the step that a ring row gets
    last = g.op("Sub", count, one)
    reached = g.op("Unsqueeze", g.op("LessOrEqual", token, last), g.const([2]))
    fresh = _rows(g, queries, g.op("Min", token, last))
    if n_new is None:
        return g.op("Where", reached, fresh, held, output=new)
    written = g.op("Unsqueeze", g.op("Where", reached, fresh, held), g.const([1]))
    real = g.op("Mul", g.op("Min", n_new, one), rows)
    return call(g, "KvAppend", (old, written, start, real), {}, [new])[0]


def _rows(g: GraphBuilder, x: ir.Value, index: ir.Value) -> ir.Value:
    """Return the rows `index` int32 [B, k] of x [B, n, F], [B, k, F]."""
    at = g.op("Unsqueeze", g.op("Cast", index, to=ir.DataType.INT64), g.const([2]))
    return g.op("GatherND", x, at, batch_dims=1)
