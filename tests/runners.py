"""Runs one op by itself; every implementation of the ops has an entry in IMPLEMENTATIONS."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from kernel_builds import library
from kernel_run import run_kernel
from numpy.typing import NDArray

from kvsift.builder import ops
from kvsift.builder.bodies import Dims, body
from kvsift.runtime.kernels import Kernels

Array = NDArray[np.generic]
Arrays = Mapping[str, Array]
Outputs = list[NDArray[np.generic]]
Run = Callable[[str, Mapping[str, ops.Value], Dims, Arrays], Outputs]

_SESSIONS: dict[tuple[object, ...], ort.InferenceSession] = {}


def one_op_model(
    op_name: str, attrs: Mapping[str, ops.Value], dims: Dims, float_type: ir.DataType
) -> ir.Model:
    """Return a model that is one node of the op, with symbolic shapes, and its body."""
    op = ops.TABLE[op_name]
    types = {"float32": ir.DataType.FLOAT, "int32": ir.DataType.INT32, "T": float_type}
    inputs = [
        ir.Value(name=t.name, type=ir.TensorType(types[t.dtype]), shape=ir.Shape(t.shape))
        for t in op.inputs
    ]
    outputs = [
        ir.Value(name=t.name, type=ir.TensorType(types[t.dtype]), shape=ir.Shape(t.shape))
        for t in op.outputs
    ]
    node = ir.node(op_name, inputs, attrs, domain=ops.DOMAIN, outputs=outputs)
    imports = {"": 24, ops.DOMAIN: ops.OPSET}
    graph = ir.Graph(inputs, outputs, nodes=[node], opset_imports=imports, name="one_op")
    return ir.Model(graph, ir_version=11, functions=[body(op_name, attrs, dims)])


def run_onnx(op_name: str, attrs: Mapping[str, ops.Value], dims: Dims, inputs: Arrays) -> Outputs:
    """Run the op's ONNX body on ONNX Runtime's CPU."""
    half = any(a.dtype == np.float16 for a in inputs.values())
    key = (op_name, tuple(sorted(attrs.items())), dims, half)
    if key not in _SESSIONS:
        kind = ir.DataType.FLOAT16 if half else ir.DataType.FLOAT
        model = ir.to_proto(one_op_model(op_name, attrs, dims, kind))
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        _SESSIONS[key] = ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    outputs: Outputs = _SESSIONS[key].run(None, dict(inputs))
    return outputs


@functools.cache
def cpu_kernels() -> Kernels:
    """Return the kernels compiled for the CPU without a sanitizer."""
    return Kernels(library("plain"))


def run_cpu_cuda(
    op_name: str, attrs: Mapping[str, ops.Value], dims: Dims, inputs: Arrays
) -> Outputs:
    """Run the op's CUDA kernels on the CPU."""
    del dims
    return run_kernel(cpu_kernels(), op_name, attrs, inputs)


def run_fixed(op_name: str, attrs: Mapping[str, ops.Value], dims: Dims, inputs: Arrays) -> Outputs:
    """Run the fixed form of the op's body, which TensorRT for RTX builds, on ONNX Runtime."""
    return run_onnx(op_name, attrs, dataclasses.replace(dims, fixed=True), inputs)


IMPLEMENTATIONS: dict[str, Run] = {
    "onnx": run_onnx,
    "fixed": run_fixed,
    "cpu-cuda": run_cpu_cuda,
}
