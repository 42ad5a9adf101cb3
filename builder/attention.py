"""Attention over the cache with the append: the one place that knows the forms of the graph.

`gqa`: com.microsoft GroupQueryAttention on a shared past/present buffer, the fast form of ONNX
Runtime on a CPU, which pays for valid rows only. `portable`: standard TensorScatter and Attention
of opset 24, which pays for capacity. TensorRT's forms are in `masked_attention.py`. All append the
step's keys and values at each slot's length and return [B, S, Hq*D]. Rows beyond the length are
written by padding tokens and never read.

In the `head` layout every KV head of a slot is a row of its own, with its own length: caches are
[B*Hkv, 1, C, D], which is the same memory. Only the portable form can do that.
"""

from __future__ import annotations

import onnx_ir as ir

from kvsift.builder.errors import UsageError
from kvsift.builder.families import ModelConfig
from kvsift.builder.graph import INT64, MICROSOFT, GraphBuilder
from kvsift.builder.package import AttentionForm
from kvsift.builder.policies.base import Policy


class Attention:
    """Emits one layer's attention; what all layers share is computed once.

    Parameters: `past_lens` int32 [Ll, B] ([L, B*Hkv] in the head layout), `step` int64 [1] (S).
    """

    def __init__(
        self,
        g: GraphBuilder,
        config: ModelConfig,
        policy: Policy,
        form: AttentionForm,
        past_lens: ir.Value,
        step: ir.Value,
    ) -> None:
        self._g = g
        self._config = config
        self._form = form
        self._shared = policy.shared_lens
        self._folded = policy.layout == "head"
        if self._folded and form == "gqa":
            raise UsageError(
                "attention 'gqa' keeps equally many rows in all heads, and this policy's heads "
                "differ; use --attention portable"
            )
        self._lens = past_lens
        self._step = step
        self._rows: tuple[ir.Value, ir.Value] | None = None
        self._cached: dict[int, tuple[ir.Value, ir.Value]] = {}

    def _all_rows(self) -> tuple[ir.Value, ir.Value]:
        """Append what the form must know of the lengths of all layers before and after the step."""
        g = self._g
        past = g.op("Cast", self._lens, to=INT64)
        total = g.op("Add", past, self._step)
        if self._form != "gqa":
            return past, total
        last = g.op("Cast", g.op("Sub", total, g.const(1)), to=ir.DataType.INT32)
        longest = g.op("ReduceMax", total, g.const([1]), keepdims=0)
        return last, g.op("Cast", longest, to=ir.DataType.INT32)

    def _layer_rows(self, layer: int) -> tuple[ir.Value, ir.Value]:
        index = 0 if self._shared else layer
        self._rows = self._rows or self._all_rows()
        if index not in self._cached:
            a, b = (self._g.op("Gather", v, self._g.const(index), axis=0) for v in self._rows)
            self._cached[index] = (a, b)
        return self._cached[index]

    def emit(
        self,
        layer: int,
        qkv: tuple[ir.Value, ir.Value, ir.Value],
        past: tuple[ir.Value, ir.Value],
        present: tuple[ir.Value, ir.Value],
    ) -> ir.Value:
        """Append keys and values and attend; q, k rotated, [B, S, heads*D] each."""
        emit = self._gqa if self._form == "gqa" else self._standard
        return emit(layer, qkv, past, present)

    def _gqa(
        self,
        layer: int,
        qkv: tuple[ir.Value, ir.Value, ir.Value],
        past: tuple[ir.Value, ir.Value],
        present: tuple[ir.Value, ir.Value],
    ) -> ir.Value:
        last, longest = self._layer_rows(layer)
        out = ir.Value(name=f"attention.{layer}")
        self._g.multi(
            "GroupQueryAttention",
            *qkv,
            *past,
            last,
            longest,
            outputs=[out, *present],
            domain=MICROSOFT,
            name=f"attention_{layer}",
            num_heads=self._config.num_heads,
            kv_num_heads=self._config.num_kv_heads,
        )
        return out

    def _standard(
        self,
        layer: int,
        qkv: tuple[ir.Value, ir.Value, ir.Value],
        past: tuple[ir.Value, ir.Value],
        present: tuple[ir.Value, ir.Value],
    ) -> ir.Value:
        g, c = self._g, self._config
        q, k, v = (
            self._split_heads(x, heads)
            for x, heads in zip(qkv, (c.num_heads, c.num_kv_heads, c.num_kv_heads), strict=True)
        )
        if self._folded:
            group = c.num_heads // c.num_kv_heads
            q = g.op("Reshape", q, g.const([-1, group, 0, 0]))
            k, v = (g.op("Reshape", x, g.const([-1, 1, 0, 0])) for x in (k, v))
        for new, old, out in ((k, past[0], present[0]), (v, past[1], present[1])):
            self._append(layer, old, new, out)
        out = self._attend(layer, q, present)
        if self._folded:
            out = g.op("Reshape", out, g.const([-1, c.num_heads, 0, 0]))
        merged = g.op("Transpose", out, perm=[0, 2, 1, 3])
        return g.op("Reshape", merged, g.const([0, 0, c.num_heads * c.head_dim]))

    def _append(self, layer: int, old: ir.Value, new: ir.Value, out: ir.Value) -> None:
        """Write `new` [R, heads, S, D] behind the valid rows of the cache `old`."""
        self._g.op("TensorScatter", old, new, self._layer_rows(layer)[0], output=out, axis=2)

    def _attend(self, layer: int, q: ir.Value, present: tuple[ir.Value, ir.Value]) -> ir.Value:
        """Return the causal attention of q [R, heads, S, D] over the valid rows."""
        lens = (None, None, None, self._layer_rows(layer)[1])
        name = f"attention_{layer}"
        return self._g.op("Attention", q, *present, *lens, is_causal=1, name=name)

    def _split_heads(self, x: ir.Value, heads: int) -> ir.Value:
        """Return [B, heads, S, D] from [B, S, heads*D]."""
        g = self._g
        split = g.op("Reshape", x, g.const([0, 0, heads, self._config.head_dim]))
        return g.op("Transpose", split, perm=[0, 2, 1, 3])
