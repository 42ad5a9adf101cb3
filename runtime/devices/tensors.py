"""Where the tensors of a cache lie in the memory of a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any

import numpy as np

from kvsift.builder.package import Manifest, window_features
from kvsift.builder.states import STATES
from kvsift.runtime.cache import KEY, VALUE
from kvsift.runtime.devices import ALIGNMENT, Memory

RING = "q_ring"


def numpy_type(name: str) -> np.dtype[Any]:
    """Return numpy's type of a type's name in the manifest; bfloat16 is one of ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        made: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return made
    return np.dtype("float32" if name == "float" else name)  # ONNX's name, which numpy takes as 64


@dataclass
class Tensor:
    """What the layers hold of one name.

    [slots, heads, C_i, *row] where it moves with the rows of the cache, else [slots, *row]
    (`heads` is None). `bases` are the addresses of the layers, at first `spacing` slots apart: the
    cache's slots, or more so that every layer is aligned. The query ring has only one.
    """

    dtype: np.dtype[Any]
    heads: int | None
    row: tuple[int, ...]
    bases: list[int] = field(default_factory=list)
    spacing: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, or of all that a slot holds."""
        return int(np.prod(self.row)) * self.dtype.itemsize

    def shape(self, capacity: int) -> tuple[int, ...]:
        """Return the shape of one slot of a layer."""
        return self.row if self.heads is None else (self.heads, capacity, *self.row)

    def slot_bytes(self, capacity: int) -> int:
        """Return the bytes of one slot of a layer."""
        return int(np.prod(self.shape(capacity))) * self.dtype.itemsize


class Tensors:
    """The tensors of a cache of `slots` sequences, all zero at first.

    `capacities`: tokens of each layer, `capacity` at first. The layers of a tensor lie one behind
    the other until they grow. `stamp` changes when one of them moves.
    """

    def __init__(self, device: Memory, manifest: Manifest, slots: int, capacity: int) -> None:
        model, policy = manifest.model, manifest.policy
        self.device = device
        self.slots = slots
        self.heads = model.num_kv_heads
        self.capacities = [capacity] * model.num_layers
        self.stamp = 0
        floats, single = numpy_type(manifest.dtype), np.dtype(np.float32)
        self.by_name = {
            name: Tensor(floats, self.heads, (model.head_dim,)) for name in (KEY, VALUE)
        }
        for name in policy.states:
            dims = STATES[name].dims(model)
            self.by_name[name] = (
                Tensor(single, self.heads, ())
                if STATES[name].follows_rows
                else Tensor(single, None, tuple(int(d) for d in dims))
            )
        if policy.window:
            features = model.num_layers * window_features(model, policy)
            self.by_name[RING] = Tensor(floats, None, (policy.window + 1, features))
        self._first = capacity
        #: The layers that lie in each allocation.
        self._blocks: dict[int, set[tuple[str, int]]] = {}
        for name in self.by_name:
            self._place(name)

    def by_row(self) -> dict[str, Tensor]:
        """Return the tensors that move with the rows of the cache."""
        return {n: t for n, t in self.by_name.items() if t.heads is not None}

    def by_slot(self) -> dict[str, Tensor]:
        """Return the tensors that belong to a sequence as a whole."""
        return {n: t for n, t in self.by_name.items() if t.heads is None}

    def address(self, tensor: Tensor, layer: int, slot: int) -> int:
        """Return where a slot of a layer begins."""
        return tensor.bases[layer] + slot * tensor.slot_bytes(self.capacities[layer])

    def clear(self, slot: int, tensors: Sequence[Tensor]) -> None:
        """Fill all that a slot holds of some tensors with zeros."""
        for tensor in tensors:
            for layer in range(len(tensor.bases)):
                size = tensor.slot_bytes(self.capacities[layer])
                self.device.zero(self.address(tensor, layer, slot), size)

    def grow(self, layer: int, capacity: int) -> None:
        """Move a layer to where each row has `capacity` tokens of room."""
        old = self.capacities[layer]
        for name, tensor in self.by_row().items():
            size = self.slots * tensor.slot_bytes(capacity)
            base = self._new_block([(name, layer)], size)
            width, pitch = old * tensor.row_bytes, capacity * tensor.row_bytes
            rows = self.slots * self.heads
            self.device.copy_rows(base, pitch, tensor.bases[layer], width, width, rows)
            self._leave((name, layer), base)
            tensor.bases[layer] = base
        self.capacities[layer] = capacity
        self.stamp += 1

    def shrink(self) -> None:
        """Lay empty layers out as they were at first: rows of no use cost a step time."""
        if all(capacity == self._first for capacity in self.capacities):
            return
        self.capacities = [self._first] * len(self.capacities)
        for name, tensor in self.by_row().items():
            for layer in range(len(tensor.bases)):
                self._leave((name, layer), -1)
            self._place(name)
        self.stamp += 1

    def runs(self, other: Tensors) -> Iterator[range]:
        """Yield the layers in groups that lie evenly spaced in both, of equal capacity in each.

        A kernel takes such a group for one tensor whose slots are those of all its layers.
        """
        start = 0
        for layer in range(1, len(self.capacities) + 1):
            if layer < len(self.capacities) and all(t.follows(layer) for t in (self, other)):
                continue
            yield range(start, layer)
            start = layer

    def follows(self, layer: int) -> bool:
        """Whether a layer lies right behind the one before it."""
        capacity = self.capacities[layer]
        return capacity == self.capacities[layer - 1] and all(
            t.bases[layer] - t.bases[layer - 1] == t.spacing * t.slot_bytes(capacity)
            for t in self.by_row().values()
        )

    def release(self) -> None:
        """Give all memory back."""
        for block in self._blocks:
            self.device.free(block)
        self._blocks.clear()

    def _place(self, name: str) -> None:
        """Give a tensor one piece of memory for all its layers, which have equal capacities."""
        tensor = self.by_name[name]
        count = 1 if name == RING else len(self.capacities)
        each = tensor.slot_bytes(self._first)
        step = ALIGNMENT // gcd(ALIGNMENT, each)
        tensor.spacing = -(-self.slots // step) * step
        size = tensor.spacing * each
        base = self._new_block([(name, i) for i in range(count)], count * size)
        tensor.bases = [base + i * size for i in range(count)]

    def _new_block(self, layers: list[tuple[str, int]], nbytes: int) -> int:
        block = self.device.allocate(nbytes)
        self.device.zero(block, nbytes)
        self._blocks[block] = set(layers)
        return block

    def _leave(self, layer: tuple[str, int], new: int) -> None:
        """Free the allocation that a layer has left, if it was the last one in it."""
        for block, layers in self._blocks.items():
            if block != new and layer in layers:
                layers.remove(layer)
                if not layers:
                    self.device.free(block)
                    del self._blocks[block]
                return
