"""Oracles of WindowMass and NexusScore."""

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


def window_mass(attrs: Mapping[str, Value], x: Mapping[str, Array]) -> list[Array]:
    """S_q = BlockSum(mean over heads of P_q), normalised to sum 1, per evicting slot and row.

    NaN (undefined) for a query that sees no key and for a skipped slot.
    """
    block, mode = int(attrs["block_size"]), HEAD_REDUCE[int(attrs["head_reduce"])]
    keys, window = x["keys"].astype(np.float64), x["q_window"].astype(np.float64)
    kv_heads, head_dim = keys.shape[1], keys.shape[3]
    W = window.shape[1]
    window = window.reshape(len(window), W, window.shape[2] // head_dim, head_dim)
    slots, rows, units = x["unit_ids"].shape
    mass = np.full((slots, rows, W, units), np.nan)
    for e, r in np.ndindex(slots, rows):
        slot, seen = int(x["evict_slots"][e]), int(x["tokens_seen"][e])
        if slot < 0:
            continue
        ids = x["unit_ids"][e, r].astype(np.int64)
        index = np.arange(units * block)
        position = ids[index // block] * block + index % block
        valid = (ids[index // block] >= 0) & (position < seen)
        index, position = index[valid], position[valid]
        for w in range(W):
            visible = position <= seen - W + w
            if not visible.any():
                continue
            heads = head_pairs(mode, window[e, w], keys[slot][:, index], r, kv_heads)
            P = np.mean([visible_attention(q, k, visible) for q, k in heads], axis=0)
            S = np.zeros(units)
            np.add.at(S, index // block, P)
            mass[e, r, w] = S / S.sum()
    return [mass]


def nexus_score(attrs: Mapping[str, Value], x: Mapping[str, Array]) -> list[Array]:
    """w = a + lambda c + eps r, per layer, evicting slot and row.

    a = mean of the rows S_q of queries that see a key; c = walk over H rows, those of queries
    that see none being 0.
    """
    block, order = int(attrs["block_size"]), WALK_ORDER[int(attrs["walk_order"])]
    W = x["mass"].shape[3]
    score = np.full(x["unit_ids"].shape, -np.inf)
    for i, e, r in np.ndindex(*score.shape[:3]):
        ids = x["unit_ids"][i, e, r].astype(np.int64)
        here = int(x["tokens_seen"][e]) - W + np.arange(W)
        oldest = ids[ids >= 0].min(initial=2**40) * block
        S = np.where((here >= oldest)[:, None], x["mass"][i, e, r].astype(np.float64), 0.0)
        a = S.sum(axis=0) / max(1, (here >= oldest).sum())
        c = walk(S[walk_rows(order, int(attrs["walk_steps"]), W)])
        weight = a + attrs["walk_lambda"] * c + attrs["tie_eps"] * recency_ramp(ids)
        score[i, e, r] = np.where(ids >= 0, weight, -np.inf)
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
