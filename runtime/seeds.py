"""64-bit seeds: where a request's seeds come from and how they travel into the graph."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvsift.builder.errors import UsageError

SEED_LIMIT = 2**64
_WORD = 2**32


def check_seed(name: str, value: object) -> int:
    """Return `value` as a seed in [0, 2^64); UsageError naming `name` for anything else."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise UsageError(
            f"{name} must be an integer in [0, 2^64), got {value!r:.60} "
            f"({type(value).__name__}); leave it out for a seed of the engine's choice"
        )
    seed = int(value)
    if not 0 <= seed < SEED_LIMIT:
        raise UsageError(
            f"{name} must be in [0, 2^64), got {seed}; "
            "leave it out for a seed of the engine's choice"
        )
    return seed


def split_seed(seed: int) -> tuple[int, int]:
    """Return the seed as two int32 values in two's complement, low word first."""
    words = (seed % _WORD, seed // _WORD)
    low, high = (word - _WORD if word >= _WORD // 2 else word for word in words)
    return low, high


def seed_words(seeds: Sequence[int]) -> NDArray[np.int32]:
    """Return int32 [E, 2], the words of E seeds in the graph's order (low word first)."""
    return np.array([split_seed(seed) for seed in seeds], np.int32).reshape(len(seeds), 2)


def request_seed(engine_seed: int, request_number: int) -> int:
    """Return the seed of a request that names none: a function of the engine's seed and its number.

    The first 64-bit word of Philox4x64-10 with key `engine_seed` [0, 2^64) and counter
    `request_number` >= 0, so neighbouring engines and requests have unrelated seeds.
    """
    return int(np.random.Philox(key=engine_seed, counter=request_number).random_raw())


@dataclass(frozen=True)
class Seeds:
    """The two seeds that a request runs with, each in [0, 2^64)."""

    sampling: int
    eviction: int


def resolve_seeds(
    seed: int | None, eviction_seed: int | None, engine_seed: int, request_number: int
) -> Seeds:
    """Return a request's seeds; eviction's defaults to sampling's, that to `request_seed`."""
    sampling = request_seed(engine_seed, request_number) if seed is None else seed
    return Seeds(sampling, sampling if eviction_seed is None else eviction_seed)
