"""What evictions keep, by policy: forced units, rows in their places, budgets, bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engines import Engines, prompt, request, run_and_inspect
from kept import POLICIES, engine_of, forced_ids, same

from kvsift.builder.errors import CapacityError


@pytest.mark.parametrize("name", POLICIES)
def test_an_eviction_keeps_what_it_must_and_no_more(engines: Engines, name: str) -> None:
    engine = engine_of(engines, name)
    policy = engine.manifest.policy
    (trace,) = run_and_inspect(engine, [request(300, 220)])
    result = trace.result
    assert result is not None
    assert result.budget_tokens is not None
    assert result.evictions == len(trace.kept)
    assert (len(trace.kept) > 1) == policy.in_decode
    size, budget = policy.block_size, result.budget_tokens // policy.block_size
    for ids, seen in zip(trace.kept, trace.seen, strict=True):
        forced = forced_ids(engine.manifest, seen)
        if policy.recent_fraction:
            forced |= set(range(seen - int(policy.recent_fraction * budget), seen))
        rows = [row[row >= 0].tolist() for row in ids.reshape(-1, ids.shape[-1])]
        assert sum(len(row) for row in rows) == budget * len(rows)
        for row in rows:
            assert len(row) == budget or not policy.shared_lens
            assert len(set(row)) == len(row)
            assert forced <= set(row)
            assert max(row) <= (seen - 1) // size
    if policy.window:  # the newest W tokens are the queries that vote
        newest = range(result.prompt_tokens + 219 - policy.window, result.prompt_tokens + 219)
        held = trace.positions_held.reshape(-1, trace.positions_held.shape[-1])
        assert all(set(newest) <= set(row.tolist()) for row in held)
    # The set changes in decode, and not only by the newest units.
    if policy.in_decode:
        old = result.prompt_tokens // size
        sets = [{i for i in row if i < old} for row in trace.kept_sets()]
        assert sets[0] != sets[-1]


@pytest.mark.parametrize("name", POLICIES)
def test_kept_rows_are_the_dense_rows_of_their_positions(engines: Engines, name: str) -> None:
    """Layer 0's keys depend on token and position only, so a dense engine tells what they are."""
    (trace,) = run_and_inspect(engine_of(engines, name), [request(300, 220)])
    read = prompt(300, seed=300) + list(trace.tokens)
    (dense,) = run_and_inspect(engines("full"), [request(read[:-1], 0)])
    assert trace.keys[0].shape[1] < 519 == dense.keys[0].shape[1]
    held = trace.positions_held[0]
    for mine, theirs in ((trace.keys[0], dense.keys[0]), (trace.values[0], dense.values[0])):
        for head in range(len(mine)):
            positions = held[head if len(held) > 1 else 0]
            positions = positions[positions >= 0]
            length = len(positions)
            assert len(set(positions.tolist())) == length
            np.testing.assert_allclose(mine[head, :length], theirs[head, positions], atol=1e-5)


@pytest.mark.parametrize("name", ["nexus", "nexus-per_head", "streaming"])
def test_density_one_equals_the_full_cache(engines: Engines, name: str) -> None:
    (trace,) = run_and_inspect(engine_of(engines, name), [request(300, 100, density=1.0)])
    (full,) = run_and_inspect(engines("full"), [request(300, 100)])
    assert trace.tokens == full.tokens
    np.testing.assert_allclose(trace.logits, full.logits, atol=1e-5)
    for mine, theirs in zip(trace.keys + trace.values, full.keys + full.values, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    assert trace.result is not None
    assert trace.result.evictions == 0
    assert trace.result.kept_tokens == 399


def test_eviction_matters_to_these_models(engines: Engines) -> None:
    """Else the equalities of this file would show nothing."""
    (full,) = run_and_inspect(engines("full"), [request(300, 20)])
    (evicted,) = run_and_inspect(engine_of(engines, "nexus"), [request(300, 20)])
    assert np.abs(full.logits[0] - evicted.logits[0]).max() < 1e-5  # the prompt saw everything
    assert np.abs(full.logits[1] - evicted.logits[1]).max() > 1e-2
    assert full.tokens != evicted.tokens


@pytest.mark.parametrize("name", POLICIES)
def test_evicted_and_stale_rows_are_never_read(engines: Engines, name: str) -> None:
    engine = engine_of(engines, name)
    requests = [request(300, 120, seed=2), request(37, 90), request(290, 5), request(120, 70)]
    clean = run_and_inspect(engine, requests)
    poisoned = run_and_inspect(engine, [*requests, requests[0]], poison=True)
    for a, b in zip([*clean, clean[0]], poisoned, strict=True):
        assert np.isfinite(b.logits).all()
        same(a, b)


def test_scopes_evict_where_they_say(engines: Engines) -> None:
    requests = [request(300, 90, density=0.3)]
    both, prefill, decode = (
        run_and_inspect(engine_of(engines, name), requests)[0]
        for name in ("nexus", "nexus-prefill", "nexus-decode")
    )
    assert both.seen[0] == prefill.seen[0] == 300
    assert both.kept_sets()[0] == prefill.kept_sets()[0]
    assert len(prefill.kept) == 1
    assert prefill.result is not None
    budget = prefill.result.budget_tokens
    assert budget is not None
    # 300 tokens end within a block, so the budget's last block is not full.
    assert prefill.result.kept_tokens == budget - 4 + 89
    assert decode.seen[0] == 312
    assert [b - a for a, b in zip(decode.seen, decode.seen[1:], strict=False)] == [8] * 9
    (full,) = run_and_inspect(engines("full"), requests)
    assert decode.tokens[:12] == full.tokens[:12]


def test_topk_at_the_prompt_end_then_the_reservoir(engines: Engines) -> None:
    """`prefill_selector=topk` keeps what top-k keeps, then depends on the seed."""
    seeds = [request(300, 60, seed=1, eviction_seed=s) for s in (1, 2)]
    mixed = [run_and_inspect(engine_of(engines, "nexus-prefill_topk"), [r])[0] for r in seeds]
    best = [run_and_inspect(engine_of(engines, "nexus-topk"), [r])[0] for r in seeds]
    drawn = [run_and_inspect(engine_of(engines, "nexus"), [r])[0] for r in seeds]
    assert mixed[0].kept_sets()[0] == mixed[1].kept_sets()[0] == best[0].kept_sets()[0]
    assert drawn[0].kept_sets()[0] != best[0].kept_sets()[0]
    assert best[0].kept_sets() == best[1].kept_sets()
    assert mixed[0].kept_sets() != mixed[1].kept_sets()


def test_the_walk_changes_what_is_kept(engines: Engines) -> None:
    def kept(**options: Any) -> list[list[int]]:
        engine = engines("nexus", selector="topk", options={"block_size": 8, **options})
        return run_and_inspect(engine, [request(300, 60)])[0].kept_sets()

    assert kept(walk_steps=0) == kept(walk_lambda=0.0)
    assert kept(walk_steps=0) != kept(walk_steps=2, walk_lambda=100.0)


def test_streaming_keeps_sinks_and_the_newest(engines: Engines) -> None:
    (trace,) = run_and_inspect(engines("streaming"), [request(300, 100, budget_tokens=50)])
    for row, seen in zip(trace.kept_sets(), trace.seen, strict=True):
        assert row[:50] == [0, 1, 2, 3, *range(seen - 46, seen)]


def test_random_keeps_sets_of_its_own_per_layer_and_head(engines: Engines) -> None:
    (trace,) = run_and_inspect(engines("random"), [request(300, 2, budget_tokens=50)])
    rows = trace.kept[0].reshape(4, 50).tolist()
    assert all(a != b for i, a in enumerate(rows) for b in rows[:i])


def test_the_minimum_budget(engines: Engines) -> None:
    engine = engines("nexus")
    defaults = run_and_inspect(engine, [request(300, 1, min_budget_tokens=None)])[0].result
    off = run_and_inspect(engine, [request(300, 1)])[0].result
    least = run_and_inspect(engine, [request(300, 1, min_budget_tokens=100)])[0].result
    assert defaults is not None
    assert off is not None
    assert least is not None
    assert defaults.budget_tokens == 256
    assert off.budget_tokens == 4 * 32  # a sink, the newest full block, the tail, and one more
    assert least.budget_tokens == 128


@pytest.mark.parametrize("name", ["nexus", "nexus-per_head", "nexus-tokens", "streaming", "random"])
def test_pinned_spans_survive(engines: Engines, name: str) -> None:
    engine = engine_of(engines, name)
    pins = [(70, 75), (140, 150), (149, 153)]
    requests = [request(300, 1, density=0.3), request(290, 150, density=0.3, pin=pins)]
    plain, trace = run_and_inspect(engine, requests)
    if engine.manifest.policy.in_decode:
        assert len(trace.kept) > 3
    pinned = {p for start, end in pins for p in range(start, end)}
    for ids, seen in zip(trace.kept, trace.seen, strict=True):
        forced = forced_ids(engine.manifest, seen, pins)
        assert all(forced <= set(row) for row in ids.reshape(-1, ids.shape[-1]).tolist())
    held = trace.positions_held.reshape(-1, trace.positions_held.shape[-1])
    assert all(pinned <= set(row.tolist()) for row in held)
    loose = plain.positions_held.reshape(-1, plain.positions_held.shape[-1])
    assert not all(pinned <= set(row.tolist()) for row in loose)


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("density", [0.2, 1e-6])
def test_the_shortest_prompts_keep_something(engines: Engines, length: int, density: float) -> None:
    (trace,) = run_and_inspect(engines("nexus"), [request(length, 40, density=density)])
    assert trace.result is not None
    assert trace.result.budget_tokens == 3 * 32  # a sink, the newest full block, and one more
    assert trace.result.kept_tokens == length + 39
    assert np.isfinite(trace.logits).all()
    # The first step after the prompt is a decode step of one token at the next position.
    assert trace.positions[0] == length


@pytest.mark.parametrize("name", ["nexus", "nexus-per_head", "streaming", "random-prefill"])
def test_bytes_are_exact(engines: Engines, name: str) -> None:
    engine = engine_of(engines, name)
    (trace,) = run_and_inspect(engine, [request(300, 77)])
    result, model = trace.result, engine.manifest.model
    assert result is not None
    held = trace.positions_held.shape[-1]
    assert result.kept_tokens == held
    assert result.kv_bytes == held * model.num_layers * model.num_kv_heads * 2 * model.head_dim * 4
    assert result.kv_bytes_dense * held == result.kv_bytes * 376
    # Two layers of keys and values at two KV heads of 16, whatever the four query heads are.
    assert sum(a.nbytes for a in trace.keys + trace.values) == result.kv_bytes
    shape = (engine.max_batch, 2, engine.cache.capacity, 16)
    assert all(a.shape == shape for a in engine.cache.keys + engine.cache.values)


def test_a_slot_holds_no_more_than_budget_and_interval(engines: Engines) -> None:
    small = engines("nexus", limits={"max_density": 0.2})
    assert small.cache.capacity == 9 * 32  # the least budget of 256 tokens, and one block
    (trace,) = run_and_inspect(small, [request(600, 300)])
    assert trace.result is not None
    assert trace.result.kept_tokens < 4 * 32 + 32
    with pytest.raises(CapacityError, match=r"800 tokens without eviction.*slot of 288 tokens"):
        small.generate([request(600, 200, density=1.0)])
