"""Key and value caches on the host: fixed slots, compacted after each eviction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvsift.builder.package import Manifest

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Rows = NDArray[np.int64]


class KVCache:
    """The caches of all layers for `slots` sequences of up to `capacity` tokens.

    `keys[i]` and `values[i]` float32 [slots, Hkv, capacity, D]; `ring` float32
    [slots, W + 1, L*Hq*D] holds the newest queries of all layers, see `names.py`; None without a
    query window. Rows are addressed by slot and
    position in the slot; the first `len` rows of a slot are valid, nothing else is ever read.
    """

    def __init__(self, manifest: Manifest, slots: int, capacity: int) -> None:
        model, policy = manifest.model, manifest.policy
        self.slots = slots
        self.capacity = capacity
        shape = (slots, model.num_kv_heads, capacity, model.head_dim)
        layers = range(model.num_layers)
        self.keys: list[Floats] = [np.zeros(shape, np.float32) for _ in layers]
        self.values: list[Floats] = [np.zeros(shape, np.float32) for _ in layers]
        self.ring: Floats | None = None
        if policy.window:
            heads = model.num_heads if policy.window_heads == "all" else 1
            features = model.num_layers * heads * model.head_dim
            self.ring = np.zeros((slots, policy.window + 1, features), np.float32)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, used or not."""
        return sum(a.nbytes for a in (*self.keys, *self.values))

    def clear_window(self, slot: int) -> None:
        """Forget the slot's queries, so that nothing of an earlier request is read."""
        if self.ring is not None:
            self.ring[slot] = 0.0

    def grow(self, capacity: int) -> None:
        """Enlarge every slot to `capacity` tokens; the rows keep their place."""
        if capacity <= self.capacity:
            return
        for arrays in (self.keys, self.values):
            for i, old in enumerate(arrays):
                new = np.zeros((*old.shape[:2], capacity, old.shape[3]), np.float32)
                new[:, :, : self.capacity] = old
                arrays[i] = new
        self.capacity = capacity

    def gather(self, source: KVCache, source_slot: int, slot: int, rows: Sequence[Rows]) -> None:
        """Copy rows of a slot of `source` (self allowed) to the front of `slot`, in order.

        `rows[i]` int64 [n] for all heads of layer i, or [Hkv, n] for each of its own.
        """
        for i, index in enumerate(rows):
            for mine, theirs in ((self.keys, source.keys), (self.values, source.values)):
                held = theirs[i][source_slot]
                if index.ndim == 1:
                    picked = held[:, index]
                else:
                    picked = np.take_along_axis(held, index[:, :, None], axis=1)
                mine[i][slot, :, : picked.shape[1]] = picked

    def copy_window(self, source: KVCache, source_slot: int, slot: int) -> None:
        """Copy the query window of a slot of another cache."""
        if self.ring is not None and source.ring is not None:
            self.ring[slot] = source.ring[source_slot]

    def move_block(self, slot: int, source: int, targets: Ints, size: int) -> None:
        """Copy the block of `size` rows number `source` over block `targets[layer, row]`.

        `targets` int32 [L, R], R = 1 when all heads of a layer move the same block.
        """
        start = source * size
        for i, target in enumerate(targets):
            for array in (self.keys[i][slot], self.values[i][slot]):
                moved = array[:, start : start + size]
                if len(target) == 1:
                    to = int(target[0]) * size
                    array[:, to : to + size] = moved
                else:
                    for head, block in enumerate(target):
                        array[head, block * size : (block + 1) * size] = moved[head]

    def poison(self, slot: int, start: int) -> None:
        """Overwrite the rows from `start` on with NaN: a test that they are never read."""
        for array in (*self.keys, *self.values):
            array[slot, :, start:] = np.nan
