"""The table of registers in docs/tensorrt.md: how ptxas' log is read, and what the docs say."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from register_table import Kernel, Usage, parse, table  # noqa: E402

FILE = "_GLOBAL__N__24af8f05_15_window_score_cu_19774e61_5613"
PAY = f"_ZN6kvsift7kernels{len(FILE)}{FILE}3payI6__halfEEvNS0_15WindowScoreArgsEPKf"
POOL = f"_ZN6kvsift7kernels{len(FILE)}{FILE}4poolENS0_15WindowScoreArgsEPKf"


def told(name: str, arch: int, registers: int, spilled: int = 0) -> str:
    return f"""\
ptxas info    : Compiling entry function '{name}' for 'sm_{arch}'
ptxas info    : Function properties for {name}
    {spilled} bytes stack frame, {spilled} bytes spill stores, {spilled} bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers, 13184 bytes smem
"""


def test_a_log_is_read() -> None:
    log = told(PAY, 80, 99, 8) + "[ 50%] Building\n" + told(POOL, 90, 31) + told(PAY, 80, 131)
    assert parse(log) == {
        (Kernel("window_score", "pay", "fp16"), "80"): Usage(131, 0),
        (Kernel("window_score", "pool"), "90"): Usage(31, 0),
    }


def test_the_table_shows_spills_and_float_types() -> None:
    log = told(PAY, 80, 131, 4) + told(PAY, 120, 128) + told(PAY.replace("I6__half", "If"), 80, 99)
    assert table(parse(log)) == [
        "| kernel | sm_80 | sm_120 |",
        "|---|---|---|",
        "| `window_score`: pay | 99/131 (8 B spilled) | 128 |",
    ]


def test_another_function_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernel"):
        parse(told("_Z4pingv", 80, 8))


def documented() -> list[str]:
    """The rows of the table in the docs."""
    text = (ROOT / "docs/tensorrt.md").read_text()
    return re.findall(r"^\| `\w+`: \w+ \|.*$", text, re.MULTILINE)


def test_the_docs_name_every_kernel() -> None:
    """Whatever the compiler: a kernel that is added or renamed needs a new table."""
    kernel = re.compile(r"__global__ void __launch_bounds__\([\w, ]+\)\s+(\w+)\(")
    sources = sorted((ROOT / "plugins/kernels").glob("*.cu"))
    names = {f"| `{s.stem}`: {name} |" for s in sources for name in kernel.findall(s.read_text())}
    rows = documented()
    assert {row[: row.index("|", 2) + 1] for row in rows} == names
    assert not any("spilled" in row for row in rows)
