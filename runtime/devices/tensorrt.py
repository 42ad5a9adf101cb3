"""The machine's first NVIDIA GPU: a thin layer over cuda-python and TensorRT.

Nothing is decided here. No line of it has been executed where there is no GPU; the calls are
checked by type and by name only (docs/tensorrt.md).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvsift.builder import plugin_library
from kvsift.builder.errors import EngineError
from kvsift.builder.gpu import gpu_name
from kvsift.builder.package import PLAN
from kvsift.runtime.devices import Bytes
from kvsift.runtime.kernels import FillHolesArgs, GatherArgs, Kernels

try:
    import tensorrt as trt
    from cuda.bindings import driver
    from cuda.bindings import runtime as cuda
except ImportError as error:  # engines of ONNX Runtime run without
    _MISSING = str(error)
else:
    _MISSING = ""


@functools.cache
def logger() -> trt.Logger:
    """Return the process's one logger: TensorRT keeps the first that it is given."""
    return trt.Logger(trt.Logger.WARNING)


def checked(result: tuple[Any, ...]) -> Any:
    """Return what a CUDA call gives beside its error. Raises EngineError with CUDA's reason."""
    error, *values = result
    if error != cuda.cudaError_t.cudaSuccess:
        text = cuda.cudaGetErrorString(error)[1].decode()
        raise EngineError(f"CUDA: {text} ({error.name}); see kvsift doctor")
    return values[0] if values else None


class GpuContext:
    """A `Context` of TensorRT: see `devices/__init__.py`."""

    def __init__(self, context: trt.IExecutionContext, stream: int) -> None:
        self._context, self._stream = context, stream
        engine = context.engine
        tensors = map(engine.get_tensor_name, range(engine.num_io_tensors))
        self._inputs = {n for n in tensors if engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT}

    def bind(self, name: str, address: int, shape: tuple[int, ...]) -> None:
        """Set an address, and the shape of an input."""
        fits = name not in self._inputs or self._context.set_input_shape(name, shape)
        if not (fits and self._context.set_tensor_address(name, address)):
            raise EngineError(f"TensorRT does not take {name} of shape {shape}; rebuild the engine")

    def run(self) -> None:
        """Enqueue the engine."""
        if not self._context.execute_async_v3(self._stream):
            raise EngineError("TensorRT did not start the step; its log above says why")


class GpuDevice:
    """A `Device`: see `devices/__init__.py`."""

    def __init__(self) -> None:
        if _MISSING:
            raise EngineError(
                "a TensorRT engine needs TensorRT, cuda-python and an NVIDIA GPU "
                f"({_MISSING}); pip install 'kvsift[tensorrt]'"
            )
        checked(cuda.cudaSetDevice(0))
        self.name = gpu_name() or ""
        self.version: str = trt.__version__
        library = plugin_library.find()
        self._kernels = Kernels(library)
        registry = trt.get_plugin_registry()
        if registry.get_creator("KvAppend", self._kernels.version, "") is None:
            registry.load_library(str(library))
        self._stream = int(checked(cuda.cudaStreamCreate()))
        props = cuda.cudaMemPoolProps()
        props.allocType = cuda.cudaMemAllocationType.cudaMemAllocationTypePinned
        props.location.type = cuda.cudaMemLocationType.cudaMemLocationTypeDevice
        self._pool = checked(cuda.cudaMemPoolCreate(props))
        keep = cuda.cudaMemPoolAttr.cudaMemPoolAttrReleaseThreshold
        checked(cuda.cudaMemPoolSetAttribute(self._pool, keep, driver.cuuint64_t(2**64 - 1)))
        self._engine: trt.ICudaEngine | None = None
        self._activations = self._activation_bytes = 0

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

    def load(self, directory: Path) -> None:
        """Deserialise the plan; all contexts share the memory of activations."""
        runtime = trt.Runtime(logger())
        self._engine = runtime.deserialize_cuda_engine((directory / PLAN).read_bytes())
        if self._engine is None:
            raise EngineError(
                f"TensorRT {self.version} cannot load {directory / PLAN} (its log above says why); "
                "rebuild it on this machine with build_engine --target tensorrt"
            )
        self._activation_bytes = max(1, self._engine.device_memory_size_v2)
        self._activations = self.allocate(self._activation_bytes)

    def context(self, profile: int) -> GpuContext:
        """Make a context that runs in the shared memory of activations."""
        assert self._engine is not None
        own = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(own)
        context.set_device_memory(self._activations, self._activation_bytes)
        context.set_optimization_profile_async(profile, self._stream)
        return GpuContext(context, self._stream)

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
        """Destroy what was made here."""
        self._engine = None
        if self._activations:
            self.free(self._activations)
        self.synchronize()
        checked(cuda.cudaMemPoolDestroy(self._pool))
        checked(cuda.cudaStreamDestroy(self._stream))
