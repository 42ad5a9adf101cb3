"""Where a decode step's time goes: ONNX Runtime's own profiler, summed by op type."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvsift.runtime.bench import steps
from kvsift.runtime.bench.timing import Series
from kvsift.runtime.cache import KEY, VALUE
from kvsift.runtime.engine import Engine
from kvsift.runtime.sessions.ort import OrtSession

#: Steps before the profile starts to count.
WARMUP = 8
TOP = 10


@dataclass(frozen=True)
class Profile:
    """Medians over steps, in ms: `step_ms` as the caller sees it, `run_ms` inside ONNX Runtime.

    `ops` are (op type, nodes per step, ms per step), the most expensive first. Profiling itself
    costs some microseconds per node, so shares mean more than times.
    """

    rows: int
    step_ms: float
    run_ms: float
    ops: tuple[tuple[str, float, float], ...]


def profile(directory: Path, prompt: list[int], batch: int, count: int, threads: int) -> Profile:
    """Profile `count` decode steps of a package at the end of `prompt`.

    A dense engine repeats the step that appends the prompt's last token, over random rows; an
    evicting one reads the prompt and decodes, evictions included.
    """
    engine = Engine(directory, max_batch=batch, threads=threads)
    run: steps.EvictedSteps | steps.DenseSteps
    if engine.manifest.policy.evicts:
        run = steps.EvictedSteps(engine, steps.prefill(engine, prompt), batch)
        rows = run.sequences[0].slot.length
    else:
        run = steps.DenseSteps(engine, prompt, len(prompt), batch)
        rows = len(prompt)
        rng = np.random.default_rng(0)
        for slot, layer in np.ndindex(engine.cache.slots, len(engine.cache.capacities)):
            held = engine.cache.read(slot, layer)
            made = {n: rng.standard_normal(held[n].shape, np.float32) for n in (KEY, VALUE)}
            engine.cache.write(slot, layer, made)
    with tempfile.TemporaryDirectory() as folder:
        session = OrtSession(directory, engine.manifest, threads, Path(folder) / "profile")
        engine.session = session
        series = Series("profiled", run.step, steps=count, warmup=WARMUP)
        series.block()
        events: list[dict[str, Any]] = json.loads(session.end_profile().read_text())
    run_ms, ops = summarise(events, count)
    return Profile(rows, series.median_ms, run_ms, ops)


def summarise(
    events: list[dict[str, Any]], count: int
) -> tuple[float, tuple[tuple[str, float, float], ...]]:
    """Return the median ms of the last `count` runs and their (op type, nodes, ms) per run.

    An `If` that runs its branch counts the nodes inside twice, under its own name and theirs.
    """
    runs = sorted((e["ts"], e["dur"]) for e in events if e["name"] == "model_run")[-count:]
    first = runs[0][0]
    nodes: dict[str, int] = defaultdict(int)
    spent: dict[str, float] = defaultdict(float)
    for event in events:
        if event["name"].endswith("_kernel_time") and event["ts"] >= first:
            op = event["args"]["op_name"]
            nodes[op] += 1
            spent[op] += event["dur"] / 1e3
    ops = [(op, nodes[op] / len(runs), spent[op] / len(runs)) for op in spent]
    ops.sort(key=lambda item: -item[2])
    return float(np.median([dur for _, dur in runs])) / 1e3, tuple(ops)
