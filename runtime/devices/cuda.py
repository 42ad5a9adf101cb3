"""The machine's first NVIDIA GPU: a thin layer over cuda-python.

Nothing is decided here. What comes after a call that succeeds has not run where there is no GPU
(docs/tensorrt.md).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvsift.builder.errors import EngineError
from kvsift.builder.gpu import gpu_name
from kvsift.runtime.devices import Bytes
from kvsift.runtime.kernels import FillHolesArgs, GatherArgs, Kernels

try:
    from cuda.bindings import driver
    from cuda.bindings import runtime as cuda
except ImportError as error:  # engines of ONNX Runtime run without
    MISSING = str(error)
else:
    MISSING = ""


def missing(what: str) -> EngineError:
    """Return the error for a package that is not there."""
    return EngineError(
        f"a TensorRT engine needs TensorRT, cuda-python and an NVIDIA GPU ({what}); "
        "pip install 'kvsift[tensorrt]'"
    )


def checked(result: tuple[Any, ...]) -> Any:
    """Return what a CUDA call gives beside its error. Raises EngineError with CUDA's reason."""
    error, *values = result
    if error != cuda.cudaError_t.cudaSuccess:
        text = cuda.cudaGetErrorString(error)[1].decode()
        raise EngineError(f"CUDA: {text} ({error.name}); see kvsift doctor")
    return values[0] if values else None


class CudaDevice:
    """What of a `Device` is CUDA's own, see `devices/__init__.py`; `library` holds the kernels."""

    def __init__(self, library: Path) -> None:
        if MISSING:
            raise missing(MISSING)
        checked(cuda.cudaSetDevice(0))
        self.name = gpu_name() or ""
        self._kernels = Kernels(library)
        self._stream = int(checked(cuda.cudaStreamCreate()))
        props = cuda.cudaMemPoolProps()
        props.allocType = cuda.cudaMemAllocationType.cudaMemAllocationTypePinned
        props.location.type = cuda.cudaMemLocationType.cudaMemLocationTypeDevice
        self._pool = checked(cuda.cudaMemPoolCreate(props))
        keep = cuda.cudaMemPoolAttr.cudaMemPoolAttrReleaseThreshold
        checked(cuda.cudaMemPoolSetAttribute(self._pool, keep, driver.cuuint64_t(2**64 - 1)))

    def allocate(self, nbytes: int) -> int:
        """Allocate from the pool."""
        return int(checked(cuda.cudaMallocFromPoolAsync(nbytes, self._pool, self._stream)))

    def free(self, address: int) -> None:
        """Free in the order of the stream."""
        checked(cuda.cudaFreeAsync(address, self._stream))

    def host_block(self, nbytes: int) -> Bytes:
        """Allocate page-locked memory."""
        address = int(checked(cuda.cudaMallocHost(nbytes)))
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))

    def free_host(self, block: Bytes) -> None:
        """Free page-locked memory."""
        checked(cuda.cudaFreeHost(block.ctypes.data))

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy; CUDA knows from the addresses which way."""
        kind = cuda.cudaMemcpyKind.cudaMemcpyDefault
        checked(cuda.cudaMemcpyAsync(target, source, nbytes, kind, self._stream))

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int
    ) -> None:
        """Copy in two dimensions."""
        kind = cuda.cudaMemcpyKind.cudaMemcpyDefault
        checked(
            cuda.cudaMemcpy2DAsync(
                target, target_pitch, source, source_pitch, width, rows, kind, self._stream
            )
        )

    def zero(self, address: int, nbytes: int) -> None:
        """Fill."""
        checked(cuda.cudaMemsetAsync(address, 0, nbytes, self._stream))

    def gather(self, args: GatherArgs) -> None:
        """Launch."""
        self._kernels.gather(args, self._stream)

    def fill_holes(self, args: FillHolesArgs) -> None:
        """Launch."""
        self._kernels.fill_holes(args, self._stream)

    def record(self, work: Callable[[], None]) -> Any:
        """Capture the stream into a CUDA graph."""
        mode = cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        checked(cuda.cudaStreamBeginCapture(self._stream, mode))
        try:
            work()
        finally:
            graph = checked(cuda.cudaStreamEndCapture(self._stream))
        made = checked(cuda.cudaGraphInstantiate(graph, 0))
        checked(cuda.cudaGraphDestroy(graph))
        return made

    def replay(self, graph: Any) -> None:
        """Launch a CUDA graph."""
        checked(cuda.cudaGraphLaunch(graph, self._stream))

    def drop(self, graph: Any) -> None:
        """Destroy a CUDA graph."""
        checked(cuda.cudaGraphExecDestroy(graph))

    def synchronize(self) -> None:
        """Wait for the stream."""
        checked(cuda.cudaStreamSynchronize(self._stream))

    def release(self) -> None:
        """Destroy the pool and the stream."""
        self.synchronize()
        checked(cuda.cudaMemPoolDestroy(self._pool))
        checked(cuda.cudaStreamDestroy(self._stream))
