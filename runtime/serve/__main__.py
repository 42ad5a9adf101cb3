"""The command `kvsift serve`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvsift.builder.errors import UsageError
from kvsift.runtime import console
from kvsift.runtime.llm import LLM

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog="Example: kvsift serve engines/nexus --port 8080")
@console.command
def serve(
    engine: Annotated[Path, typer.Argument(help="Directory made by build_engine.")],
    host: Annotated[str, typer.Option(help="Address; others reach it if it is 0.0.0.0.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: a free one.")] = 8000,
    model_name: Annotated[
        str | None, typer.Option(help="Name that clients use; default: the directory's.")
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option(help="Sequences at a time; default: the engine's.")
    ] = None,
    kv_memory: Annotated[
        str | None, typer.Option(help="Memory for KV caches, such as 2GiB; decides the batch.")
    ] = None,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait.")] = 256,
    threads: Annotated[int | None, typer.Option(help="Threads; default: one per core.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Answer OpenAI clients at /v1/chat/completions and /v1/completions until Ctrl-C."""
    try:
        import uvicorn

        from kvsift.runtime.serve.app import make_app
    except ImportError as error:
        raise UsageError(f"no package {error.name}; pip install 'kvsift[serve]'") from None

    llm = LLM(
        engine, max_batch=max_batch, kv_memory=kv_memory, threads=threads, max_queue=max_queue
    )
    name = model_name or engine.resolve().name
    config = uvicorn.Config(make_app(llm, name), host=host, port=port, log_level="warning")
    listening = config.bind_socket()
    address = f"http://{host}:{listening.getsockname()[1]}/v1"
    print(f"model {name!r} at {address}; Ctrl-C ends", file=sys.stderr, flush=True)
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    app(prog_name="kvsift serve")
