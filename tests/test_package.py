"""The package on disk: its manifest, and what damage is found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import Engines
from package_tools import make
from tiny import write_hf

from kvsift.builder.errors import EngineError, KvsiftError, PackageError
from kvsift.builder.families import tensor_shapes
from kvsift.builder.package import (
    GRAPH,
    MANIFEST,
    WEIGHTS,
    file_spec,
    load_manifest,
    verify_hashes,
)
from kvsift.builder.targets.ort import estimate_bytes
from kvsift.builder.weights import open_model
from kvsift.runtime.engine import Engine
from kvsift.runtime.sessions import ort as ort_session


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


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("limits", "max_batch", 0),
        ("limits", "chunk", 0),
        ("limits", "density", 1.5),
        ("limits", "max_density", 0),
        ("policy", "block_size", 0),
        ("policy", "sink_units", -1),
        ("policy", "decode_interval", 0),
        ("policy", "recent_fraction", 1),
        ("model", "num_layers", 0),
    ],
)
def test_a_value_out_of_range_is_named(package: Path, part: str, key: str, value: float) -> None:
    edit(package, lambda data: data[part].__setitem__(key, value))
    with pytest.raises(PackageError, match=rf"{part}\.{key} is {value!r}: .*; rebuild the engine"):
        load_manifest(package)


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


def test_wrong_attention_is_found_at_load(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort_session, "attention_error", lambda form: 0.2)
    with pytest.raises(EngineError, match=r"computes wrong gqa attention here \(off by 2.0e-01\)"):
        Engine(package)
