"""The JSON of answers, in OpenAI's shapes."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from kvsift.runtime.results import GenerationResult
from kvsift.runtime.sampling import TokenLogprobs

Decode = Callable[[int], str]


def usage(result: GenerationResult) -> dict[str, Any]:
    """Return the token counts, with what the cache kept and takes (bytes)."""
    prompt, answer = result.prompt_tokens, len(result.token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": result.cached_tokens},
        "kept_tokens": result.kept_tokens,
        "budget_tokens": result.budget_tokens,
        "evictions": result.evictions,
        "coverage": result.coverage,
        "kv_bytes": result.kv_bytes,
        "kv_bytes_dense": result.kv_bytes_dense,
        "seed": result.seed,
        "eviction_seed": result.eviction_seed,
        "session_turn": result.session_turn,
    }


class Shape:
    """The objects of one answer; both endpoints differ in names and in where the text stands."""

    def __init__(self, model: str, decode: Decode) -> None:
        self.model = model
        self.decode = decode
        self.created = int(time.time())
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"

    prefix = ""
    name = ""
    chunk_name = ""

    def whole(self, result: GenerationResult, echo: str) -> dict[str, Any]:
        """Return the answer in one piece."""
        choice = self._choice(echo + result.text)
        choice |= {"finish_reason": result.finish_reason, "logprobs": self.logprobs(result)}
        return self._object(self.name, [choice]) | {"usage": usage(result)}

    def chunk(self, text: str, result: GenerationResult | None = None) -> dict[str, Any]:
        """Return a piece of a stream; the last one has the result, and all log probabilities."""
        choice = self._delta(text)
        choice |= {"finish_reason": None, "logprobs": None}
        if result is not None:
            choice["finish_reason"] = result.finish_reason
            choice["logprobs"] = self.logprobs(result)
        return self._object(self.chunk_name, [choice])

    def final_usage(self, result: GenerationResult) -> dict[str, Any]:
        """Return the piece after the last, for those who ask for the usage."""
        return self._object(self.chunk_name, []) | {"usage": usage(result)}

    def first(self) -> dict[str, Any] | None:
        """Return the piece before all text, None if there is none."""
        return None

    def logprobs(self, result: GenerationResult) -> dict[str, Any] | None:
        """Return the log probabilities, None if nobody asked."""
        return None if result.logprobs is None else self._logprobs(result.logprobs)

    def _object(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(self, text: str) -> dict[str, Any]:
        return {"index": 0, "text": text}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"index": 0, "text": text}

    def _logprobs(self, steps: Sequence[TokenLogprobs]) -> dict[str, Any]:
        texts = [self.decode(step.token) for step in steps]
        starts = [sum(map(len, texts[:i])) for i in range(len(texts))]
        return {
            "tokens": texts,
            "token_logprobs": [_finite(step.logprob) for step in steps],
            "top_logprobs": [{self.decode(i): _finite(p) for i, p in step.top} for step in steps],
            "text_offset": starts,
        }


class CompletionShape(Shape):
    """Answers of /v1/completions."""

    prefix = "cmpl"
    name = chunk_name = "text_completion"


class ChatShape(Shape):
    """Answers of /v1/chat/completions."""

    prefix = "chatcmpl"
    name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def first(self) -> dict[str, Any] | None:
        """Return the piece that tells the role."""
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return self._object(self.chunk_name, [choice])

    def _choice(self, text: str) -> dict[str, Any]:
        return {"index": 0, "message": {"role": "assistant", "content": text}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"index": 0, "delta": {"content": text} if text else {}}

    def _logprobs(self, steps: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {"content": [self._token(s.token, s.logprob) | self._top(s) for s in steps]}

    def _top(self, step: TokenLogprobs) -> dict[str, Any]:
        return {"top_logprobs": [self._token(token, logprob) for token, logprob in step.top]}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.decode(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _finite(value: float) -> float:
    """Return a number that JSON has; OpenAI writes -9999 for what cannot be."""
    return value if math.isfinite(value) else -9999.0
