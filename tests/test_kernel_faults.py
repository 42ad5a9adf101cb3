"""The sanitizer builds find nothing in the kernels, and do find faults planted into them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import kernel_builds
import pytest

KERNELS = kernel_builds.PLUGINS / "kernels"


@dataclass(frozen=True)
class Fault:
    """A change of one file, the source that it is compiled with, and who shall find it where."""

    kind: str
    file: str
    source: str
    good: str
    bad: str
    check: str


FAULTS = {
    "histogram-barrier": Fault(
        "tsan",
        "selection.cuh",
        "selection.cu",
        "    }\n    __syncthreads();\n    state = narrowed(",
        "    }\n    state = narrowed(",
        "TopKSelect",
    ),
    "ring-barrier": Fault(
        "tsan",
        "nestedkv_memories.cu",
        "nestedkv_memories.cu",
        "    __syncthreads();  // the next step writes over the ring and the sums\n",
        "",
        "NestedKVScore",
    ),
    "tile-barrier": Fault(
        "tsan",
        "tile.cuh",
        "window_mass.cu",
        "    load_queries(s, in, first_row, slice);\n    __syncthreads();",
        "    load_queries(s, in, first_row, slice);",
        "WindowMass",
    ),
    "reduction-barrier": Fault(
        "tsan",
        "common.cuh",
        "nestedkv_score.cu",
        "  if (lane == 0) scratch[warp] = x;\n  __syncthreads();",
        "  if (lane == 0) scratch[warp] = x;",
        "NestedKVScore",
    ),
    "one-unit-too-many": Fault(
        "asan", "selection.cu", "selection.cu", "if (t < total)", "if (t <= total)", "TopKSelect"
    ),
    "rows-beyond-the-length": Fault(
        "asan", "kv_gather.cu", "kv_gather.cu", "from >= len ", "from > 2 * len ", "moves"
    ),
    "short-shared-memory": Fault(
        "asan",
        "tile.cuh",
        "window_score.cu",
        "float query[kTileSlice][kTileRows + 4];",
        "float query[kTileSlice - 28][kTileRows + 4];",
        "WindowScore",
    ),
    "short-dynamic-memory": Fault(
        "asan",
        "tile.cuh",
        "accum_update.cu",
        "tile_tokens(D) * (D + 1); }",
        "tile_tokens(D) * D; }",
        "AccumUpdate",
    ),
}


def check_library(kind: str, library: Path, *names: str) -> subprocess.CompletedProcess[str]:
    """Run kernel_check.py on a library with its sanitizer's runtime."""
    script = Path(__file__).with_name("kernel_check.py")
    return kernel_builds.run_sanitized(kind, [sys.executable, str(script), str(library), *names])


def planted(fault: Fault, folder: Path) -> Path:
    """Build a library of the fault's kind in which one file is changed."""
    text = (KERNELS / fault.file).read_text()
    assert text.count(fault.good) == 1, f"{fault.file} has changed; plant the fault elsewhere"
    shutil.copytree(KERNELS, folder / "kernels")
    for name in ("cpu", "ops.gen.h"):
        (folder / name).symlink_to(kernel_builds.PLUGINS / name)
    (folder / "kernels" / fault.file).write_text(text.replace(fault.good, fault.bad))
    kernel_builds.library(fault.kind)  # makes the other objects
    flags = [*kernel_builds.compile_flags(), *kernel_builds.KINDS[fault.kind]]
    changed, compiler = folder / "changed.o", kernel_builds.compiler()
    source = str(folder / "kernels" / fault.source)
    kernel_builds.run([compiler, *flags, "-c", "-x", "c++", source, "-o", str(changed)])
    built = kernel_builds.ROOT / "build/kernels" / fault.kind
    others = [s for s in kernel_builds.SOURCES if s.name != fault.source]
    # First, so that the linker takes templates from it.
    objects = [changed, *(built / f"{s.stem}.o" for s in others)]
    target = folder / "libfault.so"
    link = [compiler, *kernel_builds.KINDS[fault.kind], "-shared", *map(str, objects)]
    kernel_builds.run([*link, "-o", str(target)])
    return target


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["asan", "tsan"])
def test_sanitizers_find_nothing(kind: str) -> None:
    done = check_library(kind, kernel_builds.library(kind))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "Sanitizer" not in done.stderr
    assert done.stdout.split()[-1] == "checked"


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    done = check_library(fault.kind, planted(fault, tmp_path), fault.check)
    assert done.returncode != 0
    report = "ThreadSanitizer: data race" if fault.kind == "tsan" else "AddressSanitizer: "
    assert report in done.stderr, done.stdout[-1000:] + done.stderr[-3000:]
