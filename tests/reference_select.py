"""Oracles of the selectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsift.builder.ops import Value

Array = NDArray[Any]
Attrs = Mapping[str, Value]
Inputs = Mapping[str, Array]

FLOAT_MAX = float(np.finfo(np.float32).max)


def is_forced(attrs: Attrs, unit: int, seen: int, pins: Array) -> bool:
    """A sink, one of the newest full units or newer, or met by a pinned span."""
    block = int(attrs["block_size"])
    if unit < 0:
        return False
    if unit < attrs["sink_units"] or unit >= seen // block - attrs["recent_units"]:
        return True
    tokens = range(unit * block, (unit + 1) * block)
    return any(int(a) <= t < int(b) for a, b in pins for t in tokens)


def forced_units(attrs: Attrs, x: Inputs) -> Array:
    """Which units are forced, bool [L,E,R,N]."""
    ids = x["unit_ids"]
    out = np.zeros(ids.shape, bool)
    for at in np.ndindex(ids.shape):
        e = at[1]
        out[at] = is_forced(attrs, int(ids[at]), int(x["tokens_seen"][e]), x["pin_spans"][e])
    return out


def bounded(key: Array) -> Array:
    """The key as it is ranked: finite, NaN with the lowest."""
    return np.clip(np.where(np.isnan(key), -FLOAT_MAX, key), -FLOAT_MAX, FLOAT_MAX)


def topk_priority(attrs: Attrs, x: Inputs) -> Array:
    """The score itself."""
    return bounded(x["score"].astype(np.float64))


def reservoir_priority(attrs: Attrs, x: Inputs) -> Array:
    """log pi_j = logsumexp_i(ln(u_ij) / max(w_j, 1e-20)) - ln n; w scaled to sum 1.5 if asked."""
    w = x["score"].astype(np.float64)
    if attrs["normalize"]:
        usable = (x["unit_ids"] >= 0) & np.isfinite(w) & (w > 0)
        total = np.where(usable, w, 0.0).sum(axis=-1, keepdims=True)
        w = w * (1.5 / np.maximum(total, 1e-20))
    with np.errstate(invalid="ignore"):
        logs = np.log(x["u"].astype(np.float64)) / np.maximum(w, 1e-20)[:, :, :, None]
        mean = np.logaddexp.reduce(logs, axis=3) - np.log(logs.shape[3])
    return bounded(mean)


def select(attrs: Attrs, x: Inputs, key: Array) -> list[Array]:
    """Forced units, then the highest keys, lower index first; keep_len = min(valid, max(K, F))."""
    forced = forced_units(attrs, x)
    counts = np.zeros(x["budget"].shape, np.int32)
    for row in np.ndindex(counts.shape):
        valid = int((x["unit_ids"][row] >= 0).sum())
        counts[row] = min(valid, max(int(x["budget"][row]), int(forced[row].sum())))
    return keep(attrs, x, key, counts)


def own_order(ids: Array, forced: Array, key: Array) -> list[int]:
    """The valid units of a row as it would keep them: forced, then by key, lower index first."""
    valid = [j for j in range(len(ids)) if ids[j] >= 0]
    return sorted(valid, key=lambda j: (not forced[j], -key[j], j))


def keep(attrs: Attrs, x: Inputs, key: Array, counts: Array) -> list[Array]:
    """Keep the first `counts` [L,E,R] units of each row's own order."""
    ids, score = x["unit_ids"], x["score"].astype(np.float64)
    forced = forced_units(attrs, x)
    out = np.full(ids.shape, -1, np.int32)
    coverage = np.full(ids.shape[:3], np.nan)
    for row in np.ndindex(ids.shape[:3]):
        order = own_order(ids[row], forced[row], key[row])
        kept = sorted(order[: counts[row]])
        out[row][: len(kept)] = kept
        total = score[row][order].sum()
        if attrs["score_is_mass"] and np.isfinite(total) and total != 0:
            coverage[row] = score[row][kept].sum() / total
    return [out, counts, coverage]


def head_topk_select(attrs: Attrs, x: Inputs) -> list[Array]:
    """Safe units of each row, then the best (row, unit) pairs of the layer, one place at a time."""
    key, forced = topk_priority(attrs, x), forced_units(attrs, x)
    counts = np.zeros(x["budget"].shape, np.int32)
    for layer, e in np.ndindex(counts.shape[:2]):
        budgets = [max(0, int(v)) for v in x["budget"][layer, e]]
        orders, caps = [], []
        for r, budget in enumerate(budgets):
            at = (layer, e, r)
            orders.append(own_order(x["unit_ids"][at], forced[at], key[at]))
            need = int(forced[at].sum())
            caps.append(len(orders[r]))
            if attrs["max_head_ratio"]:
                most = int(attrs["max_head_ratio"] * budget + 1e-3)
                caps[r] = min(caps[r], max(need, most))
            counts[at] = min(caps[r], max(need, int(attrs["safeguard"] * budget + 1e-3)))
        while counts[layer, e].sum() < sum(budgets):
            # The next unit of each row that has room: the best key, then the lower row.
            bids = [
                (-key[layer, e, r, orders[r][counts[layer, e, r]]], r)
                for r in range(len(budgets))
                if counts[layer, e, r] < caps[r]
            ]
            if not bids:
                break
            counts[layer, e, min(bids)[1]] += 1
    return keep(attrs, x, key, counts)


def topk_select(attrs: Attrs, x: Inputs) -> list[Array]:
    """The units with the highest score."""
    return select(attrs, x, topk_priority(attrs, x))


def reservoir_select(attrs: Attrs, x: Inputs) -> list[Array]:
    """The units with the highest mean of u^(1/w)."""
    return select(attrs, x, reservoir_priority(attrs, x))
