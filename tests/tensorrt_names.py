"""Look names up in a real TensorRT module; run by a test in a process of its own.

Usage: tensorrt_names.py DIRECTORY_OF_THE_MODULE MODULE. Reads a JSON list of dotted names from
stdin and prints those that the module lacks.
"""

from __future__ import annotations

import importlib
import json
import sys


def main() -> None:
    """Print the missing names as a JSON list."""
    sys.path.insert(0, sys.argv[1])
    module = importlib.import_module(sys.argv[2])
    missing = []
    for name in json.load(sys.stdin):
        found = module
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is None:
            missing.append(name)
    print(json.dumps(missing))


main()
