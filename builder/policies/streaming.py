"""StreamingLLM: attention sinks and the newest tokens, nothing in between."""

from __future__ import annotations

import onnx_ir as ir

from kvsift.builder.graph import FLOAT, GraphBuilder
from kvsift.builder.policies.base import Options, Preset, ScoreInputs, Scorer


def _emit(g: GraphBuilder, x: ScoreInputs, options: Options, block_size: int) -> ir.Value:
    return g.op("Cast", x.unit_ids, to=FLOAT)


SCORER = Scorer(name="position", options=Options, emit=_emit, blocks=True)

PRESET = Preset(
    name="streaming",
    summary="4 sinks and the newest tokens",
    source="arXiv 2309.17453",
    scorer="position",
    selector="topk",
    scope="both",
    defaults={"sink_units": 4},
)
