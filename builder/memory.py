"""What the graph remembers between steps beside keys and values: newest queries and states.

Updated in every step, outside the guard of the eviction nodes, and bound to the same memory before
and after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from kvsift.builder import names
from kvsift.builder.families import ModelConfig
from kvsift.builder.graph import FLOAT, INT32, GraphBuilder
from kvsift.builder.masked_ring import update_ring
from kvsift.builder.package import AttentionForm, window_features
from kvsift.builder.policies.base import Policy
from kvsift.builder.policies.nodes import call
from kvsift.builder.states import STATES

Declare = Callable[[str, ir.DataType, Sequence[int | str]], ir.Value]


class Memory:
    """Emits the updates of one model and policy.

    In TensorRT's form the plugins write the outputs in place.
    `declare_input` and `declare_output` make typed graph values. `positions` int64 [B, S],
    `n_new` int32 [B], `past_lens` int32 [Ll, Bl] as in `names.py`.
    """

    def __init__(
        self,
        g: GraphBuilder,
        config: ModelConfig,
        policy: Policy,
        declare_input: Declare,
        declare_output: Declare,
        positions: ir.Value,
        n_new: ir.Value,
        past_lens: ir.Value,
        form: AttentionForm,
    ) -> None:
        self._g = g
        self._config = config
        self._policy = policy
        self._input = declare_input
        self._output = declare_output
        self._positions = positions
        self._n_new = n_new
        self._past_lens = past_lens
        self._form = form
        self._queries: list[ir.Value] = []

    def layer(
        self, i: int, raw: ir.Value, rotated: ir.Value, keys: ir.Value
    ) -> dict[str, ir.Value]:
        """Append a layer's updates and return its states.

        `raw` and `rotated` queries [B, S, Hq*D], `keys` [B, Hkv, C, D] with this step's.
        """
        if self._policy.window:
            self._queries.append(self._newest(rotated))
        states: dict[str, ir.Value] = {}
        if "accum" in self._policy.states:
            old, new = self._declare("accum", i)
            inputs = (old, rotated, keys, self._row_lens(i), self._n_new)
            states["accum"] = self._update("AccumUpdate", inputs, {}, [new])[0]
        if "query_mean" in self._policy.states:
            pairs = [self._declare(name, i) for name in ("query_mean", "query_moment")]
            first = self._g.op("Gather", self._positions, self._g.const(0), axis=1)
            first = self._g.op("Cast", first, to=INT32)
            attributes = {"sink_tokens": self._policy.sink_units}
            inputs = (pairs[0][0], pairs[1][0], raw, first, self._n_new)
            new_pair = [new for _, new in pairs]
            made = self._update("QueryStatsUpdate", inputs, attributes, new_pair)
            states["query_mean"], states["query_moment"] = made
        return states

    def ring(self) -> ir.Value | None:
        """Append the update of the query ring, all layers at once; None without a window."""
        g, size = self._g, self._policy.window + 1
        if size == 1:
            return None
        features = self._config.num_layers * window_features(self._config, self._policy)
        shape = ("B", 1, size, features) if self._form == "tensorrt" else ("B", size, features)
        old = self._input(names.Q_RING_IN, g.floats, shape)
        new = self._output(names.Q_RING_OUT, g.floats, shape)
        first = g.op("Slice", self._positions, g.const([-size]), g.const([2**31]), g.const([1]))
        first = g.op("Gather", first, g.const(0), axis=1)
        row = g.op("Mod", first, g.const(size))
        queries = g.op("Concat", *self._queries, axis=2)
        if self._form.startswith("tensorrt"):
            plugin = self._form == "tensorrt"
            return update_ring(g, old, queries, row, new, size, self._n_new if plugin else None)
        return g.op("TensorScatter", old, queries, row, output=new, axis=1, mode="circular")

    def _newest(self, q: ir.Value) -> ir.Value:
        """Append the cut to the newest W + 1 queries of the step, head-averaged if asked."""
        g, c, policy = self._g, self._config, self._policy
        q = g.op("Slice", q, g.const([-policy.window - 1]), g.const([2**31]), g.const([1]))
        if policy.window_heads == "mean":
            heads = g.op("Reshape", q, g.const([0, 0, c.num_heads, c.head_dim]))
            heads = g.cast(heads, FLOAT, g.floats)
            q = g.cast(g.op("ReduceMean", heads, g.const([2]), keepdims=0), g.floats, FLOAT)
        return q

    def _declare(self, name: str, i: int) -> tuple[ir.Value, ir.Value]:
        shape = ("B", *(f"C{i}" if d == "C" else d for d in STATES[name].dims(self._config)))
        return (
            self._input(names.state_in(name, i), FLOAT, shape),
            self._output(names.state_out(name, i), FLOAT, shape),
        )

    def _update(
        self,
        op: str,
        inputs: Sequence[ir.Value],
        attributes: dict[str, int],
        outputs: Sequence[ir.Value],
    ) -> Sequence[ir.Value]:
        """Append an update and return the graph outputs that carry what it made."""
        if self._form == "tensorrt":  # the output is the input's memory
            return call(self._g, op, inputs, attributes, outputs)
        made = call(self._g, op, inputs, attributes)
        return [self._g.op("Identity", x, output=out) for x, out in zip(made, outputs, strict=True)]

    def _row_lens(self, i: int) -> ir.Value:
        """Return the layer's lengths before the step, int32 [B, 1] or [B, Hkv]."""
        g = self._g
        at = g.const(0 if self._policy.shared_lens else i)
        lens = g.op("Gather", self._past_lens, at, axis=0)
        rows = self._config.num_kv_heads if self._policy.layout == "head" else 1
        return g.op("Reshape", lens, g.const([-1, rows]))
