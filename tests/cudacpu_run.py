"""Calls one function of a library of tests/cudacpu_faults.cu: LIBRARY SCHEDULE FUNCTION [INT ...].

Prints what came out as JSON. In a process of its own, since a fault may end it.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import numpy as np


def main() -> None:
    """Call the function and print its outcome."""
    path, schedule, function, *rest = sys.argv[1:]
    numbers = [int(v) for v in rest]
    lib = ctypes.CDLL(path)
    lib.message.restype = ctypes.c_char_p
    lib.cudacpu_set_schedule.argtypes = [ctypes.c_uint64]
    lib.cudacpu_set_schedule(int(schedule))
    # malloc'ed arrays of the exact size.
    from_ = np.arange(64, dtype=np.int32)
    to: Any = np.zeros(64 * (16 if function == "run_functions" else 1), np.int32)
    if function == "run_uninitialised":
        to = np.zeros(64, np.float32)
    pointers = {
        "run_reverse": (from_, to),
        "run_overrun": (to,),
        "run_uninitialised": (to,),
        "run_functions": (to,),
    }
    arrays = [ctypes.c_void_p(a.ctypes.data) for a in pointers.get(function, ())]
    code = getattr(lib, function)(*arrays, *numbers)
    text = lib.message(code).decode() if code else ""
    print(json.dumps({"code": code, "message": text, "out": np.nan_to_num(to, nan=-1).tolist()}))


if __name__ == "__main__":
    main()
