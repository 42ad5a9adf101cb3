"""What an engine takes in memory, told from its manifest alone."""

from __future__ import annotations

from dataclasses import dataclass

from kvsift.builder.package import WEIGHTS, Manifest
from kvsift.runtime.budgets import slot_capacity, units_of

FLOAT_BYTES = 4


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
    return 2 * FLOAT_BYTES * model.num_layers * model.num_kv_heads * model.head_dim


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


def scratch_tokens(manifest: Manifest) -> int:
    """Return the tokens of the scratch: of the longest prompt, or fewer where prompts stream."""
    limits = manifest.limits
    whole = units_of(limits.max_input, limits.chunk) * limits.chunk
    return whole if limits.max_scratch is None else min(whole, limits.max_scratch)


def sizes(manifest: Manifest) -> Sizes:
    """Return the sizes of a package, its scratch grown to the longest prompt."""
    each = token_bytes(manifest)
    return Sizes(
        weights=manifest.files[WEIGHTS].bytes,
        scratch=scratch_tokens(manifest) * each,
        slot=slot_tokens(manifest) * each,
        dense=slot_tokens(manifest, dense=True) * each,
    )
