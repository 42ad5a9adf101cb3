"""A policy in one file: keep the tokens whose values are long."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from kvsift.builder.graph import GraphBuilder
from kvsift.builder.policies.base import Options, Preset, ScoreInputs, Scorer


def _emit(g: GraphBuilder, x: ScoreInputs, options: Options, block_size: int) -> ir.Value:
    values = g.op("Gather", x.values, x.evict_slots, axis=0)
    units = g.op("Shape", x.unit_ids, start=2, end=3)
    values = g.op("Slice", values, g.const([0]), units, g.const([2]))
    norm = g.op("ReduceL2", values, g.const([3]), keepdims=0)
    used = g.op("GreaterOrEqual", x.unit_ids, g.const(0, np.int32))
    return g.op("Where", used, norm, g.const(-np.inf, np.float32))


SCORER = Scorer(name="vnorm", options=Options, emit=_emit, per_head=lambda options: True)

PRESET = Preset(
    name="toy",
    summary="tokens with long values",
    source="this test",
    scorer="vnorm",
    selector="topk",
    scope="both",
    defaults={"recent_units": 2},
)
