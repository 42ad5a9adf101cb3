"""Linear layers and the weight file: float32 matrices or weight-only integers.

Weights are written one by one to the external data file while the graph is being emitted, so that
no more than the matrices of one layer are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from kvsift.builder.graph import FLOAT, MICROSOFT, GraphBuilder

Quantize = Literal["none", "int8", "int4"]
ALIGNMENT = 4096
BLOCK = 32


class WeightFile:
    """Appends tensors to an external data file, aligned so that they can be memory-mapped.

    Floats are written as `floats`.
    """

    def __init__(
        self,
        path: Path,
        on_write: Callable[[int], None] | None = None,
        floats: ir.DataType = FLOAT,
    ) -> None:
        self.floats = floats
        self._path = path
        self._file = path.open("wb")
        self._on_write = on_write

    def add(self, name: str, array: NDArray[Any]) -> ir.ExternalTensor:
        """Write `array`, float32 as `floats`, and return the tensor that refers to it."""
        if array.dtype == np.float32:
            array = array.astype(self.floats.numpy(), copy=False)
        data = np.ascontiguousarray(array)
        offset = -(-self._file.tell() // ALIGNMENT) * ALIGNMENT
        self._file.seek(offset)
        self._file.write(data.view(np.uint8).data)
        if self._on_write:
            self._on_write(data.nbytes)
        return ir.ExternalTensor(
            self._path.name,
            offset,
            data.nbytes,
            ir.DataType.from_numpy(data.dtype),
            name=name,
            shape=ir.Shape(data.shape),
            base_dir=str(self._path.parent),
        )

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()


class Linear(Protocol):
    """Emits x @ W^T for a matrix W [out, in]."""

    def __call__(
        self, g: GraphBuilder, x: ir.Value, name: str, matrix: NDArray[np.float32]
    ) -> ir.Value:
        """Write the matrix and return the product."""
        ...


class FloatLinear:
    """MatMul with the matrix stored as [in, out]."""

    def __init__(self, weights: WeightFile) -> None:
        self._weights = weights

    def __call__(
        self, g: GraphBuilder, x: ir.Value, name: str, matrix: NDArray[np.float32]
    ) -> ir.Value:
        """Write the matrix and return the product."""
        stored = g.initializer(self._weights.add(name, matrix.T))
        return g.op("MatMul", x, stored, name=f"{name}.matmul")


class NBitsLinear:
    """MatMulNBits: symmetric integers with one scale per 32 inputs, int8 arithmetic."""

    def __init__(self, weights: WeightFile, bits: int) -> None:
        self._weights = weights
        self._bits = bits

    def __call__(
        self, g: GraphBuilder, x: ir.Value, name: str, matrix: NDArray[np.float32]
    ) -> ir.Value:
        """Quantise and write the matrix and return the product."""
        packed, scales = quantize_blocks(matrix, self._bits)
        return g.op(
            "MatMulNBits",
            x,
            g.initializer(self._weights.add(f"{name}.q{self._bits}", packed)),
            g.initializer(self._weights.add(f"{name}.scales", scales)),
            domain=MICROSOFT,
            name=f"{name}.matmul",
            K=matrix.shape[1],
            N=matrix.shape[0],
            bits=self._bits,
            block_size=BLOCK,
            accuracy_level=4,
        )


def quantize_blocks(
    matrix: NDArray[np.float32], bits: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Quantise [out, in] in blocks of 32 inputs: q = round(w / s) + 2^(bits-1), s = max|w| / top.

    Returns MatMulNBits' packed uint8 [out, blocks, 32 * bits / 8] and float32 scales
    [out * blocks]. A last block that is not full is padded with zeros.
    """
    rows, columns = matrix.shape
    blocks = -(-columns // BLOCK)
    padded = np.zeros((rows, blocks * BLOCK), np.float32)
    padded[:, :columns] = matrix
    grouped = padded.reshape(rows, blocks, BLOCK)
    zero = 1 << (bits - 1)
    scales = np.abs(grouped).max(-1) / np.float32(zero - 1)
    inverse = np.divide(1.0, scales, out=np.zeros_like(scales), where=scales > 0)
    codes = (np.rint(grouped * inverse[..., None]) + zero).astype(np.uint8)
    if bits == 4:
        codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return codes, scales.reshape(-1)


def make_linear(quantize: Quantize, weights: WeightFile) -> Linear:
    """Return the emitter for a weight precision."""
    if quantize == "none":
        return FloatLinear(weights)
    return NBitsLinear(weights, 8 if quantize == "int8" else 4)


def concat_rows(parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Stack matrices [out_i, in] (or biases) along their outputs."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=0)
