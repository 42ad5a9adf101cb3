import json
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsift.builder.errors import EngineError, UsageError
from kvsift.runtime.params import SamplingParams
from kvsift.runtime.results import GenerationResult, Timings
from kvsift.runtime.sampling import Sampler


def choose(logits, history=(), seed=0, **params):
    return Sampler(SamplingParams(**params), seed).next(np.array(logits, np.float32), history)


def softmax(logits, temperature=1.0):
    scaled = np.asarray(logits, np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


def kept_by_definition(logits, temperature, top_k, top_p, min_p):
    """The tokens that may be drawn, by full sorts and plain loops."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if top_k:
        order = order[:top_k]
    shares = softmax([logits[i] for i in order], temperature)
    kept, total = [], 0.0
    for i, share in zip(order, shares, strict=True):
        if total >= top_p:
            break
        kept.append(i)
        total += share
    best = shares[0]
    return {i for i, s in zip(order, shares, strict=True) if i in kept and s >= min_p * best}


def drawn(logits, count=400, **params):
    sampler = Sampler(SamplingParams(**params), 1)
    row = np.array(logits, np.float32)
    return np.array([sampler.next(row, ()).token for _ in range(count)])


def test_greedy_takes_the_lowest_of_equal_logits():
    assert choose([1, 3, 3, 2]).token == 1
    assert choose([-math.inf, -math.inf, -5]).token == 2


@settings(max_examples=60)
@given(
    st.lists(st.integers(-6, 6), min_size=2, max_size=200),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.sampled_from([0, 1, 3, 50]),
    st.sampled_from([1.0, 0.9, 0.31, 0.05]),
    st.sampled_from([0.0, 0.07, 0.6, 1.0]),
)
def test_draws_stay_within_the_definition(logits, temperature, top_k, top_p, min_p):
    allowed = kept_by_definition(logits, temperature, top_k, top_p, min_p)
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    assert set(drawn(logits, 40, **params)) <= allowed


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.0, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    ],
)
def test_frequencies_follow_the_truncated_softmax(params):
    logits = np.random.default_rng(3).normal(size=20) * 2
    full = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **params}
    allowed = sorted(kept_by_definition(logits, **full))
    expected = np.zeros(20)
    expected[allowed] = softmax(logits[allowed], params["temperature"])
    count = 4000
    counts = np.bincount(drawn(logits, count, **params), minlength=20)
    assert counts[expected == 0].sum() == 0
    deviation = np.sqrt(count * expected * (1 - expected)) + 1
    assert (np.abs(counts - count * expected) < 5 * deviation).all()


def test_nucleus_of_a_flat_distribution_takes_its_share_of_the_lowest_ids():
    # more tokens than the first guess of the nucleus, all equal
    tokens = drawn(np.zeros(5000), 3000, temperature=1.0, top_p=0.5)
    assert tokens.max() < 2500
    assert tokens.max() > 2400


def test_top_k_ties_go_to_the_lower_ids():
    assert set(drawn([0, 2, 1, 1, 1], 200, temperature=5.0, top_k=3)) == {1, 2, 3}


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_tightest_truncation_is_greedy(params):
    logits = np.random.default_rng(0).normal(size=300)
    assert set(drawn(logits, 20, temperature=1.0, **params)) == {int(logits.argmax())}


@pytest.mark.parametrize("temperature", [1e-320, 1e-12, 1e300])
def test_extreme_temperatures_are_finite(temperature):
    tokens = set(drawn([0, 1, 5, -math.inf], 60, temperature=temperature))
    assert tokens == ({0, 1, 2} if temperature > 1 else {2})


def test_masked_tokens_are_never_drawn():
    assert set(drawn([-math.inf, 0, -math.inf, 0], 200, temperature=1.0)) == {1, 3}


def test_same_seed_same_draws_whatever_else_runs():
    row = np.zeros(1000, np.float32)
    params = SamplingParams(temperature=1.0)
    alone = Sampler(params, 2**64 - 1)
    first = [alone.next(row, ()).token for _ in range(30)]
    again, other = Sampler(params, 2**64 - 1), Sampler(params, 5)
    mixed = []
    for _ in range(30):
        np.random.random()  # the global generator must not matter
        other.next(row, ())
        mixed.append(again.next(row, ()).token)
    assert first == mixed
    assert first != [Sampler(params, 6).next(row, ()).token for _ in range(30)]
    assert len(set(first)) > 20


def test_one_uniform_number_a_token():
    # truncation must not change how many numbers a step uses
    expected = np.random.Generator(np.random.Philox(key=4)).random(3)
    row = np.zeros(1000, np.float32)
    for params in ({}, {"top_k": 1000}, {"min_p": 0.5}):
        sampler = Sampler(SamplingParams(temperature=1.0, **params), 4)
        assert [sampler.next(row, ()).token for _ in range(3)] == [int(u * 1000) for u in expected]


def test_repetition_penalty_follows_the_sign():
    logits = [2.0, 1.9, -1.0, -1.1]
    assert choose(logits, [0, 0], repetition_penalty=1.1).token == 1
    assert choose(logits, [], repetition_penalty=1.1).token == 0
    assert choose([-1.0, -1.1], [0], repetition_penalty=1.2).token == 1
    assert choose([-1.0, -1.1], [1], repetition_penalty=0.5).token == 1
    assert choose([1.0, 1.1], np.array([1, 1, 1]), repetition_penalty=1.05).token == 1  # once only
    assert choose([1.0, 2.0], [0], repetition_penalty=1e-320, temperature=1.0).token == 0


def test_penalty_leaves_the_caller_logits_alone():
    row = np.array([1, 2, 3], np.float32)
    Sampler(SamplingParams(repetition_penalty=2.0), 0).next(row, [2])
    assert row.tolist() == [1, 2, 3]


@given(st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=40), st.integers(0, 50))
def test_logprobs_are_of_the_unmodified_distribution(logits, count):
    choice = choose(logits, [0], logprobs=count, temperature=0.3, repetition_penalty=1.5, top_k=1)
    expected = np.log(softmax(logits))
    assert choice.logprob == pytest.approx(expected[choice.token], abs=1e-9)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:count]
    assert [token for token, _ in choice.top_logprobs] == order
    assert [p for _, p in choice.top_logprobs] == pytest.approx(expected[order], abs=1e-9)


def test_no_logprobs_unless_asked_for():
    assert choose([1, 2]).logprob is None
    assert choose([1, 2]).top_logprobs == ()


@pytest.mark.parametrize(
    "logits", [[1, math.nan], [math.nan, math.nan], [math.inf, 0], [-math.inf, -math.inf]]
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_unusable_logits_are_an_engine_error(logits, temperature):
    with pytest.raises(EngineError, match="not usable"):
        choose(logits, temperature=temperature)


def test_a_step_over_a_large_vocabulary_is_fast():
    row = np.random.default_rng(0).normal(size=150_000).astype(np.float32) * 3
    params = SamplingParams(
        temperature=0.8, top_k=50, top_p=0.9, logprobs=5, repetition_penalty=1.1
    )
    sampler, history = Sampler(params, 0), np.arange(8000)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        sampler.next(row, history)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.05  # a few ms on a quiet machine


def test_result_is_json_without_nan():
    choice = choose([1, 2], logprobs=1)
    result = GenerationResult(
        text="é",
        token_ids=(1, np.int64(2)),
        finish_reason="length",
        logprobs=(choice.logprobs,),
        prompt_tokens=3,
        seed=2**64 - 1,
        eviction_seed=0,
        budget_tokens=None,
        kept_tokens=np.int32(4),
        coverage=np.float32("nan"),
        coverages=(math.nan,),
        guardrail=None,
        budget_raised_tokens=0,
        cached_tokens=0,
        session_turn=None,
        kv_bytes_allocated=1,
        kv_bytes=10,
        kv_bytes_dense=20,
        evictions=0,
        timings=Timings(math.nan, (), 0.5),
    )
    plain = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert plain["token_ids"] == [1, 2]
    assert plain["seed"] == 2**64 - 1
    assert plain["coverage"] is None
    assert plain["timings"] == {"ttft_s": None, "itl_s": [], "total_s": 0.5, "mean_itl_s": None}
    assert plain["logprobs"][0]["token"] == 1
    assert Timings(0.1, (0.2, 0.4), 1.0).mean_itl_s == pytest.approx(0.3)


def test_presence_and_frequency_penalties_count_the_answer_only():
    row = np.array([2.0, 1.9, 0.5, 0.0], np.float32)
    sampler = Sampler(SamplingParams(presence_penalty=0.05, frequency_penalty=0.04), 0)
    tokens = []
    for _ in range(40):
        expected = [
            float(x) - (0.05 + 0.04 * tokens.count(i) if i in tokens else 0)
            for i, x in enumerate(row)
        ]
        tokens.append(sampler.next(row, [0, 0, 0, *tokens]).token)
        assert tokens[-1] == int(np.argmax(expected))
    assert set(tokens) == {0, 1}


def test_a_bad_word_is_never_completed():
    row = np.array([1.0, 3.0, 2.0, 0.0], np.float32)
    assert Sampler(SamplingParams(), 0, [[1], [0]]).next(row, ()).token == 2
    pair = Sampler(SamplingParams(), 0, [[2, 1]])
    assert [pair.next(row, history).token for history in ([], [1], [2], [1, 2])] == [1, 1, 2, 2]
    free = Sampler(SamplingParams(temperature=5.0, bad_words=["x"]), 1, [[3, 0, 1]])
    history = [3, 0]
    assert 1 not in {free.next(row, history).token for _ in range(200)}
    with pytest.raises(UsageError, match="leave no token"):
        Sampler(SamplingParams(bad_words=["x"]), 0, [[0], [1], [2], [3]]).next(row, ())
