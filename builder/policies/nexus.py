"""Nexus Sampling: a walk score that finds bridge blocks, then weighted reservoir sampling."""

from __future__ import annotations

from typing import Literal

import onnx_ir as ir
from pydantic import Field

from kvsift.builder.graph import GraphBuilder
from kvsift.builder.ops import HEAD_REDUCE, WALK_ORDER
from kvsift.builder.policies.base import (
    AllLayers,
    Options,
    Preset,
    ScoreInputs,
    Scorer,
    WindowNeed,
)
from kvsift.builder.policies.nodes import call, option


class NexusOptions(Options):
    """Parameters of the Nexus score."""

    window: int = Field(16, ge=1, le=1024, description="W, newest queries that vote")
    walk_steps: int = option("NexusScore", "walk_steps")
    walk_lambda: float = option("NexusScore", "walk_lambda")
    walk_order: Literal["chronological", "newest_first", "strided"] = "chronological"
    tie_eps: float = option("NexusScore", "tie_eps")
    head_reduce: Literal["mean_qk", "mean_prob", "per_head"] = "mean_prob"


def _emit(g: GraphBuilder, x: ScoreInputs, options: NexusOptions, block_size: int) -> ir.Value:
    inputs = (x.q_window, x.keys, x.unit_ids, x.tokens_seen, x.evict_slots)
    attributes = {"block_size": block_size, "head_reduce": HEAD_REDUCE.index(options.head_reduce)}
    return call(g, "WindowMass", inputs, attributes)[0]


def _finish(
    g: GraphBuilder, mass: ir.Value, x: AllLayers, options: NexusOptions, block_size: int
) -> ir.Value:
    attributes = {
        "block_size": block_size,
        "walk_steps": min(options.walk_steps, options.window),
        "walk_order": WALK_ORDER.index(options.walk_order),
        "walk_lambda": options.walk_lambda,
        "tie_eps": options.tie_eps,
    }
    return call(g, "NexusScore", (mass, x.unit_ids, x.tokens_seen), attributes)[0]


SCORER = Scorer(
    name="nexus",
    options=NexusOptions,
    emit=_emit,
    finish=_finish,
    window=lambda o: WindowNeed(o.window, "mean" if o.head_reduce == "mean_qk" else "all"),
    per_head=lambda o: o.head_reduce == "per_head",
    blocks=True,
    default_block_size=32,
    positive=True,
    mass=True,
)

PRESET = Preset(
    name="nexus",
    summary="walk score that finds bridge blocks, weighted reservoir sampling",
    source="arXiv 2606.23961",
    scorer="nexus",
    selector="reservoir",
    scope="both",
)
