"""One decode step: a token for every running sequence, and the evictions that are due."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvsift.runtime.guardrail import share_of
from kvsift.runtime.sequence import Sequence
from kvsift.runtime.sessions import Kept, Step
from kvsift.runtime.slots import compact, evictions, kept_units, make_room, past_lens

if TYPE_CHECKING:  # the engine calls this
    from kvsift.runtime.engine import Engine


def decode(engine: Engine, sequences: Seq[Sequence]) -> NDArray[np.float32]:
    """Append the last token of each sequence and return the next one's logits [B, V] by slot.

    Slots without a sequence in the list stay as they are. The lowest slots make the smallest B.
    """
    policy = engine.manifest.policy
    batch = 1 + max(s.slot.index for s in sequences)
    ids = np.zeros((batch, 1), np.int64)
    positions = np.zeros((batch, 1), np.int64)
    n_new = np.zeros(batch, np.int32)
    full = []
    past = past_lens([s.slot for s in sequences], policy.shared_lens, batch)
    for sequence in sequences:
        slot = sequence.slot
        ids[slot.index] = sequence.tokens[-1]
        positions[slot.index] = slot.seen
        n_new[slot.index] = 1
        make_room(engine.cache, slot)
        slot.append(1)
        if policy.in_decode and slot.is_full():
            full.append(sequence)
    step = Step(ids, positions, n_new, past)
    if full:
        step.evictions = evictions([s.slot for s in full], engine.manifest, False)
    output = engine.session.run(engine.cache, step)
    if output.kept is not None:
        for e, sequence in enumerate(full):
            _settle(engine, sequence, output.kept, e)
    return engine.last_logits(output.logits)


def _settle(engine: Engine, sequence: Sequence, kept: Kept, e: int) -> None:
    """Apply what a full slot keeps, unless the sequence's guardrail raises its budget instead."""
    slot, policy = sequence.slot, engine.manifest.policy
    share = share_of(kept, e)
    if sequence.guardrail is not None:
        assert sequence.budget is not None
        more = policy.decode_interval // slot.block_size
        ceiling = engine.budgets.ceiling(len(sequence.prompt), sequence.sampling.max_tokens)
        if sequence.guardrail.spares(share, sequence.budget, more, ceiling):
            sequence.budget += more
            engine.set_budget(slot, sequence)
            return
    if (recorder := engine.recorder) is not None:
        recorder.evict(sequence, slot, kept, e, "decode")
    compact(engine.cache, slot, kept_units(kept, e), policy.needs_order)
    slot.steps += 1
    slot.coverages.append(share)
