"""Key and value caches on the host: fixed slots, compacted after each eviction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvsift.builder.package import Manifest, window_features
from kvsift.builder.states import STATES

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Rows = NDArray[np.int64]
#: Rows of one layer: the same [n] for all heads, [Hkv, n], or one array per head.
LayerRows = Rows | list[Rows]


class KVCache:
    """The caches of all layers for `slots` sequences.

    `keys[i]` and `values[i]` float32 [slots, Hkv, C_i, D] with C_i tokens of capacity; `ring`
    float32 [slots, W + 1, L*Hq*D] holds the newest queries of all layers, None without a query
    window; `states[name][i]` [slots, ...] as in `builder/states.py`. Rows are addressed by slot
    and row; of each row only the first `len` entries are valid, nothing else is ever read.
    """

    def __init__(self, manifest: Manifest, slots: int, capacity: int | Sequence[int]) -> None:
        model, policy = manifest.model, manifest.policy
        layers = model.num_layers
        sizes = [capacity] * layers if isinstance(capacity, int) else list(capacity)
        self.slots = slots
        self._heads = model.num_kv_heads
        shapes = [(slots, model.num_kv_heads, size, model.head_dim) for size in sizes]
        self.keys: list[Floats] = [np.zeros(shape, np.float32) for shape in shapes]
        self.values: list[Floats] = [np.zeros(shape, np.float32) for shape in shapes]
        self.ring: Floats | None = None
        if policy.window:
            features = layers * window_features(model, policy)
            self.ring = np.zeros((slots, policy.window + 1, features), np.float32)
        self.states: dict[str, list[Floats]] = {}
        for name in policy.states:
            dims = STATES[name].dims(model)
            self.states[name] = [
                np.zeros([slots, *(size if d == "C" else int(d) for d in dims)], np.float32)
                for size in sizes
            ]
        self._by_row = [arrays for n, arrays in self.states.items() if STATES[n].follows_rows]
        self._by_slot = [arrays for n, arrays in self.states.items() if not STATES[n].follows_rows]

    @property
    def capacities(self) -> list[int]:
        """Tokens of capacity of each layer."""
        return [a.shape[2] for a in self.keys]

    @property
    def capacity(self) -> int:
        """Tokens of capacity of the largest layer."""
        return max(self.capacities)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, used or not."""
        return sum(a.nbytes for a in (*self.keys, *self.values))

    def clear_memory(self, slot: int) -> None:
        """Forget the slot's queries and states, so that nothing of an earlier request is read."""
        if self.ring is not None:
            self.ring[slot] = 0.0
        for arrays in self.states.values():
            for array in arrays:
                array[slot] = 0.0

    def grow(self, layer: int, capacity: int) -> None:
        """Enlarge a layer's rows to at least `capacity` tokens; what they hold stays."""
        old = self.keys[layer].shape[2]
        if capacity <= old:
            return
        for arrays in (self.keys, self.values, *self._by_row):
            held = arrays[layer]
            grown = np.zeros((*held.shape[:2], capacity, *held.shape[3:]), np.float32)
            grown[:, :, :old] = held
            arrays[layer] = grown

    def gather(
        self, source: KVCache, source_slot: int, slot: int, rows: Sequence[LayerRows]
    ) -> None:
        """Copy rows of a slot of `source` (self allowed) to the front of `slot`, in order."""
        for i, index in enumerate(rows):
            pairs = [(self.keys, source.keys), (self.values, source.values)]
            pairs += zip(self._by_row, source._by_row, strict=True)
            for mine, theirs in pairs:
                held, target = theirs[i][source_slot], mine[i][slot]
                if isinstance(index, list) or index.ndim == 2:
                    for head, picked in enumerate(index):
                        target[head, : len(picked)] = held[head, picked]
                else:
                    target[:, : len(index)] = held[:, index]

    def copy_memory(self, source: KVCache, source_slot: int, slot: int) -> None:
        """Copy the queries and the states that belong to a slot of another cache."""
        if self.ring is not None and source.ring is not None:
            self.ring[slot] = source.ring[source_slot]
        for mine, theirs in zip(self._by_slot, source._by_slot, strict=True):
            for target, held in zip(mine, theirs, strict=True):
                target[slot] = held[source_slot]

    def move_block(self, slot: int, source: int, targets: Ints, size: int) -> None:
        """Copy the block of `size` rows number `source` over block `targets[layer, row]`.

        `targets` int32 [L, R], R = 1 when all heads of a layer move the same block.
        """
        start = source * size
        for i, target in enumerate(targets):
            for arrays in (self.keys, self.values, *self._by_row):
                array = arrays[i][slot]
                moved = array[:, start : start + size]
                if len(target) == 1:
                    to = int(target[0]) * size
                    array[:, to : to + size] = moved
                else:
                    for head, block in enumerate(target):
                        array[head, block * size : (block + 1) * size] = moved[head]

    def poison(self, slot: int, lens: Ints | int, value: float) -> None:
        """Overwrite the rows from `lens` ([L, 1 or Hkv], or one for all) on.

        For tests: what a row that is not valid holds changes nothing.
        """
        ends = np.broadcast_to(lens, (len(self.keys), self._heads))
        for i, row in enumerate(ends):
            for array in (self.keys[i], self.values[i]):
                for head, end in enumerate(row):
                    array[slot, head, end:] = value
