"""Oracle of NexusScore."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsift.builder.ops import HEAD_REDUCE, WALK_ORDER, Value

Array = NDArray[Any]


def visible_attention(query: Array, keys: Array, visible: Array) -> Array:
    """P = softmax(q K^T / sqrt(D)) over the visible keys, 0 elsewhere (and all 0 if none is)."""
    out = np.zeros(len(keys))
    if visible.any():
        logits = keys[visible] @ query / np.sqrt(len(query))
        weights = np.exp(logits - logits.max())
        out[visible] = weights / weights.sum()
    return out


def walk(rows: Array) -> Array:
    """C <- C + (1 + <row, C>) row over the rows in the order given; c = C / |C|_1 (0 if C = 0)."""
    state = np.zeros(rows.shape[1])
    for row in rows:
        state = state + (1.0 + row @ state) * row
    norm = np.abs(state).sum()
    return state / norm if norm > 0 else state


def walk_rows(order: str, steps: int, window: int) -> list[int]:
    """The window rows to visit, in the order of the visit."""
    steps = min(steps, window)
    if order == "chronological":
        return [window - steps + i for i in range(steps)]
    if order == "newest_first":
        return [window - 1 - i for i in range(steps)]
    return sorted(window - 1 - (i * window) // steps for i in range(steps))


def recency_ramp(ids: Array) -> Array:
    """r = (id - min id) / (max id - min id) over the units of a row, 0 if there is one."""
    used = ids[ids >= 0]
    if len(set(used.tolist())) < 2:
        return np.zeros(len(ids))
    return (ids - used.min()) / (used.max() - used.min())


def nexus_score(attrs: Mapping[str, Value], x: Mapping[str, Array]) -> list[Array]:
    """w = a + lambda c + eps r, per evicting slot and row.

    S_q = BlockSum(mean over heads of P_q) normalised to sum 1, 0 for a query that sees no key (as
    those before the sequence's start); a = mean of the other rows; c = walk over H rows.
    """
    block, mode = int(attrs["block_size"]), HEAD_REDUCE[int(attrs["head_reduce"])]
    keys, window = x["keys"].astype(np.float64), x["q_window"].astype(np.float64)
    kv_heads, head_dim = keys.shape[1], keys.shape[3]
    W = window.shape[1]
    window = window.reshape(len(window), W, -1, head_dim)
    score = np.full(x["unit_ids"].shape, -np.inf)
    for e, slot in enumerate(x["evict_slots"]):
        for r in range(score.shape[1]):
            ids = x["unit_ids"][e, r].astype(np.int64)
            if slot < 0:
                continue
            S = np.zeros((W, len(ids)))
            index = np.arange(min(int(x["lens"][e]), len(ids) * block))
            index = index[ids[index // block] >= 0]
            position = ids[index // block] * block + index % block
            for w in range(W):
                here = int(x["tokens_seen"][e]) - W + w
                heads = head_pairs(mode, window[slot, w], keys[slot][:, index], r, kv_heads)
                P = np.mean([visible_attention(q, k, position <= here) for q, k in heads], axis=0)
                np.add.at(S[w], index // block, P)
                if S[w].sum() > 0:
                    S[w] /= S[w].sum()
            a = S.sum(axis=0) / max(1, (S.sum(axis=1) > 0).sum())
            visited = walk_rows(WALK_ORDER[int(attrs["walk_order"])], int(attrs["walk_steps"]), W)
            c = walk(S[visited])
            weight = a + attrs["walk_lambda"] * c + attrs["tie_eps"] * recency_ramp(ids)
            score[e, r] = np.where(ids >= 0, weight, -np.inf)
    return [score]


def head_pairs(
    mode: str, queries: Array, keys: Array, row: int, kv_heads: int
) -> list[tuple[Array, Array]]:
    """Which (query [D], keys [T,D]) pairs are averaged into a row of scores."""
    if mode == "mean_qk":
        return [(queries.mean(axis=0), keys.mean(axis=0))]
    group = len(queries) // kv_heads
    pairs = [(query, keys[h // group]) for h, query in enumerate(queries)]
    return pairs[row * group : (row + 1) * group] if mode == "per_head" else pairs
