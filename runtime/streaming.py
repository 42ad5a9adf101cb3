"""Prompts longer than the scratch: they evict at chunk boundaries, within a fixed memory."""

from __future__ import annotations

from kvsift.builder.errors import CapacityError, UsageError
from kvsift.builder.package import Limits, Manifest, Policy
from kvsift.runtime.budgets import forced_units, units_for
from kvsift.runtime.sizes import scratch_tokens
from kvsift.runtime.slots import Slot


def with_scratch(limits: Limits, policy: Policy, max_scratch: int | None) -> Limits:
    """Return limits whose prompts stream through a scratch of `max_scratch` tokens.

    It is rounded down to whole chunks. UsageError if the policy cannot evict inside a prompt, or if
    the longest prompt's budget and one chunk do not fit.
    """
    if max_scratch is None or max_scratch >= limits.max_input:
        return limits
    if not policy.in_prefill:
        raise UsageError(
            f"--max-scratch {max_scratch}: scope {policy.scope!r} keeps every prompt whole, so it "
            f"must fit --max-input {limits.max_input}; leave it out, or use --scope both"
        )
    scratch = max_scratch // limits.chunk * limits.chunk
    forced = forced_units(
        limits.max_input, policy.block_size, policy.sink_units, policy.recent_units
    )
    units = units_for(
        limits.max_input,
        block_size=policy.block_size,
        forced=forced,
        density=limits.density,
        min_budget_tokens=policy.min_budget_tokens,
    )
    tokens = limits.max_input if units is None else units * policy.block_size
    if tokens + limits.chunk > scratch:
        raise UsageError(
            f"--max-scratch {max_scratch} must hold the budget of the longest prompt ({tokens} "
            f"tokens) and one chunk of {limits.chunk}; give "
            f"{-(-(tokens + limits.chunk) // limits.chunk) * limits.chunk} or more, or lower "
            "--density"
        )
    return limits.model_copy(update={"max_scratch": scratch})


def scratch_room(manifest: Manifest, guarded: bool) -> int:
    """Return the rows of the scratch that prompts may fill.

    A guardrail (`guarded`) tries budgets with a padding token, which a fixed scratch must hold.
    """
    spare = guarded and manifest.limits.max_scratch is not None
    return scratch_tokens(manifest) - int(spare)


def most_streamed(manifest: Manifest, guarded: bool) -> int:
    """Return the most tokens that a prompt longer than the scratch may keep: a chunk less."""
    return scratch_room(manifest, guarded) - manifest.limits.chunk


def check_scratch(
    manifest: Manifest, slot: Slot, rows: int, *, turn: bool, guarded: bool, bounded: bool
) -> None:
    """Raise CapacityError if `rows` of a prompt fit the scratch neither whole nor in a stream.

    `slot` has the request's budgets; `turn`: it goes on from an earlier one; `bounded`: the scratch
    may not grow beyond its size, else it may where a prompt stays whole or rows differ in length.
    """
    policy, whole = manifest.policy, scratch_room(manifest, guarded)
    if rows <= whole:
        return
    streams = slot.budgets is not None and (policy.in_prefill or turn)
    most, kept, longest = most_streamed(manifest, guarded), rows, rows
    if streams and slot.budgets is not None:
        kept = round(float(slot.budgets.mean()) * slot.block_size)
        # A head can win all that its layer keeps.
        longest = slot.lens.shape[1] * int(slot.budgets.max()) * slot.block_size
    if policy.in_prefill and kept > most:
        raise CapacityError(
            f"the prompt needs {rows} rows and streams through a scratch of {whole}, so it may "
            f"keep at most {most} tokens, and its budget is {kept}; lower density or "
            "budget_tokens, or rebuild with a larger --max-scratch"
        )
    if bounded and longest > most:
        needed = longest + manifest.limits.chunk
        raise CapacityError(
            f"reading this prompt may take a scratch of {needed} rows, and "
            f"kv_memory was divided for one of {whole}; shorten it, begin a new session, or load "
            "the engine with max_batch instead of kv_memory"
        )
