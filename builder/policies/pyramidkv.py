"""PyramidKV: SnapKV's scores with larger budgets for lower layers, the same in total."""

from __future__ import annotations

from kvsift.builder.policies.base import Preset

PRESET = Preset(
    name="pyramidkv",
    summary="snapkv with budgets that fall from layer to layer",
    source="arXiv 2406.02069",
    scorer="snapkv",
    selector="topk",
    scope="prefill",
    defaults={"sink_units": 0, "layer_budgets": "pyramid", "pyramid_beta": 20.0},
)
