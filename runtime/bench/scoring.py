"""The scoring benchmark: what each policy's eviction at a prompt's end costs, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnxruntime as ort

from kvsift.builder import names
from kvsift.builder.package import Policy, window_features
from kvsift.builder.states import STATES
from kvsift.runtime.bench import steps
from kvsift.runtime.bench.timing import Series, interleave
from kvsift.runtime.budgets import units_of
from kvsift.runtime.cache import KEY, VALUE
from kvsift.runtime.engine import Engine
from kvsift.runtime.layer_budgets import layer_budgets
from kvsift.runtime.slots import evictions, new_slot


def measure(
    engine: Engine,
    models: Mapping[str, tuple[Policy, bytes]],
    prompt: list[int],
    density: float,
    rounds: int,
    threads: int,
    on_block: Callable[[str], None],
) -> dict[str, Any]:
    """Return ms of every policy's scorers and selector, and of reading the prompt, interleaved.

    `engine` is dense; the keys and values are the prompt's, queries and states random numbers,
    which cost the same. Each eviction runs on all layers as it does in an engine.
    """
    reading = Series("prefill", lambda: steps.prefill(engine, prompt), warmup=0)
    steps.prefill(engine, prompt)
    series = {
        name: Series(name, _runner(engine, policy, model, len(prompt), density, threads), steps=3)
        for name, (policy, model) in models.items()
    }
    interleave([reading, *series.values()], rounds, on_block)
    rows = [
        {"policy": name, "ms": one.median_ms, "share": one.median_ms / reading.median_ms}
        for name, one in series.items()
    ]
    return {"tokens": len(prompt), "prefill_ms": reading.median_ms, "rows": rows}


def _runner(
    engine: Engine, policy: Policy, model: bytes, tokens: int, density: float, threads: int
) -> Callable[[], Any]:
    """Return a call that evicts once from the engine's scratch as the policy does."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    config, cache, size = engine.manifest.model, engine.scratch, policy.block_size
    total = units_of(tokens, size)
    forced = policy.sink_units + policy.recent_units
    units = max(forced + 1, int(density * total))
    budgets = layer_budgets(policy, units, total, config.num_layers, forced)
    slot = new_slot(config, policy, 0, total, budgets)
    slot.append(tokens)
    feed: dict[str, Any] = dict(evictions([slot], engine.manifest, True).feed())
    rng = np.random.default_rng(0)

    def random(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return rng.standard_normal(shape, np.float32)

    features = config.num_layers * window_features(config, policy)
    feed[names.Q_RING_IN] = random(1, policy.window + 1, features)
    for i in range(config.num_layers):
        held = cache.read(0, i)
        feed[names.past_key(i)], feed[names.past_value(i)] = held[KEY][None], held[VALUE][None]
        for state in policy.states:
            dims = [cache.capacity if d == "C" else int(d) for d in STATES[state].dims(config)]
            feed[names.state_in(state, i)] = np.abs(random(1, *dims))
    wanted = {i.name for i in session.get_inputs()}
    feed = {k: v for k, v in feed.items() if k in wanted}
    outputs = [names.KEEP, names.KEEP_LEN]
    return lambda: session.run(outputs, feed)
