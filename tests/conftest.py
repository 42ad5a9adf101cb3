"""Fixtures and settings shared by all tests."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from engines import Engines

# Before numpy is imported: the tests must not depend on, or take, every core of the machine.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "2")

# Derandomized: a failure seen anywhere is seen everywhere. `--hypothesis-profile=explore` searches.
settings.register_profile("kvsift", deadline=None, max_examples=50, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("kvsift")

#: Tests that have an environment of their own: file names, mark, and what they import.
_ELSEWHERE = (
    ("test_parity", "parity", "torch"),
    ("test_tritonserver", "triton", "tritonclient"),
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files whose mark was deselected, only where what they import is absent."""
    chosen = config.getoption("markexpr")
    for prefix, mark, needs in _ELSEWHERE:
        other = chosen in {m for _, m, _ in _ELSEWHERE} - {mark}
        if (other or f"not {mark}" in chosen) and collection_path.name.startswith(prefix):
            return importlib.util.find_spec(needs) is None or None
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that use the default model's weights."""
    for item in items:
        if "smollm2_gguf" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.smollm2)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """Path of the default model's GGUF file; without it a test fails and never skips."""
    from kvsift.builder.errors import ModelError
    from kvsift.builder.weights import default_model

    try:
        return default_model()
    except ModelError as error:  # its message names the pip command
        pytest.fail(str(error))


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """Engines by what they are made of, each built once per session.

    Tests that ask for the model 'smollm2' also name the fixture smollm2_gguf.
    """
    from engines import Engines

    return Engines(tmp_path_factory.mktemp("engines"))
