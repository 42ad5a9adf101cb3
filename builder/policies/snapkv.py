"""SnapKV: tokens that the prompt's newest queries look at, and their neighbours."""

from __future__ import annotations

import onnx_ir as ir
from pydantic import Field, field_validator

from kvsift.builder.graph import GraphBuilder
from kvsift.builder.policies.base import Options, Preset, ScoreInputs, Scorer, WindowNeed
from kvsift.builder.policies.window_score import Reduce, window_score


class SnapKVOptions(Options):
    """Parameters of the SnapKV score."""

    window: int = Field(64, ge=1, le=1024, description="newest queries that vote, and stay")
    pool_size: int = Field(5, ge=1, le=63, description="odd width of the average over neighbours")
    window_reduce: Reduce = Field("mean", description="over the queries")
    group_reduce: Reduce = Field("mean", description="over the query heads of a KV head")

    @field_validator("pool_size")
    @classmethod
    def _odd(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError("it must be odd")
        return value


def _emit(g: GraphBuilder, x: ScoreInputs, options: SnapKVOptions, block_size: int) -> ir.Value:
    return window_score(
        g,
        x,
        window_reduce=options.window_reduce,
        group_reduce=options.group_reduce,
        pool_size=options.pool_size,
    )


SCORER = Scorer(
    name="snapkv",
    options=SnapKVOptions,
    emit=_emit,
    window=lambda o: WindowNeed(o.window, "all"),
    per_head=lambda o: True,
    positive=True,
    mass=True,
    # The pool averages neighbours in the row.
    needs_order=True,
)

PRESET = Preset(
    name="snapkv",
    summary="attention of the newest 64 queries, pooled over 5 neighbours",
    source="arXiv 2404.14469",
    scorer="snapkv",
    selector="topk",
    scope="prefill",
    defaults={"sink_units": 0},
)
