"""Attention logits of the window's queries over the rows of the evicting slots.

No bit may depend on which slots evict together: sums are matrix products, since the order within
a Reduce follows a row's alignment in memory.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from kvsift.builder.bodies.rows import FLOAT, gathered, key_rows, slot_count, whole_cache
from kvsift.builder.bodies.tools import Body, Dims
from kvsift.builder.errors import UsageError

#: Times a distance of at least one position: far below every logit, and finite up to FAR.
MASK_SLOPE = 1e20


def check_heads(what: str, dims: Dims, instead: str = "") -> None:
    """Raise UsageError unless the window holds the queries of every head."""
    if dims.window_heads % dims.num_kv_heads:
        raise UsageError(
            f"{what} needs the window of every query head; got {dims.window_heads} for "
            f"{dims.num_kv_heads} KV heads{instead}"
        )


def query_positions(b: Body, dims: Dims) -> ir.Value:
    """Return the position of each window query, int32 [E,1,W,1]; negative before the start."""
    newest = b.reshape(b.input("tokens_seen"), -1, 1, 1, 1)
    return b.op("Add", newest, b.const(np.arange(-dims.window, 0).reshape(-1, 1), np.int32))


def causal_bias(b: Body, position: ir.Value, dims: Dims) -> ir.Value:
    """Return what to add to the logits, fp32 [E,R,W,K]: (query - key) * MASK_SLOPE at newer keys.

    Adding it costs one pass over the logits where a Where would cost seven. The row of a query
    that sees no key is arbitrary.
    """
    distance = b.op("Sub", query_positions(b, dims), b.unsqueeze(position, 2))
    return b.op("Mul", b.cast(b.op("Min", distance, b.i32(0)), FLOAT), b.f32(MASK_SLOPE))


def head_logits(b: Body, query: ir.Value, position: ir.Value, dims: Dims, rows: int) -> ir.Value:
    """Return the masked logits of every query head, fp32 [E,Hq,W,K].

    `query` fp32 [E,W,Hq,D]; `position` [E,R,K] with R = `rows`, 1 or the number of KV heads.
    """
    heads, group = dims.num_kv_heads, dims.window_heads // dims.num_kv_heads
    slot, count = slot_count(b), b.size(position, 2)
    query = b.op("Mul", query, b.f32(dims.head_dim**-0.5))
    query = b.op("Transpose", query, perm=[0, 2, 1, 3])
    query = b.reshape(query, 0, heads, group * dims.window, dims.head_dim)
    logits = b.branch(
        whole_cache(b, position),
        lambda: product(b, query, b.input("keys")),
        lambda: product(b, query, gathered(b, "keys", key_rows(b, position, dims), dims)),
    )
    bias = causal_bias(b, position, dims)
    if rows > 1:
        logits = b.reshape(logits, slot, heads, group, dims.window, count)
        logits = b.op("Add", logits, b.unsqueeze(bias, 2))
        return b.reshape(logits, slot, dims.window_heads, dims.window, count)
    return b.op("Add", b.reshape(logits, slot, dims.window_heads, dims.window, count), bias)


def window_queries(b: Body, dims: Dims) -> ir.Value:
    """Return the window's queries, fp32 [E,W,Hq,D]."""
    shape = (0, dims.window, dims.window_heads, dims.head_dim)
    return b.reshape(b.cast(b.input("q_window"), FLOAT), *shape)


def product(b: Body, query: ir.Value, keys: ir.Value) -> ir.Value:
    """Return Q K^T."""
    return b.op("MatMul", query, b.op("Transpose", b.cast(keys, FLOAT), perm=[0, 1, 3, 2]))
