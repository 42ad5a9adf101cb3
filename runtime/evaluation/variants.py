"""What is compared: each variant is a policy with options, named by what differs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Literal

from kvsift.builder.errors import unknown_name
from kvsift.builder.package import Policy

MODES = ("mean_qk", "mean_prob", "per_head")
#: The setting that the paper describes, to which all others are compared.
PAPER = "mean_qk/walk/reservoir"


@dataclass(frozen=True)
class Spec:
    """A variant as a user would ask for it: `--eviction`, `--selector`, `--set`, `--scope`."""

    name: str
    eviction: str
    selector: str | None = None
    options: dict[str, int | float | str] = field(default_factory=dict)
    scope: Literal["prefill", "both"] | None = None
    scorer: str | None = None


@dataclass(frozen=True)
class Variant:
    """A variant with its resolved policy and the bytes of its eviction model, None for `full`."""

    spec: Spec
    policy: Policy
    model: bytes | None

    @property
    def name(self) -> str:
        """The spec's name."""
        return self.spec.name

    def is_sampled(self, in_decode: bool) -> bool:
        """Whether the kept set depends on the eviction seed."""
        if self.policy.scorer == "uniform":
            return True
        same = self.policy.prefill_selector == "same"
        return self.policy.selector == "reservoir" and (same or in_decode)


def _nexus(mode: str, walk: bool, selector: str) -> Spec:
    name = f"{mode}/{'walk' if walk else 'no-walk'}/{selector}"
    options: dict[str, int | float | str] = {"head_reduce": mode}
    if not walk:
        options["walk_steps"] = 0
    return Spec(name, "nexus", selector, options)


def _prefill_topk(mode: str) -> Spec:
    options: dict[str, int | float | str] = {"head_reduce": mode, "prefill_selector": "topk"}
    return Spec(f"{mode}/walk/prefill-topk", "nexus", "reservoir", options)


_GRID = [
    _nexus(m, w, s) for m, w, s in itertools.product(MODES, (True, False), ("reservoir", "topk"))
]
_RANDOM_BLOCKS = Spec(
    "random-blocks", "random", options={"block_size": 32, "sink_units": 1, "recent_units": 1}
)
_ANCHORS = [Spec("full", "full"), Spec("streaming", "streaming")]
_RANDOM_TOKENS = Spec("random-tokens", "random")
_SMALL_BLOCKS = Spec(
    "per_head/walk/topk, blocks of 8",
    "nexus",
    "topk",
    {"head_reduce": "per_head", "block_size": 8},
)

#: The variants of each measurement. One eviction at a prompt's end cannot tell
#: prefill_selector=topk from selector topk, so only one mode shows it there.
ONE_SHOT = [
    *_GRID,
    _prefill_topk("mean_prob"),
    _SMALL_BLOCKS,
    *_ANCHORS,
    _RANDOM_BLOCKS,
    _RANDOM_TOKENS,
]
STREAM = [
    *(s for s in _GRID if "/walk/" in s.name),
    *(_prefill_topk(m) for m in MODES),
    *_ANCHORS,
    # By itself it would stop evicting at the prompt's end and keep more than the others.
    replace(_RANDOM_BLOCKS, scope="both"),
]

#: Pairs (a, b) whose difference a - b answers one question each.
CONTRASTS: dict[str, list[tuple[str, str]]] = {
    "head_reduce": [
        (f"{a}/walk/{s}", f"{b}/walk/{s}")
        for s in ("reservoir", "topk")
        for a, b in (("mean_prob", "mean_qk"), ("per_head", "mean_qk"), ("per_head", "mean_prob"))
    ],
    "walk": [(f"{m}/walk/{s}", f"{m}/no-walk/{s}") for m in MODES for s in ("reservoir", "topk")],
    "selector": [(f"{m}/walk/topk", f"{m}/walk/reservoir") for m in MODES],
    "prefill_selector": [
        *((f"{m}/walk/prefill-topk", f"{m}/walk/reservoir") for m in MODES),
        *((f"{m}/walk/prefill-topk", f"{m}/walk/topk") for m in MODES),
    ],
    "random": [(f"{m}/walk/reservoir", "random-blocks") for m in MODES],
}


def pick(specs: list[Spec], names: list[str]) -> list[Spec]:
    """Return the specs called `names`, all if there are none; UsageError for an unknown name."""
    known = [spec.name for spec in specs]
    for name in names:
        if name not in known:
            raise unknown_name("variant", name, known)
    return [spec for spec in specs if not names or spec.name in names]
