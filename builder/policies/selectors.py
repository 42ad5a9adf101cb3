"""Selectors: the rules that turn scores and a budget into the kept set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from kvsift.builder.policies.base import Options
from kvsift.builder.policies.nodes import default


class ReservoirOptions(Options):
    """Parameters of weighted reservoir sampling."""

    draws: int = Field(default("PhiloxUniform", "draws"), ge=1, le=1024, description="n")


class HeadTopKOptions(Options):
    """Parameters of the competition between the heads of a layer."""

    safeguard: float = Field(
        default("HeadTopKSelect", "safeguard"),
        ge=0,
        le=1,
        description="share of its own budget that a head never loses",
    )
    max_head_ratio: float = Field(
        default("HeadTopKSelect", "max_head_ratio"),
        ge=0,
        le=1e6,
        description="largest share of a head over its budget; 0: any",
    )


@dataclass(frozen=True)
class Selector:
    """A selector op with its options; `draws` is the number of uniforms per unit that it reads."""

    name: str
    op: str
    options: type[Options]
    draws: Callable[[Any], int]
    #: The heads of a layer may keep different numbers of units.
    per_head_lengths: bool = False


SELECTORS = {
    s.name: s
    for s in (
        Selector("reservoir", "ReservoirSelect", ReservoirOptions, lambda o: int(o.draws)),
        Selector("topk", "TopKSelect", Options, lambda o: 0),
        Selector(
            "head_topk", "HeadTopKSelect", HeadTopKOptions, lambda o: 0, per_head_lengths=True
        ),
    )
}
