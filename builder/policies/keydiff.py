"""KeyDiff: keys that point away from the mean key of their head stay."""

from __future__ import annotations

import onnx_ir as ir

from kvsift.builder.graph import GraphBuilder
from kvsift.builder.policies.base import Options, Preset, ScoreInputs, Scorer
from kvsift.builder.policies.nodes import call


def _emit(g: GraphBuilder, x: ScoreInputs, options: Options, block_size: int) -> ir.Value:
    return call(g, "KeyDiffScore", (x.keys, x.unit_ids, x.evict_slots), {})[0]


SCORER = Scorer(name="keydiff", options=Options, emit=_emit, per_head=lambda options: True)

PRESET = Preset(
    name="keydiff",
    summary="keys unlike the mean key of their head",
    source="arXiv 2504.15364",
    scorer="keydiff",
    selector="topk",
    scope="prefill",
    defaults={"sink_units": 0},
)
