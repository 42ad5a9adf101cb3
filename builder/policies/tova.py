"""TOVA: what the last query does not look at goes first; all heads of a layer share one set."""

from __future__ import annotations

import onnx_ir as ir
from pydantic import Field

from kvsift.builder.graph import GraphBuilder
from kvsift.builder.policies.base import Options, Preset, ScoreInputs, Scorer, WindowNeed
from kvsift.builder.policies.window_score import window_score


class TovaOptions(Options):
    """Parameters of the TOVA score."""

    window: int = Field(1, ge=1, le=1024, description="newest queries that are averaged, and stay")


def _emit(g: GraphBuilder, x: ScoreInputs, options: TovaOptions, block_size: int) -> ir.Value:
    return window_score(g, x, window_reduce="mean", group_reduce="mean", shared=True)


SCORER = Scorer(
    name="tova",
    options=TovaOptions,
    emit=_emit,
    window=lambda o: WindowNeed(o.window, "all"),
    positive=True,
    mass=True,
)

PRESET = Preset(
    name="tova",
    summary="attention of the last query, one set for all heads of a layer",
    source="arXiv 2401.06104",
    scorer="tova",
    selector="topk",
    scope="both",
    defaults={"sink_units": 0},
)
