"""What a slot holds: unit ids, lengths and the moves that an eviction asks for."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvsift.builder.package import Manifest
from kvsift.runtime.cache import KVCache, Rows
from kvsift.runtime.seeds import split_seed
from kvsift.runtime.sessions import Evictions, Kept

Ints = NDArray[np.int32]


@dataclass
class Slot:
    """One sequence in a cache.

    `ids` int32 [L, R, N]: unit ids in row order, -1 beyond the end. `length`: valid rows.
    `seen`: true tokens so far. `budget`: units to keep, None when nothing is evicted.
    """

    index: int
    ids: Ints
    block_size: int
    budget: int | None
    interval: int
    seed: int = 0
    pins: tuple[tuple[int, int], ...] = ()
    length: int = 0
    seen: int = 0
    #: Evictions so far: the Philox counter of the next one.
    steps: int = 0
    coverages: list[float] = field(default_factory=list)

    @property
    def units(self) -> int:
        """Units that the valid rows fill or touch."""
        return -(-self.length // self.block_size)

    def append(self, tokens: int) -> None:
        """Count `tokens` appended rows and give new units their ids."""
        first, size = self.units, self.block_size
        self.length += tokens
        self.seen += tokens
        last = (self.seen - 1) // size
        count = self.units - first
        self.ids[:, :, first : self.units] = np.arange(last - count + 1, last + 1)

    def is_full(self) -> bool:
        """Whether the row has reached its budget plus one interval and must evict."""
        return self.budget is not None and (
            self.length >= self.budget * self.block_size + self.interval
        )

    def unit_rows(self, kept: Ints) -> Rows:
        """Return the rows int64 [..., n] of kept units [..., k]; a partial tail is cut."""
        size = self.block_size
        rows = kept[..., :, None].astype(np.int64) * size + np.arange(size)
        rows = rows.reshape(*kept.shape[:-1], -1)
        tail = self.units * size - self.length
        return rows[..., : rows.shape[-1] - tail] if tail else rows


def evictions(slots: list[Slot], manifest: Manifest, prompt_end: bool) -> Evictions:
    """Return the step inputs for evicting slots; each counts this step's tokens already."""
    count = max(s.units for s in slots)
    layers, rows, _ = slots[0].ids.shape
    ids = np.full((layers, len(slots), rows, count), -1, np.int32)
    pins = np.zeros((len(slots), max(1, *(len(s.pins) for s in slots)), 2), np.int32)
    for e, slot in enumerate(slots):
        ids[:, e, :, : slot.units] = slot.ids[:, :, : slot.units]
        if slot.pins:
            pins[e, : len(slot.pins)] = slot.pins
    budget = np.array([s.budget for s in slots], np.int32)
    return Evictions(
        slots=np.array([s.index for s in slots], np.int32),
        tokens_seen=np.array([s.seen for s in slots], np.int32),
        unit_ids=ids,
        budget=np.ascontiguousarray(np.broadcast_to(budget[:, None], (layers, len(slots), rows))),
        pin_spans=pins,
        seed=np.array([split_seed(s.seed) for s in slots], np.int32),
        step=np.array([s.steps for s in slots], np.int32),
        prompt_end=np.full(len(slots), int(prompt_end), np.int32),
    )


def kept_units(kept: Kept, e: int) -> Ints:
    """Return the kept unit indices int32 [L, R, k] of evicting slot number `e`."""
    return kept.keep[:, e, :, : int(kept.keep_len[0, e, 0])]


def move_to(cache: KVCache, scratch: KVCache, source: Slot, target: Slot, units: Ints) -> None:
    """Copy the kept `units` [L, R, k] of a scratch slot, in order, into a slot of `cache`."""
    rows = source.unit_rows(units)
    cache.gather(scratch, source.index, target.index, _per_layer(rows))
    cache.copy_window(scratch, source.index, target.index)
    count = units.shape[-1]
    target.ids[:] = -1
    target.ids[:, :, :count] = np.take_along_axis(source.ids, units.astype(np.int64), axis=2)
    target.length = rows.shape[-1]
    target.seen, target.steps = source.seen, source.steps


def compact(cache: KVCache, slot: Slot, units: Ints, needs_order: bool) -> None:
    """Keep `units` [L, R, k] of a slot.

    When exactly one whole block goes and order does not matter, the last block fills the hole:
    source and target never overlap, since no block is partial then. Else rows are gathered.
    """
    count, last = units.shape[-1], slot.units - 1
    if slot.block_size > 1 and count == last and not needs_order:
        total = last * (last + 1) // 2
        victims = (total - units.sum(axis=-1)).astype(np.int32)
        cache.move_block(slot.index, last, victims, slot.block_size)
        np.put_along_axis(
            slot.ids, victims[..., None].astype(np.int64), slot.ids[:, :, last : last + 1], 2
        )
        slot.length -= slot.block_size
    else:
        rows = slot.unit_rows(units)
        cache.gather(cache, slot.index, slot.index, _per_layer(rows))
        kept = np.take_along_axis(slot.ids, units.astype(np.int64), axis=2)
        slot.ids[:, :, :count] = kept
        slot.length = rows.shape[-1]
    slot.ids[:, :, count:] = -1


def _per_layer(rows: Rows) -> list[Rows]:
    """Return rows [n] where a layer shares one set, else [Hkv, n]."""
    return [layer[0] if len(layer) == 1 else layer for layer in rows]
