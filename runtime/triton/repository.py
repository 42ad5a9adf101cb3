"""Writes the model repository that Triton loads."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tempfile
from importlib import resources
from pathlib import Path
from string import Template

from kvsift.builder.errors import UsageError
from kvsift.builder.package import load_manifest
from kvsift.runtime.sessions.profiles import check_slots
from kvsift.runtime.sizes import check_threads, planned_slots
from kvsift.runtime.triton.config import ENGINE_FOLDER, Settings, config_text

MODEL_FILE = '''"""Triton's python backend loads this file; the work is done in kvsift."""

from kvsift.runtime.triton.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def write_repository(
    engine: Path,
    output: Path,
    *,
    name: str = "kvsift",
    settings: Settings | None = None,
    batched: bool = True,
    copy: bool = False,
    force: bool = False,
) -> Path:
    """Write model `name` into the repository `output` and return its folder.

    The engine's files are hard links where the file system can make them, so that the repository
    can be mounted in a container alone; `copy` makes copies. `batched` as in `config_text`. Other
    models of the repository stay. UsageError if the name is not valid or taken (unless `force`), if
    the repository would lie inside the engine, or if the engine cannot be loaded with `settings`;
    PackageError if `engine` is no engine. A failure leaves the repository as it was.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"model name {name!r} is not valid; use letters, digits, '_', '-' and '.'")
    manifest, settings = load_manifest(engine), settings or Settings()
    check_threads(settings.threads)
    slots = planned_slots(manifest, settings.max_batch, settings.kv_memory)
    if manifest.tensorrt is not None:
        check_slots(manifest, slots)
    if output.resolve().is_relative_to(engine.resolve()):
        raise UsageError(f"{output} is part of the engine {engine}; choose another -o")
    target = output / name
    if target.exists() and not force:
        raise UsageError(f"{target} exists; choose another --name or -o, or pass --force")
    if target.exists() and not (target / "config.pbtxt").is_file():
        raise UsageError(f"{target} exists and is no Triton model; choose another --name or -o")
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".kvsift-", dir=output) as folder:
        model = Path(folder, name)
        version = model / "1"
        version.mkdir(parents=True)
        shutil.copytree(
            engine, version / ENGINE_FOLDER, copy_function=shutil.copy2 if copy else _link
        )
        (version / "model.py").write_text(MODEL_FILE, encoding="utf-8")
        text = config_text(name, settings, batched)
        (model / "config.pbtxt").write_text(text, encoding="utf-8")
        readme = Template(resources.files(__package__).joinpath("README.md.in").read_text("utf-8"))
        folder_name = shlex.quote(output.resolve().name)
        values = {"name": name, "repository": folder_name, "policy": manifest.policy.name}
        (model / "README.md").write_text(readme.substitute(values), encoding="utf-8")
        if target.exists():
            target.rename(Path(folder, "old"))
        model.rename(target)
    return target


def _link(source: str, target: str) -> None:
    """Make a hard link, or a copy where the file system has none.

    Never one to a symbolic link, which would lead nowhere from its new place.
    """
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copy2(source, target)
