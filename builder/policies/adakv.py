"""Ada-KV: SnapKV's scores, and the heads of a layer compete for its budget."""

from __future__ import annotations

from kvsift.builder.policies.base import Preset

PRESET = Preset(
    name="adakv",
    summary="snapkv with budgets that heads compete for",
    source="arXiv 2407.11550",
    scorer="snapkv",
    selector="head_topk",
    scope="prefill",
    defaults={"sink_units": 0},
)
