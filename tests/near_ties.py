"""When two choices of units count as the same: equal, or different only among near ties."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def near_ties(keep: Array, expected: Array, key: Array, rtol: float = 1e-5) -> int:
    """Return how many rows of `keep` [...,N] differ from `expected`, all of them by near ties.

    `key` [...,N] are the oracle's priorities. A unit may take another's place only if the two
    priorities lie within rtol * max(1, |priority|); AssertionError otherwise.
    """
    ties = 0
    for row in np.ndindex(keep.shape[:-1]):
        ours, theirs = ({int(j) for j in a[row] if j >= 0} for a in (keep, expected))
        assert len(ours) == len(theirs), f"row {row}: kept {len(ours)}, expected {len(theirs)}"
        ties += ours != theirs
        for taken in ours - theirs:
            for left in theirs - ours:
                gap = abs(key[row][taken] - key[row][left])
                scale = max(1.0, abs(key[row][taken]), abs(key[row][left]))
                assert gap <= rtol * scale, (
                    f"row {row}: kept unit {taken} ({key[row][taken]}) "
                    f"instead of {left} ({key[row][left]})"
                )
    return ties
