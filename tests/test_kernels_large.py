"""The kernels at 131072 units or tokens, which take several blocks, against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_cases import LARGE, LONG, long_case, run_and_check
from runners import cpu_kernels, run_kernel


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_large(name: str) -> None:
    run_and_check(cpu_kernels(), long_case(name), "float32")


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0, 1, LARGE // 3, LARGE - 1, LARGE])
def test_top_of_many_ties(budget: int) -> None:
    """Exact at any number of units kept, ties to the lower index."""
    rng = np.random.default_rng(budget)
    score = np.round(2 * rng.standard_normal(LARGE)).astype(np.float32)
    score[score == 0] *= rng.choice([1, -1], (score == 0).sum())  # -0 equals 0
    inputs = {
        "score": score.reshape(1, 1, 1, LARGE),
        "budget": np.full((1, 1, 1), budget, np.int32),
        "unit_ids": np.arange(LARGE, dtype=np.int32).reshape(1, 1, 1, LARGE),
        "tokens_seen": np.array([LARGE], np.int32),
        "pin_spans": np.zeros((1, 0, 2), np.int32),
    }
    attrs = {"block_size": 1, "sink_units": 0, "recent_units": 0, "score_is_mass": 0}
    keep, count, share = run_kernel(cpu_kernels(), "TopKSelect", attrs, inputs)
    want = np.sort(np.argsort(-score, kind="stable")[:budget])
    assert count.item() == budget
    assert np.array_equal(keep.ravel()[:budget], want)
    assert (keep.ravel()[budget:] == -1).all()
    assert np.isnan(share.item())
