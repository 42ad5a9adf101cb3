"""A request while it runs: its tokens, text and clock."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from kvsift.runtime.conversations import Conversation
from kvsift.runtime.guardrail import Guardrail
from kvsift.runtime.held import HeldRows
from kvsift.runtime.params import EvictionParams, SamplingParams
from kvsift.runtime.results import FinishReason, GenerationResult, Timings
from kvsift.runtime.sampling import Sampler, TokenLogprobs
from kvsift.runtime.seeds import Seeds
from kvsift.runtime.slots import Slot
from kvsift.runtime.text import TextStream


class Sequence:
    """State of one request between steps; it has a `slot` once its prompt has been read."""

    slot: Slot

    def __init__(
        self,
        *,
        index: int,
        prompt: Seq[int],
        sampling: SamplingParams,
        seeds: Seeds,
        eviction: EvictionParams,
        budget: int | None,
        tokenizer: Tokenizer,
        eos_token_ids: Seq[int],
        max_positions: int,
        session_id: str | None = None,
        conversation: Conversation | None = None,
    ) -> None:
        self.index = index
        self.prompt = list(prompt)
        self.sampling = sampling
        self.seeds = seeds
        self.eviction = eviction
        self.pins = tuple(eviction.pin)
        self.session_id = session_id
        #: Whether the session is busy with this request.
        self.holds_session = False
        #: The session as the request found it, None for a new one or none.
        self.conversation = conversation
        minimum = eviction.min_coverage
        self.guardrail = None if minimum is None else Guardrail(minimum)
        self.budget = budget
        #: Tokens of the prompt that did not have to be read again.
        self.cached_tokens = 0
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._room = min(sampling.max_tokens, max_positions - len(self.prompt))
        self._stops = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self._stops |= set(eos_token_ids)
        self._stream = TextStream(tokenizer, sampling.stop)
        self._sampler = Sampler(sampling, seeds.sampling, _bad_ids(tokenizer, sampling.bad_words))
        self._logprobs: list[TokenLogprobs] = []
        self._begin = time.perf_counter()
        self._times: list[float] = []

    def advance(self, logits: NDArray[np.float32], now: float) -> str:
        """Choose the next token from logits [V] and return the text that became certain."""
        if self._room == 0:
            self.finish_reason = "length"
            return self._stream.finish()
        history = self.prompt + self.tokens
        choice = self._sampler.next(logits, history)
        self.tokens.append(choice.token)
        self._times.append(now)
        if choice.logprobs is not None:
            self._logprobs.append(choice.logprobs)
        if choice.token in self._stops:
            self.finish_reason = "stop"
            return self._stream.finish()
        text = self._stream.push(choice.token)
        if self._stream.stopped:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self._room:
            self.finish_reason = "length"
            text += self._stream.finish()
            if self._stream.stopped:
                self.finish_reason = "stop"
        return text

    @property
    def latency_s(self) -> float:
        """Seconds that the newest token took: since the one before, or since the request came."""
        return self._times[-1] - (self._times[-2] if len(self._times) > 1 else self._begin)

    @property
    def past(self) -> int:
        """Tokens of the prompt that earlier turns have seen."""
        return self.conversation.rows.seen if self.conversation else 0

    @property
    def past_evictions(self) -> int:
        """Evictions of earlier turns."""
        return self.conversation.rows.steps if self.conversation else 0

    def after(self, rows: HeldRows) -> Conversation:
        """Return the session as this request leaves it, with what its slot holds."""
        talk = self.conversation
        return Conversation(
            tokens=(*self.prompt, *self.tokens),
            rows=rows,
            pins=self.pins,
            seeds=talk.seeds if talk else self.seeds,
            turns=1 + (talk.turns if talk else 0),
        )

    def cancel(self) -> str:
        """End the request where it stands and return the text that was held back."""
        self.finish_reason = "cancelled"
        return self._stream.finish()

    def result(self, kv_bytes_per_token: int, kv_bytes_allocated: int) -> GenerationResult:
        """Return the finished request's result; `kv_bytes_per_token` is over all layers.

        A request that was cancelled before it had a slot has kept nothing.
        """
        slot: Slot | None = getattr(self, "slot", None)
        finite = [c for c in slot.coverages if math.isfinite(c)] if slot else []
        rows = slot.rows_held if slot else 0.0
        budget = None
        if slot and slot.budgets is not None:
            budget = round(float(slot.budgets.mean()) * slot.block_size)
        assert self.finish_reason is not None
        return GenerationResult(
            text=self._stream.text,
            token_ids=tuple(self.tokens),
            finish_reason=self.finish_reason,
            logprobs=tuple(self._logprobs) if self.sampling.logprobs is not None else None,
            prompt_tokens=len(self.prompt),
            seed=self.seeds.sampling,
            eviction_seed=self.seeds.eviction,
            budget_tokens=budget,
            kept_tokens=round(rows),
            coverage=finite[-1] if finite else None,
            coverages=tuple(slot.coverages) if slot else (),
            guardrail=None if self.guardrail is None else self.guardrail.outcome,
            budget_raised_tokens=self._raised_tokens(),
            kv_bytes=round(rows * kv_bytes_per_token),
            kv_bytes_allocated=kv_bytes_allocated,
            kv_bytes_dense=(slot.seen if slot else 0) * kv_bytes_per_token,
            evictions=slot.steps - self.past_evictions if slot else 0,
            cached_tokens=self.cached_tokens,
            session_turn=self._turn(),
            timings=self._timings(),
        )

    def _turn(self) -> int | None:
        if self.session_id is None:
            return None
        return 1 + (self.conversation.turns if self.conversation else 0)

    def _raised_tokens(self) -> int:
        """Return the tokens that the guardrail has added to the budget."""
        if self.guardrail is None or not self.guardrail.raised:
            return 0
        return self.guardrail.raised * self.slot.block_size

    def _timings(self) -> Timings:
        last = self._times and self.finish_reason != "cancelled"
        end = self._times[-1] if last else time.perf_counter()
        first = self._times[0] - self._begin if self._times else math.nan
        gaps = tuple(b - a for a, b in zip(self._times, self._times[1:], strict=False))
        return Timings(ttft_s=first, itl_s=gaps, total_s=end - self._begin)


def _bad_ids(tokenizer: Tokenizer, words: Seq[str]) -> list[list[int]]:
    """Return the token ids of words, each as it stands and after a space."""
    texts = [form for word in words for form in (word, f" {word.lstrip()}")]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
