"""Requests together against one alone, through the scheduler: `kvsift bench serve`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from kvsift.builder.errors import UsageError
from kvsift.runtime import result_files
from kvsift.runtime.bench import report, text
from kvsift.runtime.console import parse_size
from kvsift.runtime.engine import Engine
from kvsift.runtime.params import SamplingParams
from kvsift.runtime.request import Request
from kvsift.runtime.result_files import JsonFile
from kvsift.runtime.scheduler import Scheduler
from kvsift.runtime.stats import SchedulerStats


@dataclass(frozen=True)
class Round:
    """One run of some requests that came at the same moment.

    `decode_rate` tokens per second while all of them decode: from the moment the last one has its
    first token to the moment one has its last. `end_to_end_rate` tokens per second from the first
    submission to the last token, prompts included. `step_rate` tokens per second of decode steps
    alone, over the whole round. TTFT and ITL (time to the first and between tokens) in seconds.
    """

    requests: int
    decode_rate: float
    end_to_end_rate: float
    step_rate: float
    ttft_mean_s: float
    ttft_max_s: float
    itl_median_s: float
    itl_max_s: float


def run(scheduler: Scheduler, requests: Sequence[Request]) -> Round:
    """Run requests together; UsageError if no two tokens of all of them came side by side."""
    before, start = scheduler.stats(), time.perf_counter()
    tickets = scheduler.submit_all(requests, unlimited=True)
    results = [ticket.result() for ticket in tickets]
    wall = time.perf_counter() - start
    # Clocks of requests begin when they are checked: microseconds apart, prompts are ids.
    times = [list(accumulate(r.timings.itl_s, initial=r.timings.ttft_s)) for r in results]
    begin, end = max(t[0] for t in times), min(t[-1] for t in times)
    if end <= begin:
        raise UsageError(
            f"{len(requests)} requests never decoded side by side; give a larger --max-tokens, or "
            "an engine with as many slots"
        )
    decoded = sum(begin < moment <= end for t in times for moment in t)
    gaps = np.array([gap for r in results for gap in r.timings.itl_s])
    firsts = np.array([r.timings.ttft_s for r in results])
    return Round(
        requests=len(requests),
        decode_rate=decoded / (end - begin),
        end_to_end_rate=sum(len(r.token_ids) for r in results) / wall,
        step_rate=_step_rate(before, scheduler.stats()),
        ttft_mean_s=float(firsts.mean()),
        ttft_max_s=float(firsts.max()),
        itl_median_s=float(np.median(gaps)),
        itl_max_s=float(gaps.max()),
    )


def _step_rate(before: SchedulerStats, after: SchedulerStats) -> float:
    return (after.decoded_tokens - before.decoded_tokens) / (after.decode_s - before.decode_s)


def measure(
    scheduler: Scheduler,
    requests: Sequence[Request],
    rounds: int,
    on_round: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Return the medians over `rounds` turns of one request alone and all together.

    The turns alternate, and one of a short answer comes first and is not counted.
    """
    warm = [Request(r.prompt, SamplingParams(max_tokens=8, ignore_eos=True)) for r in requests]
    for ticket in scheduler.submit_all(warm, unlimited=True):
        ticket.result()
    alone: list[Round] = []
    together: list[Round] = []
    for turn in range(rounds):
        alone.append(run(scheduler, [requests[turn % len(requests)]]))
        together.append(run(scheduler, requests))
        if on_round:
            on_round(f"round {turn + 1} of {rounds}")
    one, many = _median(alone), _median(together)
    return {
        "one": one,
        "together": many,
        "decode_ratio": many["decode_rate"] / one["decode_rate"],
        "end_to_end_ratio": many["end_to_end_rate"] / one["end_to_end_rate"],
        "rounds": [[vars(a), vars(b)] for a, b in zip(alone, together, strict=True)],
    }


def _median(found: list[Round]) -> dict[str, float]:
    """Return the median of every field."""
    return {key: float(np.median([vars(one)[key] for one in found])) for key in vars(found[0])}


def prompts(engine: Engine, count: int, tokens: int) -> list[list[int]]:
    """Return `count` different prompts of `tokens` tokens of prose."""
    ids = text.prompt(engine.tokenizer, count * tokens)
    return [ids[i * tokens : (i + 1) * tokens] for i in range(count)]


def command(
    engine: Annotated[Path, typer.Argument(help="Engine directory.", metavar="ENGINE")],
    requests: Annotated[int, typer.Option(min=2, help="Requests together.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 2048,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of one and of all.")] = 3,
    prefill_chunks: Annotated[
        int, typer.Option(min=1, help="Chunks of prompts between two decode steps.")
    ] = 1,
    kv_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Most memory of all KV caches; may give fewer slots."),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the engine.")] = 2,
    json_file: JsonFile = None,
) -> None:
    """Time requests that run together against one alone, through the scheduler.

    Example: kvsift bench serve ENGINE_DIR --requests 8 --prompt-tokens 2048 --max-tokens 256
    """
    console = Console(stderr=True)
    machine = report.machine(threads)  # its load is that before the run
    memory = None if kv_memory is None else parse_size(kv_memory)
    loaded = Engine(engine, max_batch=requests, kv_memory=memory, threads=threads)
    asked = [
        Request(ids, SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=seed))
        for seed, ids in enumerate(prompts(loaded, requests, prompt_tokens))
    ]
    with (
        Scheduler(loaded, prefill_chunks=prefill_chunks) as scheduler,
        console.status("warming up") as status,
    ):
        found = measure(scheduler, asked, rounds, status.update)
    manifest = loaded.manifest
    record = found | {
        "engine": {
            "policy": manifest.policy.name,
            "density": manifest.limits.density,
            "quantize": manifest.quantize,
            "parameters": manifest.parameters,
            "chunk": manifest.limits.chunk,
        },
        "settings": {
            "requests": requests,
            "slots": loaded.max_batch,
            "prompt_tokens": prompt_tokens,
            "max_tokens": max_tokens,
            "prefill_chunks": prefill_chunks,
        },
        "machine": machine,
        "versions": report.versions(),
    }
    if json_file:
        result_files.write(json_file, json.dumps(record, indent=1) + "\n")
    show(record)


def show(record: dict[str, Any]) -> None:
    """Print the table and the two ratios."""
    count, settings = record["settings"]["requests"], record["settings"]
    title = f"{record['engine']['policy']}, weights {record['engine']['quantize']}: "
    title += f"{settings['prompt_tokens']} prompt tokens, {settings['max_tokens']} new ones each"
    table = Table(title=title)
    for name in ("", "one alone", f"{count} together"):
        table.add_column(name)
    for name, key, scale in (
        ("decode tokens/s, all running", "decode_rate", 1),
        ("tokens/s of decode steps alone", "step_rate", 1),
        ("tokens/s end to end", "end_to_end_rate", 1),
        ("TTFT mean, ms", "ttft_mean_s", 1e3),
        ("TTFT longest, ms", "ttft_max_s", 1e3),
        ("ITL median, ms", "itl_median_s", 1e3),
        ("ITL longest, ms", "itl_max_s", 1e3),
    ):
        values = (f"{scale * record[who][key]:.1f}" for who in ("one", "together"))
        table.add_row(name, *values)
    Console(width=100).print(table)
    print(
        f"{count} together decode {record['decode_ratio']:.2f} times the tokens/s of one; "
        f"end to end, prompts included: {record['end_to_end_ratio']:.2f} times"
    )
