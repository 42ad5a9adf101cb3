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


def nestedkv_score(attrs: Attrs, x: Inputs) -> list[Array]:
    """(1 - alpha) sum w_k a_k + alpha max a_k over the stable, episodic and current memory."""
    return per_row(x, lambda keys: nestedkv_row(attrs, keys))


def nestedkv_row(attrs: Attrs, keys: Array) -> Array:
    """The score of one row of keys [n,D] in position order."""
    k = unit(keys)
    stable = np.broadcast_to(k.mean(axis=0), k.shape)
    if not attrs["continuum"]:
        return anomaly(k, stable)
    memories = (stable, episodic(attrs, k), current(int(attrs["window"]), k))
    a = np.array([min_max(anomaly(k, memory)) for memory in memories])
    blend = blend_weights(attrs, a) @ a
    if not attrs["gate"]:
        return blend
    s = min_max(a.std(axis=0))
    s = np.maximum(0.0, s - s.mean())
    alpha = 1.0 / (1.0 + np.exp(-attrs["kappa"] * (s - attrs["tau"])))
    return (1.0 - alpha) * blend + alpha * a.max(axis=0)


def anomaly(k: Array, memory: Array) -> Array:
    """a(i) = -cos(k_i, mu(i))."""
    return -(k * unit(memory)).sum(axis=-1)


def episodic(attrs: Attrs, k: Array) -> Array:
    """Mean of the token's block; blocks of clip(floor(n / div), min, max), the last ragged."""
    n = len(k)
    size = min(max(n // int(attrs["block_div"]), int(attrs["block_min"])), int(attrs["block_max"]))
    out = np.empty_like(k)
    for start in range(0, n, size):
        out[start : start + size] = k[start : start + size].mean(axis=0)
    return out


def current(window: int, k: Array) -> Array:
    """Mean of the last `window` tokens up to and with the token."""
    return np.array([k[max(0, i - window + 1) : i + 1].mean(axis=0) for i in range(len(k))])


def min_max(x: Array) -> Array:
    """(x - min) / (max - min), 0 where the span says nothing."""
    span = x.max() - x.min()
    return (x - x.min()) / span if span >= FLAT else np.zeros_like(x)


def blend_weights(attrs: Attrs, a: Array) -> Array:
    """w = softmax(log prior + beta Delta), Delta_k = mean of top p - mean of bottom p of a_k."""
    prior = np.array([attrs[f"prior_{name}"] for name in ("stable", "episodic", "current")])
    if attrs["adaptive"]:
        p = max(1, int(attrs["tail"] * a.shape[1] + 1e-3))
        ordered = np.sort(a, axis=1)
        prior = prior * np.exp(attrs["beta"] * (ordered[:, -p:] - ordered[:, :p]).mean(axis=1))
    return prior / prior.sum()
