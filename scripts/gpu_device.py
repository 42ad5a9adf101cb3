"""Device memory, copies and timing for the GPU check: CUDA's runtime through ctypes, no more.

Everything else of the check knows a device by the class `Device` alone, so that it also runs on a
device that is host memory.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import math
import statistics
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Enqueues something on the stream that it is given.
Call = Callable[[int], None]

_P, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
#: The functions of CUDA's runtime that are called, with their arguments.
CUDART: dict[str, list[Any]] = {
    "cudaMalloc": [_P, _SIZE],
    "cudaFree": [_P],
    "cudaMemcpy": [_P, _P, _SIZE, _INT],
    "cudaMemcpyAsync": [_P, _P, _SIZE, _INT, _P],
    "cudaDeviceSynchronize": [],
    "cudaDeviceGetAttribute": [_P, _INT, _INT],
    "cudaStreamCreateWithFlags": [_P, ctypes.c_uint],
    "cudaStreamBeginCapture": [_P, _INT],
    "cudaStreamEndCapture": [_P, _P],
    "cudaGraphInstantiateWithFlags": [_P, _P, ctypes.c_ulonglong],
    "cudaGraphLaunch": [_P, _P],
    "cudaGraphExecDestroy": [_P],
    "cudaGraphDestroy": [_P],
    "cudaEventCreate": [_P],
    "cudaEventRecord": [_P, _P],
    "cudaEventSynchronize": [_P],
    "cudaEventElapsedTime": [_P, _P, _P],
    "cudaEventDestroy": [_P],
}
# Numbers of cudaDeviceAttr.
_CLOCK_KHZ, _PROCESSORS, _L2_BYTES, _MAJOR, _MINOR = 13, 16, 38, 75, 76
_TO_DEVICE, _TO_HOST, _WITHIN = 1, 2, 3
_NON_BLOCKING, _RELAXED = 1, 2
#: Seconds that one figure is measured for.
MEASURED = 0.03


class DeviceError(Exception):
    """The device is not usable any more."""


@dataclass(frozen=True)
class Array:
    """Memory of a device with a shape, as `kvsift.runtime.kernels.pointer` reads it."""

    address: int
    shape: tuple[int, ...]
    nbytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"data": (self.address, False), "shape": self.shape, "version": 3}


class Device(ABC):
    """What the check needs of a device: memory, copies, waiting, time."""

    name: str
    #: Such as "90"; empty for a device that nothing has to be compiled for.
    architecture: str
    l2_bytes: int
    #: Multiply-adds count twice.
    fp32_flops: float

    def __init__(self) -> None:
        self._held: list[int] = []

    @abstractmethod
    def allocate(self, nbytes: int) -> int:
        """Return the address of new memory, aligned to 16 bytes at least."""

    @abstractmethod
    def free(self, address: int) -> None:
        """Give memory back."""

    @abstractmethod
    def copy_in(self, address: int, host: int, nbytes: int) -> None:
        """Copy from host memory."""

    @abstractmethod
    def copy_out(self, host: int, address: int, nbytes: int) -> None:
        """Copy to host memory."""

    @abstractmethod
    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy within the device."""

    @abstractmethod
    def sync(self) -> None:
        """Wait for everything; raise DeviceError if anything went wrong."""

    @abstractmethod
    def seconds(self, calls: Sequence[Call]) -> float:
        """Return the seconds that the calls take, one after another."""

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Free what is allocated inside."""
        mark = len(self._held)
        try:
            yield
        finally:
            for address in self._held[mark:]:
                self.free(address)
            del self._held[mark:]

    def empty(self, shape: tuple[int, ...], itemsize: int) -> Array:
        """Return new memory of a shape until the scope ends."""
        nbytes = math.prod(shape) * itemsize
        address = self.allocate(max(16, nbytes))
        self._held.append(address)
        return Array(address, shape, nbytes)

    def upload(self, array: NDArray[Any]) -> Array:
        """Return a copy of a host array until the scope ends."""
        array = np.ascontiguousarray(array)
        made = self.empty(array.shape, array.itemsize)
        self.copy_in(made.address, array.ctypes.data, made.nbytes)
        return made


def driver_trouble() -> str:
    """Return why there is no GPU to use, as the driver tells; empty if there is one."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver (libcuda.so.1)"
    count = ctypes.c_int(0)
    if code := cuda.cuInit(0):
        return f"the NVIDIA driver does not start (cuInit gives {code})"
    cuda.cuDeviceGetCount(ctypes.byref(count))
    return "" if count.value else "the NVIDIA driver has no device"


def driver_name() -> str:
    """Return the name of the first GPU."""
    text = ctypes.create_string_buffer(96)
    ctypes.CDLL("libcuda.so.1").cuDeviceGetName(text, len(text), 0)
    return text.value.decode()


def cudart_paths(nvcc: str | None) -> list[str]:
    """Return where CUDA's runtime library may be, the likeliest place first."""
    found: list[Path] = []
    homes = [Path(nvcc).resolve().parents[1]] if nvcc else []
    homes += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    for home in homes:
        for folder in (home / "lib64", home / "lib", *home.glob("targets/*/lib")):
            found += sorted(folder.glob("libcudart.so*"))
    for entry in map(Path, sys.path):
        found += sorted(entry.glob("nvidia/c*/lib/libcudart.so*"))
    name = ctypes.util.find_library("cudart")
    return [*map(str, found), *([name] if name else []), "libcudart.so"]


def load_cudart(nvcc: str | None) -> ctypes.CDLL:
    """Load CUDA's runtime library and declare its functions."""
    for path in cudart_paths(nvcc):
        try:
            lib = ctypes.CDLL(path)
        except OSError:
            continue
        for name, arguments in CUDART.items():
            getattr(lib, name).argtypes = arguments
        lib.cudaGetErrorString.restype = ctypes.c_char_p
        return lib
    raise DeviceError(
        "no libcudart.so: install the CUDA toolkit, or pip install 'nvidia-cuda-runtime==13.0.*'"
    )


class Cuda(Device):
    """The first GPU, through CUDA's runtime."""

    def __init__(self, lib: Any) -> None:
        super().__init__()
        self._lib = lib
        major, minor = self._attribute(_MAJOR), self._attribute(_MINOR)
        self.architecture = f"{major}{minor}"
        processors = self._attribute(_PROCESSORS)
        self.l2_bytes = self._attribute(_L2_BYTES)
        lanes = 64 if self.architecture == "80" else 128
        self.fp32_flops = 2.0 * lanes * processors * self._attribute(_CLOCK_KHZ) * 1e3
        self.name = f"{driver_name()}, {processors} multiprocessors, sm_{self.architecture}"
        self._stream = self._new("cudaStreamCreateWithFlags", _NON_BLOCKING)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._lib, name)(*arguments)
        if code:
            reason = self._lib.cudaGetErrorString(code).decode()
            raise DeviceError(f"{name} failed: {reason} (CUDA error {code})")

    def _new(self, name: str, *arguments: Any) -> int:
        made = ctypes.c_void_p()
        self._call(name, ctypes.byref(made), *arguments)
        return int(made.value or 0)

    def _attribute(self, number: int) -> int:
        value = ctypes.c_int()
        self._call("cudaDeviceGetAttribute", ctypes.byref(value), number, 0)
        return value.value

    def allocate(self, nbytes: int) -> int:
        return self._new("cudaMalloc", nbytes)

    def free(self, address: int) -> None:
        self._call("cudaFree", address)

    def copy_in(self, address: int, host: int, nbytes: int) -> None:
        self._call("cudaMemcpy", address, host, nbytes, _TO_DEVICE)

    def copy_out(self, host: int, address: int, nbytes: int) -> None:
        self._call("cudaMemcpy", host, address, nbytes, _TO_HOST)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._call("cudaMemcpyAsync", target, source, nbytes, _WITHIN, stream)

    def sync(self) -> None:
        self._call("cudaDeviceSynchronize")

    def seconds(self, calls: Sequence[Call]) -> float:
        # As one graph: Python would take longer to enqueue a small kernel than it runs.
        stream = self._stream
        self.sync()  # copies from the host may still be under way
        for call in calls:  # loads the code of the kernels
            call(stream)
        self.sync()
        self._call("cudaStreamBeginCapture", stream, _RELAXED)
        for call in calls:
            call(stream)
        graph = self._new_graph(stream)
        run = self._new("cudaGraphInstantiateWithFlags", graph, 0)
        try:
            self._passes(run, 1)
            passes = max(1, min(1000, round(MEASURED / 5 / max(1e-6, self._passes(run, 1)))))
            return statistics.median(self._passes(run, passes) for _ in range(5))
        finally:
            self._call("cudaGraphExecDestroy", run)
            self._call("cudaGraphDestroy", graph)

    def _new_graph(self, stream: int) -> int:
        graph = ctypes.c_void_p()
        self._call("cudaStreamEndCapture", stream, ctypes.byref(graph))
        return int(graph.value or 0)

    def _passes(self, run: int, count: int) -> float:
        """Seconds of one of `count` launches of a graph."""
        events = [self._new("cudaEventCreate") for _ in range(2)]
        self._call("cudaEventRecord", events[0], self._stream)
        for _ in range(count):
            self._call("cudaGraphLaunch", run, self._stream)
        self._call("cudaEventRecord", events[1], self._stream)
        self._call("cudaEventSynchronize", events[1])
        ms = ctypes.c_float()
        self._call("cudaEventElapsedTime", ctypes.byref(ms), *events)
        for event in events:
            self._call("cudaEventDestroy", event)
        return ms.value / 1e3 / count
