"""The kernels at 131072 units or tokens, which take several blocks, against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from cases import Case, attribute_choices
from kernel_cases import check
from runners import cpu_kernels, run_kernel
from step_scene import scene_of

from kvsift.builder import ops

LARGE = 131072
#: One small request of everything; what counts is the length.
ONE = {"B": 1, "E": 1, "L": 1, "Hq": 2, "Hkv": 1, "W": 3, "n": 2, "P": 1, "S": 2, "R": 1}
#: PhiloxUniform has no sums or choices, QueryStatsUpdate no axis of tokens.
SIZED = [op.name for op in ops.OPS if op.name not in ("PhiloxUniform", "QueryStatsUpdate")]


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZED)
def test_large(name: str) -> None:
    attrs = next(attribute_choices(ops.TABLE[name]))
    block = int(attrs.get("block_size", 1)) if name == "WindowMass" else 1
    if "block_size" in attrs:
        attrs = attrs | {"block_size": block}
    sizes = ONE | {"N": LARGE // block, "C": LARGE}
    lens = (LARGE - 5,)
    case = Case(name, "large", attrs, sizes, lens=lens, seen=lens, budget=LARGE // 5, new=(2,))
    inputs = scene_of(case).inputs()
    check(name, attrs, inputs, run_kernel(cpu_kernels(), name, attrs, inputs))


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
