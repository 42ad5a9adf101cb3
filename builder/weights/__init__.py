"""Weight sources: a Hugging Face directory or a GGUF file behind one interface."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvsift.builder.families import ModelConfig


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
    """Open a model directory or a .gguf file."""
    raise NotImplementedError
