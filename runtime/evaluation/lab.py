"""One engine that reads a prompt once, and any number of policies that evict from what it read.

The engine's query window holds every head, from which the window of each policy follows; its
graph gives the logits of every token, so that known text runs in few steps.
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
from kvsift.builder.errors import CapacityError, EngineError
from kvsift.builder.package import Policy, load_manifest
from kvsift.runtime.budgets import BudgetRule, units_of
from kvsift.runtime.evaluation.variants import Variant
from kvsift.runtime.host_cache import HostCache
from kvsift.runtime.layer_budgets import layer_budgets
from kvsift.runtime.params import EvictionParams
from kvsift.runtime.sessions import Kept, Step
from kvsift.runtime.sessions.ort import OrtSession
from kvsift.runtime.slots import (
    Slot,
    compact,
    every_unit,
    evictions,
    kept_units,
    move_to,
    new_slot,
)

Floats = NDArray[np.float32]
#: The block size of the policy that sets everyone's budget.
BLOCK = 32


def fair_budget(policy: Policy, prompt_tokens: int, density: float) -> int | None:
    """Return the units that a policy keeps of a prompt, None for all.

    Every policy gets as many tokens as one with blocks of BLOCK would keep, so that all are
    compared at the same size. There is no minimum budget.
    """
    if policy.scope == "none":
        return None
    blocks = int(density * units_of(prompt_tokens, BLOCK) + 1e-9)
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
    return rule.units(prompt_tokens, EvictionParams(budget_tokens=max(1, blocks * BLOCK)), 0)


class Lab:
    """A loaded evaluation engine (windows of all heads, logits of all tokens) with its caches.

    `capacity`: the longest sequence in tokens. Raises EngineError for an engine of another kind.
    """

    def __init__(self, directory: Path, capacity: int, threads: int | None = None) -> None:
        self.manifest = load_manifest(directory)
        policy, model = self.manifest.policy, self.manifest.model
        if not self.manifest.all_logits or policy.window_heads != "all":
            raise EngineError(
                f"{directory} is no evaluation engine: it needs the logits of every token and a "
                "query window of all heads; let this program build its own"
            )
        if capacity > model.max_positions:
            raise CapacityError(
                f"{capacity} tokens per sample, and the model has {model.max_positions} positions"
            )
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.session = OrtSession(directory, self.manifest, threads)
        self.scratch = self.session.new_cache(1, capacity)
        self.cache = self.session.new_cache(1, capacity)
        self._threads = threads
        self._policies: dict[str, ort.InferenceSession] = {}
        self._prompt = 0

    def read(self, tokens: Sequence[int]) -> Floats:
        """Read a prompt into the scratch from its start; return its last token's logits [V]."""
        self.scratch.clear_memory(0)
        self._prompt, logits = 0, np.zeros(0, np.float32)
        chunk = self.manifest.limits.chunk
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            logits = self._run(self.scratch, part, start, start)[-1].copy()
            self._prompt += len(part)
        return logits

    def continue_dense(self, tokens: Sequence[int], split: int) -> list[Floats]:
        """Return the logits [S, V] of text that follows the prompt, nothing evicted.

        `split` tokens per step. The scratch's window stays the prompt's, and what is appended
        after the prompt is never read again.
        """
        ring = self.scratch.ring
        assert ring is not None
        kept = ring.copy()
        made = []
        for at in range(0, len(tokens), split):
            start = self._prompt + at
            made.append(self._run(self.scratch, tokens[at : at + split], start, start))
        ring[:] = kept
        return made

    def budget(self, policy: Policy, density: float) -> int | None:
        """Return the units that a policy keeps of the prompt, see `fair_budget`."""
        return fair_budget(policy, self._prompt, density)

    def evict(self, variant: Variant, budget: int | None, seed: int) -> Slot:
        """Evict from the prompt as the variant does at its end; what stays is in the cache."""
        policy, model = variant.policy, self.manifest.model
        size = policy.block_size
        total = units_of(self._prompt, size)
        budgets = (
            None
            if budget is None
            else layer_budgets(
                policy, budget, total, model.num_layers, policy.sink_units + policy.recent_units
            )
        )
        slot = partial(
            new_slot,
            model,
            policy,
            0,
            budgets=budgets,
            seed=seed,
            recent=int(policy.recent_fraction * (budget or 0)) * size,
            layout=self.manifest.policy.layout,
        )
        source = slot(total)
        source.append(self._prompt)
        units = every_unit(source)
        if source.is_over():
            kept = self._select(variant, self.scratch, source, True)
            units = kept_units(kept, 0)
            source.steps += 1
            source.coverages.append(float(kept.coverage.mean()))
        target = slot(self.cache.capacity // size)
        move_to(self.cache, self.scratch, source, target, units)
        target.coverages = source.coverages
        return target

    def force(self, slot: Slot, tokens: Sequence[int]) -> Floats:
        """Append known tokens to the evicted cache in one step; return their logits [S, V]."""
        if slot.length + len(tokens) > self.cache.capacity:
            raise CapacityError(
                f"{slot.length + len(tokens)} tokens, the cache holds {self.cache.capacity}"
            )
        past, seen = slot.length, slot.seen
        slot.append(len(tokens))
        return self._run(self.cache, tokens, past, seen)

    def evict_full(self, variant: Variant, slot: Slot) -> bool:
        """Evict in decode if the row is full, as the variant's engine would; say whether it was."""
        if not variant.policy.in_decode or not slot.is_full():
            return False
        kept = self._select(variant, self.cache, slot, False)
        compact(self.cache, slot, kept_units(kept, 0), variant.policy.needs_order)
        slot.steps += 1
        slot.coverages.append(float(kept.coverage.mean()))
        return True

    def _run(self, cache: HostCache, tokens: Sequence[int], past: int, position: int) -> Floats:
        size = len(tokens)
        step = Step(
            input_ids=np.array([tokens], np.int64),
            position_ids=np.arange(position, position + size, dtype=np.int64)[None],
            n_new=np.array([size], np.int32),
            past_lens=np.array([[past]], np.int32),
        )
        logits: Floats = self.session.run(cache, step).logits[0]
        return logits

    def _select(self, variant: Variant, cache: HostCache, slot: Slot, prompt_end: bool) -> Kept:
        """Run the variant's eviction model on slot 0 of a cache."""
        session = self._policy_session(variant)
        asked = evictions([slot], self.manifest, prompt_end)
        feed: dict[str, NDArray[Any]] = dict(asked.feed())
        for i, (key, value) in enumerate(zip(cache.keys, cache.values, strict=True)):
            feed[names.past_key(i)], feed[names.past_value(i)] = key, value
        if variant.policy.window:
            feed[names.Q_RING_IN] = self._ring(variant.policy, cache, slot.seen)
        wanted = {i.name for i in session.get_inputs()}
        outputs = [names.KEEP, names.KEEP_LEN, names.COVERAGE]
        return Kept(*session.run(outputs, {k: v for k, v in feed.items() if k in wanted}))

    def _ring(self, policy: Policy, cache: HostCache, seen: int) -> Floats:
        """Return the query ring [1, W + 1, features] that the policy's own engine would hold."""
        held, size, model = cache.ring, policy.window + 1, self.manifest.model
        assert held is not None
        if size > held.shape[1]:
            raise EngineError(
                f"policy {policy.name!r} reads {policy.window} queries, the evaluation engine "
                f"holds {held.shape[1] - 1}; rebuild it"
            )
        positions = np.arange(seen - policy.window, seen)
        newest = held[0, positions % held.shape[1]]
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
