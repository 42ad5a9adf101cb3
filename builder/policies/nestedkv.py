"""NestedKV: keys that are unusual for the document, their block or their neighbours stay.

The switches `adaptive`, `gate` and `continuum` take the parts of the method away one by one;
without `continuum` it is KeyDiff. The heads compete by `--selector head_topk`, its default; with
`--selector topk` each has its own budget.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from pydantic import Field, model_validator

from kvsift.builder.graph import GraphBuilder
from kvsift.builder.ops import TABLE
from kvsift.builder.policies.base import Options, Preset, ScoreInputs, Scorer
from kvsift.builder.policies.nodes import call

_OP = TABLE["NestedKVScore"]


def _field(name: str) -> Any:
    """Return an option that is an attribute of the op, with its default, range and meaning."""
    attr = _OP.attr(name)
    return Field(attr.default, ge=attr.low, le=attr.high, description=attr.doc)


class NestedKVOptions(Options):
    """Parameters of the NestedKV score, named as the op's attributes."""

    window: int = _field("window")
    block_div: int = _field("block_div")
    block_min: int = _field("block_min")
    block_max: int = _field("block_max")
    tail: float = _field("tail")
    beta: float = _field("beta")
    prior_stable: float = _field("prior_stable")
    prior_episodic: float = _field("prior_episodic")
    prior_current: float = _field("prior_current")
    kappa: float = _field("kappa")
    tau: float = _field("tau")
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
    return call(g, _OP.name, inputs, options.model_dump())[0]


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
