"""Memory that exists twice, page-locked on the host and on the device, to carry small arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kvsift.runtime.devices import ALIGNMENT, Memory


@dataclass(frozen=True)
class Pair:
    """An array of the host and the address of its counterpart on the device."""

    array: NDArray[Any]
    address: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of both."""
        return tuple(self.array.shape)


class Mirror:
    """A host block and a device block of the same size, in which arrays are laid out.

    `stamp` changes whenever the blocks move; every pair made before is void then.
    """

    def __init__(self, device: Memory) -> None:
        self._device = device
        self._host = device.host_block(ALIGNMENT)
        self._address = device.allocate(ALIGNMENT)
        self._used = 0
        self.stamp = 0

    def lay_out(
        self, specs: Mapping[str, tuple[tuple[int, ...], DTypeLike]]
    ) -> tuple[dict[str, Pair], int]:
        """Return a pair for each (shape, dtype), from the front on, and the bytes of all.

        The blocks grow if they must; nothing enqueued may use them then.
        """
        places, end = {}, 0
        for name, (shape, dtype) in specs.items():
            places[name] = end
            # An empty tensor needs an address too.
            end += _aligned(max(1, int(np.prod(shape)) * np.dtype(dtype).itemsize))
        self._reserve(end)
        made = {n: self._pair(places[n], shape, dtype) for n, (shape, dtype) in specs.items()}
        return made, end

    def upload(self, nbytes: int) -> None:
        """Enqueue the copy of the first `nbytes` to the device."""
        self._device.copy(self._address, self._host.ctypes.data, nbytes)

    def download(self, nbytes: int) -> None:
        """Enqueue the copy of the first `nbytes` to the host."""
        self._device.copy(self._host.ctypes.data, self._address, nbytes)

    def put(self, *arrays: NDArray[Any]) -> list[int]:
        """Enqueue the upload of arrays, behind those since `reset`; return their addresses."""
        sizes = [_aligned(max(1, a.nbytes)) for a in arrays]
        if self._used + sum(sizes) > self._host.nbytes:
            self._device.synchronize()  # what was put before has been used
            self._used = 0
            self._reserve(sum(sizes))
        addresses = []
        for array, size in zip(arrays, sizes, strict=True):
            pair = self._pair(self._used, array.shape, array.dtype)
            pair.array[...] = array
            self._device.copy(pair.address, pair.array.ctypes.data, array.nbytes)
            addresses.append(pair.address)
            self._used += size
        return addresses

    def reset(self) -> None:
        """Begin again at the front: the device has been waited for."""
        self._used = 0

    def release(self) -> None:
        """Give both blocks back, once all that was enqueued is done."""
        self._device.free(self._address)
        self._device.synchronize()
        self._device.free_host(self._host)

    def _pair(self, at: int, shape: tuple[int, ...], dtype: DTypeLike) -> Pair:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        array = self._host[at : at + size].view(dtype).reshape(shape)
        return Pair(array, self._address + at)

    def _reserve(self, nbytes: int) -> None:
        if nbytes <= self._host.nbytes:
            return
        size = 1 << (nbytes - 1).bit_length()
        self.release()
        self._host, self._address = self._device.host_block(size), self._device.allocate(size)
        self.stamp += 1


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
