"""The coverage guardrail: a budget rises until evictions keep the share that a request asks for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from kvsift.builder.errors import UsageError
from kvsift.builder.package import Policy
from kvsift.runtime.sessions import Kept

#: met: no eviction fell below; raised: the budget rose; exhausted: the slot's capacity ended that.
Outcome = Literal["met", "raised", "exhausted"]


def check_coverage(min_coverage: float | None, policy: Policy) -> None:
    """Raise UsageError if a policy's score says nothing about attention mass."""
    if min_coverage is not None and policy.evicts and not policy.score_is_mass:
        raise UsageError(
            f"min_coverage {min_coverage:g} needs a score that is attention mass, and scorer "
            f"{policy.scorer!r} has none; leave it out, or use a policy such as nexus or snapkv"
        )


def share_of(kept: Kept, e: int) -> float:
    """Return the coverage of evicting slot number `e`, the mean over layers and rows, or NaN."""
    return float(kept.coverage[:, e].mean())


class Guardrail:
    """One request's minimum coverage and what it has done to the budget so far.

    `minimum` in (0, 1]; `raised` counts the units added to the budget, per layer and head.
    """

    def __init__(self, minimum: float) -> None:
        self.minimum = minimum
        self.raised = 0
        self._exhausted = False

    @property
    def outcome(self) -> Outcome:
        """What the guardrail had to do."""
        if self._exhausted:
            return "exhausted"
        return "raised" if self.raised else "met"

    def holds(self, share: float) -> bool:
        """Whether a coverage is enough; one that is not defined (NaN) always is."""
        return math.isnan(share) or share >= self.minimum

    def search(
        self, kept: Kept, budget: int, ceiling: int, select: Callable[[int], Kept]
    ) -> tuple[Kept, int]:
        """Return the kept set and the budget: the least in [budget, ceiling] that is enough.

        `kept` is what `budget` units keep, `select` tells it for another number. Coverage grows
        with the budget, since the same scores and draws rank the units; so halving finds it.
        """
        if self.holds(share_of(kept, 0)) or budget >= ceiling:
            self._exhausted |= not self.holds(share_of(kept, 0))
            return kept, budget
        low, high = budget, ceiling
        best = select(high)
        self._exhausted |= not self.holds(share_of(best, 0))
        while not self._exhausted and high - low > 1:
            middle = (low + high) // 2
            tried = select(middle)
            if self.holds(share_of(tried, 0)):
                high, best = middle, tried
            else:
                low = middle
        self.raised += high - budget
        return best, high

    def spares(self, share: float, budget: int, more: int, ceiling: int) -> bool:
        """Whether a decode eviction is left out, since `more` units on top of the budget fit."""
        if self.holds(share):
            return False
        if budget + more > ceiling:
            self._exhausted = True
            return False
        self.raised += more
        return True
