"""A build is all or nothing: whatever stops it leaves no half package."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from engines import LIMITS, request
from package_tools import make
from tiny import write_hf

from kvsift.builder.errors import EngineError, UsageError
from kvsift.builder.linear import WeightFile
from kvsift.builder.package import (
    MANIFEST,
    Limits,
    Manifest,
    load_manifest,
)
from kvsift.builder.policies import resolve
from kvsift.builder.targets import common
from kvsift.builder.targets.ort import build
from kvsift.builder.weights import open_model
from kvsift.runtime.engine import Engine


def test_an_existing_directory_is_kept(tmp_path: Path) -> None:
    make(tmp_path, eviction="full")
    before = (tmp_path / "engine" / MANIFEST).read_bytes()
    with pytest.raises(UsageError, match=r"engine exists; .* --force"):
        make(tmp_path)
    assert (tmp_path / "engine" / MANIFEST).read_bytes() == before
    assert make(tmp_path, force=True).policy.name == "nexus"
    assert load_manifest(tmp_path / "engine").policy.name == "nexus"


def test_force_never_deletes_what_is_no_engine(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="exists and is no engine"):
        make(tmp_path, force=True)
    (tmp_path / "engine" / "thesis.txt").unlink()
    make(tmp_path)  # an empty directory is as good as none


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "engine").write_text("a file")
    for force in (False, True):
        with pytest.raises(UsageError, match="engine exists and is no engine"):
            make(tmp_path, force=force)
    assert (tmp_path / "engine").read_text() == "a file"


def test_a_file_in_place_of_the_parent(tmp_path: Path) -> None:
    write_hf(tmp_path / "model")
    (tmp_path / "file").write_text("a file")
    source, limits = open_model(tmp_path / "model"), Limits(**LIMITS)
    with pytest.raises(EngineError, match=r"cannot write .*file/engine: "):
        build(source, resolve("full"), limits, tmp_path / "file" / "engine")


def left(tmp_path: Path) -> list[str]:
    """Return what stands beside the model."""
    return sorted(p.name for p in tmp_path.iterdir() if p.name != "model")


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add, count = WeightFile.add, 0

    def full(self: WeightFile, name: str, array: Any) -> Any:
        nonlocal count
        count += 1
        if count > 7:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return add(self, name, array)

    monkeypatch.setattr(WeightFile, "add", full)
    with pytest.raises(EngineError, match=r"cannot write .*engine: No space left on device"):
        make(tmp_path)
    assert left(tmp_path) == []
    monkeypatch.undo()
    make(tmp_path)
    assert left(tmp_path) == ["engine"]


def test_layer_weights_must_fit_the_model(tmp_path: Path) -> None:
    policy = resolve("nexus", options={"layer_budgets": (3.0, 2.0, 1.0)})
    source = open_model(write_hf(tmp_path / "model"))
    with pytest.raises(UsageError, match="layer_budgets has 3 weights and the model 2 layers"):
        build(source, policy, Limits(**LIMITS), tmp_path / "engine")
    assert left(tmp_path) == []


def test_a_failed_rebuild_keeps_the_old_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = make(tmp_path, eviction="full")

    def full(path: Path, manifest: Manifest) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(common, "write_manifest", full)
    with pytest.raises(EngineError, match="No space left"):
        make(tmp_path, force=True)
    assert left(tmp_path) == ["engine"]
    assert load_manifest(tmp_path / "engine") == old


def test_too_little_space_is_known_before_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(UsageError, match="the disk has 1 MiB free"):
        make(tmp_path)
    assert left(tmp_path) == []


BUILD_AND = """
    import os, resource, signal, sys
    from pathlib import Path
    from kvsift.builder.errors import EngineError
    from kvsift.builder.package import Limits
    from kvsift.builder.policies import resolve
    from kvsift.builder.targets.ort import build
    from kvsift.builder.weights import open_model
    # A shell's background job passes on that SIGINT is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    limits = Limits(max_input=64, max_output=64, max_batch=1, density=0.2, max_density=0.2)
    source, seen = open_model(Path(sys.argv[1])), []
    def progress(size):
        seen.append(size)
        {trouble}
    try:
        build(source, resolve("full"), limits, Path(sys.argv[2]), progress=progress)
    except EngineError as error:
        sys.exit(str(error))
"""


def build_and(tmp_path: Path, trouble: str) -> subprocess.CompletedProcess[str]:
    """Build in another process, with a statement run after each tensor."""
    write_hf(tmp_path / "model")
    code = textwrap.dedent(BUILD_AND).format(trouble=trouble)
    command = [sys.executable, "-c", code, str(tmp_path / "model"), str(tmp_path / "engine")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_file_size_limit_leaves_nothing(tmp_path: Path) -> None:
    """A real write that fails, halfway through the weights."""
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))"
    done = build_and(tmp_path, limit)
    assert done.returncode == 1
    assert "engine: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert left(tmp_path) == []


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    done = build_and(tmp_path, "len(seen) == 5 and os.kill(os.getpid(), signal.SIGINT)")
    assert done.returncode == -signal.SIGINT
    assert left(tmp_path) == []


def test_a_killed_build_leaves_no_package(tmp_path: Path) -> None:
    done = build_and(tmp_path, "len(seen) == 5 and os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "engine").exists()
    assert not any((p / MANIFEST).exists() for p in tmp_path.iterdir())
    assert len(left(tmp_path)) == 1
    make(tmp_path)
    assert left(tmp_path) == ["engine"], "the next build clears what the killed one left"
    result = Engine(tmp_path / "engine").generate([request(100, 5)])
    assert len(result[0].token_ids) == 5
