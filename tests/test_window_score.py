"""Properties of WindowScore: what a query cannot see, hold or share never matters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import Case, Scene
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from runners import IMPLEMENTATIONS

from kvsift.builder import ops
from kvsift.builder.bodies import Dims, body
from kvsift.builder.errors import UsageError

Array = NDArray[Any]
PER_SLOT = ("q_window", "unit_ids", "tokens_seen", "evict_slots")

pytestmark = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def make(**over: Any) -> tuple[Scene, dict[str, ops.Value], dict[str, Array]]:
    attrs = ops.TABLE["WindowScore"].defaults() | over.pop("attrs", {})
    scene = Scene(Case("WindowScore", "property", attrs, **over))
    return scene, attrs, scene.inputs()


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), shared=st.integers(0, 1), window=st.integers(1, 6))
def test_mean_attention_of_all_tokens_is_a_distribution(
    implementation: str, seed: int, shared: int, window: int
) -> None:
    """Means of softmax rows: what the tokens before the window get is their share of 1."""
    scene, attrs, x = make(attrs={"shared": shared}, sizes={"W": window}, seed=seed)
    score = IMPLEMENTATIONS[implementation]("WindowScore", attrs, scene.dims(), x)[0]
    held = np.isfinite(score)
    assert np.array_equal(held, x["unit_ids"] >= 0)
    rest = np.where(held, score, 0.0).sum(axis=-1)
    assert ((score[held] >= 0) & (score[held] <= 1)).all()
    assert (rest < 1.0 + 1e-5).all()
    newest = x["unit_ids"] >= x["tokens_seen"][:, None, None] - window
    assert (score[newest & held] == 0).all()


def test_shared_row_is_the_mean_of_the_rows(implementation: str) -> None:
    """With means throughout, and one set of ids, the shared row is the average of the heads'."""
    scene, attrs, x = make(attrs={"pool_size": 3}, seed=3)
    x["unit_ids"] = np.repeat(x["unit_ids"][:, :1], 2, axis=1)
    run = IMPLEMENTATIONS[implementation]
    rows = run("WindowScore", attrs, scene.dims(), x)[0]
    x["unit_ids"] = x["unit_ids"][:, :1]
    shared = run("WindowScore", attrs | {"shared": 1}, scene.dims(), x)[0]
    np.testing.assert_allclose(shared[:, 0], rows.mean(axis=1), rtol=1e-5, atol=1e-7)


def test_pool_spreads_a_peak_over_its_neighbours(implementation: str) -> None:
    """One key takes all attention: the five around it get a fifth each, the window nothing."""
    tokens, window, peak = 20, 4, 14
    dims = Dims(1, 1, 8, window)
    keys = np.zeros((1, 1, tokens, 8), np.float32)
    keys[0, 0, peak] = 100.0
    x = {
        "q_window": np.ones((1, window, 8), np.float32),
        "keys": keys,
        "unit_ids": np.arange(tokens, dtype=np.int32).reshape(1, 1, -1),
        "tokens_seen": np.array([tokens], np.int32),
        "evict_slots": np.array([0], np.int32),
    }
    attrs = ops.TABLE["WindowScore"].defaults() | {"pool_size": 5}
    score = IMPLEMENTATIONS[implementation]("WindowScore", attrs, dims, x)[0][0, 0]
    expected = np.zeros(tokens)
    expected[peak - 2 : peak + 3] = 0.2
    np.testing.assert_allclose(score, expected, atol=1e-6)


@pytest.mark.parametrize("pool", [1, 5])
@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("kind", range(3))
def test_a_slot_is_scored_alone_as_in_a_batch(
    implementation: str, kind: int, shared: int, pool: int
) -> None:
    """Another slot that leaves, or garbage outside a slot's rows, changes no bit."""
    attrs = {"window_reduce": kind, "group_reduce": kind, "shared": shared, "pool_size": pool}
    sizes = {"B": 5, "E": 5, "Hq": 6, "Hkv": 2, "W": 7, "N": 129, "C": 140}
    scene, attrs, x = make(attrs=attrs, sizes=sizes, lens=(129,) * 4, seed=5)
    run = IMPLEMENTATIONS[implementation]
    full = run("WindowScore", attrs, scene.dims(), x)[0]
    for keep in ([0, 2, 4], [3, 0], [1], [4]):
        fewer = x | {name: x[name][keep] for name in PER_SLOT}
        assert np.array_equal(run("WindowScore", attrs, scene.dims(), fewer)[0], full[keep])
    for garbage in (0.0, 1e30, np.inf):
        keys = np.where(np.isnan(x["keys"]), np.float32(garbage), x["keys"])
        assert np.array_equal(run("WindowScore", attrs, scene.dims(), x | {"keys": keys})[0], full)


@pytest.mark.parametrize("kind", range(3))
def test_a_window_that_is_not_full_gives_zeros(implementation: str, kind: int) -> None:
    """A window of 6 after 4 tokens: all tokens are in it, and two of its rows may hold anything."""
    attrs = {"window_reduce": kind, "pool_size": 5}
    scene, attrs, x = make(attrs=attrs, sizes={"E": 1}, lens=(4,), seen=(4,), seed=1)
    x["q_window"][:, :2] = np.nan
    score = IMPLEMENTATIONS[implementation]("WindowScore", attrs, scene.dims(), x)[0]
    assert (score[x["unit_ids"] >= 0] == 0).all()


def test_bad_settings_are_refused(implementation: str) -> None:
    attrs = ops.TABLE["WindowScore"].defaults()
    with pytest.raises(UsageError, match="pool_size is 4; it must be odd"):
        body("WindowScore", attrs | {"pool_size": 4}, Dims(4, 2, 8, 6))
    with pytest.raises(UsageError, match="needs the window of every query head"):
        body("WindowScore", attrs, Dims(1, 2, 8, 6))
