"""The benchmark of whole requests: contestants take turns over contexts, outputs and batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from kvsift.runtime.bench import prefill
from kvsift.runtime.bench.bandwidth import Bandwidth
from kvsift.runtime.bench.contestants import Contestant, Ours, Run
from kvsift.runtime.bench.timing import spread_of


@dataclass(frozen=True)
class Grid:
    """What is varied; `memory` bytes decide how many sequences fit."""

    contexts: Sequence[int]
    outputs: Sequence[int]
    batches: Sequence[int]
    rounds: int
    memory: int


def measure(
    contestants: Sequence[Contestant],
    prompt: Sequence[int],
    grid: Grid,
    bandwidth: Bandwidth,
    on_run: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Return one row per contestant, context, output and batch, from rounds A B C A B C ...

    kvpress and OpenVINO answer one sequence at a time: they are left out of larger batches.
    """
    rows = []
    for context, output, batch in product(grid.contexts, grid.outputs, grid.batches):
        taking = [c for c in contestants if batch == 1 or takes_batches(c)]
        runs: list[list[Run]] = [[] for _ in taking]
        for _ in range(grid.rounds):
            for series in bandwidth.series:
                series.block()
            for mine, contestant in zip(runs, taking, strict=True):
                mine.append(contestant.run(prompt[:context], output, batch))
                on_run(f"{contestant.name} {contestant.weights}, {context} tokens")
        gb_s = bandwidth.gb_s()[0]
        for c, mine in zip(taking, runs, strict=True):
            rows.append(_row(c, mine, context, output, batch, gb_s, grid.memory))
            if isinstance(c, Ours) and mine[0].cuts:
                rows[-1] |= _at_the_end(c, list(prompt[:context]), rows[-1]["ttft_ms"])
    return rows


def _at_the_end(ours: Ours, prompt: list[int], ttft_ms: float) -> dict[str, float]:
    """Return ms of the eviction at the prompt's end, and its share of the time to read it."""
    cost = prefill.eviction_cost(ours.engine, prompt, ours.density)
    ms = cost["eviction_ms"] + cost["gather_ms"]
    return {"prompt_eviction_ms": ms, "prompt_eviction_share": ms / ttft_ms}


def takes_batches(contestant: Contestant) -> bool:
    """Whether a contestant decodes several sequences together."""
    return not contestant.name.startswith(("kvpress", "OpenVINO"))


def _row(
    contestant: Contestant,
    runs: Sequence[Run],
    context: int,
    output: int,
    batch: int,
    gb_s: float,
    memory: int,
) -> dict[str, Any]:
    steps = [float(np.median(run.itl_s)) for run in runs]
    means = [float(np.mean(run.itl_s)) for run in runs]
    ttft = [run.ttft_s for run in runs]
    itl, mean = float(np.median(steps)), float(np.median(means))
    cached = runs[-1].rows
    row: dict[str, Any] = {
        "engine": contestant.name,
        "weights": contestant.weights,
        "density": contestant.density,
        "context": context,
        "output": output,
        "batch": batch,
        "ttft_ms": 1e3 * float(np.median(ttft)),
        "ttft_spread": spread_of(ttft),
        "itl_ms": 1e3 * itl,
        "itl_mean_ms": 1e3 * mean,
        "itl_p95_ms": 1e3 * float(np.quantile([t for run in runs for t in run.itl_s], 0.95)),
        "itl_spread": spread_of(steps),
        # By the mean: what evictions and stalls cost is in it.
        "tokens_s": batch / mean,
        "prefill_tokens_s": context / float(np.median(ttft)),
        "cached_tokens": cached,
        "bandwidth_gb_s": gb_s,
    }
    if cached is not None and contestant.weight_bytes and contestant.token_bytes:
        kv = batch * cached * contestant.token_bytes
        read = contestant.weight_bytes + kv
        row |= {
            "weight_bytes": contestant.weight_bytes,
            "kv_bytes_read": int(kv),
            "kv_share": kv / read,
            "floor_ms": read / gb_s / 1e6,
        }
    if runs[0].evicts:
        row |= _overhead(runs)
    if isinstance(contestant, Ours):
        held = contestant.sizes(context, output)
        dense = not contestant.engine.manifest.policy.evicts
        row |= {
            "kv_bytes_used": int((cached or 0) * contestant.engine.kv_bytes_per_token),
            "kv_bytes_allocated": held.slot,
            "scratch_bytes": held.scratch,
            "sequences_that_fit": max(0, held.sequences(memory - held.weights, dense=dense)),
        }
    return row


def _overhead(runs: Sequence[Run]) -> dict[str, float]:
    """Return what evictions add: ms to a step that evicts, and their share of all decode time.

    Medians on both sides: means would set stalls of the machine down to eviction.
    """
    ms = 1e3 * np.array([t for run in runs for t in run.itl_s])
    evicts = np.array([e for run in runs for e in run.evicts])
    plain = float(np.median(ms[~evicts]))
    extra = float(np.median(ms[evicts])) - plain
    spread = extra * float(evicts.mean())
    return {"eviction_ms": extra, "eviction_share": spread / (plain + spread)}
