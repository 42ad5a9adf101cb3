"""A policy's eviction nodes alone, as a model of their own: the caches come as inputs.

What an engine would keep can then be asked of any policy on the caches of any other engine of the
same model, without one package per policy.
"""

from __future__ import annotations

import onnx_ir as ir

from kvsift.builder import eviction, names
from kvsift.builder.errors import UsageError
from kvsift.builder.families import ModelConfig
from kvsift.builder.graph import FLOAT, IR_VERSION, GraphBuilder, value
from kvsift.builder.ops import DOMAIN, OPSET
from kvsift.builder.package import window_features
from kvsift.builder.policies.base import Policy
from kvsift.builder.states import STATES


def eviction_model(config: ModelConfig, policy: Policy) -> ir.Model:
    """Return the model of a policy's scorers and selector, without weights.

    Inputs of every layer i: past_key.i and past_value.i float32 [B, Hkv, C, D] and its states;
    q_ring_in float32 [B, W + 1, L*features]; each only if the policy reads it; then the eviction
    inputs of `names.py`. Outputs: keep, keep_len, coverage. Raises UsageError for a policy that
    evicts nothing.
    """
    if not policy.evicts:
        raise UsageError(f"eviction {policy.name!r} keeps everything: it has no eviction nodes")
    g = GraphBuilder()
    cache = ("B", config.num_kv_heads, "C", config.head_dim)
    features = config.num_layers * window_features(config, policy)
    ring = value(names.Q_RING_IN, FLOAT, ("B", policy.window + 1, features))
    layers = [
        eviction.LayerState(
            keys=value(names.past_key(i), FLOAT, cache),
            values=value(names.past_value(i), FLOAT, cache),
            states={
                name: value(names.state_in(name, i), FLOAT, ("B", *STATES[name].dims(config)))
                for name in policy.states
            },
        )
        for i in range(config.num_layers)
    ]
    inputs = eviction.eviction_inputs(config, policy)
    outputs = eviction.eviction_outputs(config, policy)
    newest = ring if policy.window else None
    eviction.emit_plain(g, config, policy, inputs, layers, newest, outputs)
    state = [v for x in layers for v in (x.keys, x.values, *x.states.values())]
    read = [v for v in (*state, ring) if v.uses()]
    graph = g.graph([*read, *inputs], outputs, "kvsift_eviction")
    graph.opset_imports[DOMAIN] = OPSET
    return ir.Model(
        graph,
        ir_version=IR_VERSION,
        producer_name="kvsift",
        functions=eviction.functions(config, policy, g.calls),
    )
