"""ONNX schemas of the op table, so that ONNX's checker and shape inference know the ops."""

from __future__ import annotations

import onnx
from onnx import TypeProto
from onnx.defs import OpSchema
from onnx.shape_inference import InferenceContext

from kvsift.builder import ops
from kvsift.builder.native_ops import NATIVE_OPS

#: By these, beside the node's type, TensorRT's importer finds the plugin of a node.
PLUGIN = {"plugin_version": ops.OPS_VERSION, "plugin_namespace": ""}
FLOAT_TYPES = ("tensor(float)", "tensor(float16)", "tensor(bfloat16)")
TYPE_NAMES: dict[ops.DType, str] = {
    "float32": "tensor(float)",
    "int32": "tensor(int32)",
    "T": "T",
}
ELEMENTS: dict[ops.DType, int] = {
    "float32": onnx.TensorProto.FLOAT,
    "int32": onnx.TensorProto.INT32,
}


def register() -> None:
    """Register the schema of every op with ONNX; again is harmless."""
    for op in (*ops.OPS, *NATIVE_OPS):
        if not onnx.defs.has(op.name, ops.DOMAIN):
            onnx.defs.register_schema(op_schema(op))


def op_schema(op: ops.Op) -> OpSchema:
    """Return the schema of one op, with type and shape inference."""
    half = any(t.dtype == "T" for t in (*op.inputs, *op.outputs))
    schema = OpSchema(
        op.name,
        ops.DOMAIN,
        ops.OPSET,
        f"{op.summary} {op.equation} ({op.source})",
        inputs=[parameter(t) for t in op.inputs],
        outputs=[parameter(t) for t in op.outputs],
        type_constraints=[("T", FLOAT_TYPES, "the model's float type")] if half else [],
        attributes=[*(attribute(a) for a in op.attrs), *(text(name) for name in PLUGIN)],
    )
    schema.set_type_and_shape_inference_function(lambda context: infer(op, context))
    return schema


def parameter(tensor: ops.Tensor) -> OpSchema.FormalParameter:
    """Return an input or output of a schema."""
    shape = f"[{', '.join(tensor.shape)}]"
    return OpSchema.FormalParameter(tensor.name, TYPE_NAMES[tensor.dtype], f"{shape}: {tensor.doc}")


def text(name: str) -> OpSchema.Attribute:
    """Return an attribute of TensorRT's importer, which other engines pass over."""
    doc = "for TensorRT's importer"
    return OpSchema.Attribute(name, OpSchema.AttrType.STRING, doc, required=False)


def attribute(attr: ops.Attr) -> OpSchema.Attribute:
    """Return an attribute of a schema; required, since every attribute is always written."""
    kind = OpSchema.AttrType.INT if attr.is_int else OpSchema.AttrType.FLOAT
    return OpSchema.Attribute(attr.name, kind, attr.doc, required=True)


def infer(op: ops.Op, context: InferenceContext) -> None:
    """Set the output types; a symbol takes its size from the first input that has it."""
    sizes: dict[str, int | str] = {}
    elements = dict(ELEMENTS)
    for index, spec in enumerate(op.inputs):
        given = context.get_input_type(index).tensor_type
        elements[spec.dtype] = given.elem_type
        shape = given.shape.dim
        for symbol, dim in zip(spec.shape, shape, strict=False):
            if dim.WhichOneof("value") and symbol not in sizes:
                sizes[symbol] = dim.dim_value if dim.HasField("dim_value") else dim.dim_param
    for attr in op.attrs:
        if attr.symbol:
            sizes[attr.symbol] = context.get_attribute(attr.name).i
    for index, spec in enumerate(op.outputs):
        kind = TypeProto()
        kind.tensor_type.elem_type = elements[spec.dtype]
        for symbol in spec.shape:
            dim = kind.tensor_type.shape.dim.add()
            size = sizes.get(symbol)
            if isinstance(size, int):
                dim.dim_value = size
            elif size:
                dim.dim_param = size
        context.set_output_type(index, kind)
