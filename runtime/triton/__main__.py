"""The command `kvsift triton`: an engine in, a Triton model repository out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvsift.runtime import console
from kvsift.runtime.params import check_integer
from kvsift.runtime.triton.config import Settings
from kvsift.runtime.triton.repository import write_repository

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog="Example: kvsift triton engines/nexus -o model_repository")
@console.command
def triton(
    engine: Annotated[Path, typer.Argument(help="Directory made by build_engine.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Model repository; other models in it stay.")
    ],
    name: Annotated[str, typer.Option(help="Name of the model.")] = "kvsift",
    max_batch: Annotated[
        int | None, typer.Option(help="Sequences at a time; default: the engine's.")
    ] = None,
    kv_memory: Annotated[
        str | None, typer.Option(help="Memory for KV caches, such as 2GiB; decides the batch.")
    ] = None,
    max_queue: Annotated[
        int, typer.Option(help="Requests that may wait; more are refused.")
    ] = Settings.max_queue,
    threads: Annotated[int | None, typer.Option(help="Threads; default: one per core.")] = None,
    session_memory: Annotated[
        str | None, typer.Option(help="Memory for sessions between turns, such as 1GiB.")
    ] = None,
    session_ttl: Annotated[
        int | None, typer.Option(help="Seconds that an unused session is kept; default: no limit.")
    ] = None,
    batch_dimension: Annotated[
        bool,
        typer.Option(
            "--batch-dimension/--no-batch-dimension",
            help="Shapes [1, 1], as TensorRT-LLM's clients and Triton's OpenAI frontend send "
            "them; else [1], as vLLM's do.",
        ),
    ] = True,
    copy: Annotated[
        bool, typer.Option("--copy", help="Copy the engine's files instead of linking them.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a model of that name.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Write a model repository for Triton's python backend."""
    check_integer("max_queue", max_queue, 0, "it is the requests that may wait")
    counts = {"max_batch": max_batch, "threads": threads, "session_ttl": session_ttl}
    for option, value in counts.items():
        if value is not None:
            check_integer(option, value, 1, "leave it out for the default")
    model = write_repository(
        engine,
        output,
        name=name,
        settings=Settings(
            max_batch=max_batch,
            kv_memory=None if kv_memory is None else console.parse_size(kv_memory),
            threads=threads,
            max_queue=max_queue,
            session_memory=None if session_memory is None else console.parse_size(session_memory),
            session_ttl=session_ttl,
        ),
        batched=batch_dimension,
        copy=copy,
        force=force,
    )
    print(f"{model}: ready; {model / 'README.md'} says how to start Triton with it")


if __name__ == "__main__":
    app(prog_name="kvsift triton")
