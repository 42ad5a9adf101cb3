"""The GPU check on host memory, with kernels compiled for the CPU: LIBRARY JSON.

As a program it also hides every package but numpy, which is all that the check may need.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SCRIPTS = Path(__file__).parents[1] / "scripts"
HIDDEN = ("ml_dtypes", "onnx", "onnx_ir", "onnxruntime", "pytest", "scipy", "torch")


def host_device() -> Any:
    """A device of host memory, with the interface of the GPU's."""

    class Host(importlib.import_module("gpu_device").Device):  # type: ignore[misc]
        name, architecture, l2_bytes, fp32_flops = "host", "", 1 << 12, 1e9

        def __init__(self) -> None:
            super().__init__()
            self.blocks: dict[int, Any] = {}

        def allocate(self, nbytes: int) -> int:
            block = np.full(nbytes + 64, 0xFF, np.uint8)
            address = int(block.ctypes.data + 63) // 64 * 64
            self.blocks[address] = block
            return address

        def free(self, address: int) -> None:
            del self.blocks[address]

        def copy_in(self, address: int, host: int, nbytes: int) -> None:
            ctypes.memmove(address, host, nbytes)

        def copy_out(self, host: int, address: int, nbytes: int) -> None:
            ctypes.memmove(host, address, nbytes)

        def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
            ctypes.memmove(target, source, nbytes)

        def sync(self) -> None:
            pass

        def seconds(self, calls: Sequence[Callable[[int], None]]) -> float:
            start = time.perf_counter()
            for call in calls:
                call(0)
            return time.perf_counter() - start

    return Host()


def scale() -> Any:
    return importlib.import_module("gpu_measure").Scale(
        tokens=128, block=8, kv_heads=2, heads=4, head_dim=16, window=4, layers=2,
        step_tokens=64, most_copies=2,
    )  # fmt: skip


def main() -> None:
    """Run the check and write what it has found."""
    sys.modules.update(dict.fromkeys(HIDDEN))  # type: ignore[arg-type]
    sys.path.insert(0, str(SCRIPTS))
    gpu_check = importlib.import_module("gpu_check")
    gpu_check.prepare_imports()
    device = host_device()
    found = gpu_check.check(sys.argv[1], device, scale(), small=True)
    assert not device.blocks  # everything was given back
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
