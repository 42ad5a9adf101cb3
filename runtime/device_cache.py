"""The key and value cache in the memory of a device, whose rows kernels move between steps."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np

from kvsift.builder.package import Manifest
from kvsift.runtime.cache import KEY, VALUE, Array, Ints, KeptUnits, KVCache
from kvsift.runtime.devices import Memory
from kvsift.runtime.devices.mirror import Mirror
from kvsift.runtime.devices.tensors import RING, Tensor, Tensors
from kvsift.runtime.kernels import FillHolesArgs, GatherArgs


class DeviceCache:
    """A `KVCache` in the memory of a device, with room for `slots` sequences.

    Every method only enqueues, but those that read or write arrays of the host, which also wait.
    `moves` carries the numbers of rows to the device.
    """

    def __init__(
        self, device: Memory, moves: Mirror, manifest: Manifest, slots: int, capacity: int
    ) -> None:
        self._device, self._moves = device, moves
        self.tensors = Tensors(device, manifest, slots, capacity)

    @property
    def slots(self) -> int:
        """Sequences that have room."""
        return self.tensors.slots

    @property
    def capacities(self) -> list[int]:
        """Tokens of capacity of each layer."""
        return list(self.tensors.capacities)

    @property
    def capacity(self) -> int:
        """Tokens of capacity of the largest layer."""
        return max(self.tensors.capacities)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, used or not."""
        held = self.tensors
        each = (held.by_name[n].slot_bytes(c) for n in (KEY, VALUE) for c in held.capacities)
        return held.slots * sum(each)

    def clear_memory(self, slot: int) -> None:
        """Forget all of an empty slot, so that nothing of an earlier request is read.

        An only slot's layers return to the capacity that they had at first: attention pays for it.
        """
        if self.slots == 1:
            self.tensors.shrink()
        self.tensors.clear(slot, list(self.tensors.by_name.values()))

    def grow(self, layer: int, capacity: int) -> None:
        """Enlarge a layer's rows to at least `capacity` tokens; what they hold stays."""
        if capacity > self.tensors.capacities[layer]:
            self.tensors.grow(layer, capacity)

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
        mine, theirs = self.tensors, self._same_kind(source)
        if theirs is not mine:
            mine.clear(slot, list(mine.by_row().values()))
        real = np.arange(kept.keep.shape[2]) < kept.counts[..., None]
        units = np.where(real, kept.keep, np.int32(-1))
        for layers, (first, second) in product(mine.runs(theirs), self._pairs()):
            held, target = theirs.by_name[first], mine.by_name[first]
            places = self._moves.put(
                _slot_numbers(source_slot, held.spacing, layers),
                _slot_numbers(slot, target.spacing, layers),
                units[layers.start : layers.stop],
                lens[layers.start : layers.stop],
            )
            args = GatherArgs(
                source=held.bases[layers.start],
                target=target.bases[layers.start],
                second_source=_base(theirs, second, layers),
                second_target=_base(mine, second, layers),
                **_named("source_slots target_slots units lens", places),
                Bs=len(layers) * held.spacing,
                Bt=len(layers) * target.spacing,
                Hkv=mine.heads,
                Cs=theirs.capacities[layers.start],
                Ct=mine.capacities[layers.start],
                **_named("E R N", (len(layers), *units.shape[1:])),
                Rl=lens.shape[1],
                row_bytes=target.row_bytes,
                block_size=block_size,
                in_place=theirs is mine,
            )
            self._device.gather(args)

    def copy_memory(self, source: KVCache, source_slot: int, slot: int) -> None:
        """Copy the queries and the states that belong to a slot of another cache."""
        theirs = self._same_kind(source)
        for name, tensor in self.tensors.by_slot().items():
            size = tensor.row_bytes
            for to, at in zip(tensor.bases, theirs.by_name[name].bases, strict=True):
                self._device.copy(to + slot * size, at + source_slot * size, size)

    def move_block(self, slot: int, source: int, targets: Ints, size: int) -> None:
        """Copy the block of `size` rows number `source` over block `targets[layer, row]`."""
        mine = self.tensors
        for layers, (first, second) in product(mine.runs(mine), self._pairs()):
            tensor, to = mine.by_name[first], targets[layers.start : layers.stop]
            numbers = _slot_numbers(slot, tensor.spacing, layers)
            places = self._moves.put(numbers, np.full_like(to, source), to)
            args = FillHolesArgs(
                data=tensor.bases[layers.start],
                second=_base(mine, second, layers),
                **_named("slots origin target", places),
                B=len(layers) * tensor.spacing,
                Hkv=mine.heads,
                C=mine.capacities[layers.start],
                **_named("E R M", (len(layers), to.shape[1], 1)),
                row_bytes=tensor.row_bytes,
                block_size=size,
            )
            self._device.fill_holes(args)

    def read(self, slot: int, layer: int) -> dict[str, Array]:
        """Return what a slot holds in a layer, copied to the host."""
        named = {n: t for n, t in self.tensors.by_name.items() if n != RING}
        made = {name: self._read(tensor, layer, slot) for name, tensor in named.items()}
        self._device.synchronize()
        return made

    def write(self, slot: int, layer: int, arrays: Mapping[str, Array]) -> None:
        """Overwrite what `read` returns, or the first rows of it."""
        for name, array in arrays.items():
            self._write(self.tensors.by_name[name], layer, slot, array)

    def read_queries(self, slot: int) -> Array | None:
        """Return a slot's query ring, copied to the host; None without a window."""
        if RING not in self.tensors.by_name:
            return None
        ring = self._read(self.tensors.by_name[RING], 0, slot)
        self._device.synchronize()
        return ring

    def write_queries(self, slot: int, ring: Array) -> None:
        """Overwrite a slot's query ring."""
        if RING in self.tensors.by_name:
            self._write(self.tensors.by_name[RING], 0, slot, ring)

    def release(self) -> None:
        """Give the memory back; the cache is of no use afterwards."""
        self.tensors.release()

    def _read(self, tensor: Tensor, layer: int, slot: int) -> Array:
        """Enqueue the copy of a slot of a layer into a new array."""
        array = np.empty(tensor.shape(self.tensors.capacities[layer]), tensor.dtype)
        source = self.tensors.address(tensor, layer, slot)
        self._device.copy(array.ctypes.data, source, array.nbytes)
        return array

    def _write(self, tensor: Tensor, layer: int, slot: int, given: Array) -> None:
        array = np.ascontiguousarray(given, tensor.dtype)
        target, source = self.tensors.address(tensor, layer, slot), array.ctypes.data
        if tensor.heads is None:
            self._device.copy(target, source, array.nbytes)
        else:
            width = array.shape[1] * tensor.row_bytes
            pitch = self.tensors.capacities[layer] * tensor.row_bytes
            self._device.copy_rows(target, pitch, source, width, width, tensor.heads)
        self._device.synchronize()  # `array` ends here

    def _pairs(self) -> list[tuple[str, str | None]]:
        """Return the tensors that one kernel moves: keys with values, then each state."""
        states = (n for n in self.tensors.by_row() if n not in (KEY, VALUE))
        return [(KEY, VALUE), *((name, None) for name in states)]

    def _same_kind(self, source: KVCache) -> Tensors:
        assert isinstance(source, DeviceCache), "caches of one engine are of one kind"
        return source.tensors


def _slot_numbers(slot: int, spacing: int, layers: range) -> Ints:
    """Return the number of a slot of each layer, counted through the slots of all layers."""
    return (np.arange(len(layers)) * spacing + slot).astype(np.int32)


def _base(tensors: Tensors, name: str | None, layers: range) -> int | None:
    return None if name is None else tensors.by_name[name].bases[layers.start]


def _named(names: str, values: tuple[int, ...] | list[int]) -> dict[str, Any]:
    return dict(zip(names.split(), values, strict=True))
