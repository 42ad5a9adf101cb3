"""What the paper says of Nexus Sampling, checked on the ops (arXiv 2606.23961)."""

from __future__ import annotations

import numpy as np
import pytest
from cases import Case, Scene
from hypothesis import given, settings
from hypothesis import strategies as st
from op_calls import (
    inclusion,
    nexus,
    sample,
    select,
    set_counts,
    set_probabilities,
)
from runners import IMPLEMENTATIONS
from scipy.optimize import nnls
from scipy.stats import chisquare

from kvsift.builder import ops
from kvsift.builder.bodies import Dims

pytestmark = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)

TRIALS = 6000
WEIGHTS = [0.4, 0.02, 0.2, 0.3, 0.07, 0.01]
PLAIN = {"walk_lambda": 0.0, "tie_eps": 0.0}
FULL = {"walk_lambda": 1.0, "tie_eps": 0.0}


def score_scene(seed: int, **sizes: int) -> Scene:
    attrs = ops.TABLE["WindowMass"].defaults() | {"block_size": 4}
    return Scene(Case("WindowMass", "property", attrs, sizes, seed=seed))


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), steps=st.integers(1, 4), mode=st.integers(0, 1))
def test_walk_is_a_convex_combination_of_its_rows(
    implementation: str, seed: int, steps: int, mode: int
) -> None:
    """c sums to 1 and is a mix of the H rows; a sums to 1 too."""
    scene = score_scene(seed, W=4)
    inputs, dims = scene.inputs(), scene.dims()
    base = nexus(implementation, inputs, dims, **PLAIN, head_reduce=mode)
    with np.errstate(invalid="ignore"):  # -inf - -inf at padding
        c = nexus(implementation, inputs, dims, **FULL, head_reduce=mode, walk_steps=steps) - base
    used = inputs["unit_ids"] >= 0
    for e in range(scene.size["E"]):
        c_row = c[e, 0][used[e, 0]]
        np.testing.assert_allclose(c_row.sum(), 1.0, atol=1e-5)
        np.testing.assert_allclose(base[e, 0][used[e, 0]].sum(), 1.0, atol=1e-5)
        rows = window_rows(implementation, inputs, dims, e, mode, steps)[:, used[e, 0]]
        rows = rows[rows.sum(axis=1) > 0.5]  # without queries that see no key
        alpha, residual = nnls(rows.T.astype(np.float64), c_row.astype(np.float64))
        assert residual < 1e-4
        np.testing.assert_allclose(alpha.sum(), 1.0, atol=1e-3)


def window_rows(
    implementation: str, inputs: dict[str, np.ndarray], dims: Dims, e: int, mode: int, steps: int
) -> np.ndarray:
    """S of the newest `steps` queries that exist, each from a window that holds one query only."""
    rows = []
    seen = int(inputs["tokens_seen"][e])
    for back in range(min(steps, seen)):
        # One query at position seen - 1 - back: hide newer keys by the causal rule.
        window = inputs["q_window"][:, dims.window - 1 - back :][:, :1]
        one = inputs | {"q_window": window, "tokens_seen": inputs["tokens_seen"] - back}
        single = Dims(dims.window_heads, dims.num_kv_heads, dims.head_dim, 1)
        rows.append(nexus(implementation, one, single, **PLAIN, head_reduce=mode)[e, 0])
    return np.array(rows)


def test_one_draw_is_sequential_sampling_without_replacement(implementation: str) -> None:
    kept = sample(implementation, WEIGHTS, 3, TRIALS)
    expected = np.array(list(set_probabilities(WEIGHTS, 3).values())) * TRIALS
    counts = set_counts(kept, 3)
    big = expected >= 5
    pooled = [np.append(x[big], x[~big].sum()) for x in (counts, expected)]
    assert chisquare(*pooled).pvalue > 1e-3


def test_many_draws_tend_to_top_k(implementation: str) -> None:
    """With n -> infinity the priority is w / (w + 1): the choice of TopKSelect."""
    weights = [4.0, 0.125, 1.0, 0.5, 2.0, 0.25]
    kept = sample(implementation, weights, 3, 20, draws=1024)
    top = select(implementation, "TopKSelect", [weights], 3)[0]
    assert (kept == top).all()


@given(data=st.data())
def test_common_draws_give_top_k_exactly(implementation: str, data: st.DataObject) -> None:
    """Where all units share their draws, u^(1/w) grows with w, so the sets are equal."""
    percents = data.draw(st.lists(st.integers(1, 400), min_size=8, max_size=8, unique=True))
    weights = [p / 100 for p in percents]
    budget = data.draw(st.integers(0, 9))
    column = data.draw(st.lists(st.floats(0.01, 0.99), min_size=3, max_size=3))
    u = np.tile(np.array(column, np.float32).reshape(1, 1, 1, 3, 1), (1, 1, 1, 1, 8))
    kept = select(implementation, "ReservoirSelect", [weights], budget, u=u)[0]
    assert (kept == select(implementation, "TopKSelect", [weights], budget)[0]).all()


@pytest.mark.parametrize("draws", [1, 5])
def test_constant_weight_gives_uniform_inclusion(implementation: str, draws: int) -> None:
    counts = set_counts(sample(implementation, [0.2] * 5, 2, TRIALS, draws), 2)
    assert chisquare(counts).pvalue > 1e-3


def test_survival_is_the_product_of_the_steps(implementation: str) -> None:
    """Lemma 1: eviction steps draw independently, so survivals multiply (and do not share luck)."""
    steps = [([0.3, 0.2, 0.5, 0.1], 2), ([0.1, 0.4, 0.4, 0.2], 2), ([0.2, 0.2, 0.2, 0.2], 3)]
    alive = np.ones((TRIALS, 4), bool)
    chance = np.ones(4)
    for number, (weights, budget) in enumerate(steps):
        alive &= sample(implementation, weights, budget, TRIALS, step=number)
        chance *= inclusion(weights, budget)
    error = np.sqrt(chance * (1 - chance) / TRIALS)
    assert (np.abs(alive.mean(axis=0) - chance) < 4 * error).all()


def test_horvitz_thompson_mass_is_unbiased(implementation: str) -> None:
    kept = sample(implementation, WEIGHTS, 3, TRIALS, seed=10**6)
    mass = np.array([0.1, 0.5, 0.05, 0.2, 0.1, 0.05])
    estimate = (kept * mass / inclusion(WEIGHTS, 3)).sum(axis=1)
    error = estimate.std() / np.sqrt(TRIALS)
    assert abs(estimate.mean() - mass.sum()) < 4 * error


def test_walk_lifts_a_bridge(implementation: str) -> None:
    """Theorem 1: a block that queries of a cluster share gains over its mean attention.

    Half of the queries look at the bridge (block 1) and at one of the cluster blocks 2-3; the
    others each look at a block of their own (4-7). The bridge covaries with its cluster.
    """
    trials, W, block, units, dim = 400, 6, 4, 9, 16
    rng = np.random.default_rng(0)
    keys = np.zeros((trials, 1, units * block, dim), np.float32)
    for unit in range(units):
        keys[:, :, unit * block : (unit + 1) * block, unit] = 4.0
    window = np.zeros((trials, W, dim), np.float32)
    for t, w in np.ndindex(trials, W):
        if rng.random() < 0.5:
            window[t, w, [1, 2 + rng.integers(2)]] = 6.0
        else:
            window[t, w, 4 + rng.integers(4)] = 6.0
    inputs = {
        "q_window": window,
        "keys": keys,
        "unit_ids": np.tile(np.arange(units, dtype=np.int32), (trials, 1, 1)),
        # The queries come after the keys, so that all of them see all blocks.
        "tokens_seen": np.full(trials, units * block + W, np.int32),
        "evict_slots": np.arange(trials, dtype=np.int32),
    }
    dims = Dims(1, 1, dim, W)
    a = nexus(implementation, inputs, dims, **PLAIN)[:, 0]
    c = nexus(implementation, inputs, dims, **FULL, walk_steps=W)[:, 0] - a
    gain = c - a
    error = gain.std(axis=0) / np.sqrt(trials)
    assert gain.mean(axis=0)[1] > 5 * error[1]
    lost = gain[:, 4:8].sum(axis=1)
    assert lost.mean() < -5 * lost.std() / np.sqrt(trials)
    # In the weight: more than a alone, scaled to the same sum, would give.
    w = nexus(implementation, inputs, dims, walk_steps=W)[:, 0]
    assert w[:, 1].mean() > 1.5 * a[:, 1].mean() * 1.01
