"""Finding the installed plugin library."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsift.builder import plugin_library
from kvsift.builder.errors import EngineError
from kvsift.builder.plugin_library import NAME, VARIABLE, candidates, find


def made(folder: Path, name: str = NAME) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.touch()
    return path


def test_the_environment_names_a_file_or_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, inside = made(tmp_path, "mine.so"), made(tmp_path / "lib")
    monkeypatch.setenv(VARIABLE, str(named))
    assert find() == named
    monkeypatch.setenv(VARIABLE, str(inside.parent))
    assert find() == inside


def test_nothing_else_is_taken_for_what_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "absent.so"))
    assert candidates() == [tmp_path / "absent.so"]
    with pytest.raises(EngineError, match=r"looked for .*absent\.so; build it .*KVSIFT_CUDA=ON"):
        find()


def test_the_package_comes_before_the_build_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(plugin_library, "__file__", str(tmp_path / "kvsift/builder/x.py"))
    monkeypatch.setattr(plugin_library.metadata, "distribution", absent)
    with pytest.raises(EngineError) as error:
        find()
    assert "\n" not in str(error.value)
    assert VARIABLE in str(error.value)
    built = made(tmp_path / "kvsift/build/plugins-cuda/plugins")
    assert find() == built
    installed = made(tmp_path / "kvsift/lib")
    assert find() == installed


def absent(name: str) -> None:
    raise plugin_library.metadata.PackageNotFoundError(name)
