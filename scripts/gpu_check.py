"""Check the CUDA kernels on the present GPU: every kernel test, then the speed of each kernel.

Usage: python scripts/gpu_check.py [--json FILE]. Needs nvcc, a C++ compiler, numpy and CUDA's
runtime library, neither TensorRT nor an installed kvsift; torch is compared with where it is there.
Prints one table. Exits 1 if a kernel is wrong, else 0, also where there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu_device import Device
    from gpu_measure import Figure, Inputs, Scale, Work

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "gpu-check"


def prepare_imports() -> None:
    """Let the tests' modules be imported, and kvsift from the sources if it is not installed."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts")]
    try:
        found = importlib.util.find_spec("kvsift.builder")
    except ModuleNotFoundError:
        found = None
    if found:
        return
    package = BUILD / "python" / "kvsift"
    package.mkdir(parents=True, exist_ok=True)
    sources = [ROOT / "kvsift/__init__.py", ROOT / "builder", ROOT / "runtime"]
    for source in sources:
        link = package / source.name
        link.unlink(missing_ok=True)
        link.symlink_to(source)
    sys.modules.pop("kvsift", None)
    sys.path.insert(0, str(package.parent))


def find_nvcc() -> str | None:
    """Return the CUDA compiler: the one that is named, the system's, or PyPI's."""
    named = os.environ.get("CUDACXX") or shutil.which("nvcc")
    places = [Path("/usr/local/cuda/bin/nvcc")]
    for entry in map(Path, sys.path):
        places += sorted(entry.glob("nvidia/cu*/bin/nvcc"))
    return named or next((str(p) for p in places if p.exists()), None)


def build_commands(nvcc: str, architecture: str, folder: Path) -> tuple[list[list[str]], list[str]]:
    """Return the commands that compile each source for one architecture, and the one that links."""
    sources = [*sorted((ROOT / "plugins/kernels").glob("*.cu")), ROOT / "plugins/capi.cpp"]
    code = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    flags = [nvcc, "-std=c++17", "-O3", "-DNDEBUG", code, "-Xcompiler=-fPIC,-fvisibility=hidden"]
    objects = [str(folder / f"{s.stem}.o") for s in sources]
    compile_all = [
        [*flags, "-x", "cu", "-c", str(s), "-o", o] for s, o in zip(sources, objects, strict=True)
    ]
    # The wheels' nvcc looks in lib64 for what they have in lib.
    library = [f"-L{Path(nvcc).resolve().parents[1] / 'lib'}"]
    return compile_all, [*flags, *library, "-shared", *objects, "-o", str(folder / "kernels.so")]


def run(command: Sequence[str]) -> None:
    """Run a command; raise with all it said if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def build(nvcc: str, architecture: str, folder: Path = BUILD) -> str:
    """Compile the kernels for one architecture; return the library."""
    folder.mkdir(parents=True, exist_ok=True)
    compile_all, link = build_commands(nvcc, architecture, folder)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, compile_all))
    run(link)
    return link[-1]


def measure_all(library: str, device: Device, scale: Scale) -> tuple[float, list[Figure]]:
    """Return the bytes per second of a copy and the figures of every kernel."""
    from gpu_measure import copy_bandwidth, measure, works
    from gpu_step import measure_step
    from gpu_torch import VERSIONS, import_torch, seconds

    from kvsift.runtime.kernels import Kernels

    # Before anything else uses the device much: torch takes memory of its own.
    torch = import_torch() if device.architecture else None

    def peer(work: Work, inputs: Inputs, copies: int) -> float | None:
        if torch is None or work.op not in VERSIONS:
            return None
        return seconds(torch, work.op, work.attrs, inputs, copies)

    kernels = Kernels(library)
    copy = copy_bandwidth(device, scale)
    figures = [measure(kernels, device, work, scale, copy, peer) for work in works(scale)]
    long = replace(scale, tokens=4 * scale.tokens)
    for work in (w for w in works(long) if w.target):
        work = replace(work, name=f"{work.name}, {long.tokens} tokens")
        figures.append(measure(kernels, device, work, long, copy, lambda *_: None))
    return copy, [*figures, measure_step(kernels, device, scale, copy)]


def table(copy: float, figures: Sequence[Figure]) -> str:
    """Return the figures as one table."""
    head = ["us", "GB/s", "of copy", "roofline", "torch us"]
    lines = [f"{'kernel':<36}" + "".join(f"{word:>10}" for word in head) + "  target"]
    lines.append(f"{'device-to-device copy':<36}{'':>10}{copy / 1e9:>10.0f}{1:>10.0%}")
    for f in figures:
        torch = f"{f.torch_microseconds:.1f}" if f.torch_microseconds else "-"
        met = "" if f.met is None else f"{f.target}: {'met' if f.met else 'MISSED'}"
        lines.append(
            f"{f.name:<36}{f.microseconds:>10.1f}{f.gbytes_per_s:>10.0f}{f.of_copy:>10.0%}"
            f"{f.roofline:>10.0%}{torch:>10}  {met}".rstrip()
        )
    return "\n".join(lines)


def check(library: str, device: Device, scale: Scale, small: bool = False) -> dict[str, Any]:
    """Run the tests, then measure; print and return what was found."""
    from gpu_cases import CopyingKernels, run_checks
    from gpu_measure import as_json

    start = time.perf_counter()
    passed, failed = run_checks(CopyingKernels(library, device), small)
    took = time.perf_counter() - start
    print(f"kernel tests: {passed} passed, {len(failed)} failed ({took:.0f} s)", flush=True)
    for name, why in failed.items():
        print(f"  {name}: {why}")
    found: dict[str, Any] = {"device": device.name, "passed": passed, "failed": failed}
    if failed:
        print("the speed of wrong kernels is not measured")
        return found
    copy, figures = measure_all(library, device, scale)
    print(table(copy, figures))
    print(
        "Buffers rotate beyond the L2 cache. 'of copy': least traffic against a copy's; 'roofline':"
        "\nagainst what copy bandwidth or fp32 arithmetic (no tensor cores) would allow."
    )
    return found | {"copy_bytes_per_s": copy, "figures": [as_json(f) for f in figures]}


def main() -> int:
    """Check the first GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    prepare_imports()
    from gpu_device import Cuda, DeviceError, driver_trouble, load_cudart

    if trouble := driver_trouble():
        print(f"gpu-check: no GPU here, nothing was checked: {trouble}")
        return 0
    from gpu_measure import Scale

    nvcc = find_nvcc()
    if not nvcc:
        print("gpu-check: no nvcc: install the CUDA toolkit, or pip install '.[nvcc]'")
        return 1
    try:
        device = Cuda(load_cudart(nvcc))
        print(device.name, flush=True)
        start = time.perf_counter()
        library = build(nvcc, device.architecture)
        print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
        found = check(library, device, Scale())
    except DeviceError as error:
        print(f"gpu-check: {error}")
        return 1
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
