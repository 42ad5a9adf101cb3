"""What a slot holds: unit ids, lengths and the moves that an eviction asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvsift.builder.package import Layout, Manifest, ModelConfig, Policy
from kvsift.runtime.cache import KeptUnits, KVCache
from kvsift.runtime.seeds import seed_words
from kvsift.runtime.sessions import Evictions, Kept

Ints = NDArray[np.int32]


@dataclass
class Slot:
    """One sequence in a cache.

    `ids` int32 [L, R, N]: unit ids in row order, -1 beyond the end. `lens` int32 [L, Rl]: valid
    rows, Rl = 1 where the heads of a layer agree. `budgets` int32 [L]: units to keep per head,
    None when nothing is evicted. `recent`: newest positions forced beside the policy's own.
    """

    index: int
    ids: Ints
    lens: Ints
    block_size: int
    budgets: Ints | None
    interval: int
    seed: int = 0
    pins: tuple[tuple[int, int], ...] = ()
    recent: int = 0
    #: Units to keep by head, int32 [L, R], where the heads of a layer have budgets of their own.
    head_budgets: Ints | None = None
    #: Whether a head may exceed its budget while the layer does not.
    heads_compete: bool = False
    #: Tokens that may come before the next eviction: the room that a grown cache leaves.
    spare: int = 0
    #: True tokens so far.
    seen: int = 0
    #: Evictions so far: the Philox counter of the next one.
    steps: int = 0
    #: Tokens that evictions have dropped, the mean over layers and heads.
    dropped: float = 0.0
    coverages: list[float] = field(default_factory=list)

    @property
    def head_limits(self) -> Ints | None:
        """Units that no head may exceed, int32 [L, R]; None where only a layer's sum counts."""
        return None if self.heads_compete else self.head_budgets

    @property
    def units(self) -> Ints:
        """Units that the valid rows fill or touch, int32 [L, Rl]."""
        return -(-self.lens // self.block_size)

    @property
    def length(self) -> int:
        """Valid rows of the longest row: of every row where all agree."""
        return int(self.lens.max())

    @property
    def rows_held(self) -> float:
        """Mean number of valid rows over layers and heads."""
        return float(self.lens.mean())

    def append(self, tokens: int) -> None:
        """Count `tokens` appended rows and give new units their ids."""
        size, before = self.block_size, self.units
        self.lens = self.lens + np.int32(tokens)
        self.seen += tokens
        last = (self.seen - 1) // size
        count = self.units - before  # the same everywhere: rows end inside the same unit
        added = int(count.flat[0])
        if not added:
            return
        most = before.max() + added
        if most > self.ids.shape[2]:
            self.ids = np.pad(
                self.ids, ((0, 0), (0, 0), (0, int(most))), constant_values=np.int32(-1)
            )
        at = before[:, :, None] + np.arange(added, dtype=np.int64)
        at = np.broadcast_to(at, (*self.ids.shape[:2], added))
        new = np.arange(last - added + 1, last + 1, dtype=np.int32)
        np.put_along_axis(self.ids, at, np.broadcast_to(new, at.shape), axis=2)

    def is_over(self) -> bool:
        """Whether a layer holds more units than its budget: a prompt's end evicts then."""
        if self.head_limits is not None:
            return bool((self.units > self.head_limits).any())
        return self.budgets is not None and bool((self.units.mean(axis=1) > self.budgets).any())

    def is_full(self) -> bool:
        """Whether a layer has reached its budget plus one interval: a decode step evicts then."""
        if self.head_limits is not None:
            full = self.head_limits * self.block_size + self.interval
            return bool((self.lens >= full).any())
        return self.budgets is not None and bool(
            (self.lens.mean(axis=1) >= self.budgets * self.block_size + self.interval).any()
        )


def new_slot(
    model: ModelConfig,
    policy: Policy,
    index: int,
    units: int,
    budgets: Ints | None,
    *,
    seed: int = 0,
    pins: tuple[tuple[int, int], ...] = (),
    recent: int = 0,
    spare: int = 0,
    layout: Layout | None = None,
) -> Slot:
    """Return an empty slot with room for the ids of `units` units.

    `layout` is the graph's, where it is not the policy's own.
    """
    rows = model.num_kv_heads if policy.per_head else 1
    len_rows = model.num_kv_heads if (layout or policy.layout) == "head" else 1
    return Slot(
        index=index,
        ids=np.full((model.num_layers, rows, units), -1, np.int32),
        lens=np.zeros((model.num_layers, len_rows), np.int32),
        block_size=policy.block_size,
        budgets=budgets,
        interval=policy.decode_interval,
        seed=seed,
        pins=pins,
        recent=recent,
        spare=spare,
        heads_compete=policy.heads_compete,
    )


def evictions(slots: list[Slot], manifest: Manifest, prompt_end: bool) -> Evictions:
    """Return the step inputs for evicting slots; each counts this step's tokens already."""
    count = max(int(s.units.max()) for s in slots)
    layers, rows, _ = slots[0].ids.shape
    ids = np.full((layers, len(slots), rows, count), -1, np.int32)
    pins = np.zeros((len(slots), max(len(s.pins) + 1 for s in slots), 2), np.int32)
    budget = np.zeros((layers, len(slots), rows), np.int32)
    for e, slot in enumerate(slots):
        held = slot.ids[:, :, :count]  # fewer columns than a slot of longer rows has
        ids[:, e, :, : held.shape[2]] = held
        spans = list(slot.pins)
        if slot.recent:
            spans.append((slot.seen - slot.recent, slot.seen))
        pins[e, : len(spans)] = np.array(spans, np.int32).reshape(-1, 2)
        assert slot.budgets is not None
        own = slot.head_budgets
        budget[:, e] = slot.budgets[:, None] if own is None else own
    return Evictions(
        slots=np.array([s.index for s in slots], np.int32),
        tokens_seen=np.array([s.seen for s in slots], np.int32),
        unit_ids=ids,
        budget=budget,
        pin_spans=pins,
        seed=seed_words([s.seed for s in slots]),
        step=np.array([s.steps for s in slots], np.int32),
        prompt_end=np.full(len(slots), int(prompt_end), np.int32),
    )


def kept_units(kept: Kept, e: int) -> KeptUnits:
    """Return what evicting slot number `e` keeps."""
    counts = kept.keep_len[:, e]
    return KeptUnits(kept.keep[:, e, :, : int(counts.max())], counts)


def every_unit(slot: Slot) -> KeptUnits:
    """Return all units of a slot."""
    layers, rows, _ = slot.ids.shape
    units = np.broadcast_to(slot.units, (layers, rows))
    every = np.arange(int(units.max()), dtype=np.int32)
    return KeptUnits(np.broadcast_to(every, (layers, rows, every.size)), units)


def move_to(cache: KVCache, scratch: KVCache, source: Slot, target: Slot, kept: KeptUnits) -> None:
    """Copy what a scratch slot keeps, in order, into a slot of `cache`, which grows as needed."""
    lens = _kept_rows(source, target.lens.shape[1], kept)
    for layer, most in enumerate(lens.max(axis=1)):
        cache.grow(layer, _room(int(most), target))
    cache.gather(scratch, source.index, target.index, kept, source.lens, source.block_size)
    cache.copy_memory(scratch, source.index, target.index)
    target.ids = _ids_of(source, kept, target.ids.shape[2])
    target.lens = lens
    target.seen, target.steps = source.seen, source.steps
    target.dropped = source.dropped + source.rows_held - target.rows_held


def past_lens(slots: Sequence[Slot], shared: bool, batch: int = 1) -> Ints:
    """Return the lengths of slots below `batch` as the graph takes them, see `names.py`.

    int32 [L, batch * rows]; [1, batch * rows] with `shared`, where all layers agree.
    """
    layers, rows = slots[0].lens.shape
    lens = np.zeros((layers, batch, rows), np.int32)
    for slot in slots:
        lens[:, slot.index] = slot.lens
    if shared:
        lens = lens[:1]
    return lens.reshape(len(lens), batch * rows)


def make_room(cache: KVCache, slot: Slot) -> None:
    """Enlarge layers in which a row of the slot has no place for the next token."""
    for layer, (most, capacity) in enumerate(
        zip(slot.lens.max(axis=1), cache.capacities, strict=True)
    ):
        if most >= capacity:
            cache.grow(layer, _room(int(most), slot))


def compact(cache: KVCache, slot: Slot, kept: KeptUnits, needs_order: bool) -> None:
    """Keep the given units of a slot.

    When exactly one whole block of each row goes and order does not matter, the last block fills
    the hole: source and target never overlap, since no block is partial then. Else rows are
    gathered.
    """
    before = slot.rows_held
    last = int(slot.units.flat[0]) - 1
    one_goes = bool((slot.units == last + 1).all() and (kept.counts == last).all())
    if slot.block_size > 1 and one_goes and not needs_order:
        total = last * (last + 1) // 2
        victims = (total - kept.keep.sum(axis=-1)).astype(np.int32)
        cache.move_block(slot.index, last, victims, slot.block_size)
        at = victims[..., None].astype(np.int64)
        np.put_along_axis(slot.ids, at, slot.ids[:, :, last : last + 1], 2)
        slot.lens = slot.lens - np.int32(slot.block_size)
        slot.ids[:, :, last:] = -1
    else:
        lens = _kept_rows(slot, slot.lens.shape[1], kept)
        cache.gather(cache, slot.index, slot.index, kept, slot.lens, slot.block_size)
        slot.ids = _ids_of(slot, kept, slot.ids.shape[2])
        slot.lens = lens
    slot.dropped += before - slot.rows_held


def _room(rows: int, slot: Slot) -> int:
    """Return the capacity for `rows` rows and the tokens to come, in whole units."""
    size = slot.block_size
    return -(-(rows + max(slot.spare, 1)) // size) * size


def _ids_of(slot: Slot, kept: KeptUnits, units: int) -> Ints:
    """Return the ids of the kept units, padded with -1 to at least `units`."""
    count = kept.keep.shape[2]
    picked = np.take_along_axis(slot.ids, np.maximum(kept.keep, 0).astype(np.int64), axis=2)
    picked = np.where(np.arange(count) < kept.counts[..., None], picked, np.int32(-1))
    ids = np.full((*slot.ids.shape[:2], max(units, count)), -1, np.int32)
    ids[:, :, :count] = picked
    return ids


def _kept_rows(slot: Slot, len_rows: int, kept: KeptUnits) -> Ints:
    """Return the number of kept rows of each layer, int32 [L, len_rows]."""
    size, (layers, rows, most) = slot.block_size, kept.keep.shape
    lens = np.broadcast_to(slot.lens, (layers, rows))
    held = np.clip(lens[..., None] - kept.keep * size, 0, size)
    real = np.arange(most) < kept.counts[..., None]
    counted = np.where(real, held, 0).sum(axis=2, dtype=np.int32)[:, :len_rows]
    return np.broadcast_to(counted, (layers, len_rows)).copy()
