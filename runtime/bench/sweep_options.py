"""The options of `kvsift bench run` and `kvsift bench paper`, checked before anything is built."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvsift.builder.errors import UsageError
from kvsift.builder.linear import Quantize
from kvsift.builder.policies import resolve
from kvsift.runtime.evaluation.options import densities, once
from kvsift.runtime.result_files import folder_option

PEERS = ("transformers", "kvpress", "openvino", "none")


Out = Annotated[
    Path,
    typer.Option("--out", "-o", help="Directory of engines and results.", callback=folder_option),
]
Model = Annotated[Path | None, typer.Option(help="Model directory or .gguf file.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads of every engine.")]
Rounds = Annotated[int, typer.Option(min=1, help="Turns of every engine.")]


def precision(name: str) -> Quantize:
    """Return a precision of weights; UsageError for an unknown one."""
    known: dict[str, Quantize] = {"none": "none", "int8": "int8", "int4": "int4"}
    if name not in known:
        raise UsageError(f"--quantize must be none, int8 or int4, got {name!r}")
    return known[name]


def _policies(names: list[str]) -> list[str]:
    for name in names:
        if not resolve(name).evicts:
            raise UsageError(f"policy {name!r} evicts nothing; the dense engine always takes part")
    return once("policy")(names)


def _precisions(names: list[str]) -> list[str]:
    return once("quantize")([precision(name) for name in names])


def _peer_names(names: list[str]) -> list[str]:
    for name in names:
        if name not in PEERS:
            raise UsageError(f"unknown peer {name!r}; known: {', '.join(PEERS)}")
    return once("peer")(names)


def _program(path: Path | None) -> Path | None:
    if path is not None and not (path.is_file() and os.access(path, os.X_OK)):
        raise UsageError(f"{path} is no program; give the Python of a virtual environment")
    return path


def _file_name(name: str) -> str:
    if Path(name).name != name or name.startswith("."):
        raise UsageError(f"name must be that of a file without its ending, got {name!r}")
    return name


Contexts = Annotated[
    list[int],
    typer.Option(min=2, help="Tokens of a prompt; repeatable.", callback=once("context")),
]
Outputs = Annotated[
    list[int], typer.Option(min=2, help="Tokens generated; repeatable.", callback=once("output"))
]
Batches = Annotated[
    list[int], typer.Option(min=1, help="Sequences at once; repeatable.", callback=once("batch"))
]
Densities = Annotated[list[float], typer.Option(help="Kept share; repeatable.", callback=densities)]
Policies = Annotated[
    list[str], typer.Option(help="Evicting policy; repeatable.", callback=_policies)
]
Precisions = Annotated[
    list[str], typer.Option(help="none, int8 or int4; repeatable.", callback=_precisions)
]
Python = Annotated[
    Path | None,
    typer.Option(help="Python of an environment with openvino-genai.", callback=_program),
]
Name = Annotated[
    str, typer.Option(help="What the files of results are called.", callback=_file_name)
]
Peers = Annotated[
    list[str],
    typer.Option(help="transformers, kvpress, openvino or none; repeatable.", callback=_peer_names),
]
