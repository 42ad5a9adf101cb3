"""How many units a request keeps: the only place that knows densities.

A unit is a block of `block_size` tokens (1 for token policies). Everything below this module
counts units; a budget of None means that nothing is evicted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvsift.builder.errors import CapacityError, UsageError
from kvsift.runtime.params import EvictionParams, Span

Scope = Literal["none", "prefill", "decode", "both"]

#: Default minimum budget, so that a short prompt with a long answer keeps something.
MIN_BUDGET_TOKENS = 256
#: d * units may fall just below a whole number that it equals on paper.
_ROUNDING = 1e-9


def units_of(tokens: int, block_size: int) -> int:
    """Return how many units `tokens` positions touch, the partial tail included."""
    return -(-tokens // block_size)


def _merged_size(spans: Iterable[Span]) -> int:
    """Return how many integers lie in the union of half-open spans."""
    size, reached = 0, 0
    for start, end in sorted(spans):
        size += max(0, end - max(start, reached))
        reached = max(reached, end)
    return size


def _pinned_units(pins: Sequence[Span], block_size: int, total: int) -> list[Span]:
    """Return the spans of units, below `total`, that pinned positions [start, end) meet."""
    return [(a // block_size, min(units_of(b, block_size), total)) for a, b in pins]


def forced_units(
    prompt_tokens: int,
    block_size: int,
    sink_units: int,
    recent_units: int,
    pins: Sequence[Span] = (),
) -> int:
    """Return the number of distinct units that an eviction after `prompt_tokens` must keep.

    Unit j is forced if j < sink_units, j >= floor(prompt_tokens / block_size) - recent_units
    (which holds for a partial tail), or a pinned span of positions meets it.
    """
    total = units_of(prompt_tokens, block_size)
    recent = max(0, prompt_tokens // block_size - recent_units)
    spans = [(0, min(sink_units, total)), (recent, total)]
    return _merged_size([*spans, *_pinned_units(pins, block_size, total)])


def steady_forced_units(
    prompt_tokens: int,
    block_size: int,
    sink_units: int,
    recent_units: int,
    pins: Sequence[Span] = (),
) -> int:
    """Return the forced units of a decode eviction: sinks, pins and newest full units, all apart.

    A decode eviction comes when no unit is partial and must free one, so a budget below this
    count could never be met. A short prompt's `forced_units` may be smaller.
    """
    total = units_of(prompt_tokens, block_size)
    pinned = _pinned_units(pins, block_size, total)
    return _merged_size([(0, sink_units), *pinned]) + recent_units


def units_for(
    prompt_tokens: int,
    *,
    block_size: int,
    forced: int,
    density: float | None = None,
    budget_tokens: int | None = None,
    min_budget_tokens: int = MIN_BUDGET_TOKENS,
) -> int | None:
    """Return the budget in units, forced ones included; None if density 1.0 switches eviction off.

    max(forced + 1, floor(density * ceil(prompt_tokens / block_size) + 1e-9), the minimum rounded
    up to units); for `budget_tokens` max(forced + 1, floor(budget_tokens / block_size)), since
    an absolute budget is a ceiling that only the forced units may raise. Exactly one of density
    and budget_tokens is given.
    """
    if budget_tokens is not None:
        return max(forced + 1, budget_tokens // block_size)
    if density is None:
        raise UsageError("no budget given; give density in (0, 1] or budget_tokens")
    if density >= 1.0:
        return None
    share = math.floor(density * units_of(prompt_tokens, block_size) + _ROUNDING)
    return max(forced + 1, share, units_of(min_budget_tokens, block_size))


def slot_capacity(
    *,
    block_size: int,
    sink_units: int,
    recent_units: int,
    max_input: int,
    max_output: int,
    max_density: float,
    max_positions: int,
    scope: Scope,
    interval: int,
    min_budget_tokens: int = MIN_BUDGET_TOKENS,
) -> int:
    """Return a slot's tokens, a multiple of block_size.

    The largest budget of an unpinned prompt of up to max_input tokens at up to max_density, plus
    `interval` tokens where decode evicts, plus max_output for scope prefill; never more than the
    positions a request can reach (max_input + max_output within max_positions) rounded up. With
    scope decode the prompt stays whole, so the budget is at least max_input.
    """
    reach = units_of(min(max_positions, max_input + max_output), block_size) * block_size
    forced = sink_units + recent_units + 1  # and the partial tail
    units = units_for(
        max_input,
        block_size=block_size,
        forced=forced,
        density=max_density,
        min_budget_tokens=min_budget_tokens,
    )
    if units is None:
        return reach
    if scope == "decode":
        units = max(units, units_of(max_input, block_size))
    spare = max_output if scope == "prefill" else interval
    return min(reach, (units + units_of(spare, block_size)) * block_size)


def largest_budget(
    capacity: int, block_size: int, scope: Scope, new_tokens: int, interval: int
) -> int:
    """Return the most units that a slot of `capacity` tokens can keep through eviction.

    `interval` tokens stay free where decode evicts; `new_tokens` tokens for scope prefill.
    """
    spare = new_tokens if scope == "prefill" else interval
    return max(0, (capacity - spare) // block_size)


@dataclass(frozen=True)
class BudgetRule:
    """The budget rule of an engine: its policy's unit, forced units, defaults and slot size."""

    block_size: int
    sink_units: int
    recent_units: int
    density: float
    scope: Scope
    #: Tokens between two decode evictions, freed by each.
    interval: int
    capacity: int
    max_positions: int
    min_budget_tokens: int = MIN_BUDGET_TOKENS
    #: Share of the budget that the newest units take beside the forced ones.
    recent_fraction: float = 0.0

    def units(
        self,
        prompt_tokens: int,
        params: EvictionParams,
        new_tokens: int,
        *,
        next_turn: bool = False,
    ) -> int | None:
        """Return the request's budget in units, None if density 1.0 switches eviction off.

        `prompt_tokens` are the true tokens so far, `new_tokens` the most that may follow. A
        budget beyond the slot is cut where everything fits anyway, and with `next_turn`; else
        CapacityError names the largest one. UsageError if a pin ends beyond the prompt,
        CapacityError if the pins leave nothing of the budget.
        """
        _check_pins(params.pin, prompt_tokens)
        forced = self.forced(prompt_tokens, params.pin)
        minimum = params.min_budget_tokens
        density = self.density if params.density is None else params.density
        units = units_for(
            prompt_tokens,
            block_size=self.block_size,
            forced=self.forced(prompt_tokens, ()),
            density=density,
            budget_tokens=params.budget_tokens,
            min_budget_tokens=self.min_budget_tokens if minimum is None else minimum,
        )
        if units is not None and self.scope == "decode":  # the prompt stays whole
            units = max(units, units_of(prompt_tokens, self.block_size))
        reach = min(self.max_positions, prompt_tokens + new_tokens)
        if units is not None and params.pin:
            self._check_room(units, forced, self.largest(reach - prompt_tokens))
        fits = reach <= self.capacity
        if units is None:
            if fits:
                return None
            raise self._too_large(f"{reach} tokens without eviction", forced, reach - prompt_tokens)
        largest = self.largest(reach - prompt_tokens)
        if units <= largest:
            return units
        if fits:  # nothing has to go, so no block need stay free
            return min(units, self.capacity // self.block_size)
        if next_turn and forced < largest:
            return largest
        tokens = f"{units * self.block_size} tokens"
        raise self._too_large(tokens, forced, reach - prompt_tokens)

    def forced(self, prompt_tokens: int, pins: Sequence[Span]) -> int:
        """Return the units that every eviction of the request must keep."""
        shape = (prompt_tokens, self.block_size, self.sink_units, self.recent_units, pins)
        forced = forced_units(*shape)
        return forced if self.scope == "prefill" else max(forced, steady_forced_units(*shape))

    def largest(self, new_tokens: int) -> int:
        """Return the largest budget in units of a request that generates `new_tokens`."""
        return largest_budget(self.capacity, self.block_size, self.scope, new_tokens, self.interval)

    def ceiling(self, prompt_tokens: int, new_tokens: int) -> int:
        """Return the most units that the request's budget may rise to."""
        reach = min(self.max_positions, prompt_tokens + new_tokens)
        if reach <= self.capacity:
            return self.capacity // self.block_size
        return self.largest(reach - prompt_tokens)

    def _check_room(self, units: int, forced: int, largest: int) -> None:
        """Raise CapacityError if pins leave no unit of a budget to choose."""
        size = self.block_size
        # Pins and the newest units that a fraction forces may lie apart, or on each other.
        needed = forced + int(self.recent_fraction * units) + 1
        if needed <= units:
            return
        fix = f"or give budget_tokens {needed * size} or more"
        if needed > largest:
            fix = f"since a slot of {self.capacity} tokens keeps at most {largest * size}"
        elif self.recent_fraction:
            fix = "or give a larger budget"
        raise CapacityError(
            f"the pinned spans need a budget of {needed * size} tokens (with the first and newest "
            f"ones, in whole units of {size}), and it is {units * size}; pin less, {fix}"
        )

    def _too_large(self, wanted: str, forced: int, new_tokens: int) -> CapacityError:
        """Return the error that says what was asked for and what this engine's slots can hold."""
        largest = self.largest(new_tokens)
        if self.scope == "none":
            return CapacityError(
                f"prompt and answer may reach {wanted.split()[0]} tokens, but a slot has "
                f"{self.capacity}; lower max_tokens, or rebuild with a larger --max-output"
            )
        if largest <= forced:
            fix = f"{forced} units are forced: pin or generate fewer tokens"
        else:
            fix = "lower density, budget_tokens or min_budget_tokens"
            if self.scope == "prefill":
                fix += " or max_tokens"
        return CapacityError(
            f"the budget is {wanted}, but a slot of {self.capacity} tokens keeps at most "
            f"{largest * self.block_size} when {new_tokens} follow; {fix}, or rebuild with a "
            "larger --max-density"
        )


def _check_pins(pins: Sequence[Span], prompt_tokens: int) -> None:
    """Raise UsageError if a pinned span ends beyond the prompt."""
    for start, end in pins:
        if end > prompt_tokens:
            raise UsageError(
                f"pin must end within the prompt's {prompt_tokens} tokens, got ({start}, {end}); "
                "give positions of the prompt, the template's tokens included"
            )
