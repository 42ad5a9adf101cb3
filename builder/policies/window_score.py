"""What the scorers that rate a token by the newest queries' attention share."""

from __future__ import annotations

from typing import Literal

import onnx_ir as ir

from kvsift.builder.graph import GraphBuilder
from kvsift.builder.ops import REDUCE
from kvsift.builder.policies.base import ScoreInputs
from kvsift.builder.policies.nodes import call

Reduce = Literal["mean", "sum", "max"]


def window_score(
    g: GraphBuilder,
    x: ScoreInputs,
    *,
    window_reduce: Reduce,
    group_reduce: Reduce,
    pool_size: int = 1,
    shared: bool = False,
) -> ir.Value:
    """Append WindowScore, float32 [E, Hkv, N], or [E, 1, N] where the heads share a set."""
    inputs = (x.q_window, x.keys, x.unit_ids, x.tokens_seen, x.evict_slots)
    attributes = {
        "window_reduce": REDUCE.index(window_reduce),
        "group_reduce": REDUCE.index(group_reduce),
        "pool_size": pool_size,
        "shared": int(shared),
    }
    return call(g, "WindowScore", inputs, attributes)[0]
