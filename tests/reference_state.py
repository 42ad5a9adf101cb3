"""Oracles of AccumUpdate and QueryStatsUpdate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from reference_nexus import visible_attention

from kvsift.builder.ops import Value

Array = NDArray[Any]


def accum_update(attrs: Mapping[str, Value], x: Mapping[str, Array]) -> list[Array]:
    """accum_j + sum over the step's tokens and the group's heads of softmax(q K^T / sqrt(D))_j.

    Row past + s holds token s of the step, which sees the rows up to its own. A new row starts at
    0, and a row that is not valid is 0.
    """
    keys = x["keys"].astype(np.float64)
    slots, kv_heads, capacity, head_dim = keys.shape
    queries = x["queries"].astype(np.float64)
    steps, heads = queries.shape[1], queries.shape[2] // head_dim
    queries = queries.reshape(slots, steps, heads, head_dim)
    row = np.arange(capacity)
    out = np.zeros((slots, kv_heads, capacity))
    for slot, g in np.ndindex(slots, kv_heads):
        lens, new = x["past_lens"][slot], int(x["n_new"][slot])
        past = int(lens[g] if len(lens) > 1 else lens[0])
        out[slot, g, :past] = x["accum"][slot, g, :past]
        group = range(g * heads // kv_heads, (g + 1) * heads // kv_heads)
        for s, h in np.ndindex(new, heads):
            if h in group:
                K = np.nan_to_num(keys[slot, g])
                out[slot, g] += visible_attention(queries[slot, s, h], K, row <= past + s)
    return [out]


def query_stats_update(attrs: Mapping[str, Value], x: Mapping[str, Array]) -> list[Array]:
    """mean and M = sum (q - mean)(q - mean)^T of the old tokens and the step's together.

    With the old sums s = n mean and Q = M + n mean mean^T: mean' = (s + sum q) / n' and
    M' = Q + sum q q^T - n' mean' mean'^T. Tokens below sink_tokens do not count.
    """
    mean, moment = x["mean"].astype(np.float64), x["moment"].astype(np.float64)
    slots, heads, head_dim = mean.shape
    queries = x["queries"].astype(np.float64)
    queries = queries.reshape(slots, queries.shape[1], heads, head_dim)
    for slot in range(slots):
        first, new = int(x["first_position"][slot]), int(x["n_new"][slot])
        if new == 0:
            continue
        counted = max(0, first - int(attrs["sink_tokens"]))
        skipped = min(new, max(0, int(attrs["sink_tokens"]) - first))
        rows = queries[slot, skipped:new]
        total = counted + len(rows)
        for h in range(heads):
            m, M = mean[slot, h], moment[slot, h]
            if counted == 0:
                m, M = np.zeros_like(m), np.zeros_like(M)
            sums = counted * m + rows[:, h].sum(axis=0)
            squares = M + counted * np.outer(m, m) + rows[:, h].T @ rows[:, h]
            mean[slot, h] = sums / max(total, 1)
            moment[slot, h] = squares - total * np.outer(mean[slot, h], mean[slot, h])
    return [mean, moment]
