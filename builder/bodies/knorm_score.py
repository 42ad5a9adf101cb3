"""Body of KNormScore."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from kvsift.builder import ops
from kvsift.builder.bodies.rows import slot_count
from kvsift.builder.bodies.tools import Body, Dims
from kvsift.builder.bodies.unit_keys import masked_score, on_chunks


def build(b: Body, attrs: Mapping[str, ops.Value], dims: Dims) -> list[ir.Value]:
    """Return [score]: minus the norm of each key, -inf at padding."""
    ones = b.const(np.ones((dims.head_dim, 1)), np.float32)
    squares = on_chunks(b, dims, 1, lambda keys: b.op("MatMul", b.op("Mul", keys, keys), ones))
    norm = b.op("Sqrt", b.reshape(squares, slot_count(b), dims.num_kv_heads, b.size(squares, 2)))
    return [masked_score(b, b.op("Neg", norm))]
