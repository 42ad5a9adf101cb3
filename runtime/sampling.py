"""Choosing the next token from one row of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvsift.builder.errors import EngineError, UsageError
from kvsift.runtime.params import SamplingParams

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]
History = Sequence[int] | NDArray[np.int64]

#: First guess of how many tokens the nucleus of top_p holds; it grows by this factor if not.
_NUCLEUS, _GROWTH = 64, 8
#: A tiny penalty may not push a score to infinity, where differences are undefined.
_LARGEST = 1e300


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probabilities of one step, of the model's own (unmodified) distribution.

    Temperature, penalties and truncation change the choice but not these numbers. `top` holds
    (token, logprob) of the most probable tokens, highest first, ties to the lower id.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Choice:
    """A chosen token; `logprobs` is None unless the request asked for them."""

    token: int
    logprobs: TokenLogprobs | None = None

    @property
    def logprob(self) -> float | None:
        """Log probability of the token in the unmodified distribution, None if not asked for."""
        return None if self.logprobs is None else self.logprobs.logprob

    @property
    def top_logprobs(self) -> tuple[tuple[int, float], ...]:
        """The most probable tokens with their log probabilities, empty if not asked for."""
        return () if self.logprobs is None else self.logprobs.top


class Sampler:
    """Chooses the tokens of one request.

    Greedy (ties to the lowest id) at temperature 0. Else in this order: penalties, bad words,
    temperature, top_k, top_p, min_p, then one uniform number of the sampler's own Philox
    generator with key `seed` picks from what is left: a choice depends on the logits, the
    history and the seed, never on other requests. `bad_ids` are sequences of ids of which the
    last is never chosen after the others.
    """

    def __init__(
        self, params: SamplingParams, seed: int, bad_ids: Sequence[Sequence[int]] = ()
    ) -> None:
        self.params = params
        self._bad = [tuple(ids) for ids in bad_ids if ids]
        self._counts: dict[int, int] = {}  # of the tokens chosen so far
        self._random = np.random.Generator(np.random.Philox(key=seed))

    def next(self, logits: NDArray[np.float32], history: History) -> Choice:
        """Return the choice for `logits` [V] after `history` (prompt and generated ids).

        EngineError if a logit is NaN or +inf, or none is finite; -inf means "never".
        """
        peak = float(logits.max())  # NaN wins a maximum, so one pass finds all three faults
        if not np.isfinite(peak):
            count = int(np.isnan(logits).sum())
            raise EngineError(
                f"the model gave logits that are not usable (maximum {peak}, {count} of "
                f"{logits.size} NaN); check the weights, or rebuild without --quantize"
            )
        scores = self._without_bad(self._penalised(logits, history), history)
        token = int(scores.argmax()) if self.params.temperature == 0 else self._draw(scores)
        self._counts[token] = self._counts.get(token, 0) + 1
        if self.params.logprobs is None:
            return Choice(token)
        return Choice(token, _logprobs(logits, token, self.params.logprobs))

    def _penalised(self, logits: NDArray[np.float32], history: History) -> NDArray[np.floating]:
        """Return the scores [V] after the penalties.

        A token in prompt or answer gets logit / repetition_penalty, or * it where the logit is
        negative; one that the answer holds c times loses presence_penalty + c frequency_penalty.
        """
        params = self.params
        repeats = params.repetition_penalty != 1.0 and len(history) > 0
        counts = bool(params.presence_penalty or params.frequency_penalty) and bool(self._counts)
        if not repeats and not counts:
            return logits
        scores = logits.astype(np.float64)
        if repeats:
            seen = np.asarray(history, np.int64)
            old = scores[seen]
            # A repeated id writes the same value twice, so `seen` need not be unique.
            with np.errstate(over="ignore"):
                factor = params.repetition_penalty
                changed = np.where(old < 0, old * factor, old / factor)
            scores[seen] = np.minimum(changed, _LARGEST)
        if counts:
            chosen = np.array(list(self._counts), np.int64)
            times = np.array(list(self._counts.values()), np.float64)
            scores[chosen] -= params.presence_penalty + params.frequency_penalty * times
        return scores

    def _without_bad(self, scores: NDArray[np.floating], history: History) -> NDArray[np.floating]:
        """Return the scores [V] with -inf for every token that would complete a bad word."""
        banned = [
            ids[-1]
            for ids in self._bad
            if len(ids) == 1 or tuple(int(i) for i in history[1 - len(ids) :]) == ids[:-1]
        ]
        if not banned:
            return scores
        scores = scores.astype(np.float64)
        scores[banned] = -np.inf
        if not np.isfinite(scores.max()):
            raise UsageError(f"bad_words {self.params.bad_words!r:.60} leave no token to choose")
        return scores

    def _draw(self, scores: NDArray[np.floating]) -> int:
        """Return a token drawn from the truncated distribution of `scores` [V]."""
        params = self.params
        ids, weights = _softmax_weights(scores, params.temperature, params.top_k)
        if params.top_p < 1.0:
            ids, weights = _nucleus(ids, weights, params.top_p)
        if params.min_p > 0.0:
            likely = weights >= params.min_p * weights.max()
            ids, weights = ids[likely], weights[likely]
        cumulative = np.cumsum(weights)
        point = self._random.random() * cumulative[-1]
        index = int(np.searchsorted(cumulative, point, side="right"))
        # Rounding may reach the total; the last token with any weight takes that point.
        last = int(np.searchsorted(cumulative, cumulative[-1], side="left"))
        return int(ids[min(index, last)])


def _softmax_weights(
    scores: NDArray[np.floating], temperature: float, top_k: int
) -> tuple[Ids, Floats]:
    """Return ids and exp((score - max) / temperature), cut to the top_k best if that is set."""
    if 0 < top_k < scores.size:
        ids = _best(scores, top_k)
        scores = scores[ids]
    else:
        ids = np.arange(scores.size, dtype=np.int64)
    with np.errstate(over="ignore", under="ignore"):
        gaps = scores.astype(np.float64) - float(scores.max())
        return ids, np.exp(gaps / temperature)


def _nucleus(ids: Ids, weights: Floats, top_p: float) -> tuple[Ids, Floats]:
    """Return the fewest tokens, best first, whose share of the weight reaches top_p."""
    need = top_p * weights.sum()
    count = _NUCLEUS
    while True:
        best = _best(weights, count)
        cumulative = np.cumsum(weights[best])
        if cumulative[-1] >= need or best.size == weights.size:
            break
        count *= _GROWTH
    size = int(np.searchsorted(cumulative, need, side="left")) + 1
    return ids[best[:size]], weights[best[:size]]


def _best(scores: NDArray[np.floating], count: int) -> Ids:
    """Return the indices of the `count` highest scores, best first, ties to the lower index."""
    if count >= scores.size:
        return np.argsort(-scores, kind="stable").astype(np.int64)
    if count == 0:
        return np.zeros(0, np.int64)
    # A partition alone picks any of several equal scores at the edge: take the lowest ids.
    edge = np.partition(scores, scores.size - count)[scores.size - count]
    above = np.flatnonzero(scores > edge)
    equal = np.flatnonzero(scores == edge)[: count - above.size]
    chosen = np.concatenate([above, equal])
    chosen.sort()
    return chosen[np.argsort(-scores[chosen], kind="stable")].astype(np.int64)


def _logprobs(logits: NDArray[np.float32], token: int, count: int) -> TokenLogprobs:
    """Return the log-softmax of `logits` [V] at `token` and at the `count` best tokens."""
    peak = float(logits.max())
    log_total = peak + float(np.log(np.exp(logits.astype(np.float64) - peak).sum()))
    top = tuple((int(i), float(logits[i]) - log_total) for i in _best(logits, count))
    return TokenLogprobs(token, float(logits[token]) - log_total, top)
