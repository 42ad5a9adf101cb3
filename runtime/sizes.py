"""What an engine takes in memory, told from its manifest alone."""

from __future__ import annotations

from dataclasses import dataclass

from kvsift.builder.package import PLAN, WEIGHTS, Manifest
from kvsift.runtime.budgets import slot_capacity, units_of

#: Bytes of a number of keys and values, by the manifest's `dtype`.
FLOAT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Sizes:
    """Bytes of an engine: weights, the scratch that reads prompts, and each sequence's cache.

    `slot` is what a sequence holds, `dense` what it would hold without eviction, both at the
    longest prompt that the engine takes and with room for its answer.
    """

    weights: int
    scratch: int
    slot: int
    dense: int

    def sequences(self, memory: int, *, dense: bool = False) -> int:
        """Return how many sequences fit in `memory` bytes beside the weights and the scratch."""
        each = self.dense if dense else self.slot
        return max(0, memory - self.weights - self.scratch) // each


def token_bytes(manifest: Manifest) -> int:
    """Return the bytes of one token's keys and values over all layers."""
    model = manifest.model
    item = FLOAT_BYTES[manifest.dtype]
    return 2 * item * model.num_layers * model.num_kv_heads * model.head_dim


def slot_tokens(manifest: Manifest, *, dense: bool = False) -> int:
    """Return the tokens that a slot has room for; `dense`: if nothing were evicted."""
    policy, limits = manifest.policy, manifest.limits
    return slot_capacity(
        block_size=policy.block_size,
        sink_units=policy.sink_units,
        recent_units=policy.recent_units,
        interval=policy.decode_interval,
        max_input=limits.max_input,
        max_output=limits.max_output,
        max_density=limits.max_density if policy.evicts and not dense else 1.0,
        max_positions=manifest.model.max_positions,
        scope=policy.scope,
        min_budget_tokens=policy.min_budget_tokens,
    )


def sizes(manifest: Manifest) -> Sizes:
    """Return the sizes of a package, its scratch grown to the longest prompt."""
    limits, each = manifest.limits, token_bytes(manifest)
    held = [manifest.files[name].bytes for name in (WEIGHTS, PLAN) if name in manifest.files]
    return Sizes(
        weights=max(held),
        scratch=units_of(limits.max_input, limits.chunk) * limits.chunk * each,
        slot=slot_tokens(manifest) * each,
        dense=slot_tokens(manifest, dense=True) * each,
    )
