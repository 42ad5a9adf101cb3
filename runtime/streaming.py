"""Prompts longer than the scratch: they evict at chunk boundaries, within a fixed memory."""

from __future__ import annotations

from kvsift.builder.errors import CapacityError, UsageError
from kvsift.builder.package import Limits, Manifest, Policy
from kvsift.runtime.budgets import forced_units, units_for
from kvsift.runtime.held import HeldRows
from kvsift.runtime.sizes import scratch_tokens


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


def most_streamed(manifest: Manifest) -> int:
    """Return the most tokens that a prompt longer than the scratch may keep: a chunk less."""
    return scratch_tokens(manifest) - manifest.limits.chunk


def check_scratch(
    manifest: Manifest, prompt_tokens: int, budget: int | None, held: HeldRows | None
) -> None:
    """Raise CapacityError if a prompt fits the scratch neither whole nor in a stream.

    `budget` in units; `held` is what an earlier turn has left of the prompt.
    """
    policy, whole = manifest.policy, scratch_tokens(manifest)
    rows = prompt_tokens - (held.seen - held.longest if held else 0)
    if rows <= whole or not policy.evicts or (held is None and not policy.in_prefill):
        return
    tokens = rows if budget is None else budget * policy.block_size
    if tokens > most_streamed(manifest):
        raise CapacityError(
            f"the prompt needs {rows} rows and streams through a scratch of {whole}, so it may "
            f"keep at most {most_streamed(manifest)} tokens, and its budget is {tokens}; lower "
            "density or budget_tokens, or rebuild with a larger --max-scratch"
        )
