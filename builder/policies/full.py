"""The full cache: nothing is evicted."""

from __future__ import annotations

from kvsift.builder.policies.base import Preset

PRESET = Preset(
    name="full",
    summary="keeps everything",
    source="baseline",
    scorer="none",
    selector="none",
    scope="none",
)
