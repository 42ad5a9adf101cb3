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

from kvsift.builder.errors import EngineError
from kvsift.builder.package import load_manifest, verify_hashes
from kvsift.runtime.admission import admit
from kvsift.runtime.budgets import BudgetRule, units_of
from kvsift.runtime.conversation_file import load_conversation, save_conversation
from kvsift.runtime.conversations import Conversations
from kvsift.runtime.decode import decode
from kvsift.runtime.held import take_rows
from kvsift.runtime.prefill import Prefill
from kvsift.runtime.prefixes import Prefixes
from kvsift.runtime.prompts import encode, load_tokenizer
from kvsift.runtime.recorder import Recorder
from kvsift.runtime.request import Request, Update
from kvsift.runtime.results import GenerationResult
from kvsift.runtime.sequence import Sequence as RunningSequence
from kvsift.runtime.sessions import Session
from kvsift.runtime.sessions.choice import open_session
from kvsift.runtime.shares import share_out
from kvsift.runtime.sizes import (
    check_threads,
    planned_slots,
    row_tokens,
    scratch_tokens,
    slot_tokens,
    token_bytes,
)
from kvsift.runtime.slots import Slot, new_slot

__all__ = ["Engine", "Request", "Update"]

Logits = NDArray[np.float32]


class Engine:
    """Loads a package and runs requests on it.

    `max_batch` slots (default: the package's), or with `kv_memory` as many as fit in so many bytes
    beside the scratch, `max_batch` at most. `threads` for ONNX Runtime, `verify` compares the
    files' hashes first. Raises PackageError or EngineError when the package cannot run,
    CapacityError if not one sequence fits.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        max_batch: int | None = None,
        kv_memory: int | None = None,
        threads: int | None = None,
        verify: bool = False,
    ) -> None:
        self.directory = Path(directory)
        self.manifest = load_manifest(self.directory)
        if verify:
            verify_hashes(self.directory, self.manifest)
        limits, policy, model = self.manifest.limits, self.manifest.policy, self.manifest.model
        check_threads(threads)
        self.max_batch = planned_slots(self.manifest, max_batch, kv_memory)
        #: Whether memory is bounded: no cache may grow beyond what was planned.
        self.bounded = kv_memory is not None
        #: Most tokens of each layer's rows [L] where layers or heads differ and memory is bounded.
        self.row_limits: list[int] | None = None
        if self.bounded and not policy.shared_lens:
            self.row_limits = row_tokens(self.manifest)
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
            recent_fraction=policy.recent_fraction,
        )
        self.session: Session = open_session(self.directory, self.manifest, threads)
        # Where rows differ in length, layers start small and grow to their longest row.
        start = capacity if policy.shared_lens else policy.block_size
        self.cache = self.session.new_cache(self.max_batch, start)
        self.scratch = self.session.new_cache(1, limits.chunk)
        #: Sessions between their turns, and prefixes that prompts share.
        self.conversations = Conversations()
        self.prefixes = Prefixes(
            scratch_tokens(self.manifest) - limits.chunk, token_bytes(self.manifest)
        )
        #: Told of every request and eviction while it is set, which another thread may change.
        self.recorder: Recorder | None = None
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
        asked = self.prepare_all(enumerate(requests))
        try:
            self.claim("an earlier request", "read its stream to the end or close() it first")
            try:
                yield from self._run(deque(asked))
            finally:
                self.release()
        finally:
            for sequence in asked:
                self.leave(sequence)

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

    def close(self) -> None:
        """Give back what the engine holds, on a GPU its memory; it runs nothing afterwards."""
        self.session.release()

    def generate(self, requests: Iterable[Request]) -> list[GenerationResult]:
        """Run requests to their end and return the results in their order."""
        done = {u.index: u.result for u in self.run(requests) if u.result}
        return [done[i] for i in sorted(done)]

    def prepare_all(self, requests: Iterable[tuple[int, Request]]) -> list[RunningSequence]:
        """Prepare requests with their indices, all or none."""
        made: list[RunningSequence] = []
        try:
            for index, request in requests:
                made.append(self.prepare(index, request))
        except BaseException:
            for sequence in made:
                self.leave(sequence)
            raise
        return made

    def prepare(self, index: int, request: Request) -> RunningSequence:
        """Return a checked request with its ids, seeds and budget; `index` names its updates.

        Its session is busy from now on until `result` or `leave`. UsageError if the prompt is empty
        or too long or a parameter does not fit it, CapacityError if a slot cannot hold what is
        asked for, SessionError if the session is busy already.
        """
        return admit(self, index, request, self._numbers)

    def leave(self, sequence: RunningSequence) -> None:
        """Let go of a sequence that ends without a result: its session stays as it was."""
        if sequence.holds_session:
            assert sequence.session_id is not None
            sequence.holds_session = False
            self.conversations.release(sequence.session_id)

    def save_session(self, session_id: str, path: str | Path) -> None:
        """Write a session to a file; SessionError if it is answering, gone or unknown."""
        save_conversation(path, self.conversations.get(session_id), self.manifest)

    def load_session(self, path: str | Path, session_id: str) -> None:
        """Read a session from a file under an id that is not busy, in the place of an older one.

        The older one may also be one that was dropped for its age or size.

        SessionError if the file is damaged or was saved by another package.
        """
        self.conversations.check_idle(session_id)
        conversation = load_conversation(path, self.manifest)
        self.conversations.replace(session_id, conversation)

    def begin(self, sequence: RunningSequence, index: int, source: Slot | None = None) -> Prefill:
        """Return the reading of a sequence's prompt into slot `index`, whose steps do the work.

        `source` describes rows that the scratch holds already; without it reading starts empty,
        and nothing of an earlier request is read. The scratch holds one prompt at a time.
        """
        if (recorder := self.recorder) is not None:
            recorder.begin(sequence)
        if source is None:
            source = self._start(sequence)
        return Prefill(self, sequence, index, source)

    def _start(self, sequence: RunningSequence) -> Slot:
        """Return the scratch's book of a sequence, with what an earlier turn or a prefix left."""
        rows = min(len(sequence.prompt), scratch_tokens(self.manifest))
        source = self.new_slot(sequence, 0, units_of(rows, self.manifest.policy.block_size))
        talk = sequence.conversation
        held = talk.rows if talk is not None else self.prefixes.rows(sequence.prompt)
        if held is None:
            self.scratch.clear_memory(0)
        else:
            held.put(self.scratch, source)
            sequence.cached_tokens = held.seen
        return source

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
        if (recorder := self.recorder) is not None:
            recorder.end(sequence)
        if sequence.holds_session and hasattr(sequence, "slot"):
            assert sequence.session_id is not None
            sequence.holds_session = False
            rows = take_rows(self.cache, sequence.slot)
            self.conversations.put(sequence.session_id, sequence.after(rows))
        self.leave(sequence)
        allocated = self.cache.nbytes // self.cache.slots
        return sequence.result(self.kv_bytes_per_token, allocated)

    def new_slot(self, sequence: RunningSequence, index: int, units: int) -> Slot:
        """Return an empty slot of a sequence with its budgets and room for `units` unit ids."""
        policy, model, size = self.manifest.policy, self.manifest.model, len(sequence.prompt)
        spare = policy.decode_interval if policy.in_decode else sequence.sampling.max_tokens
        slot = new_slot(
            model,
            policy,
            index,
            units,
            None,
            seed=sequence.seeds.eviction,
            pins=sequence.pins,
            spare=min(model.max_positions - size, spare),
        )
        if sequence.budget is not None:
            self.set_budget(slot, sequence)
        return slot

    def set_budget(self, slot: Slot, sequence: RunningSequence) -> None:
        """Share a sequence's budget out over the layers and heads of its slot."""
        assert sequence.budget is not None
        share_out(
            slot,
            sequence.budget,
            self.manifest,
            self.budgets,
            prompt_tokens=len(sequence.prompt),
            params=sequence.eviction,
            pins=sequence.pins,
        )
