"""Oracle of WindowScore."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from reference_nexus import visible_attention

from kvsift.builder.ops import REDUCE, Value

Array = NDArray[Any]
KINDS = {"mean": np.mean, "sum": np.sum, "max": np.max}


def reduced(kind: Value, rows: list[Array]) -> Array:
    """The rows [.., N] averaged, summed, or the largest of each column."""
    out: Array = KINDS[REDUCE[int(kind)]](rows, axis=0)
    return out


def neighbour_mean(values: Array, size: int) -> Array:
    """sum of values[j - size // 2 .. j + size // 2] / size, zeros beyond the ends."""
    side = size // 2
    padded = np.concatenate([np.zeros(side), values, np.zeros(side)])
    return np.array([padded[j : j + size].sum() / size for j in range(len(values))])


def window_score(attrs: Mapping[str, Value], x: Mapping[str, Array]) -> list[Array]:
    """score = group_reduce(pool(window_reduce(softmax(q K^T / sqrt(D))))), per slot and row.

    Tokens of the window are 0 before the pool. NaN (undefined) for a skipped slot, -inf at padding.
    """
    keys, window = x["keys"].astype(np.float64), x["q_window"].astype(np.float64)
    kv_heads, head_dim = keys.shape[1], keys.shape[3]
    W = window.shape[1]
    window = window.reshape(len(window), W, window.shape[2] // head_dim, head_dim)
    group = window.shape[2] // kv_heads
    score = np.full(x["unit_ids"].shape, np.nan)
    for e, r in np.ndindex(*score.shape[:2]):
        slot, seen = int(x["evict_slots"][e]), int(x["tokens_seen"][e])
        if slot < 0:
            continue
        ids = x["unit_ids"][e, r].astype(np.int64)
        valid = (ids >= 0) & (ids < seen)
        heads = range(len(window[e, 0])) if attrs["shared"] else range(r * group, (r + 1) * group)
        per_head = []
        for h in heads:
            K = np.where(valid[:, None], keys[slot, h // group, : len(ids)], 0.0)
            paid = [
                visible_attention(window[e, w, h], K, valid & (ids <= seen - W + w))
                for w in range(W)
            ]
            P = reduced(attrs["window_reduce"], paid)
            P = np.where(ids < seen - W, P, 0.0)
            per_head.append(neighbour_mean(P, int(attrs["pool_size"])))
        score[e, r] = np.where(valid, reduced(attrs["group_reduce"], per_head), -np.inf)
    return [score]
