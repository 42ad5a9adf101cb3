"""H2O: tokens that have received most attention since they came, and the newest ones.

Half of the budget goes to the newest tokens (`recent_fraction`). The paper evicts after every
token (`decode_interval=1`); the default is the product's interval of 32 tokens. The attention of
every query is added up in every step, the prompt's included, which costs about as much as the
step's own attention.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from kvsift.builder.graph import GraphBuilder
from kvsift.builder.policies.base import Options, Preset, ScoreInputs, Scorer


def _emit(g: GraphBuilder, x: ScoreInputs, options: Options, block_size: int) -> ir.Value:
    """Append the accumulators of the units, float32 [E, Hkv, N], -inf at padding."""
    slots = g.op("Max", x.evict_slots, g.const(0, np.int32))
    received = g.op("Gather", x.states["accum"], slots, axis=0)
    units = g.op("Squeeze", g.op("Shape", x.unit_ids, start=2, end=3))
    # Units beyond this layer's capacity are padding: any row will do for them.
    last = g.op("Sub", g.op("Squeeze", g.op("Shape", received, start=2, end=3)), g.const(1))
    rows = g.op("Min", g.op("Range", g.const(0), units, g.const(1)), last)
    received = g.op("Gather", received, rows, axis=2)
    used = g.op("GreaterOrEqual", x.unit_ids, g.const(0, np.int32))
    return g.op("Where", used, received, g.const(-np.inf, np.float32))


SCORER = Scorer(
    name="h2o",
    options=Options,
    emit=_emit,
    per_head=lambda options: True,
    positive=True,
    mass=True,
    states=("accum",),
)

PRESET = Preset(
    name="h2o",
    summary="attention received so far, and the newest half of the budget",
    source="arXiv 2306.14048",
    scorer="h2o",
    selector="topk",
    scope="both",
    defaults={"sink_units": 0, "recent_fraction": 0.5},
)
