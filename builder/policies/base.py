"""What a policy is: a scorer, a selector and their options, resolved into one plain record.

A policy file defines a `Scorer` (or reuses one) and a `Preset`; the registry in `__init__` finds
both. Options are pydantic models, so that `--set key=value` is checked in one place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import onnx_ir as ir
from pydantic import BaseModel, ConfigDict, Field

from kvsift.builder.graph import GraphBuilder

Scope = Literal["none", "prefill", "decode", "both"]
WindowHeads = Literal["none", "mean", "all"]
#: Tokens that one decode eviction frees when the units are tokens.
TOKEN_INTERVAL = 32


class Options(BaseModel):
    """Base of option models: unknown keys and values outside their range are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class CommonOptions(Options):
    """Options of every evicting policy, whatever its scorer and selector."""

    sink_units: int = Field(1, ge=0, description="first units that are always kept")
    recent_units: int = Field(0, ge=0, description="newest full units that are always kept")
    min_budget_tokens: int = Field(256, ge=0, description="smallest budget from a density")
    prefill_selector: Literal["same", "topk"] = Field(
        "same", description="topk: no sampling at the prompt's end, only in decode"
    )


class Policy(BaseModel):
    """A resolved policy as the graph is built from it and the manifest records it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    scorer: str
    selector: str
    scope: Scope
    #: Tokens per unit: the granularity of eviction.
    block_size: int = 1
    #: Query rows that the scorer needs, and how their heads are kept.
    window: int = 0
    window_heads: WindowHeads = "none"
    #: One kept set per KV head (else one per layer).
    per_head: bool = False
    sink_units: int = 0
    recent_units: int = 0
    min_budget_tokens: int = 0
    prefill_selector: Literal["same", "topk"] = "same"
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
    def decode_interval(self) -> int:
        """Tokens between two decode evictions of a sequence, and freed by each."""
        return self.block_size if self.block_size > 1 else TOKEN_INTERVAL


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


@dataclass(frozen=True)
class Scorer:
    """A rule that gives every unit a score, higher meaning keep.

    `emit(g, inputs, options, block_size)` appends the nodes of one layer; `finish(g, stacked,
    inputs, options, block_size)`, if any, turns what they returned, stacked over the layers, into
    the scores float32 [L, E, R, N]. Nodes of the op table come from `nodes.call`.
    """

    name: str
    options: type[Options]
    emit: Callable[[GraphBuilder, ScoreInputs, Any, int], ir.Value]
    finish: Callable[[GraphBuilder, ir.Value, AllLayers, Any, int], ir.Value] | None = None
    #: Attributes of each op of the table that it calls: their bodies go into the package.
    ops: Callable[[Any, int], dict[str, dict[str, int | float]]] = field(
        default=lambda options, block_size: {}
    )
    window: Callable[[Any], WindowNeed] = _no_window
    per_head: Callable[[Any], bool] = _whole_layer
    default_block_size: int = 1
    #: Scores are weights > 0, so that the reservoir can sample by them.
    positive: bool = False
    #: A share of the score means something (coverage).
    mass: bool = False
    needs_uniform: bool = False
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
