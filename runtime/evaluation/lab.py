"""One engine that reads a prompt once, and any number of policies that evict from what it read.

The engine's query window holds every head, from which the window of each policy follows, and its
graph keeps every state and gives the logits of every token, so that known text runs in few steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from tokenizers import Tokenizer

from kvsift.builder import names
from kvsift.builder.errors import EngineError
from kvsift.builder.package import Policy
from kvsift.runtime.budgets import BudgetRule, forced_units, units_of
from kvsift.runtime.evaluation.stage import Floats, Stage
from kvsift.runtime.evaluation.variants import Variant
from kvsift.runtime.host_cache import HostCache
from kvsift.runtime.layer_budgets import Ints, layer_budgets
from kvsift.runtime.params import EvictionParams
from kvsift.runtime.sessions import Kept
from kvsift.runtime.slots import (
    Slot,
    compact,
    every_unit,
    evictions,
    kept_units,
    move_to,
    new_slot,
)

#: The block size of the policy that sets everyone's budget.
BLOCK = 32


def held_tokens(blocks: int, seen: int) -> int:
    """Return the tokens that every policy holds of `seen`: those of `blocks` blocks of BLOCK.

    The first, the newest, a partial tail and one more are the least; the tail counts as a block
    and holds less.
    """
    least = forced_units(seen, BLOCK, sink_units=1, recent_units=1) + 1
    kept = min(units_of(seen, BLOCK), max(least, blocks))
    return kept * BLOCK - -seen % BLOCK


def fair_budget(policy: Policy, prompt_tokens: int, density: float) -> int | None:
    """Return the units that a policy keeps of a prompt, None for all: see `held_tokens`."""
    blocks = int(density * units_of(prompt_tokens, BLOCK) + 1e-9)
    return token_budget(policy, prompt_tokens, held_tokens(blocks, prompt_tokens))


def token_budget(policy: Policy, seen: int, tokens: int) -> int | None:
    """Return the units in which a policy holds `tokens` of `seen`, None if it keeps all.

    A partial tail is a unit that holds less.
    """
    if policy.scope == "none":
        return None
    rule = BudgetRule(
        block_size=policy.block_size,
        sink_units=policy.sink_units,
        recent_units=policy.recent_units,
        density=1.0,
        scope=policy.scope,
        interval=policy.decode_interval,
        capacity=1 << 30,
        max_positions=1 << 30,
    )
    whole = tokens + -seen % policy.block_size
    return rule.units(seen, EvictionParams(budget_tokens=whole), 0)


class Lab:
    """A loaded evaluation engine (windows of all heads, logits of all tokens) with its caches.

    `capacity`: the longest sequence in tokens; `slots`: sequences that decode together. `heads`:
    a second engine, for policies whose layers or heads keep different numbers of tokens. Raises
    EngineError for an engine of another kind.
    """

    def __init__(
        self,
        directory: Path,
        capacity: int,
        threads: int | None = None,
        *,
        heads: Path | None = None,
        slots: int = 1,
    ) -> None:
        self._even = Stage(directory, capacity, slots, threads)
        self._uneven = None if heads is None else Stage(heads, capacity, slots, threads)
        self.manifest = self._even.manifest
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.slots = slots
        self.scratch = self._even.session.new_cache(1, capacity)
        self._threads = threads
        self._policies: dict[str, ort.InferenceSession] = {}
        self._prompt = 0

    def stage(self, policy: Policy) -> Stage:
        """Return the engine on which what a policy left is continued."""
        if policy.shared_lens or not policy.evicts:
            return self._even
        if self._uneven is None:
            raise EngineError(
                f"policy {policy.name!r} keeps different numbers of tokens per layer or head; "
                "it needs the evaluation engine for that, which was not given"
            )
        return self._uneven

    def read(self, tokens: Sequence[int]) -> Floats:
        """Read a prompt into the scratch from its start; return its last token's logits [V]."""
        self.scratch.clear_memory(0)
        self._prompt, logits = 0, np.zeros(0, np.float32)
        chunk = self.manifest.limits.chunk
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            logits = self._even.run(self.scratch, [part], [start], [start])[0, -1].copy()
            self._prompt += len(part)
        return logits

    def continue_dense(self, tokens: Sequence[int], split: int) -> list[Floats]:
        """Return the logits [S, V] of text that follows the prompt, nothing evicted.

        `split` tokens per step. The scratch's window and states stay the prompt's, and what is
        appended after the prompt is never read again.
        """
        memory = [a for arrays in self.scratch.states.values() for a in arrays]
        memory += [] if self.scratch.ring is None else [self.scratch.ring]
        kept = [array.copy() for array in memory]
        made = []
        for at in range(0, len(tokens), split):
            start = self._prompt + at
            part = tokens[at : at + split]
            made.append(self._even.run(self.scratch, [part], [start], [start])[0])
        for array, saved in zip(memory, kept, strict=True):
            array[:] = saved
        return made

    def budget(self, policy: Policy, density: float) -> int | None:
        """Return the units that a policy keeps of the prompt, see `fair_budget`."""
        return fair_budget(policy, self._prompt, density)

    def evict(self, variant: Variant, budget: int | None, seed: int, index: int = 0) -> Slot:
        """Evict from the prompt as the variant does at its end; what stays is in slot `index`."""
        policy, model, stage = variant.policy, self.manifest.model, self.stage(variant.policy)
        size = policy.block_size
        total = units_of(self._prompt, size)
        recent, budgets = self._shares(policy, budget, self._prompt)
        slot = partial(new_slot, model, policy, seed=seed, recent=recent, budgets=budgets)
        source = slot(0, total, layout=self.manifest.policy.layout)
        source.append(self._prompt)
        units = every_unit(source)
        if source.is_over():
            kept = self._select(variant, self.scratch, source, True)
            units = kept_units(kept, 0)
            source.steps += 1
            source.coverages.append(float(kept.coverage.mean()))
        target = slot(index, stage.cache.capacity // size, layout=stage.manifest.policy.layout)
        move_to(stage.cache, self.scratch, source, target, units)
        target.coverages = source.coverages
        return target

    def force(self, variant: Variant, slot: Slot, tokens: Sequence[int]) -> Floats:
        """Append known tokens to an evicted cache in one step; return their logits [S, V]."""
        logits: Floats = self.stage(variant.policy).step([slot], [tokens])[slot.index]
        return logits

    def evict_full(self, variant: Variant, slot: Slot) -> bool:
        """Evict in decode if the row is full, as the variant's engine would; say whether it was."""
        if not variant.policy.in_decode or not slot.is_full():
            return False
        self._evict_again(variant, slot, False)
        return True

    def evict_turn(self, variant: Variant, slot: Slot, budget: int | None) -> bool:
        """Evict down to a budget, as at the end of a turn's prompt; say whether it was over."""
        slot.recent, slot.budgets = self._shares(variant.policy, budget, slot.seen)
        if not slot.is_over():
            return False
        self._evict_again(variant, slot, True)
        return True

    def _shares(self, policy: Policy, budget: int | None, seen: int) -> tuple[int, Ints | None]:
        """Return the newest tokens that stay, and the budget of each layer, as an engine does."""
        if budget is None:
            return 0, None
        recent = int(policy.recent_fraction * budget)
        forced = policy.sink_units + policy.recent_units + recent
        total, layers = units_of(seen, policy.block_size), self.manifest.model.num_layers
        return recent * policy.block_size, layer_budgets(policy, budget, total, layers, forced)

    def _evict_again(self, variant: Variant, slot: Slot, prompt_end: bool) -> None:
        cache = self.stage(variant.policy).cache
        kept = self._select(variant, cache, slot, prompt_end)
        compact(cache, slot, kept_units(kept, 0), variant.policy.needs_order)
        slot.steps += 1
        slot.coverages.append(float(kept.coverage.mean()))

    def _select(self, variant: Variant, cache: HostCache, slot: Slot, prompt_end: bool) -> Kept:
        """Run the variant's eviction model on a slot of a cache, alone."""
        session, policy = self._policy_session(variant), variant.policy
        if "query_mean" in policy.states and policy.sink_units != self.manifest.policy.sink_units:
            raise EngineError(
                f"variant {variant.name!r} leaves {policy.sink_units} sinks out of its statistics, "
                f"the evaluation engine {self.manifest.policy.sink_units}; rebuild it"
            )
        one = slice(slot.index, slot.index + 1)
        asked = evictions([slot], self.manifest, prompt_end)
        feed: dict[str, NDArray[Any]] = dict(asked.feed())
        feed[names.EVICT_SLOTS] = np.zeros(1, np.int32)
        for i, (key, value) in enumerate(zip(cache.keys, cache.values, strict=True)):
            feed[names.past_key(i)], feed[names.past_value(i)] = key[one], value[one]
            for state in policy.states:
                feed[names.state_in(state, i)] = cache.states[state][i][one]
        if policy.window:
            feed[names.Q_RING_IN] = self._ring(policy, cache, slot)
        wanted = {i.name for i in session.get_inputs()}
        outputs = [names.KEEP, names.KEEP_LEN, names.COVERAGE]
        return Kept(*session.run(outputs, {k: v for k, v in feed.items() if k in wanted}))

    def _ring(self, policy: Policy, cache: HostCache, slot: Slot) -> Floats:
        """Return the query ring [1, W + 1, features] that the policy's own engine would hold."""
        held, size, model = cache.ring, policy.window + 1, self.manifest.model
        assert held is not None
        if size > held.shape[1]:
            raise EngineError(
                f"policy {policy.name!r} reads {policy.window} queries, the evaluation engine "
                f"holds {held.shape[1] - 1}; rebuild it"
            )
        positions = np.arange(slot.seen - policy.window, slot.seen)
        newest = held[slot.index, positions % held.shape[1]]
        if policy.window_heads == "mean":
            heads = newest.reshape(-1, model.num_layers, model.num_heads, model.head_dim)
            newest = heads.mean(axis=2, dtype=np.float32).reshape(policy.window, -1)
        ring = np.zeros((1, size, newest.shape[1]), np.float32)
        ring[0, positions % size] = newest
        return ring

    def _policy_session(self, variant: Variant) -> ort.InferenceSession:
        if variant.name not in self._policies:
            assert variant.model is not None, f"{variant.name} evicts nothing"
            options = ort.SessionOptions()
            options.log_severity_level = 3
            options.inter_op_num_threads = 1
            if self._threads:
                options.intra_op_num_threads = self._threads
            # Idle threads of one session must not take the cores from the next one.
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
            self._policies[variant.name] = ort.InferenceSession(
                variant.model, options, providers=["CPUExecutionProvider"]
            )
        return self._policies[variant.name]
