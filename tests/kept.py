"""Policies to test, and what must be true of the units that they keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from engines import Engines, Trace

from kvsift.builder.package import Manifest
from kvsift.runtime.engine import Engine

#: Every kind of policy, in blocks and in tokens, one set per layer and per head.
POLICIES: dict[str, dict[str, Any]] = {
    "nexus": {"options": {"block_size": 8}},
    "nexus-32": {},
    "nexus-mean_qk": {"options": {"block_size": 8, "head_reduce": "mean_qk"}},
    "nexus-per_head": {"options": {"block_size": 8, "head_reduce": "per_head"}},
    "nexus-no_walk": {"options": {"block_size": 8, "walk_steps": 0}},
    "nexus-strided": {"options": {"block_size": 8, "walk_order": "strided"}},
    "nexus-topk": {"options": {"block_size": 8}, "selector": "topk"},
    "nexus-prefill_topk": {"options": {"block_size": 8, "prefill_selector": "topk"}},
    "nexus-tokens": {"options": {"block_size": 1}},
    "nexus-prefill": {"options": {"block_size": 8}, "scope": "prefill"},
    "nexus-decode": {"options": {"block_size": 8}, "scope": "decode"},
    "streaming": {},
    "streaming-blocks": {"options": {"block_size": 8, "sink_units": 1}},
    "random": {"options": {"block_size": 8, "recent_units": 2}, "scope": "both"},
    "random-tokens": {"options": {"recent_units": 4}, "scope": "both"},
    "random-prefill": {},
    "snapkv": {"options": {"window": 16}},
    "snapkv-both": {"options": {"window": 16}, "scope": "both"},
    "pyramidkv-both": {"options": {"window": 4, "pyramid_beta": 4.0}, "scope": "both"},
    "tova": {},
    "h2o": {},
    "morphkv": {"options": {"window": 8}},
    "expected_attention": {},
    "adakv": {"options": {"window": 16}},
    "adakv-both": {"options": {"window": 16}, "scope": "both"},
    "knorm": {},
    "keydiff-both": {"scope": "both"},
    "nestedkv": {},
    "nestedkv-both": {"scope": "both"},
    "nestedkv-reservoir": {"selector": "reservoir"},
    "nexus-heads": {
        "options": {"block_size": 8, "head_reduce": "per_head"},
        "selector": "head_topk",
    },
    "nexus-layers": {"options": {"block_size": 8, "layer_budgets": (2.0, 1.0)}},
}


def engine_of(engines: Engines, name: str, **options: Any) -> Engine:
    return engines(name.split("-")[0], **POLICIES[name], **options)


def same(a: Trace, b: Trace) -> None:
    """Assert that two runs of a request chose the same tokens and kept the same units."""
    assert a.tokens == b.tokens
    assert a.kept_sets() == b.kept_sets()
    assert a.ids.tolist() == b.ids.tolist()
    np.testing.assert_allclose(a.logits, b.logits, atol=2e-4)


def forced_ids(manifest: Manifest, seen: int, pins: Sequence[tuple[int, int]] = ()) -> set[int]:
    """Return the unit ids that no eviction after `seen` tokens may drop."""
    policy = manifest.policy
    size = policy.block_size
    full, total = seen // size, -(-seen // size)
    forced = set(range(min(policy.sink_units, total)))
    forced |= set(range(max(0, full - policy.recent_units), total))
    for start, end in pins:
        forced |= {position // size for position in range(start, end)}
    return forced
