"""Random eviction: every unit is as likely to stay as any other."""

from __future__ import annotations

import onnx_ir as ir

from kvsift.builder.graph import GraphBuilder
from kvsift.builder.policies.base import Options, Preset, ScoreInputs, Scorer


def _emit(g: GraphBuilder, x: ScoreInputs, options: Options, block_size: int) -> ir.Value:
    assert x.uniform is not None
    return g.op("Gather", x.uniform, g.const(0), axis=2)


SCORER = Scorer(
    name="uniform",
    options=Options,
    emit=_emit,
    per_head=lambda options: True,
    blocks=True,
    positive=True,
    needs_uniform=True,
)

PRESET = Preset(
    name="random",
    summary="uniformly random units, the floor of every comparison",
    source="baseline",
    scorer="uniform",
    selector="topk",
    scope="prefill",
    defaults={"sink_units": 0},
)
