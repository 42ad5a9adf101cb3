"""The .bin checkpoints of older models, through torch's weights-only loader and nothing else."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsift.builder.errors import ModelError


def open_torch_file(path: Path) -> dict[str, Any]:
    """Return the torch tensors of a .bin file by name, memory-mapped where the file allows.

    ModelError if torch is not installed, or the file is damaged or holds anything but tensors.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        raise ModelError(
            f"{path.name} needs torch to be read safely; pip install torch, or convert the model "
            "to safetensors with transformers: save_pretrained(DIR)"
        ) from None
    try:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:
            # Files of torch < 1.6 are no archives and cannot be mapped.
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch raises whatever its unpickler meets; the first line says what it was.
        reason = str(error).partition("\n")[0]
        raise ModelError(
            f"{path.name} could not be read as tensors only ({reason}); convert the model to "
            "safetensors on a machine where you trust the file"
        ) from None
    if not isinstance(state, dict) or not all(torch.is_tensor(v) for v in state.values()):
        raise ModelError(f"{path.name} holds more than named tensors; convert it to safetensors")
    return {str(name): value for name, value in state.items()}


def to_numpy(tensor: Any) -> NDArray[np.float32]:
    """Return a torch tensor as a float32 array."""
    value: NDArray[np.float32] = tensor.detach().float().numpy()
    return value
