"""The two efficiency tables of the Nexus paper: throughput and memory over the answer's length.

Prompts of 8K tokens, batch 1, density 0.2. Positions may run past the model's last one, which
costs the same; what is generated there means nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvsift.runtime.bench import steps
from kvsift.runtime.bench.timing import Series, interleave
from kvsift.runtime.cache import KEY, VALUE
from kvsift.runtime.engine import Engine
from kvsift.runtime.sizes import sizes

DECODE = (4096, 8192, 16384)
MEMORY = (4096, 8192, 16384, 32768)
#: What the paper reports of Llama-3.1-8B in bf16 on an H200 (arXiv 2606.23961, section 5.6).
PAPER = {"throughput": "1.22 to 1.30", "latency": "15 to 23 % lower", "memory": "5.0 to 10.0"}


def measure(
    dense: Engine, evicted: Engine, prompt: list[int], rounds: int, on_block: Callable[[str], None]
) -> dict[str, Any]:
    """Return both tables; a dense step is timed at lengths in between, its mean integrated."""
    lengths = [len(prompt), *(len(prompt) + d for d in DECODE)]
    _enlarge(dense, lengths[-1])
    series = [
        Series(f"dense, {rows} tokens", steps.DenseSteps(dense, prompt, rows, 1).step, 8)
        for rows in lengths
    ]
    # SnapKV evicts at the prompt's end only: it holds what is kept and the answer.
    first = steps.prefill(evicted, prompt)
    kept = first.slot.length
    short = [kept, *(kept + d for d in DECODE)]
    series += [
        Series(f"prefill-only eviction, {rows} tokens",
               steps.DenseSteps(dense, prompt, rows, 1).step, 8)
        for rows in short
    ]  # fmt: skip
    run = steps.EvictedSteps(evicted, first, 1)
    series.append(Series("nexus", run.step, run.interval))
    interleave(series, rounds, on_block)
    count = len(lengths)
    curves = {
        "dense": (lengths, [s.median_ms for s in series[:count]]),
        "prefill-only": (short, [s.median_ms for s in series[count:-1]]),
    }
    nexus = series[-1].mean_ms
    rows = []
    for answer in DECODE:
        ms = {name: _mean(*curve, answer) for name, curve in curves.items()} | {"nexus": nexus}
        rows.append(
            {
                "answer": answer,
                "ms": ms,
                "tokens_s": {name: 1e3 / value for name, value in ms.items()},
                "speedup": ms["dense"] / nexus,
            }
        )
    return {
        "prompt": len(prompt),
        "kept": kept,
        "throughput": rows,
        "memory": memory(evicted, len(prompt), kept),
        "spread": {s.name: s.spread for s in series},
    }


def memory(evicted: Engine, prompt: int, kept: int) -> list[dict[str, Any]]:
    """Return KV bytes of a sequence at the end of answers of each length in MEMORY."""
    each = evicted.kv_bytes_per_token
    held = sizes(evicted.manifest).slot
    rows = []
    for answer in MEMORY:
        dense = (prompt + answer) * each
        rows.append(
            {
                "answer": answer,
                "dense": dense,
                "prefill-only": (kept + answer) * each,
                "nexus": (kept + evicted.manifest.policy.decode_interval) * each,
                "nexus allocated": held,
                "saving": dense / held,
            }
        )
    return rows


def _mean(rows: Sequence[int], ms: Sequence[float], answer: int) -> float:
    """Return the mean step over an answer: the trapezoids between measured lengths."""
    upto = rows.index(rows[0] + answer)
    x, y = np.array(rows[: upto + 1]), np.array(ms[: upto + 1])
    return float((np.diff(x) * (y[1:] + y[:-1]) / 2).sum() / answer)


def _enlarge(engine: Engine, rows: int) -> None:
    """Give a dense engine a cache of one slot for `rows` tokens, filled with random numbers."""
    engine.cache = engine.session.new_cache(1, rows)
    rng = np.random.default_rng(0)
    for layer in range(len(engine.cache.capacities)):
        held = engine.cache.read(0, layer)
        made = {n: rng.standard_normal(held[n].shape, np.float32) for n in (KEY, VALUE)}
        engine.cache.write(0, layer, made)
