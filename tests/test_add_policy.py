"""One file is all that a new policy needs (CONTRIBUTING, "Add a policy")."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import toy_policy
from engines import Engines, request, run_and_inspect
from kept import same

from kvsift.builder import policies
from kvsift.builder.policies import PRESETS, SCORERS, resolve


@pytest.fixture
def toy() -> Iterator[None]:
    policies.register(toy_policy)
    yield
    del SCORERS["vnorm"], PRESETS["toy"]


@pytest.mark.usefixtures("toy")
def test_a_policy_from_one_file_runs_in_prompt_and_decode(engines: Engines) -> None:
    engine = engines("toy")
    trace, _ = run_and_inspect(engine, [request(300, 100), request(150, 100)])
    assert trace.result.evictions > 1
    (alone,) = run_and_inspect(engine, [request(300, 100)], poison=True)
    same(alone, trace)
    # What went had shorter values than what stayed, but for the forced tokens.
    (dense,) = run_and_inspect(engines("full"), [request(300, 0)])
    first = np.sort(trace.kept[0][0, 0])
    norms = np.linalg.norm(dense.values[0][0], axis=-1)
    free = np.setdiff1d(first, [0, 298, 299])
    gone = np.setdiff1d(np.arange(300), first)
    assert norms[free].min() >= norms[gone].max()


@pytest.mark.usefixtures("toy")
def test_its_scorer_joins_other_selectors() -> None:
    assert resolve("toy", selector="head_topk").layout == "head"
    assert resolve("nexus", scorer="vnorm", selector="topk").scorer == "vnorm"


def test_it_is_gone_after_the_test() -> None:
    assert "toy" not in PRESETS
