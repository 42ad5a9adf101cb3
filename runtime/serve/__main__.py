"""The command `kvsift serve`."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from kvsift.builder.errors import EngineError, UsageError
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
        from kvsift.runtime.serve.app import make_app
        from kvsift.runtime.serve.server import Server
    except ImportError as error:
        raise UsageError(f"no package {error.name}; pip install 'kvsift[serve]'") from None

    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with listening:
        with _told(host, port):  # before the engine loads, which may take a while
            listening.bind((host, port))
        llm = LLM(
            engine, max_batch=max_batch, kv_memory=kv_memory, threads=threads, max_queue=max_queue
        )
        name = model_name or engine.resolve().name
        with _told(host, port):  # now, so that who reads the address can connect
            listening.listen()
        where = f"[{host}]" if ":" in host else host
        address = f"http://{where}:{listening.getsockname()[1]}/v1"
        print(f"model {name!r} at {address}; Ctrl-C ends", file=sys.stderr, flush=True)
        Server(make_app(llm, name), llm.scheduler).run(sockets=[listening])


@contextlib.contextmanager
def _told(host: str, port: int) -> Iterator[None]:
    """Name the address of a failure to listen there."""
    try:
        yield
    except OSError as error:
        raise EngineError(
            f"cannot listen on {host}, port {port}: {error.strerror}; choose another --host or "
            "--port (0: a free one)"
        ) from None


if __name__ == "__main__":
    app(prog_name="kvsift serve")
