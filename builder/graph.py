"""A small layer over onnx-ir: nodes with positional inputs, shared constants, typed values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import ArrayLike, DTypeLike

ONNX_OPSET = 24
IR_VERSION = 11
MICROSOFT = "com.microsoft"

FLOAT = ir.DataType.FLOAT
INT32 = ir.DataType.INT32
INT64 = ir.DataType.INT64


def value(name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
    """Return a named graph value; strings in `shape` are symbolic dimensions."""
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


class GraphBuilder:
    """Records nodes; equal constants are written once.

    A subgraph has a `branch` name: its constants become Constant nodes, and its values are named
    apart from the outer graph's, which they may read.
    """

    def __init__(self, branch: str = "", floats: ir.DataType = FLOAT) -> None:
        self.tape = ir.tape.Tape()
        #: T of the op table: the type of weights, activations and caches.
        self.floats = floats
        self._branch = branch
        self._count = 0
        #: Attributes of the op table's nodes by op, whose bodies the model must hold.
        self.calls: dict[str, dict[str, int | float]] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}

    def op(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        output: ir.Value | None = None,
        domain: str = "",
        name: str | None = None,
        **attributes: Any,
    ) -> ir.Value:
        """Append a node with one output and return it."""
        outputs = [output] if output is not None else 1
        return self.multi(
            op_type, *inputs, outputs=outputs, domain=domain, name=name, **attributes
        )[0]

    def multi(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        outputs: int | Sequence[ir.Value],
        domain: str = "",
        name: str | None = None,
        **attributes: Any,
    ) -> Sequence[ir.Value]:
        """Append a node with several outputs (their number, or the values) and return them."""
        self._count += 1
        name = name or f"{self._branch}{op_type}_{self._count}"
        if isinstance(outputs, int):
            outputs = [ir.Value(name=f"{name}.{i}") for i in range(outputs)]
        return self.tape.op_multi_out(
            op_type, inputs, attributes or None, domain=domain, name=name, outputs=outputs
        )

    def cast(self, x: ir.Value, to: ir.DataType, source: ir.DataType) -> ir.Value:
        """Return `x`, which has the type `source`, as `to`."""
        return x if to == source else self.op("Cast", x, to=to)

    def const(self, array: ArrayLike, dtype: DTypeLike = np.int64) -> ir.Value:
        """Return a constant; the same bytes give the same value."""
        data = np.asarray(array, dtype)
        key = (data.dtype.str, data.shape, data.tobytes())
        if key not in self._constants:
            if self._branch:
                made = self.op("Constant", value=ir.tensor(data))
            else:
                tensor = ir.tensor(data, name=f"const_{len(self._constants)}")
                made = self.tape.initializer(tensor)
            self._constants[key] = made
        return self._constants[key]

    def initializer(self, tensor: ir.TensorProtocol) -> ir.Value:
        """Add a weight and return its value."""
        return self.tape.initializer(tensor)

    def graph(self, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value], name: str) -> ir.Graph:
        """Return a graph of the recorded nodes."""
        return ir.Graph(
            inputs,
            outputs,
            nodes=self.tape.nodes,
            initializers=self.tape.initializers,
            opset_imports={"": ONNX_OPSET},
            name=name,
        )
