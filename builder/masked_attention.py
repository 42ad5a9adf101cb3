"""TensorRT's forms of the attention: an explicit mask, and an append that TensorRT can do.

Its ONNX parser drops the number of valid rows of an Attention node without a word, so the rows that
a token may see are given as a mask, made from the lengths. `tensorrt` appends by the KvAppend
plugin, in place and with any capacity. `tensorrt-rtx` appends by TensorScatter, which TensorRT
takes for a static capacity only.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from kvsift.builder.attention import Attention
from kvsift.builder.families import ModelConfig
from kvsift.builder.graph import INT32, GraphBuilder
from kvsift.builder.package import AttentionForm
from kvsift.builder.policies.base import Policy
from kvsift.builder.policies.nodes import call


class MaskedAttention(Attention):
    """Emits one layer's attention for TensorRT; parameters as `Attention`, and `n_new` int32 [B].

    The layers share a mask where they share their lengths and capacity.
    """

    def __init__(
        self,
        g: GraphBuilder,
        config: ModelConfig,
        policy: Policy,
        form: AttentionForm,
        past_lens: ir.Value,
        step: ir.Value,
        n_new: ir.Value,
    ) -> None:
        super().__init__(g, config, policy, form, past_lens, step)
        self._masks: dict[int, ir.Value] = {}
        self._real: ir.Value | None = None
        if form == "tensorrt":
            self._real = n_new
            if self._folded:  # a row of its own for each head
                each = g.op("Unsqueeze", n_new, g.const([1]))
                each = g.op("Expand", each, g.const([1, config.num_kv_heads]))
                self._real = g.op("Reshape", each, g.const([-1]))

    def _append(self, layer: int, old: ir.Value, new: ir.Value, out: ir.Value) -> None:
        if self._real is None:
            super()._append(layer, old, new, out)
            return
        lens = self._g.op("Reshape", self._layer_lens(layer), self._g.const([-1, 1]))
        call(self._g, "KvAppend", (old, new, lens, self._real), {}, [out])

    def _attend(self, layer: int, q: ir.Value, present: tuple[ir.Value, ir.Value]) -> ir.Value:
        mask, name = self._mask(layer, q, present[0]), f"attention_{layer}"
        return self._g.op("Attention", q, *present, mask, name=name)

    def _mask(self, layer: int, q: ir.Value, keys: ir.Value) -> ir.Value:
        """Return which cache rows each token sees, bool [R, 1, S, C]: those up to its own."""
        index = 0 if self._shared else layer
        if index not in self._masks:
            g = self._g
            start = g.op("Reshape", self._layer_lens(layer), g.const([-1, 1, 1, 1]))
            token = g.op("Unsqueeze", self._range(q, 2), g.const([1]))  # [S, 1]
            row = self._range(keys, 2)
            self._masks[index] = g.op("LessOrEqual", row, g.op("Add", start, token))
        return self._masks[index]

    def _layer_lens(self, layer: int) -> ir.Value:
        """Return the layer's lengths before the step, int32 [R]."""
        g = self._g
        return g.op("Gather", self._lens, g.const(0 if self._shared else layer), axis=0)

    def _range(self, x: ir.Value, axis: int) -> ir.Value:
        """Return 0 .. size - 1 of an axis of `x`, int32."""
        g = self._g
        size = g.op("Squeeze", g.op("Shape", x, start=axis, end=axis + 1), g.const([0]))
        return g.op(
            "Range", g.const(0, np.int32), g.op("Cast", size, to=INT32), g.const(1, np.int32)
        )
