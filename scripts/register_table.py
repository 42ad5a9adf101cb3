"""Print the registers and spills of every kernel as the table of docs/tensorrt.md.

Usage: python scripts/register_table.py [LOG], what nvcc -Xptxas -v said while it built the library;
build/cuda/ptxas.log if none is given, which the slow test of the build leaves.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LOG = Path(__file__).parents[1] / "build/cuda/ptxas.log"
#: The float type in a mangled template argument, and its name.
TYPES = {"If": "fp32", "I6__half": "fp16", "I13__nv_bfloat16": "bf16"}
ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\d+)'")
SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
#: A mangled name begins with the lengths and names of its namespaces; the last one, which has no
#: name in the source, is called after the source file.
NAME = re.compile(r"_ZN6kvsift7kernels(\d+)(_GLOBAL__N__\w+)")
FILE = re.compile(r"_GLOBAL__N__[0-9a-f]+_\d+_(\w+)_cu_[0-9a-f]+(?:_\d+)?")


@dataclass(frozen=True, order=True)
class Kernel:
    """A kernel by its source file, its name, and what its template was given."""

    source: str
    name: str
    kind: str = ""


@dataclass(frozen=True)
class Usage:
    """Registers of a thread and bytes of spilled ones, stored and loaded."""

    registers: int
    spilled: int


def kernel_of(mangled: str) -> Kernel:
    """Read a mangled name."""
    found = NAME.match(mangled)
    if not found:
        raise ValueError(f"no kernel of an anonymous namespace: {mangled}")
    space, rest = found[2][: int(found[1])], found[2][int(found[1]) :]
    file, length = FILE.fullmatch(space), re.match(r"\d+", rest)
    if not file or not length:
        raise ValueError(f"no kernel of a source file: {mangled}")
    source, start = file[1], length.end()
    name, after = rest[start : start + int(length[0])], rest[start + int(length[0]) :]
    for mark, kind in TYPES.items():
        if after.startswith(mark):
            return Kernel(source, name, kind)
    return Kernel(source, name)


def parse(log: str) -> dict[tuple[Kernel, str], Usage]:
    """Return the usage of every kernel and architecture; where told twice, the last counts."""
    found: dict[tuple[Kernel, str], Usage] = {}
    entry: tuple[Kernel, str] | None = None
    spilled = 0
    for line in log.splitlines():
        if match := ENTRY.search(line):
            entry, spilled = (kernel_of(match[1]), match[2]), 0
        elif match := SPILL.search(line):
            spilled = int(match[1]) + int(match[2])
        elif (match := USED.search(line)) and entry:
            found[entry] = Usage(int(match[1]), spilled)
            entry = None
    return found


def cell(usages: list[Usage]) -> str:
    """The registers of each float type once if they agree, and what spills."""
    if not usages:
        return "-"
    registers = [str(u.registers) for u in usages]
    text = registers[0] if len(set(registers)) == 1 else "/".join(registers)
    spilled = max(u.spilled for u in usages)
    return f"{text} ({spilled} B spilled)" if spilled else text


def table(found: Mapping[tuple[Kernel, str], Usage]) -> list[str]:
    """Return the Markdown table: registers in fp32/fp16/bf16, a column per architecture."""
    architectures = sorted({arch for _, arch in found}, key=int)
    lines = [f"| kernel | {' | '.join(f'sm_{a}' for a in architectures)} |"]
    lines.append("|---|" + "---|" * len(architectures))
    order = [*TYPES.values(), ""]
    for source, name in sorted({(k.source, k.name) for k, _ in found}):
        cells = []
        for arch in architectures:
            here = {k.kind: u for (k, a), u in found.items() if (k.source, k.name, a) == (
                source, name, arch)}  # fmt: skip
            cells.append(cell([here[kind] for kind in sorted(here, key=order.index)]))
        lines.append(f"| `{source}`: {name} | {' | '.join(cells)} |")
    return lines


def main() -> int:
    """Print the table of a log."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("log", type=Path, nargs="?", default=LOG)
    args = parser.parse_args()
    if not args.log.is_file():
        print(
            f"no log {args.log}; build with -DCMAKE_CUDA_FLAGS='-Xptxas -v' and keep what it says"
        )
        return 1
    print("\n".join(table(parse(args.log.read_text()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
