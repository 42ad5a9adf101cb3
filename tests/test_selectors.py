"""Traps of selection that users of comparable systems have met: each is a property here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import Case, Scene
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from op_calls import nexus, sample, select
from runners import IMPLEMENTATIONS

from kvsift.builder import ops

SELECTORS = ("TopKSelect", "ReservoirSelect", "HeadTopKSelect")
ODD = st.sampled_from([0.0, 1.0, 1.0, 0.5, 3e38, 1e-45, -1.0, np.inf, -np.inf, np.nan])
UNITS = 9

pytestmark = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
each = pytest.mark.parametrize("op", SELECTORS)


@each
@given(scores=st.lists(ODD, min_size=UNITS, max_size=UNITS), budget=st.integers(-1, UNITS + 2))
def test_forced_units_survive_any_score(
    implementation: str, op: str, scores: list[float], budget: int
) -> None:
    """Sinks, the newest units and pinned spans stay under equal, huge, inf and NaN scores."""
    kept, count, _ = select(
        implementation, op, [scores], budget, sink_units=1, recent_units=2, pins=((4, 5),)
    )
    assert kept[0, [0, 4, 7, 8]].all()
    assert count[0] == min(UNITS, max(budget, 4)) == kept.sum()


@each
@given(scores=st.lists(ODD, min_size=UNITS, max_size=UNITS), low=st.integers(0, UNITS))
def test_larger_budgets_keep_supersets(
    implementation: str, op: str, scores: list[float], low: int
) -> None:
    small = select(implementation, op, [scores], low)[0]
    large = select(implementation, op, [scores], low + 2)[0]
    assert (large >= small).all()


@each
def test_ties_keep_the_lowest_indices_every_time(implementation: str, op: str) -> None:
    u = np.full((1, 1, 1, 5, 300), 0.5)
    for _ in range(50):
        kept = select(implementation, op, np.full((1, 300), 0.25), 100, u=u)[0]
        assert kept[0, :100].all()
        assert kept.sum() == 100


@each
def test_nan_is_the_lowest(implementation: str, op: str) -> None:
    scores = [np.nan, 0.1, np.nan, 0.2, np.inf, 0.3]
    kept, _, coverage = select(implementation, op, [scores], 4)
    assert kept[0].tolist() == [False, True, False, True, True, True]
    assert np.isnan(coverage[0])
    assert (
        select(implementation, op, [scores], 5)[0][0].tolist() == [True, True, False] + [True] * 3
    )


@each
def test_padding_is_never_kept(implementation: str, op: str) -> None:
    ids = [[3, -1, 5, -1, 0]]
    kept, count, coverage = select(
        implementation, op, [[0.2, np.inf, 0.3, np.nan, 0.5]], 99, ids=ids, seen=6
    )
    assert kept[0].tolist() == [True, False, True, False, True]
    assert count[0] == 3
    assert coverage[0] == 1.0


@each
@pytest.mark.parametrize("tokens", [1, 2])
def test_first_tokens_are_kept_at_any_budget(implementation: str, op: str, tokens: int) -> None:
    kept, count, _ = select(
        implementation, op, [[np.nan]], 0, seen=tokens, block_size=32, sink_units=1, recent_units=1
    )
    assert kept.all()
    assert count[0] == 1


@each
def test_partial_tail_and_recent_full_units_are_forced(implementation: str, op: str) -> None:
    """Of 70 tokens in blocks of 32, block 2 is partial: one recent unit means block 1 as well."""
    for recent, forced in ((0, [2]), (1, [1, 2]), (5, [0, 1, 2])):
        kept = select(
            implementation, op, [[9.0, 1.0, 0.0]], 0, seen=70, block_size=32, recent_units=recent
        )[0]
        assert np.flatnonzero(kept[0]).tolist() == forced


@each
def test_coverage_is_the_kept_share(implementation: str, op: str) -> None:
    scores = [[0.1, 0.4, 0.2, 0.3]]
    kept, _, coverage = select(implementation, op, scores, 2)
    np.testing.assert_allclose(coverage[0], np.array(scores[0])[kept[0]].sum(), rtol=1e-6)
    assert np.isnan(select(implementation, op, scores, 2, score_is_mass=0)[2]).all()
    # An infinite sum has no shares, also where everything finite is kept.
    assert np.isnan(select(implementation, op, [[np.inf, 1.0]], 1)[2]).all()
    assert np.isnan(select(implementation, op, [[-np.inf, 1.0]], 1)[2]).all()
    assert np.isnan(select(implementation, op, [[0.0, 0.0]], 1)[2]).all()


def test_tiny_weights_are_still_sampled(implementation: str) -> None:
    """u^(1/w) underflows below w of about 0.1; in the log domain the choice is still a choice."""
    kept = sample(implementation, [1e-3] * 8, 4, 400)
    assert (np.abs(kept.mean(axis=0) - 0.5) < 0.15).all()
    heavy = sample(implementation, [1e-4] * 4 + [1e-3] * 4, 4, 400)
    assert heavy[:, 4:].mean() > heavy[:, :4].mean() + 0.3


def test_normalized_weights_do_not_depend_on_their_scale(implementation: str) -> None:
    weights = np.random.default_rng(0).random((1, 40)) + 0.01
    u = np.random.default_rng(1).random((1, 1, 1, 5, 40)) * 0.98 + 0.01
    sets = [
        select(implementation, "ReservoirSelect", weights * scale, 12, u=u, normalize=1)[0]
        for scale in (1e-6, 1.5 / weights.sum(), 1e6)
    ]
    plain = select(
        implementation, "ReservoirSelect", weights * (1.5 / weights.sum()), 12, u=u, normalize=0
    )
    for kept in sets:
        assert (kept == plain[0]).all()


def test_kept_set_changes_from_step_to_step(implementation: str) -> None:
    """The newest units always stay; the others get another draw in every eviction step."""
    attrs = {"sink_units": 1, "recent_units": 2}
    score = np.full((1, 20), 0.05)
    rng = np.random.default_rng(0)
    sets = set()
    for _ in range(10):
        u = rng.random((1, 1, 1, 5, 20)) * 0.98 + 0.01
        kept = select(implementation, "ReservoirSelect", score, 8, u=u, **attrs)[0]
        assert kept[0, [0, 18, 19]].all()
        sets.add(kept.tobytes())
    assert len(sets) > 5


@pytest.mark.parametrize("mode", range(3))
@pytest.mark.parametrize("block", [1, 4, 13, 32])
def test_a_slot_is_scored_alone_as_in_a_batch(implementation: str, block: int, mode: int) -> None:
    """Another slot that leaves, or garbage outside a slot's rows, changes no bit."""
    attrs = {"block_size": block, "head_reduce": mode}
    sizes = {"B": 5, "E": 5, "Hq": 6, "Hkv": 2, "W": 7, "N": 13}
    scene = Scene(Case("WindowMass", "batch", attrs, sizes, lens=(13 * block,) * 4, seed=5))
    inputs, dims = scene.inputs(), scene.dims()
    full = nexus(implementation, inputs, dims, **attrs)
    per_slot = ("q_window", "unit_ids", "tokens_seen", "evict_slots")
    for keep in ([0, 2, 4], [3, 0], [1], [4]):
        fewer = inputs | {name: inputs[name][keep] for name in per_slot}
        assert np.array_equal(nexus(implementation, fewer, dims, **attrs), full[keep])
    for garbage in (0.0, 1e30, np.inf):
        keys = np.where(np.isnan(inputs["keys"]), np.float32(garbage), inputs["keys"])
        again = nexus(implementation, inputs | {"keys": keys}, dims, **attrs)
        assert np.array_equal(again, full)


@each
def test_a_slot_is_selected_alone_as_in_a_batch(implementation: str, op: str) -> None:
    """The same sets and the same coverage, bit for bit, however many slots there are."""
    attrs = ops.TABLE[op].defaults() | {"block_size": 4}
    attrs |= {"normalize": 1} if op == "ReservoirSelect" else {}
    scene = Scene(Case(op, "batch", attrs, {"E": 5, "N": 37}, lens=(148,) * 3, seed=2))
    inputs, run = scene.inputs(), IMPLEMENTATIONS[implementation]
    full = run(op, attrs, scene.dims(), inputs)
    for keep in ([0, 2, 4], [3, 0], [1]):
        fewer = {
            k: v[keep] if k in ("tokens_seen", "pin_spans") else v[:, keep]
            for k, v in inputs.items()
        }
        for some, every in zip(run(op, attrs, scene.dims(), fewer), full, strict=True):
            assert np.array_equal(some, every[:, keep])


@settings(max_examples=20)
@given(data=st.data(), mode=st.integers(0, 2), seed=st.integers(0, 99))
def test_score_follows_units_wherever_they_lie(
    implementation: str, data: st.DataObject, mode: int, seed: int
) -> None:
    """Filling a hole with the last block permutes the scores and does nothing else."""
    attrs = ops.TABLE["WindowMass"].defaults() | {"block_size": 4, "head_reduce": mode}
    scene = Scene(Case("WindowMass", "moves", attrs, {"E": 1}, lens=(28,), seed=seed))
    inputs = scene.inputs()
    order = data.draw(st.permutations(range(scene.size["N"])))
    rows = (np.array(order)[:, None] * 4 + np.arange(4)).ravel()
    moved = inputs | {
        "keys": inputs["keys"][:, :, rows],
        "unit_ids": inputs["unit_ids"][:, :, order],
    }
    before = nexus(implementation, inputs, scene.dims(), head_reduce=mode)
    after = nexus(implementation, moved, scene.dims(), head_reduce=mode)
    np.testing.assert_allclose(after, before[:, :, order], rtol=1e-5, atol=1e-7)


def stale(inputs: dict[str, NDArray[Any]], rows: int) -> dict[str, NDArray[Any]]:
    """The inputs with NaN in the window rows of queries before the sequence's start."""
    window = inputs["q_window"].copy()
    window[:, : window.shape[1] - rows] = np.nan
    return inputs | {"q_window": window}


@pytest.mark.parametrize("mode", range(3))
@pytest.mark.parametrize("seen", [1, 3, 5])
def test_window_rows_before_the_start_are_ignored(
    implementation: str, mode: int, seen: int
) -> None:
    """A slot's window still holds the rows of the request before it."""
    attrs = ops.TABLE["WindowMass"].defaults() | {"block_size": 4, "head_reduce": mode}
    sizes = {"E": 1, "W": 6}
    scene = Scene(Case("WindowMass", "start", attrs, sizes, lens=(seen,), seen=(seen,)))
    inputs = scene.inputs()
    clean = nexus(implementation, inputs, scene.dims(), head_reduce=mode, walk_steps=6)
    dirty = nexus(implementation, stale(inputs, seen), scene.dims(), head_reduce=mode, walk_steps=6)
    assert np.array_equal(clean, dirty)
    used = inputs["unit_ids"] >= 0
    total = np.where(used, clean, 0).sum(axis=-1)
    assert (np.abs(total - 1.5) < 1e-4).all()
