"""Memory of the KV caches under the names that TensorRT-LLM gives such limits."""

from __future__ import annotations

from dataclasses import dataclass

from kvsift.builder.errors import UsageError
from kvsift.builder.package import Manifest
from kvsift.runtime.params import check_in_range, check_integer
from kvsift.runtime.sizes import sizes, token_bytes


@dataclass(frozen=True)
class KvCacheConfig:
    """How much memory the KV caches may take, scratch and windows included; the lesser of two.

    `max_tokens` is the memory of so many tokens' keys and values, >= 1; `free_memory_fraction`, in
    (0, 1], a share of the host's memory that the weights leave. Raises UsageError when neither is
    given, or one is outside its range.
    """

    max_tokens: int | None = None
    free_memory_fraction: float | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is None and self.free_memory_fraction is None:
            raise UsageError(
                "KvCacheConfig() sets nothing; give max_tokens or free_memory_fraction, or leave it"
                " out"
            )
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1, "it is the tokens of all KV caches")
        if self.free_memory_fraction is not None:
            fix = "it is a share of free memory"
            check_in_range("free_memory_fraction", self.free_memory_fraction, "(0, 1]", fix)

    def kv_memory(self, manifest: Manifest) -> int:
        """Return the bytes for an engine that is not loaded yet.

        Raises UsageError for a fraction where the caches lie on a GPU or the host's free memory is
        not known.
        """
        found = []
        if self.max_tokens is not None:
            found.append(self.max_tokens * token_bytes(manifest))
        if self.free_memory_fraction is not None:
            from kvsift.runtime.console import available_memory

            free = available_memory() if manifest.target == "ort" else None
            if free is None:
                raise UsageError(
                    f"free_memory_fraction is {self.free_memory_fraction} and the free memory is "
                    f"not known here (target {manifest.target!r}); give max_tokens or kv_memory"
                )
            left = max(0, free - sizes(manifest).weights)
            found.append(max(1, int(self.free_memory_fraction * left)))
        return min(found)
