"""The engine: prompts into slots, batched decode steps, evictions where a row is full."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvsift.builder.errors import CapacityError, EngineError
from kvsift.builder.package import load_manifest, verify_hashes
from kvsift.runtime.budgets import BudgetRule, units_of
from kvsift.runtime.decode import decode
from kvsift.runtime.layer_budgets import layer_budgets
from kvsift.runtime.params import check_integer
from kvsift.runtime.prefill import Prefill
from kvsift.runtime.prompts import encode, load_tokenizer
from kvsift.runtime.request import Request, Update
from kvsift.runtime.results import GenerationResult
from kvsift.runtime.seeds import resolve_seeds
from kvsift.runtime.sequence import Sequence as RunningSequence
from kvsift.runtime.sessions import Session
from kvsift.runtime.sessions.ort import OrtSession
from kvsift.runtime.sizes import slot_tokens, token_bytes
from kvsift.runtime.slots import Slot, new_slot

__all__ = ["Engine", "Request", "Update"]

Logits = NDArray[np.float32]
#: More than any machine has; ONNX Runtime starts all that it is told to.
MAX_THREADS = 1024


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
        self.tokenizer = load_tokenizer(self.directory)
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
        self._numbers = itertools.count()
        self._claim = threading.Lock()
        self._owner: tuple[str, str] | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        return token_bytes(self.manifest)

    def encode(self, request: Request) -> list[int]:
        """Return the prompt's token ids; UsageError if it is empty or too long."""
        return encode(request, self.tokenizer, self.manifest)

    def run(self, requests: Iterable[Request]) -> Iterator[Update]:
        """Run requests, as many at once as there are slots, and yield their news in order of time.

        All requests are checked first: a bad one raises before anything runs. Closing the
        iterator early frees the slots; EngineError while another one is open, since both would
        write into the same slots.
        """
        waiting = deque(self.prepare(i, r) for i, r in enumerate(requests))
        self.claim("an earlier request", "read its stream to the end or close() it first")
        try:
            yield from self._run(waiting)
        finally:
            self.release()

    def claim(self, owner: str, fix: str) -> None:
        """Take the slots for one driver of the engine; EngineError if another has them.

        `owner` and `fix` make the message that others get until `release`.
        """
        with self._claim:
            if self._owner is not None:
                raise EngineError(
                    f"the engine is still answering {self._owner[0]}; {self._owner[1]}, give all "
                    "prompts at once, or load a second engine"
                )
            self._owner = (owner, fix)

    def release(self) -> None:
        """Give the slots back."""
        self._owner = None

    def _run(self, waiting: deque[RunningSequence]) -> Iterator[Update]:
        running: dict[int, RunningSequence] = {}
        while waiting or running:
            while waiting and len(running) < self.max_batch:
                free = next(i for i in range(self.max_batch) if i not in running)
                sequence = waiting.popleft()
                logits = self.prefill(sequence, free)
                running[free] = sequence
                yield self.advance(sequence, logits)
                if sequence.finish_reason:
                    del running[free]
            if not running:
                continue
            logits = self.decode(list(running.values()))
            for index, sequence in list(running.items()):
                yield self.advance(sequence, logits[index])
                if sequence.finish_reason:
                    del running[index]

    def generate(self, requests: Iterable[Request]) -> list[GenerationResult]:
        """Run requests to their end and return the results in their order."""
        done = {u.index: u.result for u in self.run(requests) if u.result}
        return [done[i] for i in sorted(done)]

    def prepare(self, index: int, request: Request) -> RunningSequence:
        """Return a checked request with its ids, seeds and budget; `index` names its updates.

        UsageError if the prompt is empty or too long or a parameter does not fit it,
        CapacityError if a slot cannot hold what is asked for.
        """
        ids = self.encode(request)
        seeds = resolve_seeds(
            request.sampling.seed,
            request.eviction.eviction_seed,
            self.manifest.seed,
            next(self._numbers),
        )
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

    def begin(self, sequence: RunningSequence, index: int, source: Slot | None = None) -> Prefill:
        """Return the reading of a sequence's prompt into slot `index`, whose steps do the work.

        `source` describes rows that the scratch holds already; without it reading starts empty,
        and nothing of an earlier request is read. The scratch holds one prompt at a time.
        """
        if source is None:
            units = units_of(len(sequence.prompt), self.manifest.policy.block_size)
            source = self.new_slot(sequence, 0, units)
            self.scratch.clear_memory(0)
        return Prefill(self, sequence, index, source)

    def prefill(self, sequence: RunningSequence, index: int) -> Logits:
        """Read a whole prompt into slot `index` and return its last token's logits [V]."""
        reading = self.begin(sequence, index)
        while (logits := reading.step()) is None:
            pass
        return logits

    def decode(self, sequences: Sequence[RunningSequence]) -> Logits:
        """Run one token of every sequence; rows of the result [B, V] are slots."""
        return decode(self, sequences)

    def last_logits(self, logits: Logits) -> Logits:
        """Return the last token's logits [B, V] of a step."""
        return logits[:, -1] if self.manifest.all_logits else logits

    def advance(self, sequence: RunningSequence, logits: Logits) -> Update:
        """Choose the next token of a sequence and report what is new."""
        count = len(sequence.tokens)
        text = sequence.advance(logits, time.perf_counter())
        result = self.result(sequence) if sequence.finish_reason else None
        return Update(sequence.index, text, result, tuple(sequence.tokens[count:]))

    def result(self, sequence: RunningSequence) -> GenerationResult:
        """Return the result of a sequence that has ended."""
        allocated = self.cache.nbytes // self.cache.slots
        return sequence.result(self.kv_bytes_per_token, allocated)

    def new_slot(self, sequence: RunningSequence, index: int, units: int) -> Slot:
        """Return an empty slot of a sequence with its budgets and room for `units` unit ids."""
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
