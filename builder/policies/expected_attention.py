"""Expected Attention: what future queries, taken as Gaussian, should pay, times the value's length.

The statistics leave out the sinks (`sink_units`), which are kept instead.
"""

from __future__ import annotations

import onnx_ir as ir
from pydantic import Field

from kvsift.builder.graph import GraphBuilder
from kvsift.builder.policies.base import Options, Preset, ScoreInputs, Scorer
from kvsift.builder.policies.nodes import call, option

OP = "ExpectedAttentionScore"


class ExpectedAttentionOptions(Options):
    """Parameters of the expected attention."""

    n_future: int = option(OP, "n_future")
    epsilon: float = option(OP, "epsilon")
    use_covariance: bool = Field(True, description="false: the mean query alone")
    use_vnorm: bool = Field(True, description="false: without the value's length")


def _emit(
    g: GraphBuilder, x: ScoreInputs, options: ExpectedAttentionOptions, block_size: int
) -> ir.Value:
    inputs = (
        x.states["query_mean"],
        x.states["query_moment"],
        x.inv_freq,
        x.keys,
        x.values,
        x.unit_ids,
        x.tokens_seen,
        x.evict_slots,
    )
    attributes = {
        "n_future": options.n_future,
        "sink_tokens": x.sink_units,
        "epsilon": options.epsilon,
        "use_covariance": int(options.use_covariance),
        "use_vnorm": int(options.use_vnorm),
        "rope_factor": x.rope_factor,
    }
    return call(g, OP, inputs, attributes)[0]


SCORER = Scorer(
    name="expected_attention",
    options=ExpectedAttentionOptions,
    emit=_emit,
    per_head=lambda options: True,
    positive=True,
    states=("query_mean", "query_moment"),
)

PRESET = Preset(
    name="expected_attention",
    summary="attention that the next 512 queries are expected to pay, times the value's length",
    source="arXiv 2510.00636",
    scorer="expected_attention",
    selector="topk",
    scope="prefill",
    defaults={"sink_units": 4},
)
