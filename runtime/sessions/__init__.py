"""Sessions: one step of the graph on a backend, behind one interface."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvsift.builder import names
from kvsift.runtime.cache import KVCache


@dataclass
class Evictions:
    """Which slots of a step evict, to what budget; shapes as in `names.py`, E >= 1."""

    slots: NDArray[np.int32]
    tokens_seen: NDArray[np.int32]
    unit_ids: NDArray[np.int32]
    budget: NDArray[np.int32]
    pin_spans: NDArray[np.int32]
    seed: NDArray[np.int32]
    step: NDArray[np.int32]
    prompt_end: NDArray[np.int32]

    def feed(self) -> dict[str, NDArray[np.int32]]:
        """Return the arrays by the names of the graph's inputs."""
        return {
            names.EVICT_SLOTS: self.slots,
            names.TOKENS_SEEN: self.tokens_seen,
            names.UNIT_IDS: self.unit_ids,
            names.BUDGET: self.budget,
            names.PIN_SPANS: self.pin_spans,
            names.EVICTION_SEED: self.seed,
            names.EVICTION_STEP: self.step,
            names.PROMPT_END: self.prompt_end,
        }


@dataclass
class Step:
    """Inputs of a step over the first B slots of a cache.

    `input_ids` and `position_ids` int64 [B, S], `n_new` int32 [B], `past_lens` int32 [Lr, B].
    """

    input_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    n_new: NDArray[np.int32]
    past_lens: NDArray[np.int32]
    evictions: Evictions | None = None


@dataclass
class Kept:
    """What the selector kept: `keep` int32 [L, E, R, N], `keep_len` int32 and `coverage` float32
    [L, E, R]; `scores` float32 [L, E, R, N] of an engine that traces them.
    """

    keep: NDArray[np.int32]
    keep_len: NDArray[np.int32]
    coverage: NDArray[np.float32]
    scores: NDArray[np.float32] | None = None


@dataclass
class StepOutput:
    """Logits float32 [B, V] (or [B, S, V] with all logits) and the kept sets."""

    logits: NDArray[np.float32]
    kept: Kept | None = field(default=None)


class Session(Protocol):
    """A loaded graph that runs steps in place on caches."""

    def new_cache(self, slots: int, capacity: int) -> KVCache:
        """Return an empty cache of the backend."""
        ...

    def run(self, cache: KVCache, step: Step) -> StepOutput:
        """Run one step: append to the cache, update the windows, evict where asked."""
        ...

    def release(self) -> None:
        """Give back the graph and the caches; the session is of no use afterwards."""
        ...
