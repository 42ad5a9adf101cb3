"""A prompt on its way into a slot: chunk by chunk through the scratch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvsift.runtime.budgets import units_of
from kvsift.runtime.guardrail import share_of
from kvsift.runtime.sequence import Sequence
from kvsift.runtime.sessions import Kept, Step
from kvsift.runtime.sizes import scratch_tokens
from kvsift.runtime.slots import (
    Slot,
    compact,
    every_unit,
    evictions,
    kept_units,
    move_to,
    past_lens,
)
from kvsift.runtime.streaming import most_streamed, scratch_room

if TYPE_CHECKING:  # the engine makes these
    from kvsift.runtime.engine import Engine

Logits = NDArray[np.float32]


class Prefill:
    """Reads a sequence's prompt into the engine's scratch and moves what stays into slot `index`.

    The scratch holds one prompt, so an engine has one of these at a time; decode steps may run
    between two chunks. `source` is the scratch's book: where it counts rows already, they hold the
    prompt's first `source.seen` tokens, evicted ones left out, and reading goes on behind them.
    """

    def __init__(self, engine: Engine, sequence: Sequence, index: int, source: Slot) -> None:
        self._engine = engine
        self.sequence = sequence
        self.index = index
        self.source = source

    @property
    def unread(self) -> int:
        """Tokens of the prompt that have not been read."""
        return len(self.sequence.prompt) - self.source.seen

    def step(self) -> Logits | None:
        """Read the next chunk; return the last token's logits [V] once the slot is filled.

        Chunks end at absolute multiples of the chunk size, so where a prompt is cut does not
        depend on how much of it was there before.
        """
        engine, source = self._engine, self.source
        start = source.seen
        end = self._end(start)
        self._make_room(end - start)
        past = past_lens([source], engine.manifest.policy.shared_lens)
        source.append(end - start)
        evicts = self._is_due()
        output = engine.session.run(
            engine.scratch,
            Step(
                input_ids=np.array([self.sequence.prompt[start:end]], np.int64),
                position_ids=np.arange(start, end, dtype=np.int64)[None],
                n_new=np.array([end - start], np.int32),
                past_lens=past,
                evictions=evictions([source], engine.manifest, True) if evicts else None,
            ),
        )
        kept = output.kept
        if kept is not None:
            kept = self._settle(kept)
        if self.unread:
            if kept is not None:
                compact(engine.scratch, source, kept_units(kept, 0), needs_order=True)
            elif not self.sequence.past:
                engine.prefixes.offer(self.sequence.prompt, engine.scratch, source)
            return None
        self._fill_slot(kept)
        row: Logits = engine.last_logits(output.logits)[0]
        return row

    def _end(self, start: int) -> int:
        """Return where the chunk from `start` on ends: at a multiple, or a shared prefix's end."""
        chunk, prompt = self._engine.manifest.limits.chunk, self.sequence.prompt
        end = min(len(prompt), (start // chunk + 1) * chunk)
        return end if self.sequence.past else self._engine.prefixes.cut(prompt, start, end)

    def _is_due(self) -> bool:
        """Whether the chunk that was just counted evicts: the last one, or one before no room."""
        policy, source = self._engine.manifest.policy, self.source
        # A later turn must come back to its slot, whatever the scope.
        if not (policy.in_prefill or (policy.evicts and self.sequence.past)):
            return False
        if not source.is_over():
            return False
        coming = self._end(source.seen) - source.seen if self.unread else 0
        guarded = self.sequence.guardrail is not None
        room = scratch_room(self._engine.manifest, guarded) - source.length
        return not coming or coming > room

    def _settle(self, kept: Kept) -> Kept:
        """Return what an eviction keeps once the guardrail is satisfied, and count it."""
        engine, sequence, source = self._engine, self.sequence, self.source
        if sequence.guardrail is not None:
            assert sequence.budget is not None
            new_tokens = sequence.sampling.max_tokens
            ceiling = engine.budgets.ceiling(len(sequence.prompt), new_tokens)
            if engine.manifest.policy.shared_lens:  # else a short row may need a larger mean
                ceiling = min(ceiling, int(source.units.max()))
            if self.unread:  # the next chunk needs its room
                ceiling = min(ceiling, most_streamed(engine.manifest, True) // source.block_size)
            kept, sequence.budget = sequence.guardrail.search(
                kept, sequence.budget, ceiling, self._select
            )
            engine.set_budget(source, sequence)
        if (recorder := engine.recorder) is not None:
            recorder.evict(sequence, source, kept, 0, "chunk" if self.unread else "prompt")
        source.steps += 1
        source.coverages.append(share_of(kept, 0))
        return kept

    def _select(self, units: int) -> Kept:
        """Return what a budget of `units` would keep of the scratch: a step without new tokens."""
        engine, source = self._engine, self.source
        self.sequence.budget = units
        engine.set_budget(source, self.sequence)
        self._make_room(1)  # for the padding token, which nothing reads
        step = Step(
            input_ids=np.zeros((1, 1), np.int64),
            position_ids=np.full((1, 1), source.seen, np.int64),
            n_new=np.zeros(1, np.int32),
            past_lens=past_lens([source], engine.manifest.policy.shared_lens),
            evictions=evictions([source], engine.manifest, True),
        )
        output = engine.session.run(engine.scratch, step)
        assert output.kept is not None
        return output.kept

    def _make_room(self, tokens: int) -> None:
        """Enlarge the scratch for the next chunk."""
        engine = self._engine
        chunk, rows = engine.manifest.limits.chunk, self.source.length
        # GroupQueryAttention pays for valid rows only: grow once. The portable form pays for all.
        limit = scratch_tokens(engine.manifest)
        whole = max(tokens, min(self.unread, limit - rows))
        coming = whole if engine.manifest.attention == "gqa" else tokens
        for layer in range(len(self.source.lens)):
            engine.scratch.grow(layer, units_of(rows + coming, chunk) * chunk)

    def _fill_slot(self, kept: Kept | None) -> None:
        """Move what the prompt's last eviction keeps, or everything, into the slot."""
        engine, source = self._engine, self.source
        units = every_unit(source) if kept is None else kept_units(kept, 0)
        units_held = engine.budgets.capacity // source.block_size
        slot = engine.new_slot(self.sequence, self.index, units_held)
        move_to(engine.cache, engine.scratch, source, slot, units)
        slot.coverages = source.coverages
        self.sequence.slot = slot
