"""`kvsift bench run` and `kvsift bench paper`: whole requests, beside what else there is.

They build the engines that they time.
"""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvsift.builder.errors import UsageError
from kvsift.builder.families import tensor_shapes
from kvsift.builder.policies import resolve
from kvsift.builder.weights import WeightSource, default_model, open_model
from kvsift.runtime import plotting, result_files
from kvsift.runtime.bench import paper, regguf, report, sweep, sweep_report, text
from kvsift.runtime.bench.bandwidth import MIB_DEFAULT, Bandwidth
from kvsift.runtime.bench.builds import limits_for, obtain
from kvsift.runtime.bench.contestants import Contestant, Kvpress, Ours, Transformers
from kvsift.runtime.bench.openvino_peer import OpenVino
from kvsift.runtime.bench.peak import peak_bytes
from kvsift.runtime.bench.sweep_options import (
    Batches,
    Contexts,
    Densities,
    Model,
    Name,
    Out,
    Outputs,
    Peers,
    Policies,
    Precisions,
    Python,
    Rounds,
    Threads,
    precision,
)
from kvsift.runtime.bench.transformers_peer import Peer
from kvsift.runtime.bench.transformers_peer import why_absent as no_transformers
from kvsift.runtime.console import parse_size
from kvsift.runtime.engine import Engine
from kvsift.runtime.evaluation.kvpress_peer import KvpressPeer
from kvsift.runtime.evaluation.kvpress_peer import why_absent as no_kvpress

#: Weights of OpenVINO's file beside ours.
OPENVINO_WEIGHTS = {"fp32": "fp16", "int8": "int8"}


def run_command(
    out: Out,
    context: Contexts = [4096],  # noqa: B006
    output: Outputs = [128],  # noqa: B006
    batch: Batches = [1],  # noqa: B006
    density: Densities = [0.5, 0.2, 0.1],  # noqa: B006
    policy: Policies = ["nexus"],  # noqa: B006
    quantize: Precisions = ["none", "int8"],  # noqa: B006
    rounds: Rounds = 3,
    memory: Annotated[str, typer.Option(help="Memory that sequences must fit in.")] = "8GiB",
    threads: Threads = 2,
    model: Model = None,
    peer: Peers = ["transformers", "kvpress"],  # noqa: B006
    openvino_python: Python = None,
    name: Name = "bench",
    peak: Annotated[bool, typer.Option(help="Measure peak memory, a process each.")] = True,
    bandwidth_mib: Annotated[int, typer.Option(min=1, help="MiB that the probe reads.")] = (
        MIB_DEFAULT
    ),
) -> None:
    """Time to the first token, between tokens, tokens/s and memory of whole requests.

    Example: kvsift bench run --context 8000 --density 0.2 --out results
    """
    load, model = os.getloadavg()[0], model or default_model()
    grid = sweep.Grid(context, output, batch, rounds, parse_size(memory))
    source = open_model(model)
    if (longest := max(context) + max(output)) > source.config.max_positions:
        raise UsageError(
            f"context and output are {longest} tokens together and the model has "
            f"{source.config.max_positions} positions; lower one of them"
        )
    with _progress() as progress:
        task = progress.add_task("building", total=None)
        ours = _ours(source, out / "engines", grid, density, policy, quantize, threads)
        others, absent = _peers(
            source, model, out, peer, ours, min(context), threads, openvino_python
        )
        contestants: list[Contestant] = [*ours, *others]
        total = rounds * len(contestants) * len(context) * len(output) * len(batch)
        progress.update(task, total=total)
        prompt = text.prompt(ours[0].engine.tokenizer, max(context))
        bandwidth = Bandwidth(threads, bandwidth_mib)

        def on_run(name: str) -> None:
            progress.update(task, description=name, advance=1)

        rows = sweep.measure(contestants, prompt, grid, bandwidth, on_run)
        bandwidth.close()
        for other in others:
            if isinstance(other, OpenVino):
                other.close()
        if peak:
            progress.update(task, description="peak memory")
            _add_peaks(rows, ours, threads)
    record = {
        "rows": rows,
        "absent": absent,
        "settings": {"contexts": context, "outputs": output, "batches": batch, "rounds": rounds,
                     "memory": grid.memory},
    }  # fmt: skip
    said = [f"{who} took no part: {why}." for who, why in absent.items()]
    said.append(
        "TTFT is the first sequence's of a batch, whose prompts are read in turn; TTFT and ITL are "
        "medians, tokens/s come from the mean ITL, evictions and stalls included."
    )
    for one in ours:
        for tokens in context:
            if one.kept(tokens) > one.density * tokens:
                said.append(
                    f"{one.name}, {one.weights}, density {one.density:g}: of {tokens} tokens "
                    f"{one.kept(tokens)} are kept, the least budget."
                )
    said.append(
        f"Read bandwidth {rows[-1]['bandwidth_gb_s']:.1f} GB/s. Memory to fit in: {memory}."
    )
    body = f"{sweep_report.speed(rows)}\n\n{sweep_report.memory(rows)}\n\n" + "\n".join(said) + "\n"
    _write(out, name, record, body, threads, load)
    if why := plotting.why_absent():
        plotting.say(why)
        return
    last = (max(context), max(output), min(batch))
    chosen = [r for r in rows if (r["context"], r["output"], r["batch"]) == last]
    heading = (
        f"{last[0]} tokens of context, {last[1]} generated, batch {last[2]}, {threads} threads"
    )
    sweep_report.plot(chosen, out / f"{name}.png", heading)


def paper_command(
    out: Out,
    rounds: Rounds = 3,
    threads: Threads = 2,
    model: Model = None,
    context: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 8192,
    quantize: Annotated[str, typer.Option(help="Weight precision.")] = "none",
) -> None:
    """The Nexus paper's two efficiency tables: throughput and memory over the answer's length.

    Example: kvsift bench paper --out results
    """
    load = os.getloadavg()[0]
    source = open_model(model or default_model())
    limits = limits_for(source, context, 0.2, 1)
    kind = precision(quantize)
    with _progress() as progress:
        task = progress.add_task("building", total=None)
        dense, evicted = (
            Engine(obtain(source, name, kind, limits, out / "engines-paper"), threads=threads)
            for name in ("full", "nexus")
        )
        prompt = text.prompt(dense.tokenizer, context)
        progress.update(task, description="steps", total=rounds * (2 * len(paper.DECODE) + 3))

        def on_block(name: str) -> None:
            progress.update(task, description=name, advance=1)

        found = paper.measure(dense, evicted, prompt, rounds, on_block)
    found["settings"] = {"rounds": rounds}
    _write(out, "paper", found, sweep_report.paper(found), threads, load)
    if why := plotting.why_absent():
        plotting.say(why)
    else:
        sweep_report.plot_paper(found, out / "paper.png")


def _ours(
    source: WeightSource,
    folder: Path,
    grid: sweep.Grid,
    densities: list[float],
    policies: list[str],
    quantize: list[str],
    threads: int,
) -> list[Ours]:
    """Return a dense engine and one per policy for each precision, at every density."""
    made = []
    limits = limits_for(source, max(grid.contexts), min(densities), max(grid.batches))
    limits = limits.model_copy(
        update={"max_density": max(densities), "max_output": max(grid.outputs)}
    )
    for name in quantize:
        for policy in ("full", *policies):
            path = obtain(source, policy, precision(name), limits, folder)
            engine = Engine(path, max_batch=max(grid.batches), threads=threads)
            shares = densities if engine.manifest.policy.evicts else [1.0]
            made += [Ours(engine, share) for share in shares]
    return made


def _peers(
    source: WeightSource,
    model: Path,
    out: Path,
    names: list[str],
    ours: list[Ours],
    shortest: int,
    threads: int,
    openvino_python: Path | None,
) -> tuple[list[Contestant], dict[str, str]]:
    """Return the peers that are there, and why each of the others is not.

    Those that evict keep as many tokens as our first policy at each density.
    """
    made: list[Contestant] = []
    absent = {}
    tensors: dict[str, Any] = {}
    manifest, window = ours[0].engine.manifest, resolve("snapkv").window
    first = next(o for o in ours if o.engine.manifest.policy.evicts)
    alike = [o for o in ours if (o.name, o.weights) == (first.name, first.weights)]
    for name in names:
        why = None
        if name in ("transformers", "kvpress"):
            why = no_transformers() if name == "transformers" else no_kvpress()
            if not why and name == "kvpress" and shortest <= window:
                why = f"its window of {window} tokens needs a longer context than {shortest}"
            if not why:
                tensors = tensors or {n: source.tensor(n) for n in tensor_shapes(source.config)}
        elif name == "openvino":
            why = None if openvino_python else "give its Python as --openvino-python"
            why = why if model.suffix == ".gguf" else "it reads GGUF files here"
            if any(o.weights not in OPENVINO_WEIGHTS for o in ours):
                why = f"it takes {' and '.join(OPENVINO_WEIGHTS)} weights here"
        if why:
            absent[name] = why
        elif name == "transformers":
            made.append(Transformers(Peer(manifest, tensors, threads)))
        elif name == "kvpress":
            press = KvpressPeer(manifest, tensors, threads)
            made += [Kvpress(press, o.density, o.kept) for o in alike]
        elif name == "openvino" and openvino_python:
            for weights in dict.fromkeys(OPENVINO_WEIGHTS[o.weights] for o in ours):
                file = regguf.rewrite(model, out / f"openvino-{weights}.gguf", weights)
                settings = [(1.0, first.kept), *((o.density, o.kept) for o in alike)]
                for density, kept in settings:
                    made.append(OpenVino(openvino_python, file, threads, weights, density, kept))
    return made, absent


def _add_peaks(rows: list[dict[str, Any]], ours: list[Ours], threads: int) -> None:
    """Measure the peak memory of our rows: one process per engine, density, context and batch."""
    engines = {(o.name, o.weights): o.engine.directory for o in ours}
    found: dict[tuple[Any, ...], int] = {}
    for row in rows:
        directory = engines.get((row["engine"], row["weights"]))
        if directory is not None:
            key = (directory, row["context"], 2, row["batch"], row["density"], threads)
            if key not in found:
                found[key] = peak_bytes(*key)
            row["peak_rss_bytes"] = found[key]


def _write(
    out: Path, title: str, record: dict[str, Any], body: str, threads: int, load: float
) -> None:
    """Write JSON and Markdown with the machine, versions and date, and print the Markdown."""
    machine = report.machine(threads) | {"load_1min": round(load, 2)}
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    record |= {"machine": machine, "versions": report.versions(), "date": now}
    versions = ", ".join(f"{k} {v}" for k, v in record["versions"].items())
    where = (
        f"{machine['cpu']}, {machine['cores']} cores, {threads} threads, load {load:.1f} before; "
        f"{versions}; {now}."
    )
    body = f"{body}\n{where}\n"
    result_files.write(out / f"{title}.json", json.dumps(record, indent=1) + "\n")
    result_files.write(out / f"{title}.md", body)
    print(body)


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
