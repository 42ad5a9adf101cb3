"""Decode steps of real engines at a fixed or evicting length, one call per token."""

from __future__ import annotations

import copy

import numpy as np

from kvsift.builder.errors import UsageError
from kvsift.runtime.cache import KEY, VALUE
from kvsift.runtime.engine import Engine, Request
from kvsift.runtime.params import EvictionParams, SamplingParams
from kvsift.runtime.sequence import Sequence


def prepare(engine: Engine, prompt: list[int], density: float | None = None) -> Sequence:
    """Return a request for `prompt` that has not run yet; its seeds are fixed."""
    sampling = SamplingParams(max_tokens=1, ignore_eos=True, seed=1)
    return engine.prepare(0, Request(prompt, sampling, EvictionParams(density=density)))


class EvictedSteps:
    """Greedy decoding of `batch` copies of a prefilled sequence, with every eviction that is due.

    `first` is in slot 0. The copies are then put out of phase, as requests that arrive at
    different times are: their evictions fall on different steps.
    """

    def __init__(self, engine: Engine, first: Sequence, batch: int) -> None:
        self._engine = engine
        self.sequences = [first] + [_copied(engine, first, i) for i in range(1, batch)]
        self.interval = engine.manifest.policy.decode_interval
        #: Evictions in each step so far.
        self.evictions: list[int] = []
        #: Valid rows of all slots together, after each step's append.
        self.rows: list[int] = []
        for i in range(1, batch):
            late = self.sequences[i:]
            for _ in range(self.interval // batch):
                _decode(engine, late)

    def step(self) -> None:
        """Run one step of all sequences."""
        before = sum(s.slot.steps for s in self.sequences)
        self.rows.append(sum(s.slot.length + 1 for s in self.sequences))
        _decode(self._engine, self.sequences)
        self.evictions.append(sum(s.slot.steps for s in self.sequences) - before)


class DenseSteps:
    """The same decode step again and again: it appends the last of `rows` tokens.

    The cache must hold rows [0, rows - 1) of `batch` slots.
    """

    def __init__(self, engine: Engine, prompt: list[int], rows: int, batch: int) -> None:
        self._engine = engine
        self.sequences = []
        for i in range(batch):
            sequence = prepare(engine, prompt)
            units = engine.cache.capacity // engine.manifest.policy.block_size
            sequence.slot = engine.new_slot(sequence, i, units)
            sequence.slot.append(rows - 1)
            sequence.tokens.append(prompt[-1])
            self.sequences.append(sequence)

    def step(self) -> None:
        """Run the step and take it back."""
        _decode(self._engine, self.sequences)
        for sequence in self.sequences:
            sequence.slot.lens = sequence.slot.lens - 1
            sequence.slot.seen -= 1
            sequence.tokens.pop()

    def logits(self) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        """Return the step's logits [batch, V]."""
        made = self._engine.decode(self.sequences)
        for sequence in self.sequences:
            sequence.slot.lens = sequence.slot.lens - 1
            sequence.slot.seen -= 1
        return made


def prefill(engine: Engine, prompt: list[int]) -> Sequence:
    """Read the prompt into slot 0 and return the sequence; UsageError if nothing was evicted."""
    sequence = prepare(engine, prompt)
    logits = engine.prefill(sequence, 0)
    sequence.tokens.append(int(logits.argmax()))
    if engine.manifest.policy.evicts and not sequence.slot.steps:
        raise UsageError(
            f"{len(prompt)} tokens at density {engine.manifest.limits.density:g} evict nothing; "
            "give a longer --context or a lower --density"
        )
    return sequence


def fill_dense(dense: Engine, evicted: Engine, context: int) -> None:
    """Copy the keys and values of the prompt that `evicted` has just read to all dense slots.

    Its scratch still holds every row, before eviction.
    """
    for layer in range(len(dense.cache.capacities)):
        held = evicted.scratch.read(0, layer)
        rows = {name: held[name][:, :context] for name in (KEY, VALUE)}
        for slot in range(dense.cache.slots):
            dense.cache.write(slot, layer, rows)


def _decode(engine: Engine, sequences: list[Sequence]) -> None:
    logits = engine.decode(sequences)
    for sequence in sequences:
        sequence.tokens.append(int(logits[sequence.slot.index].argmax()))


def _copied(engine: Engine, first: Sequence, index: int) -> Sequence:
    """Return a copy of the sequence in slot 0 that lives in slot `index`, with another seed."""
    made = prepare(engine, first.prompt)
    made.tokens = list(first.tokens)
    made.slot = copy.deepcopy(first.slot)
    made.slot.index, made.slot.seed = index, index + 1
    cache = engine.cache
    for layer in range(len(cache.capacities)):
        cache.write(index, layer, cache.read(0, layer))
    if (ring := cache.read_queries(0)) is not None:
        cache.write_queries(index, ring)
    return made
