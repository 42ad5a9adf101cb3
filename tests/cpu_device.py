"""A device of sessions that is the host: CUDA's order of work, ONNX Runtime for TensorRT.

Nothing that is enqueued happens before the device is waited for, memory that nobody has written
holds NaN, and freed memory turns to NaN, so that a session which relies on more than a GPU gives
goes wrong here too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from kvsift.runtime.kernels import FillHolesArgs, GatherArgs, Kernels

Bytes = NDArray[np.uint8]
Work = Callable[[], None]
#: What memory holds before it is written: NaN as any float type, -1 as an integer.
GARBAGE = 0xFF
TYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
}


def view(address: int, nbytes: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class CpuContext:
    """Binds like a context of TensorRT; its runs keep the bindings that they were enqueued with."""

    def __init__(self, device: CpuDevice, profile: int) -> None:
        self.device, self.profile = device, profile
        self.bound: dict[str, tuple[int, tuple[int, ...]]] = {}
        #: Recorded steps that hold this context and live.
        self.recorded = 0

    def bind(self, name: str, address: int, shape: tuple[int, ...]) -> None:
        assert not self.recorded, "a recorded context was bound anew"
        assert address % 256 == 0, f"{name} is not aligned"
        self.bound[name] = (address, shape)

    def run(self) -> None:
        self.device.do(partial(self.device.execute, dict(self.bound)))
        self.device.ran.append(self)


class CpuDevice:
    """Runs `model`, an ONNX graph in the TensorRT form with op bodies, and the CPU's kernels."""

    name = "host memory"
    version = "0"

    def __init__(self, kernels: Path, model: Callable[[Path], onnx.ModelProto]) -> None:
        self._kernels = Kernels(kernels)
        self._model = model
        self._queue: list[Work] = []
        self._recording: list[Work] | None = None
        self._memory: dict[int, Bytes] = {}
        self._host: dict[int, Bytes] = {}
        self._graphs: dict[int, tuple[list[Work], list[CpuContext]]] = {}
        self._session: ort.InferenceSession | None = None
        self.ran: list[CpuContext] = []
        self.contexts: list[CpuContext] = []
        self.replays = 0
        self.launches: list[str] = []
        self.bytes_most = self.bytes_now = 0
        self.released = False

    def do(self, work: Work) -> None:
        (self._queue if self._recording is None else self._recording).append(work)

    def allocate(self, nbytes: int) -> int:
        assert self._recording is None, "memory was asked for in a recorded step"
        held = np.full(nbytes + 256, GARBAGE, np.uint8)
        address = -(-held.ctypes.data // 256) * 256
        self._memory[address] = held
        self.bytes_now += nbytes
        self.bytes_most = max(self.bytes_most, self.bytes_now)
        return address

    def free(self, address: int) -> None:
        held = self._memory[address]
        self.bytes_now -= held.nbytes - 256

        def spoil() -> None:
            held.fill(GARBAGE)
            del self._memory[address]

        self.do(spoil)

    def host_block(self, nbytes: int) -> Bytes:
        block = np.full(nbytes, GARBAGE, np.uint8)
        self._host[block.ctypes.data] = block
        return block

    def free_host(self, block: Bytes) -> None:
        assert not self._queue, "a host block was freed while work may use it"
        del self._host[block.ctypes.data]

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self.do(lambda: ctypes.memmove(target, source, nbytes) and None)

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int
    ) -> None:
        for row in range(rows):
            self.copy(target + row * target_pitch, source + row * source_pitch, width)

    def zero(self, address: int, nbytes: int) -> None:
        self.do(lambda: ctypes.memset(address, 0, nbytes) and None)

    def gather(self, args: GatherArgs) -> None:
        self.launches.append("kv_gather")
        self.do(partial(self._kernels.gather, args))

    def fill_holes(self, args: FillHolesArgs) -> None:
        self.launches.append("kv_fill_holes")
        self.do(partial(self._kernels.fill_holes, args))

    def load(self, directory: Path) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = ort.InferenceSession(
            self._model(directory).SerializeToString(), options, ["CPUExecutionProvider"]
        )

    def context(self, profile: int) -> CpuContext:
        self.contexts.append(CpuContext(self, profile))
        return self.contexts[-1]

    def execute(self, bound: dict[str, tuple[int, tuple[int, ...]]]) -> None:
        """Run the graph on the memory that is bound."""
        assert self._session is not None
        binding = self._session.io_binding()
        for ends, bind in (
            (self._session.get_inputs(), binding.bind_ortvalue_input),
            (self._session.get_outputs(), binding.bind_ortvalue_output),
        ):
            for end in ends:
                address, shape = bound[end.name]
                dtype = np.dtype(TYPES[end.type])
                array = view(address, int(np.prod(shape)) * dtype.itemsize).view(dtype)
                bind(end.name, ort.OrtValue.ortvalue_from_numpy(array.reshape(shape)))
        self._session.run_with_iobinding(binding)

    def record(self, work: Work) -> int:
        self._recording, ran = [], len(self.ran)
        try:
            work()
        finally:
            recorded, self._recording = self._recording, None
        contexts = self.ran[ran:]
        del self.ran[ran:]
        for context in contexts:
            context.recorded += 1
        self._graphs[id(recorded)] = (recorded, contexts)
        return id(recorded)

    def replay(self, graph: int) -> None:
        self.replays += 1
        self._queue += self._graphs[graph][0]
        self.ran += self._graphs[graph][1]

    def drop(self, graph: int) -> None:
        for context in self._graphs.pop(graph)[1]:
            context.recorded -= 1

    def synchronize(self) -> None:
        assert self._recording is None, "a recorded step was waited for"
        queue, self._queue = self._queue, []
        for work in queue:
            work()

    def release(self) -> None:
        self.synchronize()
        assert not self._graphs, "recorded steps are left"
        assert not self._memory, f"{self.bytes_now} bytes of the arena are left"
        assert not self._host, "host blocks are left"
        self.released = True
