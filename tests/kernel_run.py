"""Runs the CUDA kernels of one op by itself; needs numpy only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsift.builder import ops
from kvsift.runtime.kernels import Kernels

Arrays = Mapping[str, NDArray[Any]]
Outputs = list[NDArray[Any]]


def run_kernel(
    kernels: Kernels, op_name: str, attrs: Mapping[str, ops.Value], inputs: Arrays
) -> Outputs:
    """Run the op's CUDA kernels on arrays of any float type, where `kernels` reads them."""
    op = ops.TABLE[op_name]
    given = [np.ascontiguousarray(inputs[t.name]) for t in op.inputs]
    floats = [str(a.dtype) for a, t in zip(given, op.inputs, strict=True) if t.dtype == "T"]
    dtype = floats[0] if floats else "float32"
    sizes = kernels.sizes(op_name, attrs, [a.shape for a in given])
    # NaN, or an absurd integer, where a kernel does not write.
    types = {"float32": (np.float32, np.nan), "int32": (np.int32, -77)}
    outputs: Outputs = [
        np.full(shape, types[t.dtype][1], types[t.dtype][0])
        for t, shape in zip(op.outputs, kernels.output_shapes(op_name, sizes), strict=True)
    ]
    # Of the exact size, so that AddressSanitizer sees more being used.
    workspace = np.full(kernels.workspace(op_name, attrs, dtype, sizes), 0xFF, np.uint8)
    kernels.run(op_name, attrs, dtype, given, outputs, workspace)
    return outputs
