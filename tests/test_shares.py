"""Budgets of layers and heads: a request's own shares of what it may keep."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from commands import is_error, kvsift
from engines import Engines, request, run_and_inspect
from hypothesis import given
from hypothesis import strategies as st

from kvsift.builder.errors import CapacityError, UsageError
from kvsift.builder.policies import resolve
from kvsift.runtime.engine import Engine
from kvsift.runtime.shares import head_budgets


def engine_of(engines: Engines, eviction: str, lengths: str, **options: Any) -> Engine:
    options["row_lengths"] = lengths
    return engines(eviction, scope="both", options=options)


@given(
    st.lists(st.floats(0.01, 100), min_size=1, max_size=8),
    st.lists(st.integers(1, 500), min_size=1, max_size=6),
    st.integers(0, 40),
)
def test_heads_share_exactly_what_their_layer_has(
    weights: list[float], layers: list[int], forced: int
) -> None:
    made = head_budgets(weights, np.array(layers, np.int32), forced)
    assert made.sum(axis=1).tolist() == [n * len(weights) for n in layers]
    for row, layer in zip(made.tolist(), layers, strict=True):
        assert min(row) >= min(layer, forced + 1)
        order = np.argsort(weights, kind="stable")
        assert all(row[a] <= row[b] + 1 for a, b in itertools.pairwise(order))


@pytest.mark.parametrize("eviction", ["nexus", "snapkv", "streaming"])
def test_layers_get_what_a_request_gives_them(engines: Engines, eviction: str) -> None:
    options = {"nexus": {"block_size": 8}, "snapkv": {"window": 8}, "streaming": {}}[eviction]
    engine = engine_of(engines, eviction, "layer", **options)
    ask = request(300, 90, budget_tokens=96, layer_budgets=[3, 1])
    (trace,) = run_and_inspect(engine, [ask])
    size = engine.manifest.policy.block_size
    for ids in trace.kept:
        count = (ids >= 0).sum(axis=2) * size
        assert (count == [[144], [48]]).all()
    assert trace.result is not None
    assert trace.result.budget_tokens == 96


def test_equal_shares_are_what_no_shares_are(engines: Engines) -> None:
    plain = engines("snapkv", scope="both")
    for lengths in ("layer", "head"):
        engine = engine_of(engines, "snapkv", lengths)
        (a,) = run_and_inspect(plain, [request(300, 60, budget_tokens=80)])
        (b,) = run_and_inspect(engine, [request(300, 60, budget_tokens=80)])
        (c,) = run_and_inspect(
            engine, [request(300, 60, budget_tokens=80, layer_budgets="uniform")]
        )
        assert a.tokens == b.tokens == c.tokens
        assert a.kept_sets() == b.kept_sets() == c.kept_sets()


def test_heads_get_what_a_request_gives_them(engines: Engines) -> None:
    engine = engine_of(engines, "snapkv", "head", window=8)
    asked = [
        request(300, 90, budget_tokens=80, layer_budgets=[1, 2], head_budgets=[1, 3]),
        request(200, 60, budget_tokens=80, head_budgets=[2, 1]),
        request(250, 60, budget_tokens=80),
    ]
    together = run_and_inspect(engine, asked)
    first = together[0]
    assert len(first.kept) > 2
    for ids in first.kept:  # 80 in the mean, so 53 and 107 by layer, the second of three parts
        assert (ids >= 0).sum(axis=2).tolist() == [[26, 80], [54, 160]]
    for trace, ask in zip(together, asked, strict=True):
        (alone,) = run_and_inspect(engine, [ask])
        assert alone.tokens == trace.tokens
        assert alone.kept_sets() == trace.kept_sets()


def test_evicted_rows_of_unequal_heads_are_never_read(engines: Engines) -> None:
    engine = engine_of(engines, "snapkv", "head", window=8)
    ask = request(300, 90, budget_tokens=80, layer_budgets=[1, 2], head_budgets=[1, 3])
    (clean,) = run_and_inspect(engine, [ask])
    (poisoned,) = run_and_inspect(engine, [ask], poison=True)
    assert clean.tokens == poisoned.tokens
    assert clean.kept_sets() == poisoned.kept_sets()


def test_heads_may_compete_for_shares_of_their_own(engines: Engines) -> None:
    engine = engines("adakv", scope="both", options={"window": 8})
    even, uneven = (
        run_and_inspect(engine, [request(300, 60, budget_tokens=80, head_budgets=weights)])[0]
        for weights in (None, [1, 9])
    )
    counts = [(t.kept[0] >= 0).sum(axis=2) for t in (even, uneven)]
    assert counts[0].sum() == counts[1].sum()
    assert (counts[1][:, 1] > counts[0][:, 1]).all()
    # A head that has won more than its budget is no reason to evict in every step.
    assert len(even.kept) == len(uneven.kept) == 1 + 60 // engine.manifest.policy.decode_interval


@pytest.mark.parametrize(
    ("lengths", "shares", "words"),
    [
        ("auto", {"layer_budgets": [1, 2]}, "rebuild with --set row_lengths=layer"),
        ("auto", {"layer_budgets": "pyramid"}, "rebuild with --set row_lengths=layer"),
        ("layer", {"head_budgets": [1, 2]}, "rebuild with --set row_lengths=head"),
        ("layer", {"layer_budgets": [1, 2, 3]}, "has 3 weights and the model 2 layers"),
        ("head", {"head_budgets": [1, 2, 3]}, "has 3 weights and the model 2 KV heads"),
    ],
)
def test_shares_that_an_engine_cannot_hold(
    engines: Engines, lengths: str, shares: Any, words: str
) -> None:
    engine = engine_of(engines, "snapkv", lengths)
    with pytest.raises(UsageError, match=words):
        engine.generate([request(300, 10, budget_tokens=80, **shares)])


@pytest.mark.parametrize("shares", [{"layer_budgets": [1, 0]}, {"head_budgets": []},
                                    {"layer_budgets": "steep"}])  # fmt: skip
def test_shares_that_are_none(shares: Any) -> None:
    with pytest.raises(UsageError, match=r"positive weights|give one weight each"):
        request(300, **shares)


def test_shares_do_not_lift_what_a_slot_holds(engines: Engines) -> None:
    engine = engines(
        "snapkv", scope="both", options={"row_lengths": "layer"}, limits={"max_density": 0.2}
    )
    largest = engine.budgets.largest(100)
    with pytest.raises(CapacityError, match=f"keeps at most {largest} "):
        engine.generate([request(500, 100, budget_tokens=largest + 1, layer_budgets=[1, 2])])


def test_shares_come_from_the_command_line(engines: Engines) -> None:
    package = engines.package("snapkv", scope="both", options={"row_lengths": "head", "window": 8})
    args = ["generate", package, "--prompt", "a b c d e f g h " * 30, "--max-tokens", 2]
    args += ["--budget-tokens", 80, "--layer-budgets"]
    assert kvsift(*args, "1,2", "--head-budgets", "1,3").exit_code == 0
    assert kvsift(*args, "pyramid").exit_code == 0
    is_error(kvsift(*args, "1,x"), 2, "--layer-budgets takes weights such as 3,2,1", "'1,x'")
    is_error(kvsift(*args, "1,2,3"), 2, "has 3 weights and the model 2 layers")
    is_error(kvsift(*args, "1,2", "--head-budgets", "uniform"), 2, "head_budgets must be a list")


def test_heads_of_one_set_have_no_budgets_of_their_own() -> None:
    with pytest.raises(UsageError, match="row_lengths=head gives heads budgets of their own"):
        resolve("nexus", options={"row_lengths": "head"})
