"""The options that the evaluation's commands share, and what they may be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from kvsift.builder.errors import UsageError
from kvsift.runtime.params import check_in_range
from kvsift.runtime.result_files import folder_option

#: Draws of a sample have eviction seeds of their own up to here.
MOST_SEEDS = 1000


def densities(values: list[float]) -> list[float]:
    """Return densities; UsageError for one outside (0, 1] or twice the same."""
    for value in values:
        density(value)
    return once("density")(values)


def density(value: float) -> float:
    """Return a density; UsageError outside (0, 1]."""
    fix = "it is the share of the prompt that is kept"
    return check_in_range("density", value, "(0, 1]", fix)


def once(name: str) -> Callable[[list[Any]], list[Any]]:
    """Return a check of a repeatable option whose values differ."""

    def check(values: list[Any]) -> list[Any]:
        if len(set(values)) < len(values):
            shown = ", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values)
            raise UsageError(f"{name} {shown}: give each one once")
        return values

    return check


def at_least(low: int, name: str, most: int | None = None) -> Callable[[int], int]:
    """Return a check of an integer option."""

    def check(value: int) -> int:
        if value < low or (most is not None and value > most):
            bound = f"at least {low}" if most is None else f"in [{low}, {most}]"
            raise UsageError(f"{name} must be {bound}, got {value}")
        return value

    return check


def counted(flag: str, help: str, least: int, most: int | None = None) -> Any:
    """Return an option that takes an integer of at least `least`."""
    check = at_least(least, flag.removeprefix("--"), most)
    return typer.Option(flag, help=help, callback=check)


Out = Annotated[
    Path,
    typer.Option("--out", "-o", help="Directory of engines and results.", callback=folder_option),
]
Model = Annotated[Path | None, typer.Option("--model", help="Model directory or GGUF file.")]
Samples = Annotated[int, typer.Option("--samples", help="Samples of each kind of text, up to 64.")]
Prompt = Annotated[int, counted("--prompt", "Tokens of the prompt.", 1)]
Follow = Annotated[int, counted("--follow", "Tokens that follow.", 2)]
Density = Annotated[
    list[float], typer.Option("--density", help="Kept share; repeatable.", callback=densities)
]
Seeds = Annotated[int, counted("--seeds", "Eviction seeds of sampled variants.", 1, MOST_SEEDS)]
Prose = Annotated[Path | None, typer.Option("--prose", help="Essays' wheel, .json or .txt file.")]
Suite = Annotated[
    str, typer.Option("--suite", help="Variants: policies, grid, stream, ablation or sampled.")
]
Names = Annotated[list[str], typer.Option("--variant", help="Only this one of them; repeatable.")]
Reference = Annotated[
    str | None, typer.Option("--reference", help="Variant that others are compared to.")
]
Threads = Annotated[int, counted("--threads", "Threads; 0: ONNX Runtime's choice.", 0)]
