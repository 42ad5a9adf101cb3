import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsift.builder.errors import UsageError
from kvsift.runtime.params import EvictionParams, SamplingParams

SAMPLING_FAULTS = [
    ("max_tokens", -3, "max_tokens must be >= 0, got -3"),
    ("max_tokens", True, "max_tokens must be an integer, got True (bool)"),
    ("max_tokens", 1.0, "max_tokens must be an integer, got 1.0 (float)"),
    ("max_tokens", "8", "max_tokens must be an integer, got '8' (str)"),
    ("max_tokens", None, "max_tokens must be an integer"),
    ("temperature", -0.1, "temperature must be in [0, inf), got -0.1"),
    ("temperature", math.inf, "temperature must be in [0, inf), got inf"),
    ("temperature", math.nan, "temperature must be in [0, inf), got nan"),
    ("temperature", True, "temperature must be a number"),
    ("temperature", 10**400, "temperature must be in [0, inf), got inf"),
    ("top_k", -1, "top_k must be >= 0"),
    ("top_p", 0.0, "top_p must be in (0, 1], got 0"),
    ("top_p", 1.01, "top_p must be in (0, 1]"),
    ("top_p", math.nan, "top_p must be in (0, 1]"),
    ("min_p", -0.1, "min_p must be in [0, 1]"),
    ("min_p", 1.1, "min_p must be in [0, 1]"),
    ("repetition_penalty", 0, "repetition_penalty must be in (0, inf)"),
    ("repetition_penalty", "x", "repetition_penalty must be a number"),
    ("stop", [""], "empty stop string"),
    ("stop", "", "empty stop string"),
    ("stop", ["a", 3], "stop must be a list of strings, got 3 (int)"),
    ("stop", 3, "stop must be a list of strings"),
    ("bad_words", [""], "empty bad word in bad_words"),
    ("bad_words", [b"x"], "bad_words must be a list of strings"),
    ("presence_penalty", 2.5, "presence_penalty must be in [-2, 2]"),
    ("frequency_penalty", math.nan, "frequency_penalty must be in [-2, 2]"),
    ("bad_words", ["\ud800"], "a bad word is not valid text: character 0 is the half code"),
    ("stop", ["a\udfff"], "a stop string is not valid text: character 1"),
    ("stop", {"a": 1}, "stop must be a list of strings, got {'a': 1} (dict)"),
    ("stop_token_ids", np.array(3), "stop_token_ids must be a list of token ids"),
    ("stop_token_ids", [-1], "stop_token_ids must be >= 0"),
    ("stop_token_ids", "12", "stop_token_ids must be a list of token ids"),
    ("stop_token_ids", [True], "stop_token_ids must be an integer"),
    ("ignore_eos", 1, "ignore_eos must be true or false"),
    ("logprobs", -1, "logprobs must be >= 0"),
    ("seed", -1, "seed must be in [0, 2^64), got -1"),
    ("seed", 2**64, "seed must be in [0, 2^64)"),
    ("seed", 1.5, "seed must be an integer in [0, 2^64), got 1.5"),
]
EVICTION_FAULTS = [
    ("density", 0, "density must be in (0, 1], got 0"),
    ("density", 1.5, "density must be in (0, 1], got 1.5; "),
    ("density", math.nan, "density must be in (0, 1], got nan"),
    ("density", -0.2, "density must be in (0, 1], got -0.2"),
    ("density", "0.2", "density must be a number in (0, 1], got '0.2' (str)"),
    ("density", True, "density must be a number in (0, 1], got True (bool)"),
    ("budget_tokens", 0, "budget_tokens must be >= 1, got 0"),
    ("budget_tokens", 1.5, "budget_tokens must be an integer"),
    ("min_budget_tokens", -1, "min_budget_tokens must be >= 0"),
    ("eviction_seed", -1, "eviction_seed must be in [0, 2^64), got -1"),
    ("eviction_seed", 2**64, "eviction_seed must be in [0, 2^64)"),
    ("eviction_seed", True, "eviction_seed must be an integer in [0, 2^64), got True"),
    ("pin", {0: 5}, "pin must be a list of spans, got {0: 5} (dict)"),
    ("layer_budgets", np.array([1.0, math.nan]), "layer_budgets must be in (0, inf), got nan"),
    ("layer_budgets", [1e308, 1e308], "layer_budgets must have a finite sum"),
    ("head_budgets", np.array(2.0), "head_budgets must be a list of positive weights"),
    ("pin", [(3, 3)], "pin must have start < end, got (3, 3)"),
    ("pin", [(5, 3)], "pin must have start < end"),
    ("pin", [(-1, 3)], "pin must be in [0, 2147483647], got -1"),
    ("pin", [(0, 2**31)], "pin must be in [0, 2147483647]"),
    ("pin", [(1, 2, 3)], "pin must be a list of (start, end)"),
    ("pin", [5], "pin must be a list of (start, end) spans"),
    ("pin", "0:5", "pin must be a list of spans"),
]


@pytest.mark.parametrize(("name", "value", "message"), SAMPLING_FAULTS)
def test_sampling_refuses(name, value, message):
    with pytest.raises(UsageError) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "value", "message"), EVICTION_FAULTS)
def test_eviction_refuses(name, value, message):
    with pytest.raises(UsageError) as caught:
        EvictionParams(**{name: value})
    assert str(caught.value).startswith(message)
    assert "; " in str(caught.value)


def test_density_and_budget_exclude_each_other():
    with pytest.raises(UsageError, match="exclude each other"):
        EvictionParams(density=0.2, budget_tokens=512)


def test_defaults():
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.top_k) == (128, 0.0, 0)
    assert (params.top_p, params.min_p, params.repetition_penalty) == (1.0, 0.0, 1.0)
    assert params.stop == ()
    assert params.logprobs is None
    assert params.seed is None
    assert EvictionParams().density is None


def test_values_are_normalised():
    params = SamplingParams(
        max_tokens=np.int32(5),
        temperature=1,
        stop=["a", "b"],
        stop_token_ids=np.array([1, 2]),
        seed=np.uint64(2**64 - 1),
    )
    assert type(params.max_tokens) is int
    assert type(params.temperature) is float
    assert params.stop == ("a", "b")
    assert params.stop_token_ids == (1, 2)
    assert params.seed == 2**64 - 1
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=None).stop == ()
    assert EvictionParams(pin=[[0, 4], (8, 9)]).pin == ((0, 4), (8, 9))
    assert hash(params) == hash(params)


@given(st.floats(0, 1, exclude_min=True), st.integers(0, 2**64 - 1))
def test_whole_range_is_accepted(density, seed):
    params = EvictionParams(density=density, eviction_seed=seed)
    assert (params.density, params.eviction_seed) == (density, seed)


@given(st.floats() | st.integers() | st.none() | st.text() | st.booleans() | st.binary())
def test_any_density_is_accepted_or_a_usage_error(value):
    try:
        density = EvictionParams(density=value).density
    except UsageError:
        return
    assert density is None or 0 < density <= 1
