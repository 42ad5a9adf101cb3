"""Rows outside of any cache: what a session holds between turns, and a shared prefix."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvsift.builder.states import STATES
from kvsift.runtime.cache import KEY, VALUE, Array, KVCache
from kvsift.runtime.slots import Slot

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class HeldRows:
    """The valid rows of one sequence in the order of their positions, with all that goes with them.

    `ids` int32 [L, R, N]: unit ids, ascending, -1 beyond the end. `lens` int32 [L, Rl]: valid rows.
    `seen`: true tokens, evicted ones included. `steps`: evictions so far. `layers[i]`: keys and
    values [Hkv, n_i, D] under KEY and VALUE, n_i being the layer's longest row, and the states by
    name. `queries` [W + 1, L*Hq*D]: the ring of newest queries, None without a window.
    """

    ids: Ints
    lens: Ints
    seen: int
    steps: int
    layers: tuple[dict[str, Array], ...]
    queries: Array | None

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        queries = 0 if self.queries is None else self.queries.nbytes
        arrays = sum(a.nbytes for layer in self.layers for a in layer.values())
        return arrays + queries + self.ids.nbytes + self.lens.nbytes

    @property
    def longest(self) -> int:
        """Valid rows of the longest row."""
        return int(self.lens.max())

    def put(self, cache: KVCache, slot: Slot) -> None:
        """Write the rows into an empty slot of a cache, which grows as needed, and into its book.

        `slot` keeps its own budgets, seed and pins.
        """
        cache.clear_memory(slot.index)
        for layer, arrays in enumerate(self.layers):
            cache.grow(layer, arrays[KEY].shape[1])
            cache.write(slot.index, layer, arrays)
        if self.queries is not None:
            cache.write_queries(slot.index, self.queries)
        units = self.ids.shape[2]
        spare = max(0, slot.ids.shape[2] - units)
        slot.ids = np.pad(self.ids, ((0, 0), (0, 0), (0, spare)), constant_values=np.int32(-1))
        slot.lens = self.lens.copy()
        slot.seen, slot.steps = self.seen, self.steps
        slot.dropped = self.seen - slot.rows_held


def take_rows(cache: KVCache, slot: Slot) -> HeldRows:
    """Return a copy of what a slot holds, rows in the order of their positions."""
    layers, rows, _ = slot.ids.shape
    units = np.broadcast_to(slot.units, (layers, rows))
    most = int(units.max())
    ids = slot.ids[:, :, :most]
    order = np.argsort(np.where(ids < 0, np.iinfo(np.int32).max, ids), axis=2, kind="stable")
    queries = cache.read_queries(slot.index)
    return HeldRows(
        ids=np.take_along_axis(ids, order, axis=2),
        lens=slot.lens.copy(),
        seen=slot.seen,
        steps=slot.steps,
        layers=tuple(
            _layer(cache.read(slot.index, i), slot, order[i], units[i], slot.lens[i])
            for i in range(layers)
        ),
        queries=None if queries is None else np.array(queries),
    )


def _layer(
    arrays: dict[str, Array], slot: Slot, order: NDArray[np.int64], units: Ints, lens: Ints
) -> dict[str, Array]:
    """Return copies of a layer's arrays, those of rows [Hkv, C, ...] cut to the valid rows."""
    lengths = np.broadcast_to(lens, units.shape)
    size = slot.block_size
    picked = []
    for row, count, length in zip(order, units, lengths, strict=True):
        index = (row[:count, None] * size + np.arange(size)).reshape(-1)
        picked.append(index[index < length])  # the newest unit, the last one, may be partial
    held = {}
    for name, array in arrays.items():
        if name not in (KEY, VALUE) and not STATES[name].follows_rows:
            held[name] = np.array(array)
            continue
        if len(picked) == 1:
            held[name] = np.ascontiguousarray(array[:, picked[0]])
            continue
        made = np.zeros((array.shape[0], int(lengths.max()), *array.shape[2:]), array.dtype)
        for head, index in enumerate(picked):
            made[head, : len(index)] = array[head, index]
        held[name] = made
    return held
