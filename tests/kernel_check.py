"""Checks a kernel library in a process of its own, for the sanitizers: LIBRARY [OP ...].

Every op on small cases, in several thread orders and float types, against the oracle.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kernel_cases import LONG, Hooks, has_floats, run_and_check, several_tiles, small_cases
from kv_moves import check_moves

from kvsift.builder import ops
from kvsift.runtime.kernels import Kernels


def main() -> None:
    """Check the library that the first argument names."""
    path, names = Path(sys.argv[1]), sys.argv[2:] or [*ops.TABLE, "moves"]
    kernels, hooks = Kernels(path), Hooks(path)
    for name in names:
        for seed in (0, 7):
            hooks.schedule(seed)
            if name == "moves":
                check_moves(kernels)
                continue
            for case in [*small_cases(name), *([several_tiles(name)] if name in LONG else [])]:
                dtypes = ["float32", "float16"] if has_floats(name) and seed == 0 else ["float32"]
                for dtype in dtypes:
                    run_and_check(kernels, case, dtype)
        print(name, flush=True)
    print("checked")


if __name__ == "__main__":
    main()
