"""Optimisation profiles: the sizes that each phase's steps have, for every symbol of the inputs."""

from __future__ import annotations

from collections.abc import Sequence

from kvsift.builder.errors import UsageError
from kvsift.builder.families import ModelConfig
from kvsift.builder.package import Limits, Profile, TensorSpec
from kvsift.builder.policies.base import Policy

#: Pinned spans that an eviction can be given; one of them may be `recent_fraction`'s.
MAX_PIN_SPANS = 64
Range = tuple[int, int, int]
Shape = tuple[int, ...]


def context_tokens(config: ModelConfig, limits: Limits, slot_tokens: int) -> int:
    """Return the largest capacity of a scratch, whole chunks: a kept turn and the next prompt."""
    reach = min(config.max_positions, limits.max_input + slot_tokens)
    if limits.max_scratch is not None:  # longer prompts evict on the way
        reach = min(reach, limits.max_scratch)
    return -(-reach // limits.chunk) * limits.chunk


def profiles(
    config: ModelConfig, policy: Policy, limits: Limits, slot_tokens: int, least_units: int = 0
) -> tuple[Profile, ...]:
    """Return the profile of prompt chunks and that of decode steps.

    `slot_tokens` is the capacity of a slot. `least_units` is the least N, which is 0 in a step
    without evictions unless the engine cannot do that.
    """
    heads = config.num_kv_heads
    context = context_tokens(config, limits, slot_tokens)
    # Layers and heads that keep different numbers of rows may hold any share of what there is.
    slot = slot_tokens if policy.shared_lens else context
    chunk = min(limits.chunk, limits.max_input)
    batch = limits.max_batch
    pins = (1, 1, MAX_PIN_SPANS)

    def units(tokens: int) -> int:
        return -(-tokens // policy.block_size)

    def all_sizes(batch: int, step: int, usual: int, most: int) -> dict[str, Range]:
        rows = (least_units, units(usual), units(most))
        return {
            "B": (1, batch, batch),
            "R": (heads, heads * batch, heads * batch),
            "S": (1, step, step),
            "C": (1, usual, most),
            "E": (0, 1, batch),
            "N": rows,
            "P": pins,
        }

    prompt = min(limits.max_input, context)
    return (
        Profile(name="context", sizes=all_sizes(1, chunk, prompt, context)),
        Profile(name="generation", sizes=all_sizes(batch, 1, slot_tokens, slot)),
    )


def shapes(profile: Profile, spec: TensorSpec) -> tuple[Shape, Shape, Shape] | None:
    """Return least, usual and largest shape of an input; None if its shape is fixed."""
    if all(isinstance(dim, int) for dim in spec.shape):
        return None

    def size(dim: int | str, index: int) -> int:
        if isinstance(dim, int):
            return dim
        # C0, C1, ... are the capacities of layers that differ.
        known = profile.sizes.get(dim) or profile.sizes.get(dim[0])
        if known is None:
            raise UsageError(f"no sizes for the symbol {dim!r} of input {spec.name!r}")
        return known[index]

    least, usual, most = (tuple(size(d, i) for d in spec.shape) for i in range(3))
    return least, usual, most


def trtexec_words(found: Sequence[Profile], inputs: Sequence[TensorSpec]) -> list[str]:
    """Return the arguments of trtexec for these profiles."""
    words = []
    for index, profile in enumerate(found):
        words.append(f"--profile={index}")
        every = [(spec.name, shapes(profile, spec)) for spec in inputs]
        for at, option in enumerate(("minShapes", "optShapes", "maxShapes")):
            parts = [f"{name}:{'x'.join(map(str, s[at]))}" for name, s in every if s is not None]
            words.append(f"--{option}={','.join(parts)}")
    return words
