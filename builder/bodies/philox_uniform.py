"""Body of PhiloxUniform: Philox4x32-10 in 64-bit integer operations."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from kvsift.builder import ops
from kvsift.builder.bodies.tools import Body, Dims, index

UINT64 = ir.DataType.UINT64
ROUNDS = 10
#: Round multipliers and Weyl key increments of the paper.
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF


def build(b: Body, attrs: Mapping[str, ops.Value], dims: Dims) -> list[ir.Value]:
    """Return [u]: one uniform per unit and draw, as exact 24-bit fractions."""
    del dims
    draws = int(attrs["draws"])
    quads = -(-draws // 4)
    ids = b.input("unit_ids")
    quad = b.const(np.arange(quads).reshape(quads, 1), np.uint64)
    counter = [
        word(b, b.unsqueeze(ids, 3)),  # [L, E, R, 1, N]
        quad,
        word(b, streams(b, int(attrs["heads_per_layer"]))),  # [L, 1, R, 1, 1]
        word(b, b.reshape(b.input("step"), 1, -1, 1, 1, 1)),
    ]
    seed = b.reshape(b.input("seed"), 1, -1, 1, 1, 2)
    low, high = b.multi("Split", 2, seed, axis=4, num_outputs=2)
    words = philox(b, counter, [word(b, low), word(b, high)])  # 4 x [L, E, R, quads, N]
    stacked = b.op("Concat", *words, axis=3)  # word-major: draw i is word i % 4 of quad i // 4
    order = [i % 4 * quads + i // 4 for i in range(draws)]
    flat = b.op("Gather", stacked, b.i64(*order), axis=3)
    bits = b.cast(b.op("BitShift", flat, u64(b, 9), direction="RIGHT"), ir.DataType.FLOAT)
    return [b.op("Mul", b.op("Add", bits, b.f32(0.5)), b.f32(2.0**-23))]


def u64(b: Body, value: int) -> ir.Value:
    """Return a uint64 scalar."""
    return b.const(value, np.uint64)


def low_word(b: Body, x: ir.Value) -> ir.Value:
    """Return the low 32 bits."""
    return b.op("BitwiseAnd", x, u64(b, WORD))


def word(b: Body, x: ir.Value) -> ir.Value:
    """Return an int32 tensor as 32-bit words; -1 becomes 0xffffffff."""
    return low_word(b, b.cast(x, UINT64))


def streams(b: Body, heads: int) -> ir.Value:
    """Return layer * heads + row as int32 [L,1,R,1,1]."""
    ids = b.input("unit_ids")
    layer = b.op("Mul", b.reshape(index(b, ids, 0), -1, 1, 1, 1, 1), b.i32(heads))
    return b.op("Add", layer, b.reshape(index(b, ids, 2), -1, 1, 1))


def philox(b: Body, counter: list[ir.Value], key: list[ir.Value]) -> list[ir.Value]:
    """Return the four output words of Philox4x32-10; all values are 32-bit words in uint64."""
    for step in range(ROUNDS):
        first = b.op("Mul", counter[0], u64(b, MULTIPLIERS[0]))
        second = b.op("Mul", counter[2], u64(b, MULTIPLIERS[1]))
        counter = [
            mix(b, second, counter[1], key[0]),
            low_word(b, second),
            mix(b, first, counter[3], key[1]),
            low_word(b, first),
        ]
        if step < ROUNDS - 1:
            key = [low_word(b, b.op("Add", k, u64(b, w))) for k, w in zip(key, WEYL, strict=True)]
    return counter


def mix(b: Body, product: ir.Value, word_in: ir.Value, key: ir.Value) -> ir.Value:
    """Return high(product) ^ word_in ^ key."""
    high = b.op("BitShift", product, u64(b, 32), direction="RIGHT")
    return b.op("BitwiseXor", b.op("BitwiseXor", high, word_in), key)
