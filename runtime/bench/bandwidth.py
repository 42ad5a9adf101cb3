"""The machine's read bandwidth: what a decode step could reach if it did nothing but read."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from kvsift.runtime.bench.timing import Series

#: Rows of the matrix that is read; far beyond any last-level cache with MIB_DEFAULT.
ROWS = 4096
MIB_DEFAULT = 256


class Bandwidth:
    """Reads a float32 matrix of `mib` MiB in two ways, each with `threads` threads.

    An ONNX Runtime MatMul [1, 4096] x [4096, N] with the matrix as an input, and numpy's maximum
    over one stripe per thread (the fastest of numpy's reductions). The faster one counts.
    """

    def __init__(self, threads: int, mib: int = MIB_DEFAULT) -> None:
        columns = mib * (1 << 20) // (4 * ROWS)
        self._matrix = np.random.default_rng(0).random((ROWS, columns), np.float32)
        self._pool = ThreadPoolExecutor(threads)
        self._stripes = np.array_split(self._matrix, threads)
        self._session = _matmul(threads)
        self._feeds = {
            "x": ort.OrtValue.ortvalue_from_numpy(np.ones((1, ROWS), np.float32)),
            "w": ort.OrtValue.ortvalue_from_numpy(self._matrix),
        }
        self.series = [
            Series("ONNX Runtime MatMul [1, K] x [K, N]", self._multiply, steps=3),
            Series("numpy maximum, one stripe per thread", self._maximum, steps=3),
        ]

    def gb_s(self) -> tuple[float, str]:
        """Return the largest of the medians in GB/s (10^9 bytes) and how it was read."""
        best = min(self.series, key=lambda s: s.median_ms)
        return self._matrix.nbytes / best.median_ms / 1e6, best.name

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown()

    def _multiply(self) -> None:
        self._session.run_with_ort_values(["y"], self._feeds)

    def _maximum(self) -> None:
        list(self._pool.map(np.max, self._stripes))


def _matmul(threads: int) -> Any:
    def tensor(name: str, shape: tuple[int | str, ...]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "read",
        [tensor("x", (1, ROWS)), tensor("w", (ROWS, "N"))],
        [tensor("y", (1, "N"))],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
