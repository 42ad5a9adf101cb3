"""CMake: what it builds, what it says is missing, and the library that nvcc makes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from nvcc import ROOT, cmake, cuda_library, nvcc, nvcc_version, run
from plugin_host import ALL_OPS, Host, exported_symbols
from test_plugin import SIZES, workspace

from kvsift.builder import ops

sys.path.insert(0, str(ROOT / "scripts"))
from register_table import parse, table

ARCHITECTURES = {"80", "86", "89", "90", "100", "120"}


def configure(build: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [cmake(), "-S", str(ROOT), "-B", str(build), *options],
        capture_output=True,
        text=True,
        check=False,
        env={k: v for k, v in os.environ.items() if k not in ("CUDACXX", "TENSORRT_ROOT")},
    )


def without_parts() -> str:
    """The option that hides nvcc and TensorRT's headers from CMake wherever they are."""
    hidden = [str(ROOT / "build/tensorrt/headers/kernel_lens/include/tensorrt"), "/usr/local/bin"]
    hidden += ["/usr/local/cuda/bin", "/usr/include/x86_64-linux-gnu", str(nvcc().parent)]
    for folder in os.environ["PATH"].split(os.pathsep):
        if shutil.which("nvcc", path=folder):
            hidden.append(folder)
    return f"-DCMAKE_IGNORE_PATH={';'.join(hidden)}"


def test_auto_says_what_is_missing(tmp_path: Path) -> None:
    """The Python package installs all the same: CMake succeeds and has nothing to build."""
    done = configure(tmp_path, without_parts())
    said = re.sub(r"\s+", " ", done.stdout)
    assert done.returncode == 0, done.stderr
    assert "the TensorRT plugin library is left out" in said
    assert "nvcc: install the CUDA toolkit, or pip install 'nvidia-cuda-nvcc==13.0.*'" in said
    assert "TensorRT's headers: name the SDK with -DTENSORRT_ROOT=DIRECTORY, or fetch" in said
    run([cmake(), "--build", str(tmp_path)])
    run([cmake(), "--install", str(tmp_path), "--prefix", str(tmp_path / "installed")])
    assert not list(tmp_path.rglob("*kvsift_trt*"))


def test_on_insists(tmp_path: Path) -> None:
    done = configure(tmp_path, without_parts(), "-DKVSIFT_CUDA=ON")
    assert done.returncode != 0
    assert "nvcc: install the CUDA toolkit" in done.stderr
    assert "python scripts/fetch_tensorrt.py headers" in re.sub(r"\s+", " ", done.stderr)


def test_off_looks_for_nothing(tmp_path: Path) -> None:
    done = configure(tmp_path, "-DKVSIFT_CUDA=OFF")
    assert done.returncode == 0
    assert "KVSIFT_CUDA=OFF, the TensorRT plugin library is left out" in done.stdout
    assert "compiler" not in done.stdout


def test_unknown_choice_is_refused(tmp_path: Path) -> None:
    done = configure(tmp_path, "-DKVSIFT_CUDA=MAYBE")
    assert done.returncode != 0
    assert "KVSIFT_CUDA is 'MAYBE'; use AUTO, ON or OFF" in done.stderr


@pytest.mark.slow
def test_nvcc_builds_the_library(tmp_path: Path) -> None:
    """For all architectures, with no undefined symbol, named and installed with its version."""
    library, log = cuda_library()
    assert library.name == f"libkvsift_trt.so.{ops.OPS_VERSION}"
    compiled = set(re.findall(r"for 'sm_(\d+)'", log.read_text()))
    assert compiled == ARCHITECTURES
    assert {"getCreators", "setLoggerFinder", "kvsift_run"} <= exported_symbols(library)
    build = library.parents[1]
    run([cmake(), "--install", str(build), "--prefix", str(tmp_path), "--strip"])
    installed = [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()]
    assert installed == [f"kvsift/lib/{library.name}"]


@pytest.mark.slow
def test_no_kernel_spills_and_the_docs_have_its_registers() -> None:
    """Registers that do not suffice go to memory; the table is that of the compiler it names."""
    used = parse(cuda_library()[1].read_text())
    assert {arch for _, arch in used} == ARCHITECTURES
    assert not {key: usage for key, usage in used.items() if usage.spilled}
    text = (ROOT / "docs/tensorrt.md").read_text()
    if f"nvcc {nvcc_version()}" in text:  # another one allots other registers
        assert all(line in text.splitlines() for line in table(used))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["static", "registry"])
def test_library_of_nvcc_in_the_registry(way: str) -> None:
    """The real thing without a GPU: found, created, and of the same mind as the CPU's library."""
    real, cpu = Host(way, cuda_library()[0]), Host()
    for op in ALL_OPS:
        attrs = op.defaults()
        for host in (real, cpu):
            assert host.create(op, attrs).words == [op.name, "1", '""', str(len(op.outputs))]
        assert real.ok("serialised").words == cpu.ok("serialised").words
        assert real.ok("aliases").words == cpu.ok("aliases").words
        assert workspace(real, op, SIZES) == workspace(cpu, op, SIZES)
    real.close()
    cpu.close()
