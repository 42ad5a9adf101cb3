"""What engines and slots ask of a key and value cache, wherever its memory is.

`host_cache.py` keeps it in numpy arrays. Nothing outside an implementation and its session knows
how the memory lies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Array = NDArray[Any]

#: Names of a layer's rows in `read` and `write`, beside those of its states.
KEY, VALUE = "key", "value"


@dataclass
class KeptUnits:
    """Kept unit indices of one slot: `keep` int32 [L, R, k], ascending, of which the first
    `counts` int32 [L, R] are real.
    """

    keep: Ints
    counts: Ints


class KVCache(Protocol):
    """The caches of all layers for a number of sequences, one in each slot.

    Layer i has room for C_i tokens: keys and values [slots, Hkv, C_i, D]. With them go the query
    ring [slots, W + 1, L*Hq*D] of policies with a query window, and the states of
    `builder/states.py`. Of each row only the first `len` entries are valid. What a method does is
    done before the next step and before anything is read.

    What an earlier request left behind never reaches a later one: attention that multiplies rows
    behind the valid ones by 0 must find numbers there, not NaN.
    """

    @property
    def slots(self) -> int:
        """Sequences that have room."""
        ...

    @property
    def capacities(self) -> list[int]:
        """Tokens of capacity of each layer."""
        ...

    @property
    def capacity(self) -> int:
        """Tokens of capacity of the largest layer."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, used or not."""
        ...

    def clear_memory(self, slot: int) -> None:
        """Forget all of an empty slot, so that nothing of an earlier request is read.

        The layers of an only slot may become smaller.
        """
        ...

    def grow(self, layer: int, capacity: int) -> None:
        """Enlarge a layer's rows to at least `capacity` tokens; what they hold stays."""
        ...

    def gather(
        self,
        source: KVCache,
        source_slot: int,
        slot: int,
        kept: KeptUnits,
        lens: Ints,
        block_size: int,
    ) -> None:
        """Copy the kept units of a slot of `source` to the front of `slot`, in order.

        Unit j is the `block_size` rows from j * block_size on, less those at or beyond `lens`
        int32 [L, Rl], the valid rows of the source. `source` may be this cache, slot for slot.
        """
        ...

    def copy_memory(self, source: KVCache, source_slot: int, slot: int) -> None:
        """Copy the queries and the states that belong to a slot of another cache."""
        ...

    def move_block(self, slot: int, source: int, targets: Ints, size: int) -> None:
        """Copy the block of `size` rows number `source` over block `targets[layer, row]`.

        `targets` int32 [L, R], R = 1 when all heads of a layer move the same block. No block is
        its own target.
        """
        ...

    def read(self, slot: int, layer: int) -> dict[str, Array]:
        """Return what a slot holds in a layer: KEY and VALUE [Hkv, C, D], and states by name.

        The arrays may be the cache's own memory: copy what must outlive the next step.
        """
        ...

    def write(self, slot: int, layer: int, arrays: Mapping[str, Array]) -> None:
        """Overwrite what `read` returns, or the first n rows: KEY [Hkv, n, D] with n <= C."""
        ...

    def read_queries(self, slot: int) -> Array | None:
        """Return a slot's query ring [W + 1, L*Hq*D] (see `read`), None without a window."""
        ...

    def write_queries(self, slot: int, ring: Array) -> None:
        """Overwrite a slot's query ring."""
        ...
