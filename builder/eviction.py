"""Eviction nodes: a scorer per layer, then one selector for all layers.

They stand after the layers, behind `If(Size(evict_slots) > 0)` on targets that run op bodies, so
that a step without evictions costs one comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from kvsift.builder import names
from kvsift.builder.bodies import Dims, body
from kvsift.builder.families import ModelConfig
from kvsift.builder.graph import FLOAT, INT32, GraphBuilder, value
from kvsift.builder.ops import TABLE
from kvsift.builder.package import window_features
from kvsift.builder.policies import SCORERS
from kvsift.builder.policies.base import AllLayers, Policy, ScoreInputs
from kvsift.builder.policies.nodes import call
from kvsift.builder.policies.selectors import SELECTORS


@dataclass(frozen=True)
class LayerState:
    """What a layer's scorer may read after the step: caches [B, Hkv, C, D] and states by name."""

    keys: ir.Value
    values: ir.Value
    states: dict[str, ir.Value]


def score_rows(config: ModelConfig, policy: Policy) -> int:
    """Return R: 1 when a layer keeps one set, else the number of KV heads."""
    return config.num_kv_heads if policy.per_head else 1


def eviction_inputs(config: ModelConfig, policy: Policy, *, drawn: bool = False) -> list[ir.Value]:
    """Return the graph inputs that say which slots evict, to what budget, with which seed.

    `drawn`: the random numbers themselves come in place of seed and step.
    """
    L, R = config.num_layers, score_rows(config, policy)
    shapes: dict[str, tuple[int | str, ...]] = {
        names.EVICT_SLOTS: ("E",),
        names.TOKENS_SEEN: ("E",),
        names.UNIT_IDS: (L, "E", R, "N"),
        names.BUDGET: (L, "E", R),
        names.PIN_SPANS: ("E", "P", 2),
        names.EVICTION_SEED: ("E", 2),
        names.EVICTION_STEP: ("E",),
    }
    if policy.prefill_selector == "topk" and _draws(policy) > 0:
        shapes[names.PROMPT_END] = ("E",)
    if drawn or not _needs_philox(policy):
        del shapes[names.EVICTION_SEED], shapes[names.EVICTION_STEP]
    inputs = [value(name, INT32, shape) for name, shape in shapes.items()]
    if drawn and _needs_philox(policy):
        draws = _philox_attributes(config, policy)["draws"]
        inputs.append(value(names.UNIFORM, FLOAT, (L, "E", R, int(draws), "N")))
    return inputs


def eviction_outputs(
    config: ModelConfig, policy: Policy, trace_scores: bool = False
) -> list[ir.Value]:
    """Return the graph outputs of the selector, and of the scorers if scores are traced."""
    L, R = config.num_layers, score_rows(config, policy)
    outputs = [
        value(names.KEEP, INT32, (L, "E", R, "N")),
        value(names.KEEP_LEN, INT32, (L, "E", R)),
        value(names.COVERAGE, FLOAT, (L, "E", R)),
    ]
    scores = value(names.SCORES, FLOAT, (L, "E", R, "N"))
    return [*outputs, scores] if trace_scores else outputs


def emit_guarded(
    g: GraphBuilder,
    config: ModelConfig,
    policy: Policy,
    inputs: Sequence[ir.Value],
    layers: Sequence[LayerState],
    ring: ir.Value | None,
    outputs: Sequence[ir.Value],
) -> None:
    """Append the `If` node; `inputs` and `outputs` as from the functions above."""
    then = GraphBuilder("then_")
    selected = emit_selection(then, config, policy, inputs, layers, ring)[: len(outputs)]
    g.calls |= then.calls
    then_outputs = [_renamed(then, v, o, "then") for v, o in zip(selected, outputs, strict=True)]
    other = GraphBuilder("else_")
    L, R = config.num_layers, score_rows(config, policy)
    empty = (np.zeros((L, 0, R, 0), np.int32), np.zeros((L, 0, R), np.int32))
    arrays = (*empty, np.zeros((L, 0, R), np.float32), np.zeros((L, 0, R, 0), np.float32))
    else_outputs = [
        _renamed(other, other.const(a, a.dtype), o, "else")
        for a, o in zip(arrays, outputs, strict=False)
    ]
    slots = next(v for v in inputs if v.name == names.EVICT_SLOTS)
    evicts = g.op("Greater", g.op("Size", slots), g.const(0))
    g.multi(
        "If",
        evicts,
        outputs=outputs,
        name="evict",
        then_branch=then.graph([], then_outputs, "evict_then"),
        else_branch=other.graph([], else_outputs, "evict_else"),
    )


def emit_plain(
    g: GraphBuilder,
    config: ModelConfig,
    policy: Policy,
    inputs: Sequence[ir.Value],
    layers: Sequence[LayerState],
    ring: ir.Value | None,
    outputs: Sequence[ir.Value],
) -> None:
    """Append the nodes without a guard, for targets where they cost nothing when no slot evicts."""
    selected = emit_selection(g, config, policy, inputs, layers, ring)[: len(outputs)]
    for made, output in zip(selected, outputs, strict=True):
        g.op("Identity", made, output=output)


def emit_selection(
    g: GraphBuilder,
    config: ModelConfig,
    policy: Policy,
    inputs: Sequence[ir.Value],
    layers: Sequence[LayerState],
    ring: ir.Value | None,
) -> Sequence[ir.Value]:
    """Append scorers and selector; return keep, keep_len, coverage and the scores.

    `ring` float32 [B, W + 1, L*Hq*D] holds the newest queries, see `names.py`.
    """
    named = {v.name: v for v in inputs}
    ids, slots = named[names.UNIT_IDS], named[names.EVICT_SLOTS]
    scorer = SCORERS[policy.scorer]
    options = scorer.options.model_validate(policy.scorer_options)
    uniform = _uniform(g, config, policy, named)
    windows = _windows(g, config, policy, named, ring)
    inv_freq = g.const(config.rope.inv_freq(config.head_dim), np.float32)
    scores = []
    for index, layer in enumerate(layers):
        at = g.const(index)
        x = ScoreInputs(
            keys=layer.keys,
            values=layer.values,
            q_window=windows[index] if windows else None,
            uniform=g.op("Gather", uniform, at, axis=0) if scorer.needs_uniform else None,
            unit_ids=g.op("Gather", ids, at, axis=0),
            tokens_seen=named[names.TOKENS_SEEN],
            evict_slots=slots,
            states=layer.states,
            inv_freq=inv_freq,
            rope_factor=config.rope.attention_factor,
            sink_units=policy.sink_units,
        )
        score = scorer.emit(g, x, options, policy.block_size)
        scores.append(g.op("Unsqueeze", score, g.const([0])))
    stacked = g.op("Concat", *scores, axis=0)
    if scorer.finish:
        every = AllLayers(ids, named[names.TOKENS_SEEN])
        stacked = scorer.finish(g, stacked, every, options, policy.block_size)
    common = (named[names.BUDGET], ids, named[names.TOKENS_SEEN], named[names.PIN_SPANS])
    selector = SELECTORS[policy.selector]
    draws = (uniform,) if _draws(policy) else ()
    selected = call(g, selector.op, (stacked, *draws, *common), selector_attributes(policy))
    return [*selected, stacked]


def selector_attributes(policy: Policy) -> dict[str, int | float]:
    """Return the attributes of the policy's selector node."""
    attributes: dict[str, int | float] = {
        "block_size": policy.block_size,
        "sink_units": policy.sink_units,
        "recent_units": policy.recent_units,
        "score_is_mass": int(policy.score_is_mass),
    }
    if policy.selector == "reservoir":
        attributes["normalize"] = int(policy.scorer != "nexus")
    known = {a.name for a in TABLE[SELECTORS[policy.selector].op].attrs}
    attributes |= {
        k: v for k, v in policy.selector_options.items() if k in known and not isinstance(v, str)
    }
    return attributes


def functions(
    config: ModelConfig,
    policy: Policy,
    calls: dict[str, dict[str, int | float]],
    *,
    fixed: bool = False,
) -> list[ir.Function]:
    """Return the bodies, in standard ONNX, of the ops that the graph calls; see `Dims.fixed`."""
    dims = Dims(
        window_heads=config.num_heads if policy.window_heads != "mean" else 1,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        window=policy.window,
        fixed=fixed,
    )
    return [body(op, attributes, dims) for op, attributes in calls.items()]


def _draws(policy: Policy) -> int:
    """Return the uniforms per unit that the selector reads."""
    selector = SELECTORS[policy.selector]
    return selector.draws(selector.options.model_validate(policy.selector_options))


def _needs_philox(policy: Policy) -> bool:
    return _draws(policy) > 0 or SCORERS[policy.scorer].needs_uniform


def _philox_attributes(config: ModelConfig, policy: Policy) -> dict[str, int | float]:
    return {"draws": max(1, _draws(policy)), "heads_per_layer": config.num_kv_heads}


def _uniform(
    g: GraphBuilder, config: ModelConfig, policy: Policy, named: dict[str | None, ir.Value]
) -> ir.Value | None:
    """Append the Philox draws of all layers, [L, E, R, n, N].

    At a prompt's end under `prefill_selector=topk` every unit gets the same draws: the priority
    then rises with the weight alone, which is top-k.
    """
    if not _needs_philox(policy):
        return None
    if names.UNIFORM in named:
        drawn = named[names.UNIFORM]
    else:
        words = (named[names.UNIT_IDS], named[names.EVICTION_SEED], named[names.EVICTION_STEP])
        drawn = call(g, "PhiloxUniform", words, _philox_attributes(config, policy))[0]
    if names.PROMPT_END not in named:
        return drawn
    one_shot = g.op("Equal", named[names.PROMPT_END], g.const(1, np.int32))
    shaped = g.op("Reshape", one_shot, g.const([1, -1, 1, 1, 1]))
    return g.op("Where", shaped, g.const(0.5, np.float32), drawn)


def _windows(
    g: GraphBuilder,
    config: ModelConfig,
    policy: Policy,
    named: dict[str | None, ir.Value],
    ring: ir.Value | None,
) -> Sequence[ir.Value]:
    """Append the evicting slots' windows in chronological order, one [E, W, Hq*D] per layer."""
    if ring is None:
        return ()
    size = policy.window + 1
    features = config.num_layers * window_features(config, policy)
    seen = g.op("Unsqueeze", named[names.TOKENS_SEEN], g.const([1]))
    # Position seen - W + i lies in row (seen - W + i) mod (W + 1), which is (seen + 1 + i) mod.
    back = g.const(np.arange(1, size), np.int32)
    row = g.op("Mod", g.op("Add", seen, back), g.const(size, np.int32))
    slots = g.op("Max", named[names.EVICT_SLOTS], g.const(0, np.int32))
    start = g.op("Unsqueeze", g.op("Mul", slots, g.const(size, np.int32)), g.const([1]))
    flat = g.op("Reshape", ring, g.const([-1, features]))
    window = g.op("Gather", flat, g.op("Add", start, row), axis=0)
    if config.num_layers == 1:
        return (window,)
    return g.multi(
        "Split", window, outputs=config.num_layers, axis=2, num_outputs=config.num_layers
    )


def _renamed(g: GraphBuilder, made: ir.Value, like: ir.Value, branch: str) -> ir.Value:
    """Return `made` as a typed output of a branch."""
    assert like.shape is not None
    dims = [d if isinstance(d, int) else f"{branch}_{d}" for d in like.shape]
    out = ir.Value(name=f"{like.name}_{branch}", type=like.type, shape=ir.Shape(dims))
    return g.op("Identity", made, output=out)
