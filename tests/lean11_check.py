"""Load the plugin library with TensorRT 11's Python module; run by a test in its own process.

Usage: lean11_check.py DIRECTORY_OF_THE_MODULE PLUGIN_LIBRARY. Reads a JSON list of [op, {attribute:
value}] from stdin and prints a JSON list of what each plugin says of itself.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

sys.path.insert(0, sys.argv[1])
import tensorrt_lean_bindings as trt  # found in the directory just named


def examine(creator: Any, attrs: dict[str, float]) -> dict[str, Any] | None:
    """Create a plugin and ask what the module lets one ask of a plugin made in C++."""
    fields = []
    for name, value in attrs.items():
        whole = isinstance(value, int)
        kind = trt.PluginFieldType.INT32 if whole else trt.PluginFieldType.FLOAT32
        fields.append(
            trt.PluginField(name, np.array([value], np.int32 if whole else np.float32), kind)
        )
    plugin = creator.create_plugin(
        "layer", trt.PluginFieldCollection(fields), trt.TensorRTPhase.BUILD
    )
    if plugin is None:
        return None
    capability = trt.PluginCapabilityType
    core, build, runtime = (
        plugin.get_capability_interface(c)
        for c in (capability.CORE, capability.BUILD, capability.RUNTIME)
    )
    assert runtime is not None
    return {
        "name": core.plugin_name,
        "version": core.plugin_version,
        "namespace": core.plugin_namespace,
        "outputs": build.num_outputs,
        "fields": [field.name for field in creator.field_names],
    }


def main() -> None:
    """Examine every op asked for."""
    logger = trt.Logger(trt.Logger.WARNING)
    registry = trt.get_plugin_registry()
    assert registry.load_library(sys.argv[2]) is not None
    found = [c.name for c in registry.all_creators]
    answers = []
    for op, attrs in json.load(sys.stdin):
        assert found.count(op) == 1, op
        answers.append(examine(registry.get_creator(op, "1", ""), attrs))
    print(json.dumps({"version": trt.__version__, "plugins": answers}))
    del logger


main()
