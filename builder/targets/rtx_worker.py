"""The process that builds with TensorRT for RTX: a job on stdin, progress and result on stdout.

Each line is a JSON object: {"phase", "done", "steps"}, then {"version"} or {"error"}.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from types import ModuleType

from kvsift.builder.errors import KvsiftError
from kvsift.builder.targets.job import Job
from kvsift.builder.targets.rtx import MODULES


def find_module() -> ModuleType:
    """Return the module of TensorRT for RTX; ImportError without it."""
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            if name == MODULES[-1]:
                raise
    raise ImportError(MODULES[0])


def main() -> None:
    """Build what stdin asks for."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints is no answer

    def tell(**values: object) -> None:
        out.write(json.dumps(values) + "\n")
        out.flush()

    job = Job.model_validate_json(sys.stdin.readline())
    try:
        # The same names, so the same code: it only must find this module.
        sys.modules["tensorrt"] = find_module()
        from kvsift.builder.targets.plan import build_plan

        version = build_plan(
            job, lambda phase, done, steps: tell(phase=phase, done=done, steps=steps)
        )
    except (KvsiftError, ImportError) as error:
        tell(error=str(error))
    else:
        tell(version=version)


if __name__ == "__main__":
    main()
