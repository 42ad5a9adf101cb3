"""`kvsift trace`: look at a trace, draw it, compare two."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsift.builder.errors import UsageError
from kvsift.runtime import console
from kvsift.runtime.recorder import listening
from kvsift.runtime.replay import Replay
from kvsift.runtime.trace import (
    Eviction,
    Trace,
    difference,
    header_difference,
    mean_coverage,
    overlap,
    place,
    read_trace,
)

if TYPE_CHECKING:
    from kvsift.runtime.engine import Engine

app = typer.Typer(
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Show, draw and compare what evictions kept; kvsift generate --trace FILE writes it.",
)

File = Annotated[Path, typer.Argument(help="A trace.", metavar="FILE")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
Number = Annotated[int | None, typer.Option("--request", help="Only this request.")]


@app.command(epilog="Example: kvsift trace show run.jsonl")
@console.command
def show(file: File, request: Number = None, debug: Debug = False) -> None:
    """List the evictions of a trace."""
    trace = read_trace(file)
    head = trace.header
    unit = f"blocks of {head.block_size}" if head.block_size > 1 else "tokens"
    print(
        f"policy {head.policy}, {unit}, {head.layers} layers of {head.rows} kept "
        f"{'sets' if head.rows > 1 else 'set'}; engine {head.engine[:12]}"
    )
    for r in trace.requests:
        if request in (None, r.request):
            tokens = next((len(e.token_ids) for e in trace.endings if e.request == r.request), None)
            ended = "not ended" if tokens is None else f"{tokens} new tokens"
            print(
                f"request {r.request}: {len(r.prompt)} prompt tokens, {ended}, seed "
                f"{r.sampling['seed']}, eviction seed {r.eviction['eviction_seed']}"
            )
    events = _chosen(trace, request)
    rows = [
        [
            str(e.request),
            str(e.step),
            e.phase,
            str(e.tokens_seen),
            f"{sum(e.budget) / len(e.budget):g}",
            f"{sum(len(row) for layer in e.kept for row in layer) / (head.layers * head.rows):g}",
            "-" if (share := mean_coverage(e)) is None else f"{share:.3f}",
        ]
        for e in events
    ]
    columns = ["request", "eviction", "at", "tokens seen", "budget", "kept", "coverage"]
    console.print_table("Evictions (units, means over layers and heads)", columns, rows)


@app.command(epilog="Example: kvsift trace plot run.jsonl -o kept.png")
@console.command
def plot(
    file: File,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="PNG file; default: FILE with .png.")
    ] = None,
    request: Number = None,
    debug: Debug = False,
) -> None:
    """Draw which positions stay, over evictions and over layers, as a PNG."""
    from kvsift.runtime.trace_plot import plot_trace

    trace = read_trace(file)
    chosen = _chosen(trace, request)
    number = request if request is not None else chosen[0].request
    path = output or file.with_suffix(".png")
    plot_trace(trace, number, path)
    print(path)


@app.command(epilog="Example: kvsift trace diff before.jsonl after.jsonl")
@console.command
def diff(
    a: Annotated[Path, typer.Argument(help="A trace.", metavar="A")],
    b: Annotated[Path, typer.Argument(help="Another one.", metavar="B")],
    debug: Debug = False,
) -> None:
    """Compare the evictions of two traces, one by one; exit code 1 if they differ.

    The engines may be of different weights, but must have the same layers, heads and units.
    """
    one, two = read_trace(a), read_trace(b)
    why = header_difference(one.header, two.header)
    if why and (one.header.shape != two.header.shape):
        raise UsageError(f"{a} and {b} cannot be compared: {why}; trace the same kind of engine")
    if why:
        print(f"the engines differ: {why}")
    rows, first = [], None
    # Batches may have told of their evictions in another order.
    theirs = {(e.request, e.step): e for e in two.evictions}
    for x in one.evictions:
        y = theirs.get((x.request, x.step))
        if y is None:
            continue
        found = difference(x, y, "in A", "in B")
        first = first or found
        rows.append([place(x), "equal" if found is None else f"{overlap(x, y):.3f} in common"])
    extra = len(one.evictions) - len(two.evictions)
    if rows:
        console.print_table(f"{a} against {b}", ["eviction", "kept sets"], rows)
    if extra:
        side = "A" if extra > 0 else "B"
        print(f"{side} has {abs(extra)} evictions more")
    if first:
        print(f"first difference: {first}")
    if first or extra:
        raise typer.Exit(console.EXIT_FAILURE)
    print(f"all {len(rows)} evictions kept the same units")


def replay_trace(engine: Engine, file: Path) -> None:
    """Run the requests of a trace again and compare every kept set; ReplayError if one differs."""
    replay = Replay(read_trace(file), engine.manifest)
    if not replay.trace.requests:
        raise UsageError(f"{file} holds no request to run again; trace one")
    with listening(engine, replay):
        for request in replay.requests():
            engine.generate([request])
    print(f"replayed {len(replay.trace.requests)} requests: all {replay.compared} evictions equal")
    if replay.cut:
        print(f"{replay.cut} of them: as far as the trace goes, which does not hold their end")


def _chosen(trace: Trace, request: int | None) -> list[Eviction]:
    """Return the evictions of a request, or all; UsageError if there are none."""
    events = trace.evictions if request is None else trace.of(request)
    if not events:
        known = sorted({e.request for e in trace.evictions})
        there = f"evictions of requests {', '.join(map(str, known))}" if known else "no evictions"
        what = "the trace" if request is None else f"request {request}"
        raise UsageError(f"{what} has nothing to show: the trace holds {there}")
    return events
