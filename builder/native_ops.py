"""Rows of the ops that only native engines have: no ONNX body, no part in ONNX Runtime's graph.

They are described like the ops of `ops.py` and go into the same generated header, so that a native
library declares all its ops from one place.
"""

from __future__ import annotations

from kvsift.builder.ops import Op, Tensor

NATIVE_OPS: tuple[Op, ...] = (
    Op(
        "KvAppend",
        "Writes the step's keys or values behind the valid rows of the cache, in place.",
        (
            Tensor("cache", "T", ("B", "Hkv", "C", "D"), "keys or values of the layer"),
            Tensor("rows", "T", ("B", "Hkv", "S", "D"), "keys or values of the step"),
            Tensor("past_lens", "int32", ("B", "Rl"), "valid rows before the step (Rl = 1 or Hkv)"),
            Tensor("n_new", "int32", ("B",), "real tokens of this step; 0 leaves the slot alone"),
        ),
        (Tensor("cache_out", "T", ("B", "Hkv", "C", "D"), "the same memory as `cache`"),),
        (),
        "cache_out[b, h, past_lens[b, h] + s] = rows[b, h, s] for s < n_new[b]; rows past the "
        "capacity are dropped; every other row stays",
        "the append of TensorScatter-24, with a length per head and without a static capacity",
    ),
)


def alias(op: Op, output: Tensor) -> int:
    """Return the input whose memory an output takes over, or -1: `x_out` is the next `x`."""
    for i, t in enumerate(op.inputs):
        if output == Tensor(f"{t.name}_out", t.dtype, t.shape, output.doc):
            return i
    return -1
