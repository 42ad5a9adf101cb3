import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsift.builder.errors import UsageError
from kvsift.runtime.seeds import (
    Seeds,
    check_seed,
    request_seed,
    resolve_seeds,
    seed_words,
    split_seed,
)

SEEDS = st.integers(0, 2**64 - 1)


@given(SEEDS)
def test_words_are_int32_in_twos_complement(seed):
    low, high = split_seed(seed)
    assert -(2**31) <= low < 2**31
    assert -(2**31) <= high < 2**31
    # the independent view: the little-endian bytes of a 64-bit integer
    assert np.array([seed], np.uint64).view(np.int32).tolist() == [low, high]


@pytest.mark.parametrize(
    ("seed", "words"),
    [
        (0, (0, 0)),
        (1, (1, 0)),
        (2**31, (-(2**31), 0)),
        (2**32 - 1, (-1, 0)),
        (2**63 - 1, (-1, 2**31 - 1)),
        (2**64 - 1, (-1, -1)),
    ],
)
def test_edges(seed, words):
    assert split_seed(seed) == words
    assert check_seed("seed", seed) == seed


def test_seed_words_shape():
    words = seed_words([1, 2**64 - 1, 2**32])
    assert words.dtype == np.int32
    assert words.tolist() == [[1, 0], [-1, -1], [0, 1]]
    assert seed_words([]).shape == (0, 2)


@given(SEEDS, st.integers(0, 2**40))
def test_request_seed_is_a_function_in_range(engine, number):
    seed = request_seed(engine, number)
    assert seed == request_seed(engine, number)
    assert 0 <= seed < 2**64


def test_request_seeds_are_distinct_and_mixed():
    seeds = [request_seed(engine, number) for engine in range(20) for number in range(100)]
    assert len(set(seeds)) == len(seeds)
    bits = np.unpackbits(np.array(seeds, np.uint64).view(np.uint8)).reshape(len(seeds), 64)
    # 2000 fair bits: the mean of each lies within 5 standard deviations (0.056) of a half
    assert np.abs(bits.mean(0) - 0.5).max() < 0.056
    flips = (bits[1:] != bits[:-1]).mean(0)  # neighbours differ in half of their bits
    assert np.abs(flips - 0.5).max() < 0.056


def test_request_seed_does_not_change_between_versions():
    # Results quote seeds, so a changed rule would make old runs unrepeatable.
    assert [request_seed(0, 0), request_seed(2**64 - 1, 7)] == [
        213000021201967259,
        12664908465135092885,
    ]


def test_defaults_of_the_seeds():
    default = request_seed(5, 9)
    assert resolve_seeds(None, None, 5, 9) == Seeds(default, default)
    assert resolve_seeds(3, None, 5, 9) == Seeds(3, 3)
    assert resolve_seeds(None, 4, 5, 9) == Seeds(default, 4)
    assert resolve_seeds(0, 0, 5, 9) == Seeds(0, 0)


@pytest.mark.parametrize("value", [-1, 2**64, 1.0, True, "1", None])
def test_bad_seed(value):
    with pytest.raises(UsageError, match=r"^engine_seed must be .*\[0, 2\^64\)"):
        check_seed("engine_seed", value)
