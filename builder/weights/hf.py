"""Weights out of a Hugging Face directory: safetensors, or .bin through torch's safe loader."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from kvsift.builder.errors import ModelError
from kvsift.builder.families import from_hf_config, tensor_shapes
from kvsift.builder.weights import checked
from kvsift.builder.weights.torch_bin import open_torch_file, to_numpy

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
_FLOATS = ("F32", "F16", "BF16", "F64")


class HfSource:
    """A directory with config.json and safetensors (or .bin) weights."""

    def __init__(self, path: Path) -> None:
        """Read the config and every file's header; ModelError if damaged or unsupported."""
        self._path = path
        raw = _json(path, "config.json")
        ends = _end_tokens(raw, path)
        self.config = from_hf_config({**raw, "eos_token_id": ends} if ends else raw)
        self._shapes = tensor_shapes(self.config)
        self._where: dict[str, Path] = {}
        self._torch: dict[str, Any] = {}
        for file in _weight_files(path):
            if file.suffix == ".safetensors":
                self._index_safetensors(file)
            else:
                self._index_torch(file)
        self._check_names()

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Return the tensor `name` as float32; ModelError if missing, misshapen or not finite."""
        if name not in self._shapes:
            raise ModelError(f"a {self.config.family} model has no tensor {name}")
        file = self._where[name]
        if name in self._torch:
            value = to_numpy(self._torch[name])
        else:
            with safe_open(file, framework="np") as handle:
                value = np.asarray(handle.get_tensor(name)).astype(np.float32, copy=False)
        return checked(name, value, self._shapes[name], file.name)

    def save_tokenizer(self, directory: Path) -> None:
        """Copy the tokenizer's files; ModelError if tokenizer.json is missing or cannot be read."""
        if not (self._path / "tokenizer.json").is_file():
            raise ModelError(
                f"{self._path} has no tokenizer.json; make one with transformers: "
                "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
            )
        try:
            Tokenizer.from_file(str(self._path / "tokenizer.json"))
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(
                f"{self._path / 'tokenizer.json'} cannot be read ({error}); copy it again"
            ) from None
        for name in _TOKENIZER_FILES:
            if not (self._path / name).is_file():
                continue
            if name.endswith(".json"):
                _json(self._path, name)
            shutil.copyfile(self._path / name, directory / name)

    def _index_safetensors(self, file: Path) -> None:
        """Note which tensors `file` holds; a truncated file fails here, before any work."""
        try:
            with safe_open(file, framework="np") as handle:
                for name in handle.keys():  # noqa: SIM118 - a handle is no mapping
                    part = handle.get_slice(name)
                    self._note(file, name, tuple(part.get_shape()), part.get_dtype() in _FLOATS)
        except OSError as error:
            raise ModelError(f"{file} cannot be read ({error}); check its permissions") from None
        except SafetensorError as error:
            raise ModelError(
                f"{file.name} is no complete safetensors file ({error}); download it again and "
                f"compare its size, {file.stat().st_size} bytes here"
            ) from None

    def _index_torch(self, file: Path) -> None:
        for name, value in open_torch_file(file).items():
            self._note(file, name, tuple(value.shape), value.is_floating_point())
            self._torch[name] = value

    def _note(self, file: Path, name: str, found: tuple[int, ...], is_float: bool) -> None:
        self._where[name] = file
        shape = self._shapes.get(name, found)
        if found != shape:
            raise ModelError(
                f"tensor {name} in {file.name} has shape {list(found)}; the config expects "
                f"{list(shape)}"
            )
        if name in self._shapes and not is_float:
            raise ModelError(
                f"tensor {name} in {file.name} is not floating point; known: {', '.join(_FLOATS)}"
            )

    def _check_names(self) -> None:
        missing = sorted(self._shapes.keys() - self._where.keys())
        if missing:
            raise ModelError(
                f"{self._path} lacks tensor {missing[0]} ({len(missing)} missing of "
                f"{len(self._shapes)}); is a weight file missing, or config.json of another model?"
            )
        for name in sorted(self._where.keys() - self._shapes.keys()):
            # Old checkpoints store the rotary table, tied ones the head; both follow from the
            # rest. Anything else, a bias for instance, would silently be left out.
            if name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq"):
                raise ModelError(
                    f"tensor {name} is not part of a {self.config.family} model; this variant "
                    "is not supported"
                )


def _weight_files(path: Path) -> list[Path]:
    for single, index in (
        ("model.safetensors", "model.safetensors.index.json"),
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ):
        if (path / single).is_file():
            return [path / single]
        if (path / index).is_file():
            shards = _json(path, index).get("weight_map")
            if not isinstance(shards, dict) or not shards:
                raise ModelError(f"{index} has no weight_map; download it again")
            names = sorted({str(name) for name in shards.values()})
            for name in names:
                if Path(name).name != name:
                    raise ModelError(f"{index} names {name!r}, which is outside the directory")
                if not (path / name).is_file():
                    raise ModelError(
                        f"shard {name} named in {index} is missing from {path}; download it"
                    )
            return [path / name for name in names]
    raise ModelError(
        f"{path} has no model.safetensors, model.safetensors.index.json or pytorch_model.bin"
    )


def _json(path: Path, name: str) -> dict[str, Any]:
    file = path / name
    if not file.is_file():
        raise ModelError(f"{path} has no {name}; give the directory of a Hugging Face model")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} is no valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds {type(value).__name__}; a JSON object is expected")
    return value


def _end_tokens(raw: dict[str, Any], path: Path) -> list[int]:
    """Return the end tokens of generation_config.json (generation goes by it) and config.json."""
    sources = [raw]
    if (path / "generation_config.json").is_file():
        sources.insert(0, _json(path, "generation_config.json"))
    found: list[int] = []
    for source in sources:
        value = source.get("eos_token_id")
        found += value if isinstance(value, list) else [] if value is None else [value]
    # By equality: what is no id, and perhaps has no hash, is for the config's own check to name.
    return [end for i, end in enumerate(found) if end not in found[:i]]
