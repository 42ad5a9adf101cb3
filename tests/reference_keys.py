"""Oracles of the scorers that read keys alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsift.builder.ops import Value

Array = NDArray[Any]
Attrs = Mapping[str, Value]
Inputs = Mapping[str, Array]

#: A scale whose anomalies span less than this says nothing: it counts as constant.
FLAT = 1e-5


def unit(x: Array) -> Array:
    """x / |x| along the last axis, 0 where x is 0."""
    norm = np.sqrt((x * x).sum(axis=-1, keepdims=True))
    return np.divide(x, norm, out=np.zeros_like(x), where=norm > 0)


def per_row(x: Inputs, rule: Callable[[Array], Array]) -> list[Array]:
    """Apply a rule on keys [n,D] to the valid units of each row; -inf at padding.

    NaN (undefined) for a skipped slot that has ids all the same.
    """
    ids = x["unit_ids"]
    score = np.full(ids.shape, -np.inf)
    for e, r in np.ndindex(*ids.shape[:2]):
        if x["evict_slots"][e] < 0:
            score[e, r] = np.where(ids[e, r] >= 0, np.nan, -np.inf)
            continue
        n = int((ids[e, r] >= 0).sum())
        assert (ids[e, r, :n] >= 0).all(), "valid units must be a prefix"
        if n:
            score[e, r, :n] = rule(x["keys"][x["evict_slots"][e], r, :n].astype(np.float64))
    return [score]


def knorm_score(attrs: Attrs, x: Inputs) -> list[Array]:
    """-|k|."""
    return per_row(x, lambda keys: -np.sqrt((keys * keys).sum(axis=-1)))


def keydiff_score(attrs: Attrs, x: Inputs) -> list[Array]:
    """-cos(k, mean of k / |k|)."""
    return per_row(x, lambda keys: -unit(keys) @ unit(unit(keys).mean(axis=0)))
