"""What a session asks of an accelerator: memory, copies, kernels, engines and recorded steps.

`cuda.py` and `tensorrt.py` are those of NVIDIA GPUs. All work is enqueued on one stream, in order;
only `synchronize` waits. Memory is told by address, sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvsift.runtime.kernels import FillHolesArgs, GatherArgs

Bytes = NDArray[np.uint8]
#: Every tensor begins at a multiple of it, bytes.
ALIGNMENT = 256
#: A recorded step, as the device names it.
Graph = Any


class Context(Protocol):
    """An engine at given shapes and addresses, which stay until they are bound anew."""

    def bind(self, name: str, address: int, shape: tuple[int, ...]) -> None:
        """Give an input or output its memory and shape. Raises EngineError if it has no place."""
        ...

    def run(self) -> None:
        """Enqueue the engine once; every input and output is bound."""
        ...


class Memory(Protocol):
    """Memory of one accelerator, and what moves it. Any method may raise EngineError."""

    def allocate(self, nbytes: int) -> int:
        """Return the address of new memory of the arena, aligned to ALIGNMENT."""
        ...

    def free(self, address: int) -> None:
        """Give memory back to the arena once what is enqueued has used it."""
        ...

    def host_block(self, nbytes: int) -> Bytes:
        """Return page-locked memory of the host, which `copy` reads and writes without waiting."""
        ...

    def free_host(self, block: Bytes) -> None:
        """Release a host block; nothing enqueued may use it any more."""
        ...

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Enqueue a copy between any two addresses, of the device or of the host."""
        ...

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int
    ) -> None:
        """Enqueue a copy of `rows` pieces of `width` bytes, `pitch` bytes apart."""
        ...

    def zero(self, address: int, nbytes: int) -> None:
        """Enqueue a fill with zeros."""
        ...

    def gather(self, args: GatherArgs) -> None:
        """Enqueue the kernel `kv_gather`."""
        ...

    def fill_holes(self, args: FillHolesArgs) -> None:
        """Enqueue the kernel `kv_fill_holes`."""
        ...

    def synchronize(self) -> None:
        """Wait until all that was enqueued is done."""
        ...


class Device(Memory, Protocol):
    """One accelerator with the engine that runs on it. Any method may raise EngineError."""

    #: Name of the accelerator, as an engine records it.
    name: str
    #: Version of the library that runs engines.
    version: str

    def load(self, directory: Path) -> None:
        """Load the engine of a package."""
        ...

    def context(self, profile: int) -> Context:
        """Return a new context of the loaded engine for one of its profiles."""
        ...

    def record(self, work: Callable[[], None]) -> Graph:
        """Call `work` and return what it enqueued, which does not run, as one recorded step.

        The addresses and contexts in it must live as long as it does, and its contexts must not be
        bound anew.
        """
        ...

    def replay(self, graph: Graph) -> None:
        """Enqueue a recorded step."""
        ...

    def drop(self, graph: Graph) -> None:
        """Release a recorded step that no longer runs."""
        ...

    def release(self) -> None:
        """Give back the engine, the arena and the stream; the device is of no use afterwards."""
        ...
