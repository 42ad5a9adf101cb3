"""TensorRT's form of the graph: what it holds, and the numbers that it gives."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import LIMITS, Engines, request
from plugin_bodies import runnable

from kvsift.builder.package import Limits
from kvsift.builder.policies import resolve
from kvsift.builder.targets import tensorrt
from kvsift.builder.targets.common import BuildOptions
from kvsift.builder.weights import open_model
from kvsift.runtime.engine import Engine
from kvsift.runtime.sessions.ort import OrtSession

#: Policies by name: scores of windows, of keys, of heads that compete, states, nothing at all.
POLICIES: dict[str, dict[str, Any]] = {
    "nexus": {"options": {"block_size": 8}},
    "snapkv": {"options": {"window": 16}, "scope": "both"},
    "nestedkv": {},
    "nexus-mean_qk": {"options": {"block_size": 8, "head_reduce": "mean_qk"}},
    "pyramidkv": {"options": {"window": 4}, "scope": "both"},
    "adakv": {"options": {"window": 16}, "scope": "both"},
    "h2o": {},
    "expected_attention": {},
    "random": {"options": {"block_size": 8}, "scope": "both"},
    "full": {},
}


def build(engines: Engines, target: Path, policy: str, model: str = "tiny", **options: Any) -> Path:
    name = policy.partition("-")[0]
    limits = Limits(**(LIMITS | ({"max_density": 0.5} if name == "full" else {})))
    if name == "full":
        limits = limits.model_copy(update={"density": 1.0, "max_density": 1.0})
    tensorrt.build(
        open_model(engines.model(model)),
        resolve(name, **POLICIES[policy]),
        limits,
        target,
        BuildOptions(**options),
        slot_tokens=640,
        onnx_only=True,
    )
    return target


def open_plugins(directory: Path) -> Engine:
    """An engine of TensorRT's form whose plugins are bodies; these need one unit at least."""
    engine = Engine(directory, threads=1)
    session = engine.session
    assert isinstance(session, OrtSession)
    empty = session._empty
    ids = np.zeros((*empty.unit_ids.shape[:3], 1), np.int32)
    session._empty = dataclasses.replace(empty, unit_ids=ids)
    return engine


def answers(engine: Engine) -> list[tuple[int, ...]]:
    """Tokens of requests that run side by side, evict at different times and end apart."""
    asked = [request(330, 90), request(150, 120, seed=2), request(47, 40), request(401, 30)]
    found: dict[int, tuple[int, ...]] = {}
    for update in engine.run(asked):
        if update.result is not None:
            found[update.index] = update.result.token_ids
    return [found[i] for i in range(len(asked))]


@pytest.mark.parametrize("policy", POLICIES)
def test_same_tokens_as_the_other_form(engines: Engines, tmp_path: Path, policy: str) -> None:
    directory = build(engines, tmp_path / "trt", policy)
    name = policy.partition("-")[0]
    limits = {"density": 1.0, "max_density": 1.0} if name == "full" else None
    other = engines(name, limits=limits, **POLICIES[policy])
    expected = answers(other)
    assert len(set(expected)) == len(expected)
    assert answers(open_plugins(runnable(directory, tmp_path / "ort"))) == expected
