"""kvsift: KV-cache eviction engines for ONNX Runtime and TensorRT."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsift.builder.errors import KvsiftError
    from kvsift.runtime.kv_cache_config import KvCacheConfig
    from kvsift.runtime.llm import LLM
    from kvsift.runtime.output import CompletionOutput, RequestOutput
    from kvsift.runtime.params import EvictionParams, SamplingParams
    from kvsift.runtime.results import GenerationResult

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "EvictionParams",
    "GenerationResult",
    "KvCacheConfig",
    "KvsiftError",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

#: Imported when first asked for, so that `import kvsift` loads no inference engine.
_HOMES = {
    "LLM": "kvsift.runtime.llm",
    "CompletionOutput": "kvsift.runtime.output",
    "EvictionParams": "kvsift.runtime.params",
    "GenerationResult": "kvsift.runtime.results",
    "KvCacheConfig": "kvsift.runtime.kv_cache_config",
    "KvsiftError": "kvsift.builder.errors",
    "RequestOutput": "kvsift.runtime.output",
    "SamplingParams": "kvsift.runtime.params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
