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
    and row; of each row only the first `len` entries are valid. GroupQueryAttention reads nothing
    else; the portable form multiplies the rest by 0, so there it is kept at 0: what one request
    left behind, were it NaN, would reach the next one otherwise.
    """

    def __init__(self, manifest: Manifest, slots: int, capacity: int | Sequence[int]) -> None:
        model, policy = manifest.model, manifest.policy
        layers = model.num_layers
        sizes = [capacity] * layers if isinstance(capacity, int) else list(capacity)
        self.slots = slots
        #: Spoil what is evicted, moved away or stale with NaN: tests show that it changes nothing.
        self.poison = False
        self._zero_stale = manifest.attention != "gqa"
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
        """Forget all of an empty slot, so that nothing of an earlier request is read."""
        self._end_rows(slot, 0)
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
        made = []
        for arrays in (self.keys, self.values, *self._by_row):
            held = arrays[layer]
            grown = np.zeros((*held.shape[:2], capacity, *held.shape[3:]), np.float32)
            grown[:, :, :old] = held
            made.append((arrays, grown))
        for arrays, grown in made:  # all or none: memory may end in between
            arrays[layer] = grown

    def gather(
        self, source: KVCache, source_slot: int, slot: int, rows: Sequence[LayerRows]
    ) -> None:
        """Copy rows of a slot of `source` (self allowed) to the front of `slot`, in order."""
        if self.poison:
            self._poison_rows(slot, rows if source is self else None)
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
        self._end_rows(slot, _lengths(rows))
        if self.poison and source is not self:
            source._poison_rows(source_slot, None)

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
        self._end_rows(slot, start)

    def _end_rows(self, slot: int, ends: Sequence[Sequence[int]] | int) -> None:
        """Zero (or spoil) what follows the valid rows of a slot, from `ends` on.

        `ends` is one for all, or [L][1 or Hkv].
        """
        if not (self._zero_stale or self.poison):
            return
        value = 0.0 if self._zero_stale else np.nan
        for i, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            row = [ends] if isinstance(ends, int) else ends[i]
            for head, end in enumerate(row):
                heads = slice(None) if len(row) == 1 else head
                keys[slot, heads, end:] = value
                values[slot, heads, end:] = value

    def _poison_rows(self, slot: int, kept: Sequence[LayerRows] | None) -> None:
        """Fill all rows of a slot with NaN, or all but the kept ones."""
        for i, arrays in enumerate(zip(self.keys, self.values, strict=True)):
            for head in range(self._heads):
                gone = np.ones(self.keys[i].shape[2], bool)
                if kept is not None:
                    gone[_of_head(kept[i], head)] = False
                for array in arrays:
                    array[slot, head, gone] = np.nan


def _of_head(rows: LayerRows, head: int) -> Rows:
    """Return the rows of one head."""
    return rows[head] if isinstance(rows, list) or rows.ndim == 2 else rows


def _lengths(rows: Sequence[LayerRows]) -> list[list[int]]:
    """Return how many rows each layer keeps, for all heads or for each."""
    return [
        [len(r) for r in index] if isinstance(index, list) or index.ndim == 2 else [len(index)]
        for index in rows
    ]
