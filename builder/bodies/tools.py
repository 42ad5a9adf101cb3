"""Writes an op's body: a small tape for ONNX functions made of standard nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import DTypeLike, NDArray
from onnx_ir.tape import Tape

from kvsift.builder import ops

#: Opset of the standard nodes in a body.
ONNX_OPSET = 24
#: Stands for "no position": above every position, below an int32 overflow.
FAR = 1 << 30
#: Largest finite fp32; scores are clamped to it before they are compared.
FLOAT_MAX = float(np.finfo(np.float32).max)
#: Units of a row in the fixed form: TensorRT's TopK gives no more.
MOST_FIXED_UNITS = 3840


Attribute = int | float | str | list[int] | ir.Graph


@dataclass(frozen=True)
class Dims:
    """What a body must know statically of the model and the policy."""

    #: Query heads in the window tensor: the model's, or 1 when it is already averaged.
    window_heads: int
    num_kv_heads: int
    head_dim: int
    #: W, queries in the window.
    window: int
    #: TensorRT's form: no shape depends on what a tensor holds, there are no branches and no
    #: doubles, and TopK sorts all units of a row. Elsewhere that would cost time or bits.
    fixed: bool = False


class Body:
    """Collects the nodes of one function; every value is named, constants are shared."""

    def __init__(self, op: ops.Op, fixed: bool = False) -> None:
        self.fixed = fixed
        self._op = op
        self._tape = Tape()
        self._consts: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}
        self._inputs = {t.name: ir.Value(name=t.name) for t in op.inputs}
        self._count = 0

    def input(self, name: str) -> ir.Value:
        """Return the function's input called `name`."""
        return self._inputs[name]

    def op(self, kind: str, *inputs: ir.Value, **attrs: Attribute) -> ir.Value:
        """Add a node with one output and return that output."""
        return self.multi(kind, 1, *inputs, **attrs)[0]

    def multi(
        self, kind: str, outputs: int, *inputs: ir.Value, **attrs: Attribute
    ) -> Sequence[ir.Value]:
        """Add a node with `outputs` outputs and return them."""
        values = self._tape.op_multi_out(kind, inputs, attrs, num_outputs=outputs)
        for value in values:
            value.name = f"{kind.lower()}_{self._count}"
            self._count += 1
        return values

    def branch(
        self, condition: ir.Value, then: Callable[[], ir.Value], other: Callable[[], ir.Value]
    ) -> ir.Value:
        """Return the value of `then` where the scalar condition holds, else that of `other`.

        `other` must be right in any case: the fixed form takes it without asking.
        """
        if self.fixed:
            return other()
        graphs = {}
        for name, build in (("then_branch", then), ("else_branch", other)):
            tape, consts = self._tape, self._consts
            self._tape, self._consts = Tape(), dict(consts)
            out = build()
            graphs[name] = ir.Graph([], [out], nodes=self._tape.nodes, name=name)
            self._tape, self._consts = tape, consts
        return self.op("If", condition, **graphs)

    def loop(
        self,
        count: ir.Value,
        start: ir.Value,
        step: Callable[[ir.Value, ir.Value], ir.Value],
    ) -> ir.Value:
        """Return `state = step(i, state)` repeated for i = 0 .. count - 1 from `start`.

        `count` and i are int64 scalars; the state is fp32 and keeps its shape.
        """
        types = (ir.DataType.INT64, ir.DataType.BOOL, ir.DataType.FLOAT)
        shapes = (ir.Shape([]), ir.Shape([]), None)
        i, go, state = (
            ir.Value(name=f"loop_{self._count + k}", type=ir.TensorType(t), shape=shape)
            for k, (t, shape) in enumerate(zip(types, shapes, strict=True))
        )
        self._count += 3
        tape, consts = self._tape, self._consts
        self._tape, self._consts = Tape(), dict(consts)
        outputs = [self.op("Identity", go), step(i, state)]
        body = ir.Graph([i, go, state], outputs, nodes=self._tape.nodes, name="step")
        self._tape, self._consts = tape, consts
        return self.op("Loop", count, self.const(True, np.bool_), start, body=body)

    def const(
        self, value: float | Sequence[int] | NDArray[np.generic], dtype: DTypeLike
    ) -> ir.Value:
        """Return a constant, the same value for equal contents."""
        array = np.asarray(value, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._consts:
            attrs = {"value": ir.tensor(array)}
            node = self._tape.op("Constant", [], attrs)
            node.name = f"const_{self._count}"
            self._count += 1
            self._consts[key] = node
        return self._consts[key]

    def i64(self, *values: int) -> ir.Value:
        """Return a 1-D int64 constant: a shape, axes or indices."""
        return self.const(values, np.int64)

    def i32(self, value: int) -> ir.Value:
        """Return an int32 scalar."""
        return self.const(value, np.int32)

    def f32(self, value: float) -> ir.Value:
        """Return a float32 scalar."""
        return self.const(value, np.float32)

    def cast(self, x: ir.Value, to: ir.DataType) -> ir.Value:
        """Cast `x`."""
        return self.op("Cast", x, to=int(to))

    def precise(self, x: ir.Value) -> ir.Value:
        """Cast `x` to the widest float type there is: double, or float32 in the fixed form."""
        return self.cast(x, ir.DataType.FLOAT if self.fixed else ir.DataType.DOUBLE)

    def precise_const(self, value: float) -> ir.Value:
        """Return a scalar of the type of `precise`."""
        return self.const(value, np.float32 if self.fixed else np.float64)

    def size(self, x: ir.Value, axis: int) -> ir.Value:
        """Return the size of an axis as int64 [1]."""
        return self.op("Shape", x, start=axis, end=axis + 1)

    def reshape(self, x: ir.Value, *dims: int | ir.Value) -> ir.Value:
        """Reshape to `dims`: numbers (0 copies the input's axis) and int64 [1] values."""
        if all(isinstance(d, int) for d in dims):
            return self.op("Reshape", x, self.i64(*(d for d in dims if isinstance(d, int))))
        parts = [self.i64(d) if isinstance(d, int) else d for d in dims]
        return self.op("Reshape", x, self.op("Concat", *parts, axis=0))

    def unsqueeze(self, x: ir.Value, *axes: int) -> ir.Value:
        """Insert axes of size 1 (numbered in the result)."""
        return self.op("Unsqueeze", x, self.i64(*axes))

    def reduce(self, kind: str, x: ir.Value, *axes: int, keep: bool = False) -> ir.Value:
        """Apply `Reduce<kind>` over `axes`."""
        return self.op(f"Reduce{kind}", x, self.i64(*axes), keepdims=int(keep))

    def total(self, x: ir.Value, axis: int) -> ir.Value:
        """Sum over an axis in index order, so that no bit depends on padding or on the batch.

        ReduceSum groups the terms by how a row happens to be aligned in memory.
        """
        sums = self.op("CumSum", x, self.const(axis, np.int64))
        return self.op("Gather", sums, self.const(-1, np.int64), axis=axis)

    def finish(self, outputs: Sequence[ir.Value]) -> ir.Function:
        """Return the function; its outputs are renamed as the op table names them."""
        for value, spec in zip(outputs, self._op.outputs, strict=True):
            value.name = spec.name
        graph = ir.Graph(
            list(self._inputs.values()),
            list(outputs),
            nodes=self._tape.nodes,
            opset_imports={"": ONNX_OPSET},
            name=self._op.name,
        )
        # The values are in the body already; the names let a node carry them for other backends.
        attrs = [ir.Attr(a.name, ir.AttributeType.UNDEFINED, None) for a in self._op.attrs]
        return ir.Function(ops.DOMAIN, self._op.name, graph=graph, attributes=attrs)


def index(b: Body, x: ir.Value, axis: int) -> ir.Value:
    """Return 0 .. size-1 of an axis of `x` as int32 [size]."""
    size = b.cast(b.op("Squeeze", b.size(x, axis)), ir.DataType.INT32)
    return b.op("Range", b.i32(0), size, b.i32(1))
