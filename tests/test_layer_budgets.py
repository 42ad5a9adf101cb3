import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsift.builder.errors import UsageError
from kvsift.builder.policies import resolve
from kvsift.builder.policies.base import Policy
from kvsift.runtime.layer_budgets import layer_budgets

UNITS = st.integers(1, 3000)
LAYERS = st.integers(1, 40)


def policy_of(rule: object, window: int = 0) -> Policy:
    return resolve("streaming").model_copy(update={"layer_budgets": rule, "window": window})


@given(UNITS, LAYERS)
def test_uniform_budgets_are_equal(units: int, layers: int) -> None:
    assert layer_budgets(policy_of("uniform"), units, 5000, layers, 3).tolist() == [units] * layers


@given(UNITS, st.integers(0, 4000), LAYERS, st.integers(0, 70), st.integers(0, 64))
def test_a_pyramid_falls_and_keeps_the_sum(
    units: int, more: int, layers: int, forced: int, window: int
) -> None:
    made = layer_budgets(policy_of("pyramid", window), units, units + more, layers, forced)
    assert made.sum() == units * layers
    assert (made >= min(units, forced + 1)).all()
    assert (np.diff(made) <= 1).all()  # rounding to the exact sum may lift one layer by one


def test_the_pyramid_of_the_paper() -> None:
    """512 of 4096 tokens in 30 layers: 998 in the first, 26 in the last if the window is less."""
    made = layer_budgets(policy_of("pyramid", 16), 512, 4096, 30, 16)
    assert made[0] == 998
    assert made[-1] == 26
    assert layer_budgets(policy_of("pyramid", 64), 512, 4096, 30, 64).tolist() == [512] * 30


@given(UNITS, st.lists(st.floats(0.01, 100), min_size=1, max_size=40))
def test_weights_share_the_sum(units: int, weights: list[float]) -> None:
    made = layer_budgets(policy_of(tuple(weights)), units, 5000, len(weights), 0)
    assert made.sum() == units * len(weights)
    exact = np.array(weights) / sum(weights) * made.sum()
    assert (made >= 1).all()
    if (exact >= 1).all():
        assert (np.abs(made - exact) <= len(weights)).all()
        assert (np.abs(made - exact) < 1.5).all()


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 0.0, 1.0), (1.0, -1.0, 2.0)])
def test_weights_that_do_not_fit_are_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(UsageError, match="one positive weight for each of the 3 layers"):
        layer_budgets(policy_of(weights), 10, 100, 3, 0)
