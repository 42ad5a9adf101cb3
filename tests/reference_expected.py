"""Oracle of ExpectedAttentionScore."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsift.builder.ops import Value

Array = NDArray[Any]


def rotation(position: int, inv_freq: Array) -> Array:
    """R of a position, [D,D]: the pair (i, i + D/2) turns by position * inv_freq_i."""
    cos, sin = np.diag(np.cos(position * inv_freq)), np.diag(np.sin(position * inv_freq))
    return np.block([[cos, -sin], [sin, cos]])


def expected_attention_score(attrs: Mapping[str, Value], x: Mapping[str, Array]) -> list[Array]:
    """score = mean over the group of (p + epsilon) |v|.

    p = softmax over the non-sink units of mu' k / sqrt(D) + k^T cov' k / (2 D), mu' = M mu,
    cov' = M cov M^T, M = rope_factor * mean of R over the next n_future positions, cov = moment /
    count. Sinks are 0, padding -inf, a skipped slot NaN (undefined).
    """
    keys, values = x["keys"].astype(np.float64), x["values"].astype(np.float64)
    kv_heads, head_dim = keys.shape[1], keys.shape[3]
    group = x["mean"].shape[1] // kv_heads
    sinks, inv_freq = int(attrs["sink_tokens"]), x["inv_freq"].astype(np.float64)
    score = np.full(x["unit_ids"].shape, np.nan)
    for e, g in np.ndindex(*score.shape[:2]):
        slot, seen = int(x["evict_slots"][e]), int(x["tokens_seen"][e])
        if slot < 0:
            continue
        ids = x["unit_ids"][e, g].astype(np.int64)
        score[e, g] = np.where(ids >= 0, 0.0, -np.inf)
        rated = np.flatnonzero(ids >= sinks)
        if not len(rated):
            continue
        future = range(seen, seen + int(attrs["n_future"]))
        M = attrs["rope_factor"] * np.mean([rotation(p, inv_freq) for p in future], axis=0)
        K, V = keys[slot, g, rated], values[slot, g, rated]
        probs = []
        for h in range(g * group, (g + 1) * group):
            mu = M @ x["mean"][slot, h].astype(np.float64)
            logits = K @ mu / np.sqrt(head_dim)
            if attrs["use_covariance"]:
                cov = x["moment"][slot, h].astype(np.float64) / max(1, seen - sinks)
                logits += np.einsum("ni,ij,nj->n", K, M @ cov @ M.T, K) / (2 * head_dim)
            weights = np.exp(logits - logits.max())
            probs.append(weights / weights.sum())
        length = np.linalg.norm(V, axis=1) if attrs["use_vnorm"] else 1.0
        score[e, g, rated] = (np.mean(probs, axis=0) + attrs["epsilon"]) * length
    return [score]
