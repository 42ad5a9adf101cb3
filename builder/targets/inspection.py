"""Reads what TensorRT's inspector tells of an engine."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

#: Layers that move data and compute nothing, as the inspector calls them.
COPIES = frozenset({"reformat", "shuffle", "copy", "memcpy", "identity", "cast", "slice"})


def cache_copies(information: dict[str, Any], caches: Set[str]) -> list[str]:
    """Return the layers that copy one of the tensors `caches`.

    `information` is the inspector's JSON with detailed layers: each has its type and the names of
    what it reads and writes.
    """
    found = []
    for layer in information.get("Layers", ()):
        if not isinstance(layer, dict):  # without details it is a name
            continue
        ends = [*layer.get("Inputs", ()), *layer.get("Outputs", ())]
        names = {end.get("Name") for end in ends if isinstance(end, dict)}
        if str(layer.get("LayerType", "")).lower() in COPIES and names & caches:
            found.append(str(layer.get("Name", "unnamed")))
    return found
