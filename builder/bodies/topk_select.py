"""Body of TopKSelect."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from kvsift.builder import ops
from kvsift.builder.bodies.selection import forced_units, keep_best, valid_units
from kvsift.builder.bodies.tools import Body, Dims


def build(b: Body, attrs: Mapping[str, ops.Value], dims: Dims) -> list[ir.Value]:
    """Return [keep, keep_len, coverage]."""
    del dims
    valid = valid_units(b)
    return keep_best(b, attrs, b.input("score"), valid, forced_units(b, attrs, valid))
