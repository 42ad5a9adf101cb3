"""The decoder graph: prefill chunks and decode steps, with the eviction nodes after the layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from kvsift.builder import eviction, names
from kvsift.builder.attention import Attention
from kvsift.builder.families import ModelConfig
from kvsift.builder.graph import (
    FLOAT,
    INT32,
    INT64,
    IR_VERSION,
    GraphBuilder,
    value,
)
from kvsift.builder.linear import FloatLinear, Linear, WeightFile, concat_rows
from kvsift.builder.masked_attention import MaskedAttention
from kvsift.builder.memory import Memory
from kvsift.builder.ops import DOMAIN, OPSET
from kvsift.builder.package import AttentionForm
from kvsift.builder.policies.base import Policy
from kvsift.builder.weights import WeightSource


def cache_shape(
    config: ModelConfig, policy: Policy, layer: int, static: int | None = None
) -> tuple[int | str, ...]:
    """Return the shape of a layer's key or value cache in the graph, C symbolic or `static`."""
    capacity = static or ("C" if policy.shared_lens else f"C{layer}")
    if policy.layout == "head":
        return ("R", 1, capacity, config.head_dim)
    return ("B", config.num_kv_heads, capacity, config.head_dim)


class Decoder:
    """Emits the whole graph of one model and policy, layer by layer.

    The weights' float type is that of activations and caches. `capacity`: tokens of every cache,
    where it must be static. `all_logits`: logits of every token, float32 [B, S, V], as evaluation
    needs, else of the last one, [B, V]. `trace_scores`: the scores of every eviction are an output,
    too.
    """

    def __init__(
        self,
        source: WeightSource,
        policy: Policy,
        weights: WeightFile,
        linear: Linear,
        *,
        form: AttentionForm = "gqa",
        capacity: int | None = None,
        all_logits: bool = False,
        trace_scores: bool = False,
    ) -> None:
        self.config: ModelConfig = source.config
        self._source = source
        self._policy = policy
        self._weights = weights
        self._linear = linear
        self._form = form
        self._capacity = capacity
        self._all_logits = all_logits
        self._trace_scores = trace_scores
        self._g = GraphBuilder(floats=weights.floats)
        self._inputs: list[ir.Value] = []
        self._outputs: list[ir.Value] = []

    def build(self) -> ir.Model:
        """Emit the graph and return the model; weights are written on the way."""
        g, c = self._g, self.config
        ids = self._input(names.INPUT_IDS, INT64, ("B", "S"))
        positions = self._input(names.POSITION_IDS, INT64, ("B", "S"))
        n_new = self._input(names.N_NEW, INT32, ("B",))
        policy = self._policy
        rows = "R" if policy.layout == "head" else "B"
        past_lens = self._input(
            names.PAST_LENS, INT32, (1 if policy.shared_lens else c.num_layers, rows)
        )
        step = g.op("Shape", ids, start=1, end=2)
        attention = (
            MaskedAttention(g, c, policy, self._form, past_lens, step, n_new)
            if self._form.startswith("tensorrt")
            else Attention(g, c, policy, self._form, past_lens, step)
        )
        declare = (self._input, self._output)
        memory = Memory(g, c, policy, *declare, positions, n_new, past_lens, self._form)
        rotation = self._rotation(positions)
        embedding = self._weight("model.embed_tokens.weight")
        x = g.op("Gather", embedding, ids)
        layers = []
        for i in range(c.num_layers):
            x, state = self._layer(i, x, attention, memory, rotation)
            layers.append(state)
        self._head(x, embedding, n_new)
        if policy.evicts:
            ring = memory.ring()
            inputs = eviction.eviction_inputs(c, policy, drawn=self._form == "tensorrt-rtx")
            outputs = eviction.eviction_outputs(c, policy, self._trace_scores)
            self._inputs += inputs
            guarded = not self._form.startswith("tensorrt")
            emit = eviction.emit_guarded if guarded else eviction.emit_plain
            emit(g, c, policy, inputs, layers, ring, outputs)
            self._outputs += outputs
        return self._model()

    def _layer(
        self,
        i: int,
        x: ir.Value,
        attention: Attention,
        memory: Memory,
        rotation: tuple[ir.Value, ir.Value],
    ) -> tuple[ir.Value, eviction.LayerState]:
        g, c = self._g, self.config
        prefix = f"model.layers.{i}"
        raw, k, v = self._qkv(i, self._norm(x, f"{prefix}.input_layernorm.weight"))
        q, k = self._rotate(raw, c.num_heads, rotation), self._rotate(k, c.num_kv_heads, rotation)
        shape = cache_shape(c, self._policy, i, self._capacity)
        ends = (names.past_key, names.past_value), (names.present_key, names.present_value)
        past = tuple(self._input(name(i), g.floats, shape) for name in ends[0])
        present = tuple(self._output(name(i), g.floats, shape) for name in ends[1])
        out = attention.emit(i, (q, k, v), (past[0], past[1]), (present[0], present[1]))
        x = g.op("Add", x, self._project(f"{prefix}.self_attn.o_proj", out))
        y = self._norm(x, f"{prefix}.post_attention_layernorm.weight")
        x = g.op("Add", x, self._mlp(prefix, y))
        keys, values = (self._by_slot(cache) for cache in present)
        states = memory.layer(i, raw, q, keys)
        return x, eviction.LayerState(keys, values, states)

    def _by_slot(self, cache: ir.Value) -> ir.Value:
        """Return a cache as [B, Hkv, C, D], whatever its layout."""
        if self._policy.layout == "sequence":
            return cache
        g, c = self._g, self.config
        rows = g.op("Shape", cache, start=2)
        shape = g.op("Concat", g.const([-1, c.num_kv_heads]), rows, axis=0)
        return g.op("Reshape", cache, shape)

    def _qkv(self, i: int, x: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        g, c = self._g, self.config
        prefix = f"model.layers.{i}.self_attn"
        y = self._project(f"{prefix}.qkv", x, [f"{prefix}.{p}_proj" for p in "qkv"], c.qkv_bias)
        sizes = np.array([c.num_heads, c.num_kv_heads, c.num_kv_heads]) * c.head_dim
        q, k, v = g.multi("Split", y, g.const(sizes), outputs=3, axis=-1)
        if c.qk_norm:
            q = self._head_norm(q, c.num_heads, f"{prefix}.q_norm.weight")
            k = self._head_norm(k, c.num_kv_heads, f"{prefix}.k_norm.weight")
        return q, k, v

    def _mlp(self, prefix: str, x: ir.Value) -> ir.Value:
        g = self._g
        both = self._project(
            f"{prefix}.mlp.gate_up", x, [f"{prefix}.mlp.{p}_proj" for p in ("gate", "up")]
        )
        gate, up = g.multi("Split", both, outputs=2, axis=-1, num_outputs=2)
        active = g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), up)
        return self._project(f"{prefix}.mlp.down_proj", active)

    def _project(
        self, name: str, x: ir.Value, parts: Sequence[str] = (), bias: bool = False
    ) -> ir.Value:
        """Append one linear layer of the stacked matrices `parts` (default: `name` itself)."""
        g, parts = self._g, parts or [name]
        matrix = concat_rows([self._source.tensor(f"{part}.weight") for part in parts])
        y = self._linear(g, x, f"{name}.weight", matrix)
        if not bias:
            return y
        added = concat_rows([self._source.tensor(f"{part}.bias") for part in parts])
        return g.op("Add", y, g.initializer(self._weights.add(f"{name}.bias", added)))

    def _weight(self, name: str) -> ir.Value:
        return self._g.initializer(self._weights.add(name, self._source.tensor(name)))

    def _norm(self, x: ir.Value, name: str) -> ir.Value:
        return self._g.op(
            "RMSNormalization", x, self._weight(name), epsilon=self.config.rms_eps, axis=-1
        )

    def _head_norm(self, x: ir.Value, heads: int, name: str) -> ir.Value:
        g, size = self._g, self.config.head_dim
        split = g.op("Reshape", x, g.const([0, 0, heads, size]))
        return g.op("Reshape", self._norm(split, name), g.const([0, 0, heads * size]))

    def _rotation(self, positions: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Append cos and sin of the positions' angles, [B, S, D/2]: no table to store."""
        g, rope = self._g, self.config.rope
        frequencies = g.const(rope.inv_freq(self.config.head_dim), np.float32)
        at = g.op("Unsqueeze", g.op("Cast", positions, to=FLOAT), g.const([2]))
        angles = g.op("Mul", at, frequencies)
        cos, sin = g.op("Cos", angles), g.op("Sin", angles)
        if rope.attention_factor != 1.0:
            factor = g.const(rope.attention_factor, np.float32)
            cos, sin = g.op("Mul", cos, factor), g.op("Mul", sin, factor)
        return g.cast(cos, g.floats, FLOAT), g.cast(sin, g.floats, FLOAT)

    def _rotate(self, x: ir.Value, heads: int, rotation: tuple[ir.Value, ir.Value]) -> ir.Value:
        return self._g.op("RotaryEmbedding", x, *rotation, num_heads=heads)

    def _head(self, x: ir.Value, embedding: ir.Value, n_new: ir.Value) -> None:
        g, c = self._g, self.config
        if not self._all_logits:
            last = g.op("Sub", g.op("Max", n_new, g.const(1, np.int32)), g.const(1, np.int32))
            index = g.op("Unsqueeze", g.op("Cast", last, to=INT64), g.const([1]))
            x = g.op("GatherND", x, index, batch_dims=1)
        x = self._norm(x, "model.norm.weight")
        shape = ("B", "S", c.vocab_size) if self._all_logits else ("B", c.vocab_size)
        logits = self._output(names.LOGITS, FLOAT, shape)
        if c.tied_embeddings and isinstance(self._linear, FloatLinear):
            # One copy of the matrix serves the lookup and, transposed by Gemm, the head.
            flat = g.op("Reshape", x, g.const([-1, c.hidden_size]))
            made = g.op("Gemm", flat, embedding, transB=1, name="lm_head")
        else:
            name = "model.embed_tokens" if c.tied_embeddings else "lm_head"
            matrix = self._source.tensor(f"{name}.weight")
            made = self._linear(g, x, "lm_head.weight", matrix)
        if self._all_logits:
            made = g.op(
                "Reshape",
                made,
                g.op("Concat", g.op("Shape", x, end=2), g.const([c.vocab_size]), axis=0),
            )
        if g.floats == FLOAT:
            g.op("Identity", made, output=logits)
        else:
            g.op("Cast", made, to=FLOAT, output=logits)

    def _input(self, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
        made = value(name, dtype, shape)
        self._inputs.append(made)
        return made

    def _output(self, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
        made = value(name, dtype, shape)
        self._outputs.append(made)
        return made

    def _model(self) -> ir.Model:
        graph = self._g.graph(self._inputs, self._outputs, "kvsift")
        graph.opset_imports.update({"com.microsoft": 1, DOMAIN: OPSET})
        # A body of the plugin's name in the file could be taken for the plugin.
        calls = {} if self._form == "tensorrt" else self._g.calls
        fixed = self._form == "tensorrt-rtx"
        return ir.Model(
            graph,
            ir_version=IR_VERSION,
            producer_name="kvsift",
            functions=eviction.functions(self.config, self._policy, calls, fixed=fixed),
        )
