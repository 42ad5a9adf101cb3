"""The guardrail raises a budget until evictions keep enough of the attention mass."""

from __future__ import annotations

import math

import pytest
from commands import kvsift
from engines import Engines, request, run_and_inspect
from kept import POLICIES, engine_of

from kvsift.builder.errors import UsageError
from kvsift.runtime.scheduler import Scheduler

MASSES = ["nexus", "nexus-per_head", "nexus-layers", "snapkv-both", "tova", "h2o", "morphkv"]


@pytest.mark.parametrize("name", [*MASSES, "adakv-both", "nexus-heads"])
def test_every_eviction_keeps_what_is_asked_for(engines: Engines, name: str) -> None:
    engine = engine_of(engines, name)
    ask = {"seed": 2, "budget_tokens": 40}
    (plain,) = run_and_inspect(engine, [request(300, 90, **ask)])
    assert plain.result is not None
    least = (min(plain.result.coverages) + 1) / 2
    (guarded,) = run_and_inspect(engine, [request(300, 90, **ask, min_coverage=least)])
    assert guarded.result is not None
    assert min(plain.result.coverages) < least <= min(guarded.result.coverages)
    result = guarded.result
    assert (plain.result.guardrail, result.guardrail) == (None, "raised")
    assert result.budget_tokens == plain.result.budget_tokens + result.budget_raised_tokens
    assert result.budget_raised_tokens > 0
    # The least budget that does: one unit less would not have been enough at the prompt's end.
    units = guarded.kept[0].shape[-1] if engine.manifest.policy.shared_lens else 0
    if units:
        less = (units - 1) * engine.manifest.policy.block_size
        (short,) = run_and_inspect(engine, [request(300, 1, seed=2, budget_tokens=less)])
        assert short.result is not None
        assert short.result.coverages[0] < least


@pytest.mark.parametrize("name", ["nexus", "h2o", "adakv-both", "nexus-layers"])
def test_decode_raises_a_budget_too(engines: Engines, name: str) -> None:
    """The prompt fits its budget, so that only the answer's evictions lose anything."""
    engine = engine_of(engines, name)
    ask = {"seed": 2, "budget_tokens": 64}
    (plain,) = run_and_inspect(engine, [request(50, 160, **ask)])
    assert plain.result is not None
    least = (min(plain.result.coverages) + 1) / 2
    (guarded,) = run_and_inspect(engine, [request(50, 160, **ask, min_coverage=least)])
    assert guarded.result is not None
    assert guarded.result.guardrail == "raised"
    assert min(guarded.result.coverages, default=1.0) >= least
    assert guarded.result.kept_tokens > plain.result.kept_tokens


def test_what_is_enough_stays_as_it_was(engines: Engines) -> None:
    engine = engine_of(engines, "nexus")
    (plain,) = run_and_inspect(engine, [request(300, 90, density=0.5)])
    (guarded,) = run_and_inspect(engine, [request(300, 90, density=0.5, min_coverage=0.01)])
    assert plain.tokens == guarded.tokens
    assert plain.kept_sets() == guarded.kept_sets()
    assert guarded.result is not None
    assert (guarded.result.guardrail, guarded.result.budget_raised_tokens) == ("met", 0)


def test_the_slot_ends_what_the_guardrail_can_do(engines: Engines) -> None:
    engine = engine_of(engines, "nexus", limits={"max_density": 0.2})
    (trace,) = run_and_inspect(engine, [request(600, 100, min_coverage=0.999)])
    assert trace.result is not None
    assert trace.result.guardrail == "exhausted"
    assert trace.result.budget_tokens == engine.budgets.largest(100) * 8
    assert trace.most_rows <= engine.cache.capacity
    assert min(trace.result.coverages) < 0.999


def test_neighbours_of_a_guarded_request_are_untouched(engines: Engines) -> None:
    engine = engine_of(engines, "h2o")
    asked = [request(300, 60, seed=2, budget_tokens=40), request(200, 60, budget_tokens=40)]
    alone = [run_and_inspect(engine, [r])[0] for r in asked]
    guarded = request(250, 60, budget_tokens=40, min_coverage=0.9)
    both = run_and_inspect(engine, [asked[0], guarded, asked[1]])
    for a, b in zip(alone, (both[0], both[2]), strict=True):
        assert a.tokens == b.tokens
        assert a.kept_sets() == b.kept_sets()


@pytest.mark.parametrize("name", ["knorm", "keydiff-both", "nestedkv", "streaming", "random"])
def test_scores_that_are_no_mass_have_no_coverage(engines: Engines, name: str) -> None:
    engine = engine_of(engines, name)
    (trace,) = run_and_inspect(engine, [request(300, 40)])
    assert trace.result is not None
    assert trace.result.coverage is None
    assert all(math.isnan(c) for c in trace.result.coverages)
    assert set(trace.result.to_dict()["coverages"]) == {None}
    with pytest.raises(UsageError, match=r"min_coverage 0.9 needs a score that is attention mass"):
        engine.generate([request(300, 40, min_coverage=0.9)])


def test_stats_sum_up_coverage(engines: Engines) -> None:
    engine = engine_of(engines, "nexus")
    asked = [request(300, 60, budget_tokens=40), request(300, 60, budget_tokens=40, min_coverage=1)]
    with Scheduler(engine) as scheduler:
        results = [t.result(60) for t in scheduler.submit_all(asked)]
        stats = scheduler.stats()
    shares = [share for r in results for share in r.coverages]
    assert stats.covered == len(shares) > 2
    assert stats.coverage == pytest.approx(sum(shares))
    assert stats.raised == 1


def test_the_command_says_that_it_raised_the_budget(engines: Engines) -> None:
    package = engines.package("nexus", **POLICIES["nexus"])
    args = ["--prompt", "a b c d e f g h " * 40, "--max-tokens", "3", "--min-coverage", "0.95"]
    done = kvsift("generate", package, *args, "--min-budget-tokens", "0")
    assert done.exit_code == 0, done.output
    assert "of it added for coverage" in done.stderr
