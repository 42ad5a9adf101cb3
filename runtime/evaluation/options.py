"""The options that the evaluation's commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Out = Annotated[Path, typer.Option("--out", "-o", help="Directory of engines and results.")]
Model = Annotated[Path | None, typer.Option("--model", help="Model directory or GGUF file.")]
Samples = Annotated[int, typer.Option("--samples", help="Samples of each kind of text, up to 64.")]
Prompt = Annotated[int, typer.Option("--prompt", help="Tokens of the prompt.")]
Follow = Annotated[int, typer.Option("--follow", help="Tokens that follow.")]
Density = Annotated[list[float], typer.Option("--density", help="Kept share; repeatable.")]
Seeds = Annotated[int, typer.Option("--seeds", help="Eviction seeds of sampled variants.")]
Prose = Annotated[Path | None, typer.Option("--prose", help="Essays' wheel, .json or .txt file.")]
Suite = Annotated[
    str, typer.Option("--suite", help="Variants: policies, grid, stream, ablation or sampled.")
]
Names = Annotated[list[str], typer.Option("--variant", help="Only this one of them; repeatable.")]
Reference = Annotated[
    str | None, typer.Option("--reference", help="Variant that others are compared to.")
]
Threads = Annotated[int, typer.Option("--threads", help="Threads; 0: ONNX Runtime's choice.")]
