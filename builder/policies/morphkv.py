"""MorphKV: tokens that the last R queries look at, those R themselves kept.

The paper evicts after every token (`decode_interval=1`). The default is the product's interval of
32 tokens: an eviction reads the layer's keys, so one per token doubles the attention of a step.
"""

from __future__ import annotations

from typing import Literal

import onnx_ir as ir
from pydantic import Field

from kvsift.builder.graph import GraphBuilder
from kvsift.builder.policies.base import Options, Preset, ScoreInputs, Scorer, WindowNeed
from kvsift.builder.policies.window_score import window_score


class MorphKVOptions(Options):
    """Parameters of the MorphKV score."""

    window: int = Field(32, ge=1, le=1024, description="R, newest queries that vote, and stay")
    window_reduce: Literal["sum", "max"] = Field("sum", description="over the queries")


def _emit(g: GraphBuilder, x: ScoreInputs, options: MorphKVOptions, block_size: int) -> ir.Value:
    return window_score(g, x, window_reduce=options.window_reduce, group_reduce="sum")


SCORER = Scorer(
    name="morphkv",
    options=MorphKVOptions,
    emit=_emit,
    window=lambda o: WindowNeed(o.window, "all"),
    per_head=lambda o: True,
    positive=True,
    mass=True,
)

PRESET = Preset(
    name="morphkv",
    summary="attention of the newest 32 queries, in decode too",
    source="arXiv 2503.00979",
    scorer="morphkv",
    selector="topk",
    scope="both",
    defaults={"sink_units": 0},
)
