"""An evaluation engine with a cache of several slots, in which evicted sequences go on."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsift.builder.errors import CapacityError, EngineError
from kvsift.builder.package import load_manifest
from kvsift.runtime.host_cache import HostCache
from kvsift.runtime.sessions import Step
from kvsift.runtime.sessions.ort import OrtSession
from kvsift.runtime.slots import Slot, past_lens

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Saved:
    """A slot as it was, with its queries and states; rows appended since are forgotten."""

    slot: Slot
    memory: list[NDArray[Any]]


class Stage:
    """A loaded evaluation engine and `slots` slots of `capacity` tokens.

    Raises EngineError for an engine that is none, CapacityError beyond the model's positions.
    """

    def __init__(self, directory: Path, capacity: int, slots: int, threads: int | None) -> None:
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
        self.session = OrtSession(directory, self.manifest, threads)
        self.cache = self.session.new_cache(slots, capacity)

    def step(self, slots: Sequence[Slot], tokens: Sequence[Sequence[int]]) -> Floats:
        """Append known tokens to slots, equally many to each, in one step.

        Returns logits [B, S, V] whose rows are slot indices; those of other slots mean nothing.
        Several tokens at once are for slot 0 alone: GroupQueryAttention takes no batch of them.
        """
        for slot in slots:
            if slot.length + len(tokens[0]) > self.cache.capacity:
                raise CapacityError(
                    f"{slot.length + len(tokens[0])} tokens, the cache holds {self.cache.capacity}"
                )
        batch = 1 + max(s.index for s in slots)
        rows: list[Sequence[int] | None] = [None] * batch
        seen = [0] * batch
        past = past_lens(slots, self.manifest.policy.shared_lens, batch)
        for slot, part in zip(slots, tokens, strict=True):
            rows[slot.index], seen[slot.index] = part, slot.seen
            slot.append(len(part))
        return self._step(self.cache, rows, past, seen)

    def run(
        self,
        cache: HostCache,
        tokens: Sequence[Sequence[int] | None],
        past: Sequence[int],
        positions: Sequence[int],
    ) -> Floats:
        """Run tokens over a cache whose rows all have one length; return logits [B, S, V]."""
        return self._step(cache, tokens, np.array([past], np.int32), positions)

    def save(self, slot: Slot) -> Saved:
        """Return what `restore` needs to take back later steps without eviction."""
        return Saved(copy.deepcopy(slot), [a[slot.index].copy() for a in self._memory()])

    def restore(self, saved: Saved) -> Slot:
        """Take back every step since `save`; return the slot as it was."""
        for array, held in zip(self._memory(), saved.memory, strict=True):
            array[saved.slot.index] = held
        return copy.deepcopy(saved.slot)

    def _memory(self) -> list[NDArray[Any]]:
        made: list[NDArray[Any]] = [a for arrays in self.cache.states.values() for a in arrays]
        return made if self.cache.ring is None else [*made, self.cache.ring]

    def _step(
        self,
        cache: HostCache,
        tokens: Sequence[Sequence[int] | None],
        past_lens: NDArray[np.int32],
        positions: Sequence[int],
    ) -> Floats:
        size = next(len(part) for part in tokens if part is not None)
        blank = [0] * size
        step = Step(
            input_ids=np.array([part if part is not None else blank for part in tokens], np.int64),
            position_ids=np.array(positions, np.int64)[:, None] + np.arange(size),
            n_new=np.array([0 if part is None else size for part in tokens], np.int32),
            past_lens=past_lens,
        )
        return self.session.run(cache, step).logits
