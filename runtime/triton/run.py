"""The command `kvsift tritonserver`: the bundled Triton server on a model repository."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from kvsift.builder.errors import EngineError, UsageError
from kvsift.runtime import console
from kvsift.runtime.triton.server import TritonServer

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(
    epilog="Example: kvsift tritonserver model_repository --model-control-mode=explicit",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
@console.command
def tritonserver(
    context: typer.Context,
    repository: Annotated[Path, typer.Argument(help="Directory made by kvsift triton.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(help="HTTP; 0: a free one.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="gRPC; 0: a free one.")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="Metrics; 0: a free one.")] = 8002,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Run the Triton server of nvidia-pytriton on the CPU until Ctrl-C.

    More options go to tritonserver as they are.
    """
    if not repository.is_dir():
        raise UsageError(f"no model repository {repository}; write one with kvsift triton")
    server = TritonServer(
        repository,
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        options=context.args,
    )
    # The server is in a session of its own, and would outlive a terminal that closes.
    for number in _ENDS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, _leave)
    try:
        server.launch()
        code = server.wait()
    except KeyboardInterrupt:
        code = 0
    finally:
        server.stop()
    if code:
        raise EngineError(f"tritonserver ended with {code}; its output above says why")


def _leave(number: int, frame: object) -> None:
    """Leave `wait` once: no signal of any kind may interrupt `stop`, which may take its time."""
    for each in _ENDS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    app(prog_name="kvsift tritonserver")
