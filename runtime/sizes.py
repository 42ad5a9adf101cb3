"""What an engine takes in memory, told from its manifest alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from kvsift.builder.errors import CapacityError
from kvsift.builder.package import PLAN, WEIGHTS, DType, Limits, Manifest, Policy, window_features
from kvsift.builder.states import STATES
from kvsift.runtime.budgets import largest_budget, slot_capacity, units_of
from kvsift.runtime.layer_budgets import layer_budgets
from kvsift.runtime.params import check_integer

#: Bytes of a number of keys, values and the query window, by the manifest's `dtype`.
FLOAT_BYTES: dict[DType, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
#: More than any machine has; ONNX Runtime starts all that it is told to.
MAX_THREADS = 1024
#: More than is of use; every one takes memory.
MAX_SLOTS = 1024
#: Bytes of a number of the states.
STATE_BYTES = 4


@dataclass(frozen=True)
class Sizes:
    """Bytes of an engine: weights, the scratch that reads prompts, and each sequence's slot.

    `slot` is what a sequence takes, its query window and states included, `dense` what it would
    take without eviction, both at the longest prompt that the engine takes and with room for its
    answer. The scratch is that of the longest prompt.
    """

    weights: int
    scratch: int
    slot: int
    dense: int

    def sequences(self, memory: int, *, dense: bool = False) -> int:
        """Return how many sequences fit in `memory` bytes beside the scratch."""
        return max(0, memory - self.scratch) // (self.dense if dense else self.slot)


def token_bytes(manifest: Manifest) -> int:
    """Return the bytes of one token's keys and values over all layers."""
    model = manifest.model
    item = FLOAT_BYTES[manifest.dtype]
    return 2 * item * model.num_layers * model.num_kv_heads * model.head_dim


def slot_tokens(manifest: Manifest, *, dense: bool = False) -> int:
    """Return the tokens that a slot has room for; `dense`: if nothing were evicted."""
    positions = manifest.model.max_positions
    return planned_slot_tokens(manifest.policy, manifest.limits, positions, dense=dense)


def planned_slot_tokens(
    policy: Policy, limits: Limits, max_positions: int, *, dense: bool = False
) -> int:
    """Return the same before there is an engine."""
    return slot_capacity(
        block_size=policy.block_size,
        sink_units=policy.sink_units,
        recent_units=policy.recent_units,
        interval=policy.decode_interval,
        max_input=limits.max_input,
        max_output=limits.max_output,
        max_density=limits.max_density if policy.evicts and not dense else 1.0,
        max_positions=max_positions,
        scope=policy.scope,
        min_budget_tokens=policy.min_budget_tokens,
    )


def scratch_tokens(manifest: Manifest) -> int:
    """Return the tokens of the scratch: of the longest prompt, or fewer where prompts stream."""
    limits = manifest.limits
    whole = units_of(limits.max_input, limits.chunk) * limits.chunk
    return whole if limits.max_scratch is None else min(whole, limits.max_scratch)


def row_tokens(manifest: Manifest, *, dense: bool = False) -> list[int]:
    """Return the tokens that each layer of a slot must have room for, [L]; `dense` as above.

    Where layers or heads differ in length, that is the longest row that the policy's own budgets
    can give: a head may win the whole budget of its layer.
    """
    policy, model, limits = manifest.policy, manifest.model, manifest.limits
    capacity = slot_tokens(manifest, dense=dense)
    if dense or policy.shared_lens:
        return [capacity] * model.num_layers
    size, interval = policy.block_size, policy.decode_interval
    units = largest_budget(capacity, size, policy.scope, limits.max_output, interval)
    # Shares of a prompt that cuts none of them; where one does, they are nearer to the mean.
    shares = layer_budgets(policy, units, 1 << 40, model.num_layers, 0)
    heads = model.num_kv_heads if policy.layout == "head" else 1
    # A row that is full grows by another interval, some tokens of which are over already.
    spare = limits.max_output if policy.scope == "prefill" else 2 * interval
    reach = slot_tokens(manifest, dense=True)
    most = (heads * max(units, int(share) + 1) * size + spare for share in shares)
    return [units_of(min(reach, rows), size) * size for rows in most]


def cache_bytes(manifest: Manifest, rows: Sequence[int]) -> int:
    """Return the bytes of one slot of a cache whose layers have room for `rows` tokens, [L].

    Keys and values, the query window, and the states of `builder/states.py`.
    """
    policy, model = manifest.policy, manifest.model
    total = token_bytes(manifest) // model.num_layers * sum(rows)
    if policy.window:
        features = model.num_layers * window_features(model, policy)
        total += FLOAT_BYTES[manifest.dtype] * (policy.window + 1) * features
    for name in policy.states:
        dims = STATES[name].dims(model)
        fixed = prod(d for d in dims if not isinstance(d, str))
        total += STATE_BYTES * sum(fixed * (size if "C" in dims else 1) for size in rows)
    return total


def sizes(manifest: Manifest) -> Sizes:
    """Return the sizes of a package."""
    held = [manifest.files[name].bytes for name in (WEIGHTS, PLAN) if name in manifest.files]
    scratch = [scratch_tokens(manifest)] * manifest.model.num_layers
    return Sizes(
        weights=max(held),
        scratch=cache_bytes(manifest, scratch),
        slot=cache_bytes(manifest, row_tokens(manifest)),
        dense=cache_bytes(manifest, row_tokens(manifest, dense=True)),
    )


def planned_slots(manifest: Manifest, max_batch: int | None, kv_memory: int | None) -> int:
    """Return how many sequences an engine runs at a time that is loaded with these options.

    `kv_memory` in bytes; None is the default of `Engine`. UsageError for what no engine takes,
    CapacityError if there is no room for one sequence.
    """
    slots = manifest.limits.max_batch if max_batch is None else max_batch
    check_integer("max_batch", slots, 1, "it is the sequences at a time", MAX_SLOTS)
    if kv_memory is not None:
        check_integer("kv_memory", kv_memory, 1, "it is the bytes of slots and scratch")
        fixed = manifest.tensorrt is not None or max_batch is not None
        slots = slots_in(manifest, kv_memory, slots if fixed else MAX_SLOTS)
    return slots


def check_threads(threads: int | None) -> None:
    """Raise UsageError for a count of threads that no engine takes; None is the default."""
    if threads is not None:
        check_integer("threads", threads, 1, "leave it out for all cores", MAX_THREADS)


def slots_in(manifest: Manifest, memory: int, most: int) -> int:
    """Return how many slots, at most `most`, `memory` bytes hold beside the scratch.

    CapacityError if there is no room for one.
    """
    size = sizes(manifest)
    if not (fit := size.sequences(memory)):
        raise CapacityError(
            f"kv_memory is {memory} bytes, but one sequence needs {size.scratch + size.slot}: "
            f"{size.slot} for its slot and {size.scratch} for the scratch that reads prompts; give "
            "more, or rebuild with a smaller --max-input or --max-density"
        )
    return min(fit, most)
