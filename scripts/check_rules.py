"""Check the project's rules for source files: short files, short lines, nothing unfinished.

Usage: python scripts/check_rules.py [DIRECTORY]. Prints one line per offence, exits 1 if any.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_LINES = 350
MAX_COLUMNS = 100
SUFFIXES = {".py", ".h", ".cu", ".cuh", ".cpp", ".sh", ".toml", ".yaml", ".cmake"}
NAMES = {"Makefile", "CMakeLists.txt"}
SKIPPED_DIRS = {"build", "dist", "demo", "engines", "__pycache__"}
# Spelled in two halves, so that this file passes its own check.
UNFINISHED = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "raise NotImpl" + "emented")))


def sources(root: Path) -> Iterator[Path]:
    """Yield the hand-written source files under `root`; generated ones are called *.gen.*."""
    for directory, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in SKIPPED_DIRS and not f.startswith("."))
        for path in (Path(directory, name) for name in sorted(files)):
            if (path.suffix in SUFFIXES or path.name in NAMES) and ".gen." not in path.name:
                yield path


def offences(path: Path) -> Iterator[str]:
    """Yield what is wrong with one file, as `line: message`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if len(lines) > MAX_LINES:
        yield f"{len(lines)}: {len(lines)} lines, at most {MAX_LINES}; split it by idea"
    for number, line in enumerate(lines, start=1):
        if len(line) > MAX_COLUMNS:
            yield f"{number}: {len(line)} columns, at most {MAX_COLUMNS}"
        if UNFINISHED.search(line):
            yield f"{number}: unfinished: {line.strip()[:60]}"


def main() -> int:
    """Check the directory named on the command line, else the current one."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    found = [f"{path.relative_to(root)}:{bad}" for path in sources(root) for bad in offences(path)]
    print("\n".join(found) or "rules: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
