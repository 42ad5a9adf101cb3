"""Body of ExpectedAttentionScore: the softmax that Gaussian queries of the near future expect."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from kvsift.builder import ops
from kvsift.builder.bodies.attention import check_heads, product
from kvsift.builder.bodies.rows import FLOAT, gathered, key_positions, key_rows, slot_count
from kvsift.builder.bodies.tools import FAR, FLOAT_MAX, Body, Dims


def build(b: Body, attrs: Mapping[str, ops.Value], dims: Dims) -> list[ir.Value]:
    """Return [score].

    Rows that are not valid are replaced by valid ones, which leaves the logits finite.
    """
    check_heads("ExpectedAttentionScore", dims)
    heads, group = dims.num_kv_heads, dims.window_heads // dims.num_kv_heads
    position = key_positions(b, 1)  # [E, R, N]
    rows = key_rows(b, position, dims)
    keys = b.cast(gathered(b, "keys", rows, dims), FLOAT)  # [E, Hkv, N, D]
    slot, units = slot_count(b), b.size(position, 2)
    cos, sin = mean_rotation(b, attrs)

    mean = rotated(b, of_slots(b, "mean"), cos, sin, 2)  # [E, Hq, D]
    mean = b.reshape(mean, slot, heads, group, dims.head_dim)
    logits = product(b, b.op("Mul", mean, b.f32(dims.head_dim**-0.5)), keys)  # [E, Hkv, G, N]
    if attrs["use_covariance"]:
        cov = covariance(b, attrs, cos, sin)
        cov = b.reshape(cov, slot, heads, group, dims.head_dim, dims.head_dim)
        logits = b.op("Add", logits, half_square(b, keys, cov, dims))

    held = b.op("Less", position, b.i32(FAR))
    sink = b.op("Less", position, b.i32(int(attrs["sink_tokens"])))
    rated = b.unsqueeze(b.op("And", held, b.op("Not", sink)), 2)  # [E, R, 1, N]
    probs = b.op("Softmax", b.op("Where", rated, logits, b.f32(-FLOAT_MAX)), axis=-1)
    share = b.const(np.full((1, group), 1.0 / group), np.float32)
    score = b.op("Add", b.op("MatMul", share, probs), b.f32(float(attrs["epsilon"])))
    score = b.reshape(score, slot, heads, units)
    if attrs["use_vnorm"]:
        score = b.op("Mul", score, norms(b, rows, dims))
    score = b.op("Where", b.reshape(rated, slot, 0, units), score, b.f32(0.0))
    return [b.op("Where", held, score, b.f32(-np.inf))]


def of_slots(b: Body, name: str) -> ir.Value:
    """Return the evicting slots' part of a state."""
    return b.op("Gather", b.input(name), b.op("Max", b.input("evict_slots"), b.i32(0)), axis=0)


def mean_rotation(b: Body, attrs: Mapping[str, ops.Value]) -> tuple[ir.Value, ir.Value]:
    """Return cos and sin averaged over the positions to come, fp32 [E,1,Dh]."""
    count = int(attrs["n_future"])
    ahead = b.const(np.arange(count).reshape(-1, 1), np.int32)
    position = b.op("Add", b.reshape(b.input("tokens_seen"), -1, 1, 1), ahead)
    angle = b.op("Mul", b.cast(position, FLOAT), b.input("inv_freq"))  # [E, n_future, Dh]
    mean = b.const(np.full((1, count), float(attrs["rope_factor"]) / count), np.float32)
    return b.op("MatMul", mean, b.op("Cos", angle)), b.op("MatMul", mean, b.op("Sin", angle))


def rotated(b: Body, x: ir.Value, cos: ir.Value, sin: ir.Value, axis: int) -> ir.Value:
    """Rotate the halves of an axis of size D by cos and sin that broadcast over the others."""
    first, second = b.multi("Split", 2, x, axis=axis, num_outputs=2)
    return b.op(
        "Concat",
        b.op("Sub", b.op("Mul", first, cos), b.op("Mul", second, sin)),
        b.op("Add", b.op("Mul", second, cos), b.op("Mul", first, sin)),
        axis=axis,
    )


def covariance(b: Body, attrs: Mapping[str, ops.Value], cos: ir.Value, sin: ir.Value) -> ir.Value:
    """Return M cov M^T of every query head, fp32 [E,Hq,D,D]."""
    counted = b.op("Sub", b.input("tokens_seen"), b.i32(int(attrs["sink_tokens"])))
    count = b.cast(b.op("Max", counted, b.i32(1)), FLOAT)
    cov = b.op("Div", of_slots(b, "moment"), b.reshape(count, -1, 1, 1, 1))
    columns = rotated(b, cov, b.unsqueeze(cos, 2), b.unsqueeze(sin, 2), 3)  # by [E, 1, 1, Dh]
    return rotated(b, columns, b.unsqueeze(cos, 3), b.unsqueeze(sin, 3), 2)  # by [E, 1, Dh, 1]


def half_square(b: Body, keys: ir.Value, cov: ir.Value, dims: Dims) -> ir.Value:
    """Return k^T cov k / (2 D) of keys [E,Hkv,N,D] and cov [E,Hkv,G,D,D], fp32 [E,Hkv,G,N]."""
    keys = b.unsqueeze(keys, 2)
    squares = b.op("Mul", b.op("MatMul", keys, cov), keys)  # [E, Hkv, G, N, D]
    scale = b.const(np.full((dims.head_dim, 1), 0.5 / dims.head_dim), np.float32)
    return b.op("Squeeze", b.op("MatMul", squares, scale), b.i64(4))


def norms(b: Body, rows: ir.Value, dims: Dims) -> ir.Value:
    """Return |v| of the rows, fp32 [E,Hkv,N]."""
    values = b.cast(gathered(b, "values", rows, dims), FLOAT)
    ones = b.const(np.ones((dims.head_dim, 1)), np.float32)
    squares = b.op("MatMul", b.op("Mul", values, values), ones)
    return b.op("Sqrt", b.op("Squeeze", squares, b.i64(3)))
