"""KvCacheConfig: limits under TensorRT-LLM's names become bytes."""

from __future__ import annotations

from typing import Any

import pytest
from engines import Engines

from kvsift import LLM, KvCacheConfig
from kvsift.builder.errors import CapacityError, UsageError
from kvsift.builder.package import load_manifest
from kvsift.runtime import console
from kvsift.runtime.sizes import sizes, token_bytes


def test_the_lesser_limit_decides(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = load_manifest(engines.package("nexus"))
    weights, token = sizes(manifest).weights, token_bytes(manifest)
    monkeypatch.setattr(console, "available_memory", lambda: weights + 1000 * token)
    for given, tokens in (((700, None), 700), ((None, 0.5), 500), ((700, 0.5), 500), ((9, 1), 9)):
        assert KvCacheConfig(*given).kv_memory(manifest) == tokens * token


def test_an_engine_takes_as_many_slots_as_fit(engines: Engines) -> None:
    package = engines.package("nexus")
    manifest = load_manifest(package)
    size = sizes(manifest)
    tokens = -(-(size.scratch + 3 * size.slot) // token_bytes(manifest))
    with LLM(package, kv_cache_config=KvCacheConfig(max_tokens=tokens), threads=1) as llm:
        assert llm.engine.max_batch == 3
    with pytest.raises(CapacityError, match="one sequence needs"):
        LLM(package, kv_cache_config=KvCacheConfig(max_tokens=1), threads=1)
    with pytest.raises(UsageError, match="must be a KvCacheConfig, got dict"):
        LLM(package, kv_cache_config={"max_tokens": 9})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="kv_memory and kv_cache_config"):
        LLM(package, kv_memory="1GiB", kv_cache_config=KvCacheConfig(max_tokens=tokens))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "sets nothing"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"free_memory_fraction": 1.5}, r"free_memory_fraction must be in \(0, 1\]"),
        ({"free_memory_fraction": 0.0}, "free_memory_fraction"),
    ],
)
def test_values_outside_their_range_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        KvCacheConfig(**given)


def test_a_fraction_of_a_gpu_is_refused(engines: Engines) -> None:
    manifest = load_manifest(engines.package("nexus")).model_copy(update={"target": "tensorrt"})
    with pytest.raises(UsageError, match="give max_tokens or kv_memory"):
        KvCacheConfig(free_memory_fraction=0.5).kv_memory(manifest)
