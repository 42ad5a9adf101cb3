"""The package on disk: its manifest, what damage is found, and that a build is all or nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import LIMITS, Engines, request
from tiny import write_hf

from kvsift.builder.errors import EngineError, KvsiftError, PackageError, UsageError
from kvsift.builder.families import tensor_shapes
from kvsift.builder.linear import WeightFile
from kvsift.builder.package import (
    GRAPH,
    MANIFEST,
    WEIGHTS,
    Limits,
    Manifest,
    file_spec,
    load_manifest,
    verify_hashes,
)
from kvsift.builder.policies import resolve
from kvsift.builder.targets import common
from kvsift.builder.targets.ort import BuildOptions, build, estimate_bytes
from kvsift.builder.weights import open_model
from kvsift.runtime.engine import Engine
from kvsift.runtime.sessions import ort as ort_session


def make(tmp_path: Path, eviction: str = "nexus", **options: Any) -> Manifest:
    """Build `tmp_path/engine` from a tiny model."""
    model = tmp_path / "model"
    if not model.exists():
        write_hf(model)
    policy, limits = resolve(eviction), Limits(**LIMITS)
    source = open_model(model)
    return build(source, policy, limits, tmp_path / "engine", BuildOptions(**options))


@pytest.fixture
def package(engines: Engines, tmp_path: Path) -> Path:
    """Return a copy of a package, to be damaged."""
    return Path(shutil.copytree(engines.package("nexus"), tmp_path / "copy"))


def edit(package: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest as JSON."""
    data = json.loads((package / MANIFEST).read_text())
    change(data)
    (package / MANIFEST).write_text(json.dumps(data))


def refused(package: Path, kind: type[KvsiftError] = PackageError, **options: Any) -> str:
    """Return the one-line message with which an engine refuses the package."""
    with pytest.raises(kind) as caught:
        Engine(package, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_manifest_tells_everything(tmp_path: Path) -> None:
    manifest = make(tmp_path)
    package = tmp_path / "engine"
    assert load_manifest(package) == manifest
    files = {p.name for p in package.iterdir()}
    assert files == {MANIFEST, *manifest.files}
    assert {GRAPH, WEIGHTS, "README.md", "tokenizer.json", "tokenizer_config.json"} <= files
    for name, spec in manifest.files.items():
        assert spec == file_spec(package / name)
    shapes = tensor_shapes(manifest.model)
    assert manifest.parameters == sum(int(np.prod(s)) for s in shapes.values())
    assert {"onnx", "onnx-ir", "numpy", "python"} <= set(manifest.built_with)
    # The manifest lists the graph's own inputs and outputs, in their order.
    session = Engine(package, threads=1).session
    graph = session._session  # type: ignore[attr-defined]
    for specs, values in ((manifest.inputs, graph.get_inputs()),
                          (manifest.outputs, graph.get_outputs())):  # fmt: skip
        assert [s.name for s in specs] == [v.name for v in values]
        for spec, value in zip(specs, values, strict=True):
            onnx_name = {"float": "tensor(float)"}.get(spec.dtype, f"tensor({spec.dtype})")
            assert value.type == onnx_name
            assert [*spec.shape] == list(value.shape)


def test_the_same_build_has_the_same_hashes(tmp_path: Path) -> None:
    first = make(tmp_path)
    second = make(tmp_path, force=True)
    assert first == second


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_estimate_is_near_the_weight_file(tmp_path: Path, quantize: Any, tied: bool) -> None:
    """Alignment is what it leaves out, and it only matters to models as tiny as these."""
    write_hf(tmp_path / "model", tied=tied)
    manifest = make(tmp_path, quantize=quantize)
    source = open_model(tmp_path / "model")
    # At most one page before each of the written tensors.
    slack = 4096 * 2 * len(tensor_shapes(source.config))
    size = manifest.files[WEIGHTS].bytes
    assert size - slack < estimate_bytes(source, quantize) < size * 1.1 + 4096


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("schema_version", 0, ["package schema 0", "reads 1", "build_engine"]),
        ("schema_version", 99, ["package schema 99", "reads 1"]),
        ("schema_version", None, ["package schema None"]),
        ("ops_version", "0", ["op set '0'"]),
        ("layout", "paged", ["layout", "rebuild"]),
        ("invented", 1, ["invented", "rebuild"]),
        ("limits", {}, ["limits.max_input", "rebuild"]),
    ],
)
def test_another_version_or_key_is_named(
    package: Path, key: str, value: Any, words: list[str]
) -> None:
    edit(package, lambda data: data.update({key: value}))
    message = refused(package)
    assert all(word in message for word in words)


def test_an_older_package_names_its_maker(package: Path) -> None:
    edit(package, lambda data: data.update(schema_version=0, kvsift_version="0.0.7", gone=[1]))
    assert "made by kvsift 0.0.7" in refused(package)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00" * 10, '{"schema_version": 1'])
def test_a_damaged_manifest(package: Path, text: str) -> None:
    (package / MANIFEST).write_text(text)
    assert MANIFEST in refused(package)


def test_a_manifest_that_is_no_text(package: Path) -> None:
    (package / MANIFEST).write_bytes(b"\xff\xfe\x00{")
    assert "is damaged" in refused(package)


def test_no_package_at_all(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        assert f"has no {MANIFEST}" in refused(path)


@pytest.mark.parametrize("name", [GRAPH, WEIGHTS, "tokenizer.json", "README.md"])
def test_missing_and_truncated_files(package: Path, name: str) -> None:
    whole = (package / name).read_bytes()
    (package / name).write_bytes(whole[:-1])
    assert f"{name} has {len(whole) - 1} bytes, the manifest says {len(whole)}" in refused(package)
    (package / name).unlink()
    assert f"{name} is missing" in refused(package)


@pytest.mark.parametrize("name", [GRAPH, WEIGHTS, "tokenizer.json"])
def test_hashes_find_a_changed_byte(package: Path, name: str) -> None:
    manifest = load_manifest(package)
    verify_hashes(package, manifest)
    data = bytearray((package / name).read_bytes())
    data[len(data) // 2] ^= 1
    (package / name).write_bytes(data)
    assert load_manifest(package) == manifest  # the size is the same
    with pytest.raises(PackageError, match=f"{name} has changed since it was built"):
        verify_hashes(package, manifest)
    assert f"{name} has changed" in refused(package, verify=True)


def test_damage_of_the_same_size_is_an_error_without_hashes_too(package: Path) -> None:
    for name, kind in (("tokenizer.json", PackageError), (GRAPH, EngineError)):
        whole = (package / name).read_bytes()
        (package / name).write_bytes(b"{" * len(whole))
        assert name in refused(package, kind)
        (package / name).write_bytes(whole)
    Engine(package)


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


def test_wrong_attention_is_found_at_load(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort_session, "attention_error", lambda form: 0.2)
    with pytest.raises(EngineError, match=r"computes wrong gqa attention here \(off by 2.0e-01\)"):
        Engine(package)


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
