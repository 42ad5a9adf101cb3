"""Heads that compete for a layer's budget: what HeadTopKSelect promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import REFERENCE
from runners import IMPLEMENTATIONS

from kvsift.builder import ops
from kvsift.builder.bodies import Dims

Array = NDArray[Any]

LAYERS, SLOTS, ROWS, UNITS = 2, 2, 3, 9
DIMS = Dims(3, ROWS, 8, 6)
ODD = st.sampled_from([0.0, 1.0, 1.0, 0.5, 0.25, 1e38, -1.0, np.inf, -np.inf, np.nan])

every = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def ask(
    score: Any,
    budget: Any,
    *,
    valid: Any = None,
    ids: Any = None,
    seen: int = 0,
    pins: Any = ((0, 0),),
) -> dict[str, Array]:
    """Inputs for score [L,E,R,N]; the first `valid` [L,E,R] units of a row count, ids 0, 1, ..."""
    score = np.asarray(score, np.float32)
    slots, units = score.shape[1], score.shape[3]
    numbers = np.broadcast_to(np.arange(units) if ids is None else np.asarray(ids), score.shape)
    counts = np.broadcast_to(units if valid is None else np.asarray(valid), score.shape[:3])
    return {
        "score": score,
        "budget": np.broadcast_to(budget, score.shape[:3]).astype(np.int32),
        "unit_ids": np.where(np.arange(units) < counts[..., None], numbers, -1).astype(np.int32),
        "tokens_seen": np.full(slots, seen or units, np.int32),
        "pin_spans": np.broadcast_to(np.array(pins, np.int32), (slots, len(pins), 2)).copy(),
    }


def choose(
    implementation: str, x: dict[str, Array], op: str = "HeadTopKSelect", **attrs: ops.Value
) -> tuple[Array, Array]:
    """(kept mask [L,E,R,N], keep_len [L,E,R]); nothing is forced unless `attrs` say so."""
    given_ = {"block_size": 1, "sink_units": 0, "recent_units": 0} | attrs
    merged = ops.TABLE[op].defaults() | given_
    keep, keep_len, _ = IMPLEMENTATIONS[implementation](op, merged, DIMS, x)
    kept = np.zeros((*keep.shape[:3], keep.shape[3] + 1), bool)
    np.put_along_axis(kept, keep.astype(np.int64), True, axis=3)  # -1 marks the extra column
    return kept[..., :-1], keep_len


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Scores with ties and odd values, budgets and lengths that differ, and every option."""
    shape = (LAYERS, SLOTS, ROWS, UNITS)
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    odd = [*draw(st.lists(ODD, min_size=1, max_size=5)), 0.125, 0.75]
    score = np.where(rng.random(shape) < 0.5, rng.random(shape), rng.choice(odd, shape))
    score *= np.array([1.0, 0.5, 3.0]).reshape(1, 1, 3, 1)  # heads of different strength
    return {
        "score": score,
        "budget": rng.integers(0, UNITS + 3, shape[:3]),
        "valid": rng.integers(0, UNITS + 1, shape[:3]),
        "pins": [(a, a + draw(st.integers(0, 3))) for a in (draw(st.integers(0, UNITS)),)],
        "attrs": {
            "safeguard": draw(st.sampled_from([0.0, 0.2, 0.5, 1.0])),
            "max_head_ratio": draw(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0])),
            "sink_units": draw(st.integers(0, 2)),
            "recent_units": draw(st.integers(0, 2)),
        },
    }


def forced_mask(x: dict[str, Array], attrs: dict[str, Any]) -> Array:
    ids = x["unit_ids"]
    start, end = x["pin_spans"][0, 0]
    forced = (ids < attrs["sink_units"]) | (ids >= UNITS - attrs["recent_units"])
    return (ids >= 0) & (forced | ((ids >= start) & (ids < end)))


@every
@given(request=requests())
def test_promises(implementation: str, request: dict[str, Any]) -> None:
    """Budgets add up, every row is safe and bounded, forced units stay, and no padding is kept."""
    attrs = request["attrs"]
    x = ask(request["score"], request["budget"], valid=request["valid"], pins=request["pins"])
    kept, count = choose(implementation, x, **attrs)
    forced, valid = forced_mask(x, attrs), x["unit_ids"] >= 0
    assert (kept >= forced).all()
    assert not (kept & ~valid).any()
    assert np.array_equal(kept.sum(axis=3), count)

    need, have, budget = forced.sum(axis=3), valid.sum(axis=3), x["budget"]
    cap = have
    if attrs["max_head_ratio"]:
        cap = np.minimum(have, np.maximum(need, np.floor(attrs["max_head_ratio"] * budget)))
    assert (count <= cap).all()
    safe = np.minimum(cap, np.maximum(need, np.floor(attrs["safeguard"] * budget + 1e-3)))
    assert (count >= safe).all()
    total = np.clip(budget.sum(axis=2), safe.sum(axis=2), cap.sum(axis=2))
    assert np.array_equal(count.sum(axis=2), total)

    merged = ops.TABLE["HeadTopKSelect"].defaults() | {"block_size": 1} | attrs
    with np.errstate(invalid="ignore"):
        want = REFERENCE["HeadTopKSelect"](merged, x)
    assert np.array_equal(count, want[1])
    assert all(
        np.flatnonzero(kept[row]).tolist() == want[0][row][: count[row]].tolist()
        for row in np.ndindex(count.shape)
    )


@every
@given(request=requests())
def test_full_safeguard_is_top_k_of_each_row(implementation: str, request: dict[str, Any]) -> None:
    """With nothing to compete for, no head gains or loses a place."""
    x = ask(request["score"], np.minimum(request["budget"], request["valid"]))
    x["unit_ids"] = ask(request["score"], 0, valid=request["valid"])["unit_ids"]
    ours = choose(implementation, x, safeguard=1.0, max_head_ratio=1.0)
    theirs = choose(implementation, x, "TopKSelect")
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


@every
@given(request=requests())
def test_a_layer_is_chosen_alone_as_in_a_batch(
    implementation: str, request: dict[str, Any]
) -> None:
    """Other layers, other slots and padded units change nothing."""
    x = ask(request["score"], request["budget"], valid=request["valid"])
    kept, count = choose(implementation, x, **request["attrs"])
    for layer, e in np.ndindex(LAYERS, SLOTS):
        one = {k: x[k][layer : layer + 1, e : e + 1] for k in ("score", "budget", "unit_ids")}
        wide = ((0, 0), (0, 0), (0, 0), (0, 4))
        one["score"] = np.pad(one["score"], wide, constant_values=np.inf)
        one["unit_ids"] = np.pad(one["unit_ids"], wide, constant_values=-1)
        one |= {k: x[k][e : e + 1] for k in ("tokens_seen", "pin_spans")}
        alone, length = choose(implementation, one, **request["attrs"])
        assert np.array_equal(alone[0, 0][:, :UNITS], kept[layer, e])
        assert np.array_equal(length[0, 0], count[layer, e])


@every
def test_the_best_pairs_of_the_layer_win(implementation: str) -> None:
    """A head whose keys matter takes places of one whose keys do not, down to its safe share."""
    score = np.zeros((1, 1, 3, 10))
    score[0, 0, 0] = np.linspace(0.9, 1.0, 10)
    score[0, 0, 1] = np.linspace(0.3, 0.8, 10)
    score[0, 0, 2] = np.linspace(0.0, 0.1, 10)
    lengths = {
        ratio: choose(implementation, ask(score, 5), max_head_ratio=ratio)[1][0, 0].tolist()
        for ratio in (0.0, 2.0, 1.4, 1.0)
    }
    assert lengths == {0.0: [10, 4, 1], 2.0: [10, 4, 1], 1.4: [7, 7, 1], 1.0: [5, 5, 5]}
    kept = choose(implementation, ask(score, 5), max_head_ratio=1.4)[0][0, 0]
    assert np.array_equal(kept, np.arange(10) >= np.array([[3], [3], [9]]))


@every
def test_ties_go_to_the_lower_row_then_the_lower_unit(implementation: str) -> None:
    x = ask(np.full((1, 1, 3, 8), 0.5), 4)
    for _ in range(20):
        kept, count = choose(implementation, x, safeguard=0.25, max_head_ratio=1.5)
        assert count[0, 0].tolist() == [6, 5, 1]
        assert all(kept[0, 0, r, : count[0, 0, r]].all() for r in range(3))


@every
def test_nan_and_padding_never_win_a_place(implementation: str) -> None:
    score = np.full((1, 1, 2, 6), 0.5)
    score[0, 0, 0] = np.nan
    score[0, 0, 1, 3:] = np.inf
    x = ask(score, 3, valid=[[[6, 3]]])
    kept, count = choose(implementation, x, safeguard=0.0, max_head_ratio=0.0)
    assert count[0, 0].tolist() == [3, 3]  # row 1 has no more; NaN is still better than nothing
    assert kept[0, 0].tolist() == [[True] * 3 + [False] * 3] * 2


@every
def test_forced_units_count_against_the_budget(implementation: str) -> None:
    """A row of forced units alone may exceed its cap; the others share what is left."""
    score = np.tile(np.linspace(0, 1, 8), (1, 1, 2, 1))
    x = ask(score, 2, pins=((0, 0),))
    x["unit_ids"][0, 0, 1] = np.arange(8) + 8  # the ids of row 1 are no sinks
    kept, count = choose(
        implementation,
        x | {"tokens_seen": np.array([16], np.int32)},
        sink_units=3,
        max_head_ratio=1.0,
    )
    assert count[0, 0].tolist() == [3, 1]
    assert kept[0, 0, 0].tolist() == [True] * 3 + [False] * 5
    assert kept[0, 0, 1].tolist() == [False] * 7 + [True]


@every
@pytest.mark.parametrize("units", [1, 2, 300])
def test_no_budget_keeps_the_forced_units_only(implementation: str, units: int) -> None:
    x = ask(np.ones((1, 2, 3, units)), 0)
    kept, count = choose(implementation, x, sink_units=1, recent_units=1)
    assert (count == min(units, 2)).all()
    assert kept[..., [0, -1]].all()


@every
@pytest.mark.parametrize("safeguard", [0.1, 0.2, 0.3, 0.7])
def test_safe_shares_are_rounded_like_the_exact_product(
    implementation: str, safeguard: float
) -> None:
    """floor(0.1 * 30) is 3, in whatever precision the share is stored."""
    strong = np.zeros((1, 1, 2, 64))
    strong[0, 0, 0] = 1.0
    for budget in (10, 20, 30):
        for share in (safeguard, float(np.float32(safeguard))):
            x = ask(strong, budget)
            count = choose(implementation, x, safeguard=share, max_head_ratio=0.0)[1]
            assert count[0, 0, 1] == round(safeguard * budget)
