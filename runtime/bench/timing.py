"""Interleaved timing: engines take turns, so that a slow minute of the machine hits all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Series:
    """Something to time: `run` does one step, `steps` of them are a block.

    A block starts with one step that is not counted: it pays for caches gone cold and for threads
    of the previous engine that still spin.
    """

    name: str
    run: Callable[[], Any]
    steps: int = 1
    warmup: int = 1
    #: Seconds of every counted step, one list per block.
    blocks: list[list[float]] = field(default_factory=list)

    def block(self) -> None:
        """Run and time one block."""
        for _ in range(self.warmup):
            self.run()
        times = []
        for _ in range(self.steps):
            start = time.perf_counter()
            self.run()
            times.append(time.perf_counter() - start)
        self.blocks.append(times)

    @property
    def times(self) -> list[float]:
        """Seconds of all counted steps in order."""
        return [t for block in self.blocks for t in block]

    @property
    def median_ms(self) -> float:
        """Median step in ms."""
        return 1e3 * float(np.median(self.times))

    @property
    def mean_ms(self) -> float:
        """Median over blocks of a block's mean step in ms: what a stall within a block costs."""
        return 1e3 * float(np.median([np.mean(block) for block in self.blocks]))

    @property
    def spread(self) -> float:
        """Largest minus smallest block median, over the median of all steps."""
        return spread_of([float(np.median(block)) for block in self.blocks])


def spread_of(medians: list[float]) -> float:
    """Return (max - min) / median of some medians; 0 for a single one."""
    return (max(medians) - min(medians)) / float(np.median(medians))


def interleave(
    series: Iterable[Series], rounds: int, on_block: Callable[[str], None] | None = None
) -> None:
    """Run `rounds` rounds A B C A B C ...; `on_block` is called with each block's name."""
    every = list(series)
    for _ in range(rounds):
        for one in every:
            one.block()
            if on_block:
                on_block(one.name)
