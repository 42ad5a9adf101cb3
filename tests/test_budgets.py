import math
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvsift.builder.errors import CapacityError, UsageError
from kvsift.runtime.budgets import (
    BudgetRule,
    forced_units,
    largest_budget,
    slot_capacity,
    steady_forced_units,
    units_for,
)
from kvsift.runtime.params import EvictionParams

BLOCKS = st.sampled_from([1, 2, 8, 32, 48])
PROMPTS = st.integers(1, 5000)
DENSITIES = st.floats(0.001, 1.0)
SCOPES = st.sampled_from(["prefill", "decode", "both"])
SMALL = st.integers(0, 6)


def rule_of(density=0.2, max_density=0.2, scope="both", **changes):
    shape = {"block_size": 32, "sink_units": 1, "recent_units": 1, "min_budget_tokens": 256}
    limits = {"max_input": 8192, "max_output": 512, "max_positions": 8192}
    for key, value in changes.items():
        (limits if key in limits else shape)[key] = value
    shape.setdefault("interval", shape["block_size"])
    capacity = slot_capacity(**shape, **limits, max_density=max_density, scope=scope)
    positions = limits["max_positions"]
    return BudgetRule(
        density=density, scope=scope, capacity=capacity, max_positions=positions, **shape
    )


@st.composite
def pinned_prompts(draw):
    prompt = draw(st.integers(1, 400))
    spans = draw(st.lists(st.tuples(st.integers(0, prompt - 1), st.integers(1, 60)), max_size=4))
    return prompt, [(start, min(prompt, start + size)) for start, size in spans]


@given(pinned_prompts(), BLOCKS, SMALL, SMALL)
def test_forced_units_counts_the_rule_of_the_selectors(case, block, sinks, recent):
    prompt, pins = case
    forced = 0
    for j in range(math.ceil(prompt / block)):
        pinned = any(start < (j + 1) * block and end > j * block for start, end in pins)
        forced += j < sinks or j >= prompt // block - recent or pinned
    assert forced_units(prompt, block, sinks, recent, pins) == forced


@given(pinned_prompts(), BLOCKS, SMALL, SMALL)
def test_steady_forced_is_what_a_much_longer_sequence_forces(case, block, sinks, recent):
    prompt, pins = case
    longer = (prompt // block + sinks + recent + 2) * block  # whole blocks, as in decode
    forced = forced_units(longer, block, sinks, recent, pins)
    assert steady_forced_units(prompt, block, sinks, recent, pins) == forced


def test_8192_tokens_at_a_fifth_are_51_blocks():
    forced = forced_units(8192, 32, 1, 1)
    assert forced == 2
    assert units_for(8192, block_size=32, forced=forced, density=0.2) == 51
    assert 51 * 32 == 1632


@pytest.mark.parametrize(
    ("prompt", "density", "units"),
    [(10, 0.3, 3), (100, 0.29, 29), (1000, 0.7, 700), (30, 0.1, 3), (29, 0.1, 2)],
)
def test_products_that_are_whole_on_paper(prompt, density, units):
    budget = units_for(prompt, block_size=1, forced=0, density=density, min_budget_tokens=0)
    assert budget == units


@given(PROMPTS, BLOCKS, DENSITIES, st.integers(0, 600), SMALL)
@example(1, 32, 0.001, 0, 1)
def test_budget_is_the_largest_of_its_three_floors(prompt, block, density, minimum, forced):
    budget = units_for(
        prompt, block_size=block, forced=forced, density=density, min_budget_tokens=minimum
    )
    if density == 1.0:
        assert budget is None
        return
    blocks = math.ceil(prompt / block)
    assert budget >= forced + 1
    assert budget * block >= minimum
    assert budget > density * blocks - 1
    # and no more than needed: one unit less breaks one of the three
    assert (
        budget == forced + 1 or (budget - 1) * block < minimum or budget <= density * blocks + 1e-6
    )


@given(PROMPTS, BLOCKS, st.integers(1, 6000), SMALL)
def test_absolute_budget_is_a_ceiling_above_the_forced_units(prompt, block, tokens, forced):
    budget = units_for(prompt, block_size=block, forced=forced, budget_tokens=tokens)
    assert budget == max(forced + 1, tokens // block)


def test_a_budget_needs_a_density_or_tokens():
    with pytest.raises(UsageError, match="no budget given"):
        units_for(10, block_size=32, forced=1)


@given(
    st.integers(1, 4000),
    st.integers(1, 600),
    st.floats(0.01, 1.0),
    SCOPES,
    BLOCKS,
    SMALL,
    SMALL,
    st.data(),
)
def test_every_unpinned_request_within_the_limits_fits(
    max_input, max_output, max_density, scope, block, sinks, recent, data
):
    limits = {"max_input": max_input, "max_output": max_output, "max_positions": 4096}
    shape = {"block_size": block, "sink_units": sinks, "recent_units": recent}
    rule = rule_of(max_density, max_density, scope, **shape, **limits)
    assert rule.capacity % block == 0
    assert rule.capacity < min(4096, max_input + max_output) + block
    prompt = data.draw(st.integers(1, max_input))
    new = data.draw(st.integers(0, max_output))
    density = data.draw(st.floats(0.005, max_density))
    units = rule.units(prompt, EvictionParams(density=density), new)
    reach = min(4096, prompt + new)
    if units is None:
        assert density == 1.0
        assert reach <= rule.capacity
        return
    kept = min(prompt, units * block)
    if scope == "prefill":
        assert min(reach, kept + new) <= rule.capacity
    else:
        assert min(reach, units * block + block) <= rule.capacity


def test_capacity_by_scope():
    assert rule_of(scope="both").capacity == (51 + 1) * 32
    assert rule_of(scope="decode").capacity == 8192
    assert rule_of(scope="decode", max_input=1000).capacity == (32 + 1) * 32
    assert rule_of(scope="prefill", max_output=100).capacity == (51 + 4) * 32
    assert rule_of(max_density=1.0).capacity == 8192
    assert rule_of(max_density=0.99, max_positions=1000).capacity == 1024
    assert rule_of(max_input=64).capacity == (8 + 1) * 32  # the minimum budget
    assert rule_of(block_size=1, sink_units=4, recent_units=1).capacity == 1638 + 1
    assert rule_of(block_size=1, sink_units=4, recent_units=1, interval=32).capacity == 1638 + 32


@given(st.integers(0, 5000), BLOCKS, SCOPES, st.integers(0, 5000))
def test_largest_budget_fits_and_one_more_does_not(capacity, block, scope, new):
    def needs(units):
        return units * block + (new if scope == "prefill" else block)

    largest = largest_budget(capacity, block, scope, new, block)
    assert largest == 0 or needs(largest) <= capacity
    assert needs(largest + 1) > capacity


def test_rule_uses_the_engine_defaults():
    rule = rule_of()
    assert rule.units(8192, EvictionParams(), 0) == 51
    assert rule.units(1, EvictionParams(), 8) == 8  # 256 tokens at least
    assert rule.units(300, EvictionParams(min_budget_tokens=0), 200) == 4  # sink, newest, tail, one
    assert rule.units(8000, EvictionParams(budget_tokens=1000), 100) == 31
    assert rule.units(8000, EvictionParams(budget_tokens=1), 100) == 3
    assert rule.units(8000, EvictionParams(pin=[(1000, 1800)]), 100) == 50


def test_pins_that_exceed_the_budget_are_refused():
    rule = rule_of()
    fits = EvictionParams(budget_tokens=512, pin=[(1000, 1400)])  # 14 units, sink and newest
    assert rule.units(8000, fits, 100) == 16
    with pytest.raises(CapacityError, match=r"need a budget of 512 .*it is 256; .*tokens 512 or"):
        rule.units(8000, EvictionParams(density=0.01, pin=[(1000, 1400)]), 100)
    with pytest.raises(CapacityError, match=r"pin less, since a slot .* keeps at most 1632$"):
        rule.units(8000, EvictionParams(pin=[(0, 4000)]), 50)
    half = replace(rule, recent_fraction=0.5)  # 8 more units of 16 are the newest ones
    with pytest.raises(CapacityError, match=r"need a budget of 768 tokens"):
        half.units(8000, fits, 100)
    assert half.units(8000, EvictionParams(budget_tokens=1024, pin=[(1000, 1400)]), 100) == 32


def test_short_prompt_leaves_decode_a_block_to_free():
    rule = rule_of(recent_units=3, min_budget_tokens=0)
    assert forced_units(1, 32, 1, 3) == 1
    assert rule.units(1, EvictionParams(), 500) == 5  # 1 sink + 3 newest + 1


def test_density_one_is_off_where_all_fits():
    assert rule_of().units(500, EvictionParams(density=1.0), 64) is None
    with pytest.raises(CapacityError, match=r"is 8064 tokens without eviction.*at most 1632"):
        rule_of().units(8000, EvictionParams(density=1.0), 64)


def test_too_large_a_budget_names_the_largest():
    with pytest.raises(CapacityError, match=r"^the budget is 4096 tokens, .* keeps at most 1632 "):
        rule_of().units(8192, EvictionParams(density=0.5), 0)
    with pytest.raises(CapacityError, match="at most 1632"):
        rule_of().units(8000, EvictionParams(budget_tokens=1664), 50)
    assert rule_of().units(8000, EvictionParams(budget_tokens=1632), 50) == 51


def test_a_large_budget_is_no_fault_where_everything_fits():
    assert rule_of().units(100, EvictionParams(min_budget_tokens=4000), 50) == 52


def test_next_turn_is_cut_to_the_slot():
    rule = rule_of(density=0.5, max_density=0.5, max_input=2048)
    with pytest.raises(CapacityError):
        rule.units(4000, EvictionParams(), 100)
    assert rule.units(4000, EvictionParams(), 100, next_turn=True) == 32
    with pytest.raises(CapacityError):
        rule.units(4000, EvictionParams(pin=[(0, 3000)]), 100, next_turn=True)


def test_pin_beyond_the_prompt():
    with pytest.raises(UsageError, match=r"pin must end within the prompt's 100 tokens"):
        rule_of().units(100, EvictionParams(pin=[(90, 101)]), 1)
