"""NestedKV: keys that are unusual for the document, their block or their neighbours stay.

The switches `adaptive`, `gate` and `continuum` take the parts of the method away one by one;
without `continuum` it is KeyDiff. The heads compete by `--selector head_topk`, its default; with
`--selector topk` each has its own budget.
"""

from __future__ import annotations

import onnx_ir as ir
from pydantic import Field, model_validator

from kvsift.builder.graph import GraphBuilder
from kvsift.builder.policies.base import Options, Preset, ScoreInputs, Scorer
from kvsift.builder.policies.nodes import call, option

_OP = "NestedKVScore"


class NestedKVOptions(Options):
    """Parameters of the NestedKV score, named as the op's attributes."""

    window: int = option(_OP, "window")
    block_div: int = option(_OP, "block_div")
    block_min: int = option(_OP, "block_min")
    block_max: int = option(_OP, "block_max")
    tail: float = option(_OP, "tail")
    beta: float = option(_OP, "beta")
    prior_stable: float = option(_OP, "prior_stable")
    prior_episodic: float = option(_OP, "prior_episodic")
    prior_current: float = option(_OP, "prior_current")
    kappa: float = option(_OP, "kappa")
    tau: float = option(_OP, "tau")
    adaptive: bool = Field(True, description="off: the blend keeps the prior weights")
    gate: bool = Field(True, description="off: no routing to the strongest memory")
    continuum: bool = Field(True, description="off: the stable memory alone, which is KeyDiff")

    @model_validator(mode="after")
    def _consistent(self) -> NestedKVOptions:
        if not self.prior_stable + self.prior_episodic + self.prior_current:
            raise ValueError("the three priors are 0; one at least must be above 0")
        if self.block_min > self.block_max:
            raise ValueError(f"block_min {self.block_min} is above block_max {self.block_max}")
        return self


def _emit(g: GraphBuilder, x: ScoreInputs, options: NestedKVOptions, block_size: int) -> ir.Value:
    inputs = (x.keys, x.unit_ids, x.evict_slots)
    return call(g, _OP, inputs, options.model_dump())[0]


SCORER = Scorer(
    name="nestedkv",
    options=NestedKVOptions,
    emit=_emit,
    per_head=lambda options: True,
    positive=True,
    goes_negative=lambda options: not options.continuum,
    needs_order=True,
)

PRESET = Preset(
    name="nestedkv",
    summary="keys unusual for the document, their block or their neighbours; heads compete",
    source="arXiv 2605.26678",
    scorer="nestedkv",
    selector="head_topk",
    scope="prefill",
    defaults={"sink_units": 4},
)
