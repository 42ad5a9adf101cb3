"""The engine: prompts into slots, batched decode steps, evictions where a row is full."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from kvsift.builder.errors import CapacityError, EngineError, PackageError, UsageError
from kvsift.builder.package import load_manifest, verify_hashes
from kvsift.runtime.budgets import BudgetRule, units_of
from kvsift.runtime.layer_budgets import layer_budgets
from kvsift.runtime.params import EvictionParams, SamplingParams, check_integer, prompt_ids
from kvsift.runtime.results import GenerationResult
from kvsift.runtime.seeds import resolve_seeds
from kvsift.runtime.sequence import Sequence as RunningSequence
from kvsift.runtime.sessions import Session, Step
from kvsift.runtime.sessions.ort import OrtSession
from kvsift.runtime.sizes import slot_tokens, token_bytes
from kvsift.runtime.slots import (
    Slot,
    compact,
    every_unit,
    evictions,
    kept_units,
    make_room,
    move_to,
    new_slot,
)

Logits = NDArray[np.float32]
#: More than any machine has; ONNX Runtime starts all that it is told to.
MAX_THREADS = 1024


@dataclass(frozen=True)
class Request:
    """A prompt (text, or token ids) with its parameters."""

    prompt: str | Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    eviction: EvictionParams = field(default_factory=EvictionParams)
    #: Whether the tokenizer adds its special tokens (False for text from a chat template).
    add_special_tokens: bool = True


@dataclass(frozen=True)
class Update:
    """News of request number `index`: new text, and the result when it has finished."""

    index: int
    text: str
    result: GenerationResult | None = None


class Engine:
    """Loads a package and runs requests on it.

    `max_batch` slots (default: the package's), `threads` for ONNX Runtime, `verify` compares the
    files' hashes first. Raises PackageError or EngineError when the package cannot run.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        max_batch: int | None = None,
        threads: int | None = None,
        verify: bool = False,
    ) -> None:
        self.directory = Path(directory)
        self.manifest = load_manifest(self.directory)
        if verify:
            verify_hashes(self.directory, self.manifest)
        limits, policy, model = self.manifest.limits, self.manifest.policy, self.manifest.model
        self.max_batch = limits.max_batch if max_batch is None else max_batch
        check_integer("max_batch", self.max_batch, 1, "it is the sequences at a time", 1024)
        if threads is not None:
            check_integer("threads", threads, 1, "leave it out for all cores", MAX_THREADS)
        self.tokenizer = self._load_tokenizer()
        capacity = slot_tokens(self.manifest)
        self.budgets = BudgetRule(
            block_size=policy.block_size,
            sink_units=policy.sink_units,
            recent_units=policy.recent_units,
            interval=policy.decode_interval,
            density=limits.density if policy.evicts else 1.0,
            scope=policy.scope,
            capacity=capacity,
            max_positions=model.max_positions,
            min_budget_tokens=policy.min_budget_tokens,
        )
        self.session: Session = OrtSession(self.directory, self.manifest, threads)
        # Where rows differ in length, layers start small and grow to their longest row.
        start = capacity if policy.shared_lens else policy.block_size
        self.cache = self.session.new_cache(self.max_batch, start)
        self.scratch = self.session.new_cache(1, limits.chunk)
        self._requests = 0
        self._busy = False

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        return token_bytes(self.manifest)

    def encode(self, request: Request) -> list[int]:
        """Return the prompt's token ids; UsageError if it is empty or too long."""
        ids = self._ids(request)
        vocab, limits = self.manifest.model.vocab_size, self.manifest.limits
        positions = self.manifest.model.max_positions
        if not ids:
            raise UsageError("empty prompt: there is nothing to condition on; give some text")
        if wrong := next((i for i in ids if not 0 <= i < vocab), None):
            raise UsageError(f"token id {wrong} is outside the vocabulary [0, {vocab})")
        if len(ids) > positions:
            raise CapacityError(
                f"the prompt has {len(ids)} tokens and the model has {positions} positions; "
                f"shorten it"
            )
        if len(ids) > limits.max_input:
            raise CapacityError(
                f"the prompt has {len(ids)} tokens and the engine was built with --max-input "
                f"{limits.max_input}; shorten it or rebuild"
            )
        return ids

    def _ids(self, request: Request) -> list[int]:
        """Return the ids of the prompt, none for the empty text; UsageError if it is neither."""
        prompt = request.prompt
        if not isinstance(prompt, str):
            return prompt_ids(prompt)
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the prompt is not valid text: character {error.start} is the half code "
                f"{prompt[error.start]!a}, which no UTF-8 text has; mend its encoding"
            ) from None
        encoded = self.tokenizer.encode(prompt, add_special_tokens=request.add_special_tokens)
        return list(encoded.ids) if prompt else []

    def run(self, requests: Iterable[Request]) -> Iterator[Update]:
        """Run requests, as many at once as there are slots, and yield their news in order of time.

        All requests are checked first: a bad one raises before anything runs. Closing the
        iterator early frees the slots; EngineError while another one is open, since both would
        write into the same slots.
        """
        waiting = deque(self._prepare(i, r) for i, r in enumerate(requests))
        if self._busy:
            raise EngineError(
                "the engine is still answering an earlier request; read its stream to the end or "
                "close() it first, give all prompts at once, or load a second engine"
            )
        self._busy = True
        try:
            yield from self._run(waiting)
        finally:
            self._busy = False

    def _run(self, waiting: deque[RunningSequence]) -> Iterator[Update]:
        running: dict[int, RunningSequence] = {}
        while waiting or running:
            while waiting and len(running) < self.max_batch:
                free = next(i for i in range(self.max_batch) if i not in running)
                sequence = waiting.popleft()
                logits = self._prefill(sequence, free)
                running[free] = sequence
                yield self._advance(sequence, logits)
                if sequence.finish_reason:
                    del running[free]
            if not running:
                continue
            logits = self._decode(list(running.values()))
            for index, sequence in list(running.items()):
                yield self._advance(sequence, logits[index])
                if sequence.finish_reason:
                    del running[index]

    def generate(self, requests: Iterable[Request]) -> list[GenerationResult]:
        """Run requests to their end and return the results in their order."""
        done = {u.index: u.result for u in self.run(requests) if u.result}
        return [done[i] for i in sorted(done)]

    def _prepare(self, index: int, request: Request) -> RunningSequence:
        ids = self.encode(request)
        seeds = resolve_seeds(
            request.sampling.seed,
            request.eviction.eviction_seed,
            self.manifest.seed,
            self._requests,
        )
        self._requests += 1
        limits = self.manifest.limits
        if self.manifest.policy.scope == "prefill" and request.sampling.max_tokens > (
            limits.max_output
        ):
            raise CapacityError(
                f"max_tokens is {request.sampling.max_tokens} and the engine was built with "
                f"--max-output {limits.max_output}; lower it or rebuild"
            )
        budget = self.budgets.units(len(ids), request.eviction, request.sampling.max_tokens)
        model = self.manifest.model
        return RunningSequence(
            index=index,
            prompt=ids,
            sampling=request.sampling,
            seeds=seeds,
            pins=tuple(request.eviction.pin),
            budget=budget,
            tokenizer=self.tokenizer,
            eos_token_ids=model.eos_token_ids,
            max_positions=model.max_positions,
        )

    def _prefill(self, sequence: RunningSequence, index: int) -> Logits:
        """Read the prompt into the scratch in chunks, evict, and move what stays into a slot."""
        policy, chunk = self.manifest.policy, self.manifest.limits.chunk
        ids = sequence.prompt
        source = self._slot(sequence, 0, units_of(len(ids), policy.block_size))
        # GroupQueryAttention pays for valid rows only: grow once. The portable form pays for all.
        whole = units_of(len(ids), chunk) * chunk if self.manifest.attention == "gqa" else 0
        self.scratch.clear_memory(0)
        kept = None
        for start in range(0, len(ids), chunk):
            part = np.array([ids[start : start + chunk]], np.int64)
            size = part.shape[1]
            for layer in range(len(source.lens)):
                self.scratch.grow(layer, max(whole, start + chunk))
            past = self._past_lens([source])
            source.append(size)
            last = start + size == len(ids)
            evicts = last and policy.in_prefill and source.is_over()
            step = Step(
                input_ids=part,
                position_ids=np.arange(start, start + size, dtype=np.int64)[None],
                n_new=np.array([size], np.int32),
                past_lens=past,
                evictions=evictions([source], self.manifest, True) if evicts else None,
            )
            output = self.session.run(self.scratch, step)
            kept = output.kept
        units = every_unit(source) if kept is None else kept_units(kept, 0)
        if kept is not None:
            source.steps += 1
            source.coverages.append(float(kept.coverage.mean()))
        slot = self._slot(sequence, index, self.budgets.capacity // policy.block_size)
        move_to(self.cache, self.scratch, source, slot, units)
        slot.coverages = source.coverages
        sequence.slot = slot
        row: Logits = self._last(output.logits)[0]
        return row

    def _decode(self, sequences: list[RunningSequence]) -> Logits:
        """Run one token of every sequence; rows of the result are slots."""
        batch = 1 + max(s.slot.index for s in sequences)
        ids = np.zeros((batch, 1), np.int64)
        positions = np.zeros((batch, 1), np.int64)
        n_new = np.zeros(batch, np.int32)
        full = []
        past = self._past_lens([s.slot for s in sequences], batch)
        for sequence in sequences:
            slot = sequence.slot
            ids[slot.index] = sequence.tokens[-1]
            positions[slot.index] = slot.seen
            n_new[slot.index] = 1
            make_room(self.cache, slot)
            slot.append(1)
            if self.manifest.policy.in_decode and slot.is_full():
                full.append(slot)
        step = Step(ids, positions, n_new, past)
        if full:
            step.evictions = evictions(full, self.manifest, False)
        output = self.session.run(self.cache, step)
        if output.kept is not None:
            for e, slot in enumerate(full):
                units = kept_units(output.kept, e)
                compact(self.cache, slot, units, self.manifest.policy.needs_order)
                slot.steps += 1
                slot.coverages.append(float(output.kept.coverage[:, e].mean()))
        return self._last(output.logits)

    def _last(self, logits: Logits) -> Logits:
        """Return the last token's logits [B, V] of a step."""
        return logits[:, -1] if self.manifest.all_logits else logits

    def _past_lens(self, slots: list[Slot], batch: int = 1) -> NDArray[np.int32]:
        """Return the lengths of slots below `batch` as the graph takes them, see `names.py`."""
        layers, rows = slots[0].lens.shape
        lens = np.zeros((layers, batch, rows), np.int32)
        for slot in slots:
            lens[:, slot.index] = slot.lens
        if self.manifest.policy.shared_lens:
            lens = lens[:1]
        return lens.reshape(len(lens), batch * rows)

    def _advance(self, sequence: RunningSequence, logits: Logits) -> Update:
        """Choose the next token of a sequence and report what is new."""
        text = sequence.advance(logits, time.perf_counter())
        result = None
        if sequence.finish_reason:
            allocated = self.cache.nbytes // self.cache.slots
            result = sequence.result(self.kv_bytes_per_token, allocated)
        return Update(sequence.index, text, result)

    def _slot(self, sequence: RunningSequence, index: int, units: int) -> Slot:
        policy, model, size = self.manifest.policy, self.manifest.model, len(sequence.prompt)
        budgets, recent = None, 0
        spare = policy.decode_interval if policy.in_decode else sequence.sampling.max_tokens
        if sequence.budget is not None:
            recent = int(policy.recent_fraction * sequence.budget)
            forced = self.budgets.forced(size, sequence.pins) + recent
            prompt_units = units_of(size, policy.block_size)
            budgets = layer_budgets(policy, sequence.budget, prompt_units, model.num_layers, forced)
        return new_slot(
            model,
            policy,
            index,
            units,
            budgets,
            seed=sequence.seeds.eviction,
            pins=sequence.pins,
            spare=min(model.max_positions - size, spare),
            recent=recent * policy.block_size,
        )

    def _load_tokenizer(self) -> Tokenizer:
        path = self.directory / "tokenizer.json"
        try:
            tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:
            raise PackageError(f"{path} cannot be read ({error}); rebuild the engine") from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer
