"""Body of KeyDiffScore."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from kvsift.builder import ops
from kvsift.builder.bodies.rows import slot_count
from kvsift.builder.bodies.tools import Body, Dims
from kvsift.builder.bodies.unit_keys import (
    CHUNK,
    chunk_sums,
    masked_score,
    on_chunks,
    unit,
    units_only,
    valid_counts,
)


def build(b: Body, attrs: Mapping[str, ops.Value], dims: Dims) -> list[ir.Value]:
    """Return [score]: minus the cosine of each key and the mean direction, -inf at padding."""
    keys = on_chunks(b, dims, CHUNK, lambda keys: unit(b, keys, dims.head_dim))
    sums = chunk_sums(b, dims, CHUNK, keys, valid_counts(b))
    heads, width = dims.num_kv_heads, dims.head_dim
    away = b.op("Neg", mean_direction(b, dims, sums))
    away = b.reshape(away, slot_count(b), heads, width, 1)
    padded = b.op("Mul", b.size(keys, 2), b.i64(CHUNK))
    rows = b.reshape(keys, slot_count(b), heads, padded, width)
    score = b.op("Squeeze", b.op("MatMul", rows, away), b.i64(3))
    return [masked_score(b, units_only(b, score, 2))]


def mean_direction(b: Body, dims: Dims, sums: ir.Value) -> ir.Value:
    """Return the direction of the sum of the chunks' sums [E,Hkv,chunks,D] as [E,Hkv,1,D]."""
    return unit(b, b.unsqueeze(b.total(sums, 2), 2), dims.head_dim)
