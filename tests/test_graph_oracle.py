"""What whole graphs keep against what the float64 oracle makes of their own caches and queries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engines import Engines, request, run_and_inspect
from near_ties import near_ties
from numpy.typing import NDArray
from reference import PRIORITY, REFERENCE

from kvsift.builder.ops import HEAD_REDUCE, WALK_ORDER
from kvsift.builder.weights import open_model
from kvsift.runtime.engine import Engine
from kvsift.runtime.host_cache import HostCache
from kvsift.runtime.sessions import Evictions, Kept, Step, StepOutput

Array = NDArray[Any]
WINDOW, BLOCK, DRAWS = 16, 8, 5
NEXUS: dict[str, dict[str, Any]] = {
    "mean_prob": {},
    "mean_qk": {"head_reduce": "mean_qk"},
    "per_head": {"head_reduce": "per_head"},
    "no walk": {"walk_steps": 0},
    "strided": {"walk_order": "strided", "walk_steps": 5, "walk_lambda": 3.0},
    "newest first": {"walk_order": "newest_first", "walk_steps": 8, "walk_lambda": 2.0},
    "no ramp": {"tie_eps": 0.0},
    "topk": {"selector": "topk"},
    "topk first": {"prefill_selector": "topk"},
    "sinks": {"sink_units": 3, "recent_units": 4},
}


def queries(cache: HostCache, x: Evictions, layer: int, layers: int) -> Array:
    """Return the evicting slots' last W queries of a layer by their positions, [E, W, features]."""
    assert cache.ring is not None
    seen = x.tokens_seen[:, None]
    rows = cache.ring[x.slots[:, None], (seen - WINDOW + np.arange(WINDOW)) % (WINDOW + 1)]
    return np.split(rows, layers, axis=2)[layer]


def nexus_scores(engine: Engine, cache: HostCache, x: Evictions, options: dict[str, Any]) -> Array:
    layers = engine.manifest.model.num_layers
    mode = HEAD_REDUCE.index(options.get("head_reduce", "mean_prob"))
    mass = [
        REFERENCE["WindowMass"](
            {"block_size": BLOCK, "head_reduce": mode},
            {
                "q_window": queries(cache, x, layer, layers),
                "keys": cache.keys[layer],
                "unit_ids": x.unit_ids[layer],
                "tokens_seen": x.tokens_seen,
                "evict_slots": x.slots,
            },
        )[0]
        for layer in range(layers)
    ]
    attrs = {
        "block_size": BLOCK,
        "walk_steps": options.get("walk_steps", 3),
        "walk_order": WALK_ORDER.index(options.get("walk_order", "chronological")),
        "walk_lambda": options.get("walk_lambda", 0.5),
        "tie_eps": options.get("tie_eps", 1e-6),
    }
    inputs = {"mass": np.stack(mass), "unit_ids": x.unit_ids, "tokens_seen": x.tokens_seen}
    return REFERENCE["NexusScore"](attrs, inputs)[0]


def compare(
    kept: Kept, x: Evictions, score: Array, op: str, options: dict[str, Any], heads: int
) -> int:
    """Assert that the graph kept what the oracle keeps; return the number of near ties."""
    inputs: dict[str, Array] = {
        "score": score,
        "budget": x.budget,
        "unit_ids": x.unit_ids,
        "tokens_seen": x.tokens_seen,
        "pin_spans": x.pin_spans,
    }
    attrs = {
        "block_size": BLOCK,
        "sink_units": options.get("sink_units", 1),
        "recent_units": options.get("recent_units", 2),
        "score_is_mass": 1,
        "normalize": 0,
    }
    if op == "ReservoirSelect":
        drawn = {"unit_ids": x.unit_ids, "seed": x.seed, "step": x.step}
        (u,) = REFERENCE["PhiloxUniform"]({"draws": DRAWS, "heads_per_layer": heads}, drawn)
        if options.get("prefill_selector") == "topk":
            u = np.where(x.prompt_end[:, None, None, None] == 1, 0.5, u)
        inputs["u"] = u
    keep, keep_len, coverage = REFERENCE[op](attrs, inputs)
    np.testing.assert_array_equal(kept.keep_len, keep_len)
    np.testing.assert_allclose(kept.coverage, coverage, rtol=1e-4)
    return near_ties(kept.keep, keep, PRIORITY[op](attrs, inputs), rtol=1e-4)


@pytest.mark.parametrize("name", NEXUS)
def test_nexus_keeps_what_the_oracle_keeps(engines: Engines, name: str) -> None:
    options = dict(NEXUS[name])
    selector = options.pop("selector", "reservoir")
    engine = engines("nexus", selector=selector, options={"block_size": BLOCK, **options})
    op = "TopKSelect" if selector == "topk" else "ReservoirSelect"
    seen: list[int] = []
    ties: list[int] = []

    def watch(cache: HostCache, step: Step, output: StepOutput) -> None:
        x = step.evictions
        if x is None:
            return
        assert output.kept is not None
        score = nexus_scores(engine, cache, x, options)
        heads = engine.manifest.model.num_kv_heads
        ties.append(compare(output.kept, x, score, op, options, heads))
        seen.append(len(x.slots))

    requests = [
        request(300, 40, seed=2**63 + 7),
        request(161, 40, seed=2, pin=[(50, 60)], density=0.6),
        request(124, 40, density=0.5),
    ]
    run_and_inspect(engine, requests, watch=watch)
    assert len(seen) > 8
    assert max(seen) > 1  # slots that evict together
    assert sum(ties) <= 1


def test_the_ring_holds_the_rotated_queries(engines: Engines) -> None:
    """Layer 0's queries, computed here from the weights."""
    engine = engines("nexus", options={"block_size": BLOCK})
    tokens = request(300).prompt
    run_and_inspect(engine, [request(300, 0)])
    source = open_model(engines.model("tiny"))
    x = source.tensor("model.embed_tokens.weight")[np.array(tokens)].astype(np.float64)
    x /= np.sqrt((x * x).mean(-1, keepdims=True) + source.config.rms_eps)
    x *= source.tensor("model.layers.0.input_layernorm.weight")
    q = (x @ source.tensor("model.layers.0.self_attn.q_proj.weight").T).reshape(300, 4, 2, 8)
    angle = np.arange(300)[:, None] / 10000.0 ** (np.arange(8) / 8)
    turn = np.exp(1j * angle)[:, None]
    turned = (q[:, :, 0] + 1j * q[:, :, 1]) * turn
    want = np.stack([turned.real, turned.imag], 2).reshape(300, 64)
    assert engine.cache.ring is not None
    for position in range(300 - WINDOW, 300):
        got = engine.cache.ring[0, position % (WINDOW + 1), :64]
        np.testing.assert_allclose(got, want[position], atol=1e-4)
