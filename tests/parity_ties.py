"""Kept sets against scores of another implementation: equal, or different among near ties only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def row_bounds(scores: Array, counts: Array) -> Array:
    """Return the score of rank `counts` [L] in each row, [L, Hkv, 1]."""
    ranked = np.sort(scores, axis=-1)
    at = np.broadcast_to(scores.shape[-1] - counts[:, None, None], (*scores.shape[:2], 1))
    return np.take_along_axis(ranked, at.astype(np.int64), axis=-1)


def layer_bounds(scores: Array, counts: Array, safe: Array) -> Array:
    """Return the lowest score that AdaKV's rule keeps outside the safe ones, [L, 1, 1].

    Of a layer's Hkv * counts places each row's `safe` [L] best have theirs.
    """
    layers, rows, _ = scores.shape
    open_to_all = np.where(scores >= row_bounds(scores, safe), -np.inf, scores)
    places = rows * (counts - safe)
    ranked = np.sort(open_to_all.reshape(layers, -1), axis=-1)
    bounds: Array = ranked[np.arange(layers), ranked.shape[1] - places]
    return bounds[:, None, None]


def is_near(scores: Array, bounds: Sequence[Array], rtol: float) -> Array:
    """Return which scores lie within rtol * |score| of a bound; bounds broadcast to scores."""
    near = np.zeros(scores.shape, bool)
    for bound in bounds:
        near |= np.abs(scores - bound) <= rtol * np.abs(scores)
    return near


def near_ties(
    ours: Array, theirs: Array, scores: Array, bounds: Sequence[Array], rtol: float
) -> int:
    """Return how many tokens only we keep; all differences must be near ties as in `is_near`.

    AssertionError for any other difference, and for unequal counts in a layer.
    """
    assert (ours.sum((1, 2)) == theirs.sum((1, 2))).all()
    differ = ours != theirs
    wrong = np.argwhere(differ & ~is_near(scores, bounds, rtol))
    assert not len(wrong), (
        f"{len(wrong)} of {differ.sum()} differences are no near ties; the first at layer, head, "
        f"token {wrong[0]}: score {scores[tuple(wrong[0])]}, "
        f"bounds {[float(np.broadcast_to(b, scores.shape)[tuple(wrong[0])]) for b in bounds]}"
    )
    return int((ours & ~theirs).sum())


def settled(ours: Array, scores: Array, bounds: Sequence[Array], rtol: float) -> Array:
    """Return factors float32 on the scores that settle every near tie as we did."""
    nudge = np.where(is_near(scores, bounds, rtol), 3 * rtol * np.sign(scores), 0.0)
    return (1 + np.where(ours, nudge, -nudge)).astype(np.float32)
