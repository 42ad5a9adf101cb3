"""Properties of the states that every step updates: they do not depend on how steps are cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from cases import Case
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from runners import IMPLEMENTATIONS
from step_scene import StepScene

from kvsift.builder import ops
from kvsift.builder.bodies import Dims

Array = NDArray[Any]

HEADS, KV_HEADS, SIZE, ROWS = 4, 2, 8, 48
DIMS = Dims(HEADS, KV_HEADS, SIZE, 1)
CUTS = st.lists(st.integers(1, 12), min_size=1, max_size=5)

pytestmark = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def tokens(count: int, seed: int) -> tuple[Array, Array]:
    """Queries [count, Hq*D] and keys [Hkv, count, D]."""
    rng = np.random.default_rng(seed)
    queries = 2.0 * rng.standard_normal((count, HEADS * SIZE)) + 0.5
    keys = rng.standard_normal((KV_HEADS, count, SIZE))
    return queries.astype(np.float32), keys.astype(np.float32)


def accumulate(implementation: str, queries: Array, keys: Array, cuts: Sequence[int]) -> Array:
    """The accumulator [Hkv, ROWS] after steps of the given sizes; unwritten rows hold NaN."""
    state = np.full((1, KV_HEADS, ROWS), np.nan, np.float32)
    cache = np.full((1, KV_HEADS, ROWS, SIZE), np.nan, np.float32)
    start = 0
    for count in cuts:
        cache[0, :, start : start + count] = keys[:, start : start + count]
        x = {
            "accum": state,
            "queries": queries[None, start : start + count],
            "keys": cache,
            "past_lens": np.array([[start]], np.int32),
            "n_new": np.array([count], np.int32),
        }
        state = IMPLEMENTATIONS[implementation]("AccumUpdate", {}, DIMS, x)[0]
        start += count
    return state[0]


def statistics(
    implementation: str, queries: Array, cuts: Sequence[int], sinks: int
) -> tuple[Array, Array]:
    """Mean [Hq,D] and moment [Hq,D,D] after steps of the given sizes, from a stale state."""
    mean = np.full((1, HEADS, SIZE), np.nan, np.float32)
    moment = np.full((1, HEADS, SIZE, SIZE), np.nan, np.float32)
    start = 0
    for count in cuts:
        x = {
            "mean": mean,
            "moment": moment,
            "queries": queries[None, start : start + count],
            "first_position": np.array([start], np.int32),
            "n_new": np.array([count], np.int32),
        }
        attrs = {"sink_tokens": sinks}
        mean, moment = IMPLEMENTATIONS[implementation]("QueryStatsUpdate", attrs, DIMS, x)
        start += count
    return mean[0], moment[0]


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), cuts=CUTS)
def test_attention_mass_is_the_number_of_queries(
    implementation: str, seed: int, cuts: list[int]
) -> None:
    """Every query and head gives a mass of 1, however the tokens come: nothing gets lost."""
    count = min(sum(cuts), 40)
    cuts = [c for c in np.diff([0, *np.minimum(np.cumsum(cuts), count)]) if c]
    queries, keys = tokens(count, seed)
    state = accumulate(implementation, queries, keys, cuts)
    group = HEADS // KV_HEADS
    np.testing.assert_allclose(state.sum(axis=1), count * group, rtol=1e-5)
    assert (state[:, :count] > 0).all()
    assert (state[:, count:] == 0).all()


@pytest.mark.parametrize("cuts", [(7, 1, 32), (1,) * 40, (39, 1)])
def test_accumulator_does_not_depend_on_the_cuts(
    implementation: str, cuts: tuple[int, ...]
) -> None:
    queries, keys = tokens(40, 0)
    once = accumulate(implementation, queries, keys, (40,))
    np.testing.assert_allclose(
        accumulate(implementation, queries, keys, cuts), once, rtol=1e-5, atol=1e-6
    )


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), cuts=CUTS, sinks=st.integers(0, 6))
def test_statistics_are_those_of_all_tokens(
    implementation: str, seed: int, cuts: list[int], sinks: int
) -> None:
    """Mean and covariance as numpy computes them from all tokens but the sinks."""
    queries, _ = tokens(sum(cuts), seed)
    mean, moment = statistics(implementation, queries, cuts, sinks)
    counted = queries[sinks:].astype(np.float64).reshape(-1, HEADS, SIZE)
    for h in range(HEADS):
        if not len(counted):
            assert (mean[h] == 0).all()
            assert (moment[h] == 0).all()
            continue
        np.testing.assert_allclose(mean[h], counted[:, h].mean(axis=0), rtol=1e-5, atol=1e-5)
        cov = np.cov(counted[:, h].T, bias=True)
        np.testing.assert_allclose(moment[h] / len(counted), cov, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("cuts", [(7, 1, 32), (1,) * 40, (3, 37)])
def test_statistics_do_not_depend_on_the_cuts(implementation: str, cuts: tuple[int, ...]) -> None:
    queries, _ = tokens(40, 1)
    once = statistics(implementation, queries, (40,), 4)
    for some, whole in zip(statistics(implementation, queries, cuts, 4), once, strict=True):
        np.testing.assert_allclose(some, whole, rtol=1e-5, atol=1e-5 * np.abs(whole).max())


def run(implementation: str, scene: StepScene, x: dict[str, Array]) -> list[Array]:
    return list(IMPLEMENTATIONS[implementation](scene.case.op, scene.case.attrs, scene.dims(), x))


def states_of(op: str) -> list[str]:
    """The inputs that come out again."""
    return [t.name.removesuffix("_out") for t in ops.TABLE[op].outputs]


@pytest.mark.parametrize("steps", [1, 9])
@pytest.mark.parametrize("op", ["AccumUpdate", "QueryStatsUpdate"])
def test_nothing_new_changes_no_bit(implementation: str, op: str, steps: int) -> None:
    """An idle slot keeps its state, wherever it stands, though others of the batch move on."""
    attrs = ops.TABLE[op].defaults()
    for lens, seed in itertools.product(((0, 20, 9, 3), (2, 5, 0, 12)), range(3)):
        new = (0, steps, 0, steps)
        scene = StepScene(Case(op, "idle", attrs, {"S": steps}, lens=lens, new=new, seed=seed))
        x = scene.inputs()
        if op == "AccumUpdate":
            x["accum"] = np.nan_to_num(x["accum"])
        for name, after in zip(states_of(op), run(implementation, scene, x), strict=True):
            for slot in (0, 2):
                assert after[slot].tobytes() == x[name][slot].tobytes()


@pytest.mark.parametrize("op", ["AccumUpdate", "QueryStatsUpdate"])
def test_padding_and_garbage_never_arrive(implementation: str, op: str) -> None:
    """Tokens beyond n_new and rows beyond the length are as good as absent, whatever they hold."""
    attrs = ops.TABLE[op].defaults()
    scene = StepScene(Case(op, "padding", attrs, lens=(6, 0, 19), new=(4, 2, 9, 1), seed=7))
    x = scene.inputs()
    clean = run(implementation, scene, x)
    assert all(np.isfinite(state).all() for state in clean)
    for garbage in (0.0, 1e30, np.inf):
        spoilt = {
            name: np.where(np.isnan(a), np.float32(garbage), a) if a.dtype.kind == "f" else a
            for name, a in x.items()
        }
        for ours, theirs in zip(run(implementation, scene, spoilt), clean, strict=True):
            assert np.array_equal(ours, theirs)
    # As many tokens in the step as are real: the same but for rounding.
    for slot, count in enumerate(scene.new):
        alone = {name: a[slot : slot + 1] for name, a in x.items()}
        alone["queries"] = alone["queries"][:, :count]
        for ours, theirs in zip(run(implementation, scene, alone), clean, strict=True):
            np.testing.assert_allclose(ours[0], theirs[slot], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("steps", [1, 9])
@pytest.mark.parametrize("op", ["AccumUpdate", "QueryStatsUpdate"])
def test_a_slot_is_updated_alone_as_in_a_batch(implementation: str, op: str, steps: int) -> None:
    attrs = ops.TABLE[op].defaults()
    sizes = {"S": steps, "C": 130, "B": 5}
    scene = StepScene(Case(op, "batch", attrs, sizes, lens=(120, 5, 64), seed=3))
    x = scene.inputs()
    full = run(implementation, scene, x)
    for keep in ([0, 2, 4], [1, 3], [2]):
        some = run(implementation, scene, {name: a[keep] for name, a in x.items()})
        for ours, theirs in zip(some, full, strict=True):
            assert np.array_equal(ours, theirs[keep])
