"""The engine package on disk: a directory with the graph, its weights, a manifest, a tokenizer.

Written to a temporary sibling and renamed, so that a killed build leaves no half package.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvsift.builder.errors import PackageError, UsageError
from kvsift.builder.families import ModelConfig
from kvsift.builder.ops import HEAD_REDUCE as HEAD_REDUCE
from kvsift.builder.ops import OPS_VERSION
from kvsift.builder.ops import REDUCE as REDUCE
from kvsift.builder.ops import WALK_ORDER as WALK_ORDER
from kvsift.builder.policies.base import Layout  # what the runtime knows of policies
from kvsift.builder.policies.base import Policy as Policy

__all__ = ["Layout", "Manifest", "ModelConfig", "Policy", "load_manifest", "window_features"]

MANIFEST = "kvsift.json"
GRAPH = "model.onnx"
WEIGHTS = "model.data"
README = "README.md"
#: A TensorRT engine; a package of `--onnx-only` has none until trtexec writes it.
PLAN = "engine.plan"
#: Raised whenever an older runtime could misread a package.
SCHEMA_VERSION = 1

Target = Literal["ort", "tensorrt", "tensorrt-rtx"]
#: Forms of the attention and the append, see `attention.py`.
AttentionForm = Literal["gqa", "portable", "tensorrt", "tensorrt-rtx"]
#: Types of weights, activations, caches and the query ring; states and logits are float32.
DType = Literal["float32", "float16", "bfloat16"]


def window_features(config: ModelConfig, policy: Policy) -> int:
    """Return the width Hq*D of a layer's query window, 0 when the policy needs none."""
    heads = {"none": 0, "mean": 1, "all": config.num_heads}[policy.window_heads]
    return heads * config.head_dim


class TensorSpec(BaseModel):
    """Name, ONNX dtype and symbolic shape of a graph input or output."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    dtype: str
    shape: tuple[int | str, ...]


class FileSpec(BaseModel):
    """Size and sha256 of a file of the package."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: int = Field(ge=0)
    sha256: str


class Limits(BaseModel):
    """What the engine was built for; tokens unless said otherwise."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_input: int = Field(ge=1)
    max_output: int = Field(ge=1)
    max_batch: int = Field(ge=1)
    #: Density of requests that name none, and the largest that a slot has room for.
    density: float = Field(gt=0, le=1)
    max_density: float = Field(gt=0, le=1)
    chunk: int = Field(default=1024, ge=1)
    #: Tokens of the scratch, if prompts may be longer than it; a multiple of `chunk`.
    max_scratch: int | None = Field(default=None, ge=1)


class Profile(BaseModel):
    """Sizes that an engine was optimised for: (least, most common, largest) of each symbol.

    The symbols are those of the shapes of the manifest's `inputs`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Literal["context", "generation"]
    sizes: dict[str, tuple[int, int, int]]


class TensorRTBuild(BaseModel):
    """What the runtime must know of a TensorRT engine.

    `version` (TensorRT's) and `gpu` are None where the engine has not been built (`--onnx-only`),
    `gpu` also where it was built without one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: str | None = None
    gpu: str | None = None
    #: Version of the plugins that the engine asks for; None where it holds op bodies instead.
    plugin_version: str | None
    #: By the index that the engine knows them by.
    profiles: tuple[Profile, ...]
    #: (input, output) that a plugin writes in place: both must be bound to the same memory.
    aliased: tuple[tuple[str, str], ...]


class Manifest(BaseModel):
    """Everything that the runtime must know of a package."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = SCHEMA_VERSION
    kvsift_version: str
    ops_version: str = OPS_VERSION
    target: Target
    attention: AttentionForm
    dtype: DType = "float32"
    quantize: Literal["none", "int8", "int4"]
    all_logits: bool = False
    trace_scores: bool = False
    seed: int = 0
    model: ModelConfig
    policy: Policy
    limits: Limits
    parameters: int = Field(ge=0)
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    #: For the targets tensorrt and tensorrt-rtx.
    tensorrt: TensorRTBuild | None = None
    files: dict[str, FileSpec]
    built_with: dict[str, str]


def load_manifest(directory: Path) -> Manifest:
    """Read and check a package's manifest.

    Raises PackageError when it is missing, damaged, of another schema or op set, or when a file
    is missing or has another size.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise PackageError(
            f"{directory} is no engine: it has no {MANIFEST}; build one with build_engine -o DIR"
        )
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PackageError(f"{path} is damaged ({error}); rebuild the engine") from None
    _check_versions(directory, data)
    try:
        manifest = Manifest.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        where = f"{where} is {first['input']!r}: " if where else ""
        raise PackageError(f"{path}: {where}{first['msg']}; rebuild the engine") from None
    for name, spec in manifest.files.items():
        file = directory / name
        size = file.stat().st_size if file.is_file() else -1
        if size != spec.bytes:
            found = "is missing" if size < 0 else f"has {size} bytes"
            raise PackageError(
                f"{file} {found}, the manifest says {spec.bytes} bytes; rebuild the engine"
            )
    return manifest


def _check_versions(directory: Path, data: Any) -> None:
    if not isinstance(data, dict):
        raise PackageError(f"{directory / MANIFEST} is no manifest; rebuild the engine")
    for key, ours, what in (
        ("schema_version", SCHEMA_VERSION, "package schema"),
        ("ops_version", OPS_VERSION, "op set"),
    ):
        found = data.get(key)
        if found != ours:
            made = data.get("kvsift_version", "unknown")
            raise PackageError(
                f"{directory} has {what} {found!r} (made by kvsift {made}), this kvsift reads "
                f"{ours!r}; rebuild it with build_engine"
            )


def verify_hashes(directory: Path, manifest: Manifest) -> None:
    """Compare every file's sha256 with the manifest; PackageError names the first that differs."""
    for name, spec in manifest.files.items():
        if file_spec(directory / name).sha256 != spec.sha256:
            raise PackageError(f"{directory / name} has changed since it was built; rebuild it")


def file_spec(path: Path) -> FileSpec:
    """Return size and sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return FileSpec(bytes=path.stat().st_size, sha256=digest.hexdigest())


def package_hash(manifest: Manifest) -> str:
    """Return the sha256 in hex of what a package computes: of its files' names and hashes.

    The README is left out; state of one package (sessions, traces) is read by the same only.
    """
    digest = hashlib.sha256()
    for name, spec in sorted(manifest.files.items()):
        if name != README:
            digest.update(f"{name} {spec.sha256}\n".encode())
    return digest.hexdigest()


@contextmanager
def new_package(directory: Path, force: bool = False) -> Iterator[Path]:
    """Yield a temporary sibling of `directory`, renamed to it when the block succeeds.

    Raises UsageError when `directory` exists and `force` is false, or is no engine package.
    """
    if directory.exists():
        other = not directory.is_dir() or any(directory.iterdir())
        if other and not (directory / MANIFEST).is_file():
            raise UsageError(f"{directory} exists and is no engine; choose another -o")
        if not force and any(directory.iterdir()):
            raise UsageError(f"{directory} exists; choose another -o or pass --force")
    directory.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(directory)
    prefix = f".{directory.name}.{os.getpid()}."
    building = Path(tempfile.mkdtemp(prefix=prefix, dir=directory.parent))
    old = Path(f"{building}.old")
    try:
        yield building
        building.chmod(0o755)
        if directory.exists():
            directory.rename(old)
        building.rename(directory)
    finally:
        for leftover in (building, old):
            shutil.rmtree(leftover, ignore_errors=True)


def _remove_leftovers(directory: Path) -> None:
    """Remove what killed builds of the same package left beside it."""
    for path in directory.parent.glob(f".{glob.escape(directory.name)}.*"):
        owner = path.name.removeprefix(f".{directory.name}.").split(".")[0]
        if owner.isdigit() and not _is_running(int(owner)):
            shutil.rmtree(path, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest as indented JSON."""
    text = manifest.model_dump_json(indent=1)
    (directory / MANIFEST).write_text(text + "\n", encoding="utf-8")
