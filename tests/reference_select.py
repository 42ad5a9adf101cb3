"""Oracles of the selectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

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
    return bounded(logsumexp(logs, axis=3) - np.log(logs.shape[3]))


def select(attrs: Attrs, x: Inputs, key: Array) -> list[Array]:
    """Forced units, then the highest keys, lower index first; keep_len = min(valid, max(K, F))."""
    ids, score = x["unit_ids"], x["score"].astype(np.float64)
    forced = forced_units(attrs, x)
    keep = np.full(ids.shape, -1, np.int32)
    keep_len = np.zeros(ids.shape[:3], np.int32)
    coverage = np.full(ids.shape[:3], np.nan)
    for row in np.ndindex(ids.shape[:3]):
        valid = [j for j in range(ids.shape[3]) if ids[row][j] >= 0]
        order = sorted(valid, key=lambda j: (not forced[row][j], -key[row][j], j))
        count = min(len(valid), max(int(x["budget"][row]), int(forced[row].sum())))
        kept = sorted(order[:count])
        keep[row][:count], keep_len[row] = kept, count
        total = score[row][valid].sum()
        if attrs["score_is_mass"] and np.isfinite(total) and total != 0:
            coverage[row] = score[row][kept].sum() / total
    return [keep, keep_len, coverage]


def topk_select(attrs: Attrs, x: Inputs) -> list[Array]:
    """The units with the highest score."""
    return select(attrs, x, topk_priority(attrs, x))


def reservoir_select(attrs: Attrs, x: Inputs) -> list[Array]:
    """The units with the highest mean of u^(1/w)."""
    return select(attrs, x, reservoir_priority(attrs, x))
