"""The commands of `kvsift bench`, also `python -m kvsift.runtime.bench`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, get_args

import onnx_ir as ir
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvsift.builder.errors import KvsiftError, UsageError, unknown_name
from kvsift.builder.eviction_model import eviction_model
from kvsift.builder.families import tensor_shapes
from kvsift.builder.linear import Quantize
from kvsift.builder.policies import resolve
from kvsift.builder.weights import default_model, open_model
from kvsift.runtime import result_files
from kvsift.runtime.bench import decode, prefill, report, scoring, serve, sweep_commands, text
from kvsift.runtime.bench import profile as profiling
from kvsift.runtime.bench.bandwidth import MIB_DEFAULT, Bandwidth
from kvsift.runtime.bench.builds import limits_for, obtain
from kvsift.runtime.bench.transformers_peer import Peer, why_absent
from kvsift.runtime.engine import Engine
from kvsift.runtime.evaluation.options import density as density_option
from kvsift.runtime.evaluation.options import once
from kvsift.runtime.result_files import JsonFile

DENSE, EVICTED = "full", "nexus"

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Measure speed and memory.",
)

Context = Annotated[int, typer.Option(help="Tokens of context, those of the prompt.")]
Density = Annotated[
    float, typer.Option(help="Share of the prompt that is kept.", callback=density_option)
]
Threads = Annotated[int, typer.Option(min=1, help="Threads of every engine.")]


@app.command("decode")
def decode_command(
    context: Context = 8192,
    json_file: JsonFile = None,
    model: Annotated[
        Path | None, typer.Option(help="Model directory or .gguf file; default: SmolLM2-135M.")
    ] = None,
    density: Density = 0.2,
    batch: Annotated[str, typer.Option(help="Batch sizes, with commas.")] = "1,4",
    quantize: Annotated[str, typer.Option(help="Weight precisions, with commas.")] = "none,int8",
    rounds: Annotated[int, typer.Option(min=2, help="Turns of every engine in decode.")] = 8,
    prefill_rounds: Annotated[int, typer.Option(min=1, help="Turns in prefill.")] = 3,
    threads: Threads = 2,
    peer: Annotated[bool, typer.Option(help="Time transformers too, if installed.")] = True,
    engines_dir: Annotated[
        Path | None, typer.Option("--engines", help="Where engines are kept for the next run.")
    ] = None,
    bandwidth_mib: Annotated[
        int, typer.Option(min=1, help="MiB that the bandwidth probe reads.")
    ] = MIB_DEFAULT,
) -> None:
    """Time dense, evicted and transformers decode, and prefill, in interleaved runs.

    Example: kvsift bench decode --context 8192 --json decode.json
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    batches, kinds = _integers(batch), _precisions(quantize)
    source = open_model(model or default_model())
    absent = why_absent() if peer else "switched off by --no-peer"
    keep = nullcontext(str(engines_dir)) if engines_dir else tempfile.TemporaryDirectory()
    console = Console(stderr=True)
    with keep as folder, _progress(console) as progress:
        task = progress.add_task("building", total=None)

        def on_build(name: str) -> None:
            progress.update(task, description=f"building {name}")

        def on_block(name: str) -> None:
            progress.update(task, description=name, advance=1)

        settings = decode.Settings(batches, rounds, threads, on_block)
        limits = limits_for(source, context, density, max(batches))
        pairs = []
        for kind in kinds:
            dense, evicted = (
                obtain(source, policy, kind, limits, Path(folder), on_build)
                for policy in (DENSE, EVICTED)
            )
            pairs.append(decode.load_pair(dense, evicted, settings))
        theirs = None
        if not absent:
            tensors = {name: source.tensor(name) for name in tensor_shapes(source.config)}
            theirs = Peer(pairs[0].dense.manifest, tensors, threads)
        prompt = text.prompt(pairs[0].evicted.tokenizer, context)
        blocks = len(batches) * rounds * (3 * len(kinds) + 2 + (theirs is not None))
        blocks += prefill_rounds * (len(kinds) + (theirs is not None))
        progress.update(task, description="reading the prompt", total=blocks)
        bandwidth = Bandwidth(threads, bandwidth_mib)
        rows = decode.measure(pairs, theirs, bandwidth, prompt, settings)
        bandwidth.close()
        reading = prefill.measure(pairs, theirs, prompt, prefill_rounds, on_block)
    said = {
        "model": source.config.family,
        "parameters": pairs[0].dense.manifest.parameters,
        "context": context,
        "density": density,
        "rounds": rounds,
        "policy": EVICTED,
        "transformers_absent": absent,
    }
    record = report.document(rows, reading, said, threads, load)
    if json_file:
        result_files.write(json_file, json.dumps(record, indent=1) + "\n")
    report.show(record, Console(width=None if sys.stdout.isatty() else 120))
    print("\n" + report.markdown(record))


@app.command("profile")
def profile_command(
    engine: Annotated[Path, typer.Option(help="Engine directory.")],
    context: Context = 8192,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps to profile.")] = 32,
    threads: Threads = 2,
    json_file: JsonFile = None,
) -> None:
    """Say where the time of a decode step goes, by op type.

    Example: kvsift bench profile --engine ENGINE_DIR --context 8192
    """
    prompt = text.prompt_of(engine, context)
    found = profiling.profile(engine, prompt, batch, steps, threads)
    lines = report.profile_lines(found)
    if json_file:
        content: dict[str, Any] = {
            "rows": found.rows,
            "batch": batch,
            "step_ms": found.step_ms,
            "run_ms": found.run_ms,
            "ops": [{"op": op, "nodes": n, "ms": ms} for op, n, ms in found.ops],
            "machine": report.machine(threads),
            "versions": report.versions(),
        }
        result_files.write(json_file, json.dumps(content, indent=1) + "\n")
    table = Table(title=f"{found.step_ms:.1f} ms per step over {found.rows} rows, batch {batch}")
    for column, side in (("op", "left"), ("nodes", "right"), ("ms", "right"), ("share", "right")):
        table.add_column(column, justify=side)  # type: ignore[arg-type]
    for line in lines:
        table.add_row(*line)
    Console().print(table)


@app.command("scoring")
def scoring_command(
    context: Context = 8192,
    policies: Annotated[
        str, typer.Option(help="Policies to time, with commas.")
    ] = "keydiff,nestedkv,nexus,snapkv,expected_attention,h2o",
    model: Annotated[
        Path | None, typer.Option(help="Model directory or .gguf file; default: SmolLM2-135M.")
    ] = None,
    density: Density = 0.2,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of every policy.")] = 3,
    threads: Threads = 2,
    json_file: JsonFile = None,
) -> None:
    """Time what every policy's eviction adds to reading a prompt, in an interleaved run.

    Example: kvsift bench scoring --policies keydiff,nestedkv
    """
    source = open_model(model or default_model())
    models = {}
    for name in policies.split(","):
        policy = resolve(name.strip())
        nodes = ir.serde.serialize_model(eviction_model(source.config, policy))
        models[name.strip()] = (policy, nodes.SerializeToString())
    with tempfile.TemporaryDirectory() as folder, _progress(Console(stderr=True)) as progress:
        task = progress.add_task("scoring", total=rounds * (len(models) + 1))
        limits = limits_for(source, context, density, 1)
        engine = Engine(obtain(source, DENSE, "none", limits, Path(folder)), threads=threads)
        prompt = text.prompt(engine.tokenizer, context)
        found = scoring.measure(
            engine, models, prompt, density, rounds, threads, lambda _: progress.advance(task)
        )
    found |= {"machine": report.machine(threads), "versions": report.versions()}
    if json_file:
        result_files.write(json_file, json.dumps(found, indent=1) + "\n")
    title = f"eviction after {found['tokens']} tokens, read in {found['prefill_ms']:.0f} ms"
    table = Table(title=title)
    for column in ("policy", "ms", "share of reading"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for row in found["rows"]:
        table.add_row(row["policy"], f"{row['ms']:.1f}", f"{row['share']:.2%}")
    Console().print(table)


app.command("serve")(serve.command)
app.command("run")(sweep_commands.run_command)
app.command("paper")(sweep_commands.paper_command)


def _integers(given: str) -> list[int]:
    try:
        values = [int(part) for part in given.split(",")]
    except ValueError:
        values = []
    if not values or not all(1 <= v <= 1024 for v in values):
        raise UsageError(f"--batch must be numbers in [1, 1024] with commas, got {given!r}")
    return once("batch")(values)


def _precisions(given: str) -> list[Quantize]:
    known: tuple[Quantize, ...] = get_args(Quantize)
    names = [part.strip() for part in given.split(",")]
    for name in names:
        if name not in known:
            raise unknown_name("precision", name, known)
    return [kind for kind in known if kind in names]


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def main() -> None:
    """Run the command line; an error is one line, exit code 2 for bad usage and 1 for failure."""
    try:
        app()
    except KvsiftError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)


if __name__ == "__main__":
    main()
