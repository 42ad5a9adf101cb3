"""Key norm: keys of small norm attract attention, so the largest norms go first."""

from __future__ import annotations

import onnx_ir as ir

from kvsift.builder.graph import GraphBuilder
from kvsift.builder.policies.base import Options, Preset, ScoreInputs, Scorer
from kvsift.builder.policies.nodes import call


def _emit(g: GraphBuilder, x: ScoreInputs, options: Options, block_size: int) -> ir.Value:
    return call(g, "KNormScore", (x.keys, x.unit_ids, x.evict_slots), {})[0]


SCORER = Scorer(name="knorm", options=Options, emit=_emit, per_head=lambda options: True)

PRESET = Preset(
    name="knorm",
    summary="keys of small norm",
    source="arXiv 2406.11430",
    scorer="knorm",
    selector="topk",
    scope="prefill",
    defaults={"sink_units": 0},
)
