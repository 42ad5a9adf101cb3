"""Properties of ExpectedAttentionScore: it expects what sampled queries do on average."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import Case, Scene
from numpy.typing import NDArray
from reference_expected import rotation
from runners import IMPLEMENTATIONS

from kvsift.builder import ops
from kvsift.builder.bodies import Dims

Array = NDArray[Any]

OP = "ExpectedAttentionScore"
SIZE, TOKENS = 8, 12
DIMS = Dims(1, 1, SIZE, 1)
PLAIN = {"use_vnorm": 0, "sink_tokens": 0}

pytestmark = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def one_slot(mean: Array, cov: Array, inv_freq: Array, seed: int) -> dict[str, Array]:
    """A slot of TOKENS random keys and values with one query head."""
    rng = np.random.default_rng(seed)
    cache = rng.standard_normal((2, 1, 1, TOKENS, SIZE)).astype(np.float32)
    return {
        "mean": mean.reshape(1, 1, SIZE).astype(np.float32),
        "moment": (cov * TOKENS).reshape(1, 1, SIZE, SIZE).astype(np.float32),
        "inv_freq": inv_freq.astype(np.float32),
        "keys": cache[0],
        "values": cache[1],
        "unit_ids": np.arange(TOKENS, dtype=np.int32).reshape(1, 1, -1),
        "tokens_seen": np.array([TOKENS], np.int32),
        "evict_slots": np.array([0], np.int32),
    }


def score(implementation: str, x: dict[str, Array], **attrs: ops.Value) -> Array:
    return IMPLEMENTATIONS[implementation](OP, ops.TABLE[OP].defaults() | attrs, DIMS, x)[0][0, 0]


def test_it_is_the_expectation_over_gaussian_queries(implementation: str) -> None:
    """Without rotation: E exp(q k / sqrt(D)) of q ~ N(mean, cov), normalised over the keys."""
    rng = np.random.default_rng(0)
    mean, half = rng.standard_normal(SIZE), 0.3 * rng.standard_normal((SIZE, SIZE))
    x = one_slot(mean, half @ half.T, np.zeros(SIZE // 2), seed=1)
    queries = mean + rng.standard_normal((200_000, SIZE)) @ half.T
    weights = np.exp(queries @ x["keys"][0, 0].T / np.sqrt(SIZE))
    expected = weights.mean(axis=0) / weights.mean(axis=0).sum()
    np.testing.assert_allclose(score(implementation, x, **PLAIN), expected, rtol=0.02)
    without = score(implementation, x, **PLAIN, use_covariance=0)
    assert np.abs(without / expected - 1).max() > 0.1


def test_one_certain_query_of_the_next_position(implementation: str) -> None:
    """No spread and one position to come: plain attention of the mean query, rotated there."""
    rng = np.random.default_rng(2)
    mean, inv_freq = rng.standard_normal(SIZE), np.array([1.0, 0.3, 0.1, 0.01])
    x = one_slot(mean, np.zeros((SIZE, SIZE)), inv_freq, seed=3)
    query = 1.5 * rotation(TOKENS, inv_freq) @ mean
    weights = np.exp(x["keys"][0, 0] @ query / np.sqrt(SIZE))
    got = score(implementation, x, **PLAIN, n_future=1, rope_factor=1.5)
    np.testing.assert_allclose(got, weights / weights.sum(), rtol=1e-5)


def test_sinks_take_no_share(implementation: str) -> None:
    """The others' shares add up to 1 without the sinks, whatever the sinks hold."""
    x = one_slot(np.ones(SIZE), np.eye(SIZE), np.ones(SIZE // 2), seed=4)
    got = score(implementation, x, use_vnorm=0, sink_tokens=3)
    assert (got[:3] == 0).all()
    np.testing.assert_allclose(got[3:].sum(), 1.0, rtol=1e-5)
    x["keys"][0, 0, :3] = x["values"][0, 0, :3] = np.nan
    assert np.array_equal(score(implementation, x, use_vnorm=0, sink_tokens=3), got)
    # Sinks alone: nothing is rated.
    assert (score(implementation, x, sink_tokens=TOKENS) == 0).all()


def test_value_length_scales_a_score(implementation: str) -> None:
    x = one_slot(np.ones(SIZE), np.eye(SIZE), np.ones(SIZE // 2), seed=5)
    once = score(implementation, x, epsilon=0.01)
    x["values"] *= np.linspace(1, 3, TOKENS, dtype=np.float32)[:, None]
    np.testing.assert_allclose(
        score(implementation, x, epsilon=0.01), once * np.linspace(1, 3, TOKENS), rtol=1e-5
    )


def test_a_slot_is_scored_alone_as_in_a_batch(implementation: str) -> None:
    """Another slot that leaves, or garbage outside a slot's rows, changes no bit."""
    attrs = ops.TABLE[OP].defaults()
    sizes = {"B": 5, "E": 5, "Hq": 6, "Hkv": 2, "N": 129, "C": 140}
    scene = Scene(Case(OP, "batch", attrs, sizes, lens=(129,) * 4, seed=5))
    x, run = scene.inputs(), IMPLEMENTATIONS[implementation]
    full = run(OP, attrs, scene.dims(), x)[0]
    for keep in ([0, 2, 4], [3, 0], [1], [4]):
        fewer = x | {n: x[n][keep] for n in ("unit_ids", "tokens_seen", "evict_slots")}
        assert np.array_equal(run(OP, attrs, scene.dims(), fewer)[0], full[keep])
    for garbage in (0.0, 1e30, np.inf):
        spoilt = {
            n: np.where(np.isnan(x[n]), np.float32(garbage), x[n])
            for n in ("keys", "values", "mean", "moment")
        }
        assert np.array_equal(run(OP, attrs, scene.dims(), x | spoilt)[0], full)
