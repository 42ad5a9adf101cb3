"""The float64 oracle: what every op computes, written plainly and independently of the bodies.

`REFERENCE[op](attrs, inputs)` returns the op's outputs; float outputs are float64.
`PRIORITY[op](attrs, inputs)` returns the key [L,E,R,N] by which a selector ranks units, so that
near ties can be told from errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from reference_expected import expected_attention_score
from reference_keys import keydiff_score, knorm_score, nestedkv_score
from reference_nexus import nexus_score, window_mass
from reference_philox import philox_uniform
from reference_select import (
    Array,
    head_topk_select,
    reservoir_priority,
    reservoir_select,
    topk_priority,
    topk_select,
)
from reference_state import accum_update, query_stats_update
from reference_window import window_score

from kvsift.builder.ops import Value

Attrs = Mapping[str, Value]
Inputs = Mapping[str, Array]

REFERENCE: dict[str, Callable[[Attrs, Inputs], list[Array]]] = {
    "AccumUpdate": accum_update,
    "ExpectedAttentionScore": expected_attention_score,
    "HeadTopKSelect": head_topk_select,
    "KNormScore": knorm_score,
    "KeyDiffScore": keydiff_score,
    "NestedKVScore": nestedkv_score,
    "NexusScore": nexus_score,
    "PhiloxUniform": philox_uniform,
    "QueryStatsUpdate": query_stats_update,
    "ReservoirSelect": reservoir_select,
    "TopKSelect": topk_select,
    "WindowMass": window_mass,
    "WindowScore": window_score,
}
PRIORITY: dict[str, Callable[[Attrs, Inputs], Array]] = {
    "HeadTopKSelect": topk_priority,
    "ReservoirSelect": reservoir_priority,
    "TopKSelect": topk_priority,
}
