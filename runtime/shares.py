"""How a request's budget is shared out: among the layers, and among the KV heads of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvsift.builder.errors import CapacityError, UsageError
from kvsift.builder.package import Manifest
from kvsift.runtime.budgets import BudgetRule, units_of
from kvsift.runtime.layer_budgets import exact_shares, layer_budgets
from kvsift.runtime.params import EvictionParams, Span
from kvsift.runtime.slots import Slot

Ints = NDArray[np.int32]


def check_shares(params: EvictionParams, manifest: Manifest) -> None:
    """Raise UsageError if the engine cannot hold rows of the lengths that a request asks for."""
    policy, model = manifest.policy, manifest.model
    layers, heads = params.layer_budgets, params.head_budgets
    if layers is not None and policy.shared_lens:
        raise UsageError(
            "layer_budgets: all layers of this engine have equally many rows; leave it out, or "
            "rebuild with --set row_lengths=layer"
        )
    if not isinstance(layers, str | None) and len(layers) != model.num_layers:
        raise UsageError(
            f"layer_budgets has {len(layers)} weights and the model {model.num_layers} layers; "
            "give one weight per layer, uniform or pyramid"
        )
    if heads is None:
        return
    if policy.layout != "head":
        raise UsageError(
            "head_budgets: the heads of a layer of this engine have equally many rows; leave it "
            "out, or rebuild with --set row_lengths=head"
        )
    if len(heads) != model.num_kv_heads:
        raise UsageError(
            f"head_budgets has {len(heads)} weights and the model {model.num_kv_heads} KV heads; "
            "give one weight per KV head"
        )


def share_out(
    slot: Slot,
    units: int,
    manifest: Manifest,
    rule: BudgetRule,
    *,
    prompt_tokens: int,
    params: EvictionParams,
    pins: Sequence[Span],
) -> None:
    """Give a slot its budgets, of `units` per layer and head in the mean."""
    policy, model = manifest.policy, manifest.model
    recent = int(policy.recent_fraction * units)
    forced = rule.forced(prompt_tokens, pins) + recent
    total = units_of(prompt_tokens, policy.block_size)
    layers = layer_budgets(
        policy, units, total, model.num_layers, forced, share=params.layer_budgets
    )
    slot.budgets, slot.recent = layers, recent * policy.block_size
    if params.head_budgets is not None:
        slot.head_budgets = head_budgets(params.head_budgets, layers, forced)


def check_rows(slot: Slot, limits: Sequence[int], reach: int) -> None:
    """Raise CapacityError if a request's budgets could give a layer rows beyond `limits`, [L].

    `reach` is the most tokens that the request comes to; a head can win all that its layer keeps.
    """
    if slot.budgets is None:
        return
    heads = slot.lens.shape[1]
    for layer, (budget, limit) in enumerate(zip(slot.budgets, limits, strict=True)):
        rows = heads * int(budget) * slot.block_size + slot.spare
        if min(rows, reach) > limit:
            largest = max(0, limit - slot.spare) // (heads * slot.block_size) * slot.block_size
            raise CapacityError(
                f"layer_budgets give layer {layer} {int(budget) * slot.block_size} tokens, but "
                f"kv_memory was divided for at most {largest} there; lower the budget or that "
                "layer's weight, or load the engine with max_batch instead of kv_memory"
            )


def head_budgets(weights: Sequence[float], layers: Ints, forced: int) -> Ints:
    """Return int32 [L, R], each layer's budget shared among R heads; a row sums to R times it.

    No head falls below `forced` + 1 units (or its layer's budget, if that is less).
    """
    heads = np.array(weights, np.float64)
    shares = layers[:, None] * (heads / heads.mean())
    rows = [
        exact_shares(row, int(budget) * len(heads), min(int(budget), forced + 1))
        for row, budget in zip(shares, layers, strict=True)
    ]
    return np.stack(rows)
