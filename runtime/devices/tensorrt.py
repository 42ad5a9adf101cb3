"""TensorRT on the machine's first NVIDIA GPU: a thin layer over its Python module.

Nothing is decided here. No line that calls TensorRT has run where there is no GPU; the calls are
checked by type and by name only (docs/tensorrt.md).
"""

from __future__ import annotations

import functools
from pathlib import Path

from kvsift.builder import plugin_library
from kvsift.builder.errors import EngineError
from kvsift.builder.package import PLAN
from kvsift.runtime.devices.cuda import CudaDevice, missing

try:
    import tensorrt as trt
except ImportError as error:  # engines of ONNX Runtime run without
    MISSING = str(error)
else:
    MISSING = ""


@functools.cache
def logger() -> trt.Logger:
    """Return the process's one logger: TensorRT keeps the first that it is given."""
    return trt.Logger(trt.Logger.WARNING)


class TensorRTContext:
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


class TensorRTDevice(CudaDevice):
    """A `Device`: see `devices/__init__.py`."""

    def __init__(self) -> None:
        if MISSING:
            raise missing(MISSING)
        library = plugin_library.find()
        super().__init__(library)
        self.version: str = trt.__version__
        registry = trt.get_plugin_registry()
        if registry.get_creator("KvAppend", self._kernels.version, "") is None:
            registry.load_library(str(library))
        self._engine: trt.ICudaEngine | None = None
        self._activations = self._activation_bytes = 0

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

    def context(self, profile: int) -> TensorRTContext:
        """Make a context that runs in the shared memory of activations."""
        assert self._engine is not None
        own = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(own)
        context.set_device_memory(self._activations, self._activation_bytes)
        context.set_optimization_profile_async(profile, self._stream)
        return TensorRTContext(context, self._stream)

    def release(self) -> None:
        """Let go of the engine and its memory, then of the device."""
        self._engine = None
        if self._activations:
            self.free(self._activations)
        super().release()
