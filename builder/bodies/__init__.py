"""Op bodies: every op of the table as an ONNX function of standard nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir

from kvsift.builder import ops
from kvsift.builder.bodies import (
    accum_update,
    expected_attention_score,
    head_topk_select,
    keydiff_score,
    knorm_score,
    nestedkv_score,
    nexus_score,
    philox_uniform,
    query_stats_update,
    reservoir_select,
    topk_select,
    window_mass,
    window_score,
)
from kvsift.builder.bodies.tools import Body, Dims
from kvsift.builder.errors import UsageError, unknown_name

__all__ = ["BODIES", "Dims", "body"]

Build = Callable[[Body, Mapping[str, ops.Value], Dims], list[ir.Value]]

BODIES: dict[str, Build] = {
    "AccumUpdate": accum_update.build,
    "ExpectedAttentionScore": expected_attention_score.build,
    "HeadTopKSelect": head_topk_select.build,
    "KNormScore": knorm_score.build,
    "KeyDiffScore": keydiff_score.build,
    "NestedKVScore": nestedkv_score.build,
    "NexusScore": nexus_score.build,
    "PhiloxUniform": philox_uniform.build,
    "QueryStatsUpdate": query_stats_update.build,
    "ReservoirSelect": reservoir_select.build,
    "TopKSelect": topk_select.build,
    "WindowMass": window_mass.build,
    "WindowScore": window_score.build,
}


def body(op_name: str, attrs: Mapping[str, ops.Value], dims: Dims) -> ir.Function:
    """Return the function body of an op, with the attribute values baked in.

    A function holds one set of attributes, so a model uses one setting of an op. Float inputs may
    be fp32 or fp16. `attrs` must name every attribute of the op; UsageError if one is missing,
    unknown or out of range.
    """
    if op_name not in BODIES:
        raise unknown_name("op", op_name, BODIES)
    op = ops.TABLE[op_name]
    check_attrs(op, attrs)
    b = Body(op, dims.fixed)
    return b.finish(BODIES[op_name](b, attrs, dims))


def check_attrs(op: ops.Op, attrs: Mapping[str, ops.Value]) -> None:
    """Raise UsageError unless `attrs` holds exactly the op's attributes, each within its range."""
    known = [a.name for a in op.attrs]
    for name in attrs:
        if name not in known:
            raise unknown_name(f"attribute of {op.name}", name, known)
    for attr in op.attrs:
        if attr.name not in attrs:
            raise UsageError(f"{op.name} needs the attribute {attr.name!r}; write every attribute")
        value = attrs[attr.name]
        if not attr.low <= value <= attr.high or (attr.is_int and value != int(value)):
            kind = "an integer" if attr.is_int else "a number"
            raise UsageError(
                f"{op.name}.{attr.name} is {value!r}; it must be {kind} "
                f"in [{attr.low}, {attr.high}]"
            )
