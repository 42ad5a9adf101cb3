"""The key and value cache on the host, in numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvsift.builder.package import Manifest, window_features
from kvsift.builder.states import STATES
from kvsift.runtime.cache import KEY, VALUE, Array, Ints, KeptUnits, KVCache

Floats = NDArray[np.float32]
#: Rows [n] of one layer: one array for all heads, or one per head.
LayerRows = list[NDArray[np.int64]]


class HostCache:
    """A `KVCache` in the memory of the host, with room for `slots` sequences.

    `keys[i]` and `values[i]` float32 [slots, Hkv, C_i, D]; `ring` float32 [slots, W + 1, L*Hq*D],
    None without a query window; `states[name][i]` [slots, ...] as in `builder/states.py`.
    GroupQueryAttention reads nothing behind the valid rows; the portable form multiplies it by 0,
    so there it is kept at 0.
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
        self.keys, self.values = _in_one_block(shapes, 2)
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
        self,
        source: KVCache,
        source_slot: int,
        slot: int,
        kept: KeptUnits,
        lens: Ints,
        block_size: int,
    ) -> None:
        """Copy the kept units of a slot of `source` (self allowed) to the front of `slot`."""
        theirs = self._same_kind(source)
        rows = [_layer_rows(kept, lens, block_size, i) for i in range(len(self.keys))]
        if self.poison:
            self._poison_rows(slot, rows if source is self else None)
        pairs = [(self.keys, theirs.keys), (self.values, theirs.values)]
        pairs += zip(self._by_row, theirs._by_row, strict=True)
        for to, origin in pairs:
            for i, picked in enumerate(rows):
                held, target = origin[i][source_slot], to[i][slot]
                if len(picked) == 1:
                    target[:, : len(picked[0])] = held[:, picked[0]]
                    continue
                for head, index in enumerate(picked):
                    target[head, : len(index)] = held[head, index]
        self._end_rows(slot, [[len(r) for r in picked] for picked in rows])
        if self.poison and theirs is not self:
            theirs._poison_rows(source_slot, None)

    def copy_memory(self, source: KVCache, source_slot: int, slot: int) -> None:
        """Copy the queries and the states that belong to a slot of another cache."""
        other = self._same_kind(source)
        if self.ring is not None and other.ring is not None:
            self.ring[slot] = other.ring[source_slot]
        for mine, theirs in zip(self._by_slot, other._by_slot, strict=True):
            for target, held in zip(mine, theirs, strict=True):
                target[slot] = held[source_slot]

    def move_block(self, slot: int, source: int, targets: Ints, size: int) -> None:
        """Copy the block of `size` rows number `source` over block `targets[layer, row]`."""
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

    def read(self, slot: int, layer: int) -> dict[str, Array]:
        """Return what a slot holds in a layer; the arrays are the cache's own memory."""
        return {name: arrays[layer][slot] for name, arrays in self._named()}

    def write(self, slot: int, layer: int, arrays: Mapping[str, Array]) -> None:
        """Overwrite what `read` returns, or the first rows of it."""
        targets = self.read(slot, layer)
        for name, array in arrays.items():
            target = targets[name]
            if array.ndim > 1:
                target = target[:, : array.shape[1]]
            target[...] = array

    def read_queries(self, slot: int) -> Array | None:
        """Return a slot's query ring, the cache's own memory; None without a window."""
        return None if self.ring is None else self.ring[slot]

    def write_queries(self, slot: int, ring: Array) -> None:
        """Overwrite a slot's query ring."""
        if self.ring is not None:
            self.ring[slot] = ring

    def _named(self) -> list[tuple[str, list[Floats]]]:
        return [(KEY, self.keys), (VALUE, self.values), *self.states.items()]

    def _same_kind(self, source: KVCache) -> HostCache:
        assert isinstance(source, HostCache), "caches of one engine are of one kind"
        return source

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
                    gone[kept[i][head if len(kept[i]) > 1 else 0]] = False
                for array in arrays:
                    array[slot, head, gone] = np.nan


def _layer_rows(kept: KeptUnits, lens: Ints, block_size: int, layer: int) -> LayerRows:
    """Return the kept rows of a layer, of all heads or of each."""
    counts = kept.counts[layer]
    lengths = np.broadcast_to(lens[layer], counts.shape)
    made = []
    for units, count, length in zip(kept.keep[layer], counts, lengths, strict=True):
        first = units[:count, None].astype(np.int64) * block_size
        rows = (first + np.arange(block_size)).reshape(-1)
        made.append(rows[rows < length])
    return made


def _in_one_block(shapes: Sequence[tuple[int, ...]], times: int) -> list[list[Floats]]:
    """Return `times` lists of zeros of these shapes, as parts of one allocation.

    numpy asks for huge pages from 4 MiB on, which one layer of a compact cache seldom is.
    """
    sizes = [int(np.prod(shape)) for shape in shapes]
    parts = np.split(np.zeros(times * sum(sizes), np.float32), np.cumsum(sizes * times)[:-1])
    arrays = [part.reshape(shape) for part, shape in zip(parts, [*shapes] * times, strict=True)]
    return [arrays[i : i + len(shapes)] for i in range(0, len(arrays), len(shapes))]
