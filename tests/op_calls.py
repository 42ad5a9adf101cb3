"""Short calls of the selectors and of the Nexus score for property tests."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray
from runners import IMPLEMENTATIONS

from kvsift.builder import ops
from kvsift.builder.bodies import Dims

Array = NDArray[Any]

DIMS = Dims(2, 1, 8, 6)


def uniforms(implementation: str, ids: Array, draws: int, seed: int = 0, step: int = 0) -> Array:
    """PhiloxUniform for E requests whose seeds are seed, seed + 1, ..."""
    slots = ids.shape[1]
    inputs = {
        "unit_ids": ids,
        "seed": np.stack([np.arange(seed, seed + slots), np.zeros(slots)], 1).astype(np.int32),
        "step": np.full(slots, step, np.int32),
    }
    attrs = ops.TABLE["PhiloxUniform"].defaults() | {"draws": draws}
    return IMPLEMENTATIONS[implementation]("PhiloxUniform", attrs, DIMS, inputs)[0]


def select(
    implementation: str,
    op: str,
    score: Any,
    budget: int,
    *,
    u: Array | None = None,
    ids: Any = None,
    seen: int | None = None,
    pins: Any = ((0, 0),),
    **attrs: ops.Value,
) -> tuple[Array, Array, Array]:
    """Run a selector on score [E,N] with one layer and one row; (kept mask [E,N], len, coverage).

    Without `ids` the units are 0 .. N-1; nothing is forced unless `attrs` say so.
    """
    score = np.asarray(score, np.float32)
    slots, units = score.shape
    ids = np.broadcast_to(np.arange(units) if ids is None else ids, score.shape).astype(np.int32)
    merged = ops.TABLE[op].defaults() | {"block_size": 1, "sink_units": 0, "recent_units": 0}
    inputs = {
        "score": score[None, :, None],
        "budget": np.full((1, slots, 1), budget, np.int32),
        "unit_ids": ids[None, :, None],
        "tokens_seen": np.full(slots, units if seen is None else seen, np.int32),
        "pin_spans": np.broadcast_to(np.array(pins, np.int32), (slots, len(pins), 2)).copy(),
    }
    if op == "ReservoirSelect":
        draws = uniforms(implementation, inputs["unit_ids"], 5) if u is None else u
        inputs["u"] = draws.astype(np.float32)
    keep, keep_len, coverage = IMPLEMENTATIONS[implementation](op, merged | attrs, DIMS, inputs)
    kept = np.zeros((slots, units + 1), bool)
    np.put_along_axis(kept, keep[0, :, 0], True, axis=1)  # -1 marks the extra column
    return kept[:, :-1], keep_len[0, :, 0], coverage[0, :, 0]


def sample(
    implementation: str, weights: list[float], budget: int, trials: int, draws: int = 1, **at: int
) -> Array:
    """Kept masks [trials,N] of the reservoir, each trial a request with its own seed."""
    score = np.tile(np.array(weights, np.float32), (trials, 1))
    ids = np.broadcast_to(np.arange(len(weights), dtype=np.int32), (1, trials, 1, len(weights)))
    u = uniforms(implementation, ids.copy(), draws, **at)
    return select(implementation, "ReservoirSelect", score, budget, u=u)[0]


def set_probabilities(weights: list[float], budget: int) -> dict[tuple[int, ...], float]:
    """Probability of each set under sequential weighted sampling without replacement."""
    total = dict.fromkeys(itertools.combinations(range(len(weights)), budget), 0.0)
    for order in itertools.permutations(range(len(weights)), budget):
        left, chance = sum(weights), 1.0
        for j in order:
            chance *= weights[j] / left
            left -= weights[j]
        total[tuple(sorted(order))] += chance
    return total


def inclusion(weights: list[float], budget: int) -> Array:
    """Probability of each unit to be in the set."""
    out = np.zeros(len(weights))
    for chosen, chance in set_probabilities(weights, budget).items():
        out[list(chosen)] += chance
    return out


def set_counts(kept: Array, budget: int) -> Array:
    """How often each set of `budget` units occurs, in the order of set_probabilities."""
    sets = list(itertools.combinations(range(kept.shape[1]), budget))
    index = {s: i for i, s in enumerate(sets)}
    rows = [index[tuple(np.flatnonzero(row).tolist())] for row in kept]
    return np.bincount(rows, minlength=len(sets))


def nexus(implementation: str, inputs: dict[str, Array], dims: Dims, **attrs: ops.Value) -> Array:
    """NexusScore of WindowMass, [E,R,N], with the default attributes but for `attrs`."""
    run = IMPLEMENTATIONS[implementation]
    given = {"block_size": 4} | attrs
    mine = [
        {k: given.get(k, v) for k, v in ops.TABLE[op].defaults().items()}
        for op in ("WindowMass", "NexusScore")
    ]
    mass = run("WindowMass", mine[0], dims, inputs)[0]
    layer = {
        "mass": mass[None],
        "unit_ids": inputs["unit_ids"][None],
        "tokens_seen": inputs["tokens_seen"],
    }
    return run("NexusScore", mine[1], dims, layer)[0][0]
