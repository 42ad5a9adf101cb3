"""Nodes of the op table, written with every attribute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
from pydantic import Field

from kvsift.builder.graph import GraphBuilder
from kvsift.builder.native_ops import NATIVE_OPS
from kvsift.builder.ops import DOMAIN, TABLE, Value

ROWS = TABLE | {op.name: op for op in NATIVE_OPS}


def option(op: str, attribute: str) -> Any:
    """Return a policy option that is an op's attribute, with its default, range and meaning."""
    attr = TABLE[op].attr(attribute)
    return Field(attr.default, ge=attr.low, le=attr.high, description=attr.doc)


def call(
    g: GraphBuilder,
    op: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, Value],
    outputs: Sequence[ir.Value] | None = None,
) -> Sequence[ir.Value]:
    """Append a node of the op table and return its outputs, which are `outputs` if given.

    Every attribute is written, since TensorRT's importer only warns of a missing one. A model
    holds one body per op, so an op is called with the same attributes everywhere.
    """
    row = ROWS[op]
    assert len(inputs) == len(row.inputs)
    assert None not in inputs, f"{op} needs every input"
    written: dict[str, Value] = row.defaults() | dict(attributes)
    assert written.keys() == row.defaults().keys(), f"{op} has no such attribute"
    values: dict[str, Any] = {
        a.name: int(written[a.name]) if a.is_int else float(written[a.name]) for a in row.attrs
    }
    assert g.calls.setdefault(op, values) == values, f"{op} is called with other attributes"
    return g.multi(op, *inputs, outputs=outputs or len(row.outputs), domain=DOMAIN, **values)
