"""The TensorRT session on a device that is the host, against ONNX Runtime's session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_engines import on_cpu, package
from engines import Engines, request, run_and_inspect

#: Query ring and one kept set for all heads; pooling, which needs order; heads that differ in
#: length; sums of each row.
POLICIES: dict[str, dict[str, Any]] = {
    "nexus": {"options": {"block_size": 8}},
    "snapkv": {},
    "nestedkv": {},
    "h2o": {},
}


@pytest.mark.parametrize("name", POLICIES)
def test_tokens_and_kept_sets_equal_onnx_runtime(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    options = POLICIES[name]
    requests = [request(300, 60, seed=7), request(90, 40, seed=2, pin=[(50, 60)]), request(200, 50)]
    want = run_and_inspect(engines(name, **options), requests)
    with on_cpu(package(engines, tmp_path / "engine", name, **options), monkeypatch) as (engine, d):
        got = run_and_inspect(engine, requests)
        for ours, theirs in zip(got, want, strict=True):
            assert ours.tokens == theirs.tokens
            assert ours.kept_sets() == theirs.kept_sets()
            np.testing.assert_allclose(np.array(ours.logits), np.array(theirs.logits), atol=2e-4)
        assert d.replays
