"""Say which names a module lacks; run by a test in its own process.

Usage: names_check.py DIRECTORY... Reads {"module": name, "names": [dotted name]} from stdin and
prints {"missing": [..], "parameters": {name: number}} of the module found in the directories;
the numbers are those of functions whose docstring begins with their parameters.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import sys

sys.path[:0] = sys.argv[1:]
asked = json.load(sys.stdin)
module = importlib.import_module(asked["module"])
missing, parameters = [], {}
for name in asked["names"]:
    try:
        found = functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        missing.append(name)
        continue
    last = name.rpartition(".")[2]
    text = re.match(rf"{last}\((.*?)\)\s*(\n|$)", (found.__doc__ or "").strip())
    if text:
        parameters[name] = len([p for p in text[1].split(",") if p.strip()])
print(json.dumps({"missing": missing, "parameters": parameters}))
