"""Selectors: the rules that turn scores and a budget into the kept set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvsift.builder.policies.base import Options
from kvsift.builder.policies.nodes import option


class ReservoirOptions(Options):
    """Parameters of weighted reservoir sampling."""

    draws: int = option("PhiloxUniform", "draws")


class HeadTopKOptions(Options):
    """Parameters of the competition between the heads of a layer."""

    safeguard: float = option("HeadTopKSelect", "safeguard")
    max_head_ratio: float = option("HeadTopKSelect", "max_head_ratio")


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
