"""Every scorer with every selector: it runs, or it is refused with the reason."""

from __future__ import annotations

import itertools

import pytest
from engines import Engines, request, run_and_inspect

from kvsift.builder.errors import UsageError
from kvsift.builder.policies import SCORERS, resolve
from kvsift.builder.policies.selectors import SELECTORS

#: Why a pair cannot work. Key: scorer and selector.
REFUSED = {
    **{(s, "reservoir"): "samples by positive weights" for s in ("keydiff", "knorm", "position")},
    **{(s, "head_topk"): "one score for all of them" for s in ("nexus", "position", "tova")},
}
#: Blocks and windows that fit the short prompts here.
OPTIONS = {"nexus": {"block_size": 8}, "snapkv": {"window": 16}, "morphkv": {"window": 16}}


@pytest.mark.parametrize(("scorer", "selector"), [*itertools.product(SCORERS, SELECTORS)])
@pytest.mark.parametrize("scope", ["prefill", "both"])
def test_a_pair_runs_or_says_why_not(
    engines: Engines, scorer: str, selector: str, scope: str
) -> None:
    asked = {"scorer": scorer, "selector": selector, "scope": scope}
    if (scorer, selector) in REFUSED:
        with pytest.raises(UsageError, match=REFUSED[scorer, selector]):
            resolve("nexus", **asked)
        return
    engine = engines("nexus", options=OPTIONS.get(scorer), **asked)
    (trace,) = run_and_inspect(engine, [request(300, 80)])
    assert trace.result is not None
    assert trace.result.evictions > (scope == "both")
    assert trace.result.kept_tokens < 300 + 80 - 100


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("weights", [(3.0, 1.0), (1.0, 3.0)])
def test_a_scorer_takes_layers_of_different_lengths(
    engines: Engines, scorer: str, weights: tuple[float, float]
) -> None:
    """A layer that keeps less than another is given padding units beyond its capacity."""
    options = {"layer_budgets": weights, **OPTIONS.get(scorer, {})}
    engine = engines("nexus", scorer=scorer, selector="topk", scope="both", options=options)
    (trace,) = run_and_inspect(engine, [request(300, 80)])
    assert trace.result is not None
    assert trace.result.evictions > 1
    assert engine.cache.capacities[0] != engine.cache.capacities[1]


def test_options_open_refused_pairs() -> None:
    options = {"head_reduce": "per_head"}
    assert resolve("nexus", selector="head_topk", options=options).layout == "head"


def test_a_negative_score_is_no_weight() -> None:
    options = {"continuum": False}
    with pytest.raises(UsageError, match="positive weights"):
        resolve("nestedkv", selector="reservoir", options=options)
