"""What a policy is: a scorer, a selector and their options, resolved into one plain record.

A policy file defines a `Scorer` (or reuses one) and a `Preset`; the registry in `__init__` finds
both. Options are pydantic models, so that `--set key=value` is checked in one place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import onnx_ir as ir
from pydantic import BaseModel, ConfigDict, Field, field_validator

from kvsift.builder.graph import GraphBuilder

Scope = Literal["none", "prefill", "decode", "both"]
Layout = Literal["sequence", "head"]
WindowHeads = Literal["none", "mean", "all"]
#: Tokens that one decode eviction frees when the units are tokens.
TOKEN_INTERVAL = 32


class Options(BaseModel):
    """Base of option models: unknown keys and values outside their range are errors."""

    # JSON, and so the manifest, has no infinity.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class CommonOptions(Options):
    """Options of every evicting policy, whatever its scorer and selector."""

    sink_units: int = Field(1, ge=0, description="first units that are always kept")
    recent_units: int = Field(0, ge=0, description="newest full units that are always kept")
    min_budget_tokens: int = Field(256, ge=0, description="smallest budget from a density")
    prefill_selector: Literal["same", "topk"] = Field(
        "same", description="topk: no sampling at the prompt's end, only in decode"
    )
    recent_fraction: float = Field(
        0.0, ge=0, lt=1, description="share of the budget that the newest units take for sure"
    )
    decode_interval: int = Field(
        0, ge=0, description="tokens between two decode evictions; 0: a block, or 32 tokens"
    )
    layer_budgets: Literal["uniform", "pyramid"] | tuple[float, ...] = Field(
        "uniform", description="uniform, pyramid, or one relative weight per layer"
    )
    row_lengths: Literal["auto", "layer", "head"] = Field(
        "auto",
        description="auto: rows are equally long where the policy allows it; layer, head: requests "
        "may give layers, or layers and heads, budgets of their own",
    )
    pyramid_beta: float = Field(20.0, ge=1, description="steepness of the pyramid")

    @field_validator("layer_budgets", mode="before")
    @classmethod
    def _weights(cls, value: Any) -> Any:
        """Read the command line's `3,2,1` (and `3`, which comes as a number), and check it."""
        if value in ("uniform", "pyramid"):
            return value
        parts = value.split(",") if isinstance(value, str) else value
        parts = [parts] if isinstance(parts, (int, float)) else parts
        try:
            weights = tuple(float(part) for part in parts)
        except (TypeError, ValueError):
            weights = ()
        # Their sum must be finite too, or shares could not be told.
        if not weights or min(weights) <= 0 or not math.isfinite(sum(weights)):
            raise ValueError(
                "it must be uniform, pyramid, or one positive weight per layer such as 3,2,1"
            )
        return weights


class Policy(BaseModel):
    """A resolved policy as the graph is built from it and the manifest records it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str
    scorer: str
    selector: str
    scope: Scope
    #: Tokens per unit: the granularity of eviction.
    block_size: int = Field(default=1, ge=1)
    #: Query rows that the scorer needs, and how their heads are kept.
    window: int = Field(default=0, ge=0)
    window_heads: WindowHeads = "none"
    #: One kept set per KV head (else one per layer).
    per_head: bool = False
    sink_units: int = Field(default=0, ge=0)
    recent_units: int = Field(default=0, ge=0)
    min_budget_tokens: int = Field(default=0, ge=0)
    prefill_selector: Literal["same", "topk"] = "same"
    recent_fraction: float = Field(default=0.0, ge=0, lt=1)
    layer_budgets: Literal["uniform", "pyramid"] | tuple[float, ...] = "uniform"
    row_lengths: Literal["auto", "layer", "head"] = "auto"
    pyramid_beta: float = Field(default=20.0, ge=1)
    #: Tokens between two decode evictions of a sequence, and freed by each.
    decode_interval: int = Field(default=TOKEN_INTERVAL, ge=1)
    #: `head`: the heads of a layer keep different numbers of rows.
    layout: Layout = "sequence"
    #: State tensors that the graph updates in every step, see `builder/states.py`.
    states: tuple[str, ...] = ()
    #: The kept share of the score is a share of attention mass: coverage is defined.
    score_is_mass: bool = False
    #: Rows must stay in position order (decode evictions gather instead of filling holes).
    needs_order: bool = False
    scorer_options: dict[str, int | float | str] = {}
    selector_options: dict[str, int | float | str] = {}

    @property
    def evicts(self) -> bool:
        """Whether the graph has eviction nodes."""
        return self.scope != "none"

    @property
    def in_prefill(self) -> bool:
        """Whether the prompt's end evicts."""
        return self.scope in ("prefill", "both")

    @property
    def in_decode(self) -> bool:
        """Whether decode steps evict."""
        return self.scope in ("decode", "both")

    @property
    def heads_compete(self) -> bool:
        """Whether the heads of a layer share one budget, so that a head may exceed its own."""
        return self.selector == "head_topk"

    @property
    def shared_lens(self) -> bool:
        """Whether all layers and heads keep equally many rows."""
        uniform = self.layer_budgets == "uniform" and self.row_lengths == "auto"
        return self.layout == "sequence" and uniform


@dataclass(frozen=True)
class ScoreInputs:
    """Graph values that a scorer may read of one layer; shapes as in `ops.py`.

    `unit_ids` int32 [E, R, N], `tokens_seen` and `evict_slots` int32 [E], `keys` and `values`
    [B, Hkv, C, D], `q_window` [E, W, Hq*D] or None, `uniform` the layer's Philox draws float32
    [E, R, n, N] or None.
    """

    keys: ir.Value
    values: ir.Value
    q_window: ir.Value | None
    uniform: ir.Value | None
    unit_ids: ir.Value
    tokens_seen: ir.Value
    evict_slots: ir.Value
    #: State after the step by name (`accum`, `query_mean`, `query_moment`), see `states.py`.
    states: dict[str, ir.Value]
    #: Inverse frequencies float32 [D / 2] of the rotation, and the factor on its cos and sin.
    inv_freq: ir.Value
    rope_factor: float
    #: First units that the policy always keeps.
    sink_units: int = 4


@dataclass(frozen=True)
class AllLayers:
    """What a scorer may read of all layers: `unit_ids` int32 [L, E, R, N], `tokens_seen` [E]."""

    unit_ids: ir.Value
    tokens_seen: ir.Value


@dataclass(frozen=True)
class WindowNeed:
    """The queries that a scorer needs: the last `rows`, averaged over heads or not."""

    rows: int
    heads: WindowHeads


def _no_window(options: Any) -> WindowNeed:
    return WindowNeed(0, "none")


def _whole_layer(options: Any) -> bool:
    return False


def _never(options: Any) -> bool:
    return False


@dataclass(frozen=True)
class Scorer:
    """A rule that gives every unit a score, higher meaning keep.

    `emit(g, inputs, options, block_size)` appends the nodes of one layer; `finish(g, stacked,
    inputs, options, block_size)`, if any, turns what they returned, stacked over the layers, into
    the scores float32 [L, E, R, N]. Nodes of the op table come from `nodes.call`, which notes them
    so that their bodies go into the package.
    """

    name: str
    options: type[Options]
    emit: Callable[[GraphBuilder, ScoreInputs, Any, int], ir.Value]
    finish: Callable[[GraphBuilder, ir.Value, AllLayers, Any, int], ir.Value] | None = None
    window: Callable[[Any], WindowNeed] = _no_window
    per_head: Callable[[Any], bool] = _whole_layer
    #: Units may be blocks; else they are tokens.
    blocks: bool = False
    default_block_size: int = 1
    #: Scores are weights > 0, so that the reservoir can sample by them.
    positive: bool = False
    #: Options under which that does not hold.
    goes_negative: Callable[[Any], bool] = _never
    #: A share of the score means something (coverage).
    mass: bool = False
    needs_uniform: bool = False
    #: State tensors that it reads, see `builder/states.py`.
    states: tuple[str, ...] = ()
    needs_order: bool = False


@dataclass(frozen=True)
class Preset:
    """A named policy: `--eviction NAME`."""

    name: str
    summary: str
    source: str
    scorer: str
    selector: str
    scope: Scope
    #: Values that differ from the options' own defaults.
    defaults: dict[str, Any] = field(default_factory=dict)
