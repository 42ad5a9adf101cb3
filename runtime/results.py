"""What a finished request reports."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from kvsift.runtime.guardrail import Outcome
from kvsift.runtime.sampling import TokenLogprobs

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Timings:
    """Wall-clock seconds of a request: to the first token, between tokens, in all.

    `itl_s` holds one entry per token after the first. A request without tokens has ttft_s NaN.
    """

    ttft_s: float
    itl_s: tuple[float, ...]
    total_s: float

    @property
    def mean_itl_s(self) -> float:
        """Mean seconds between two tokens, NaN with fewer than two tokens."""
        return sum(self.itl_s) / len(self.itl_s) if self.itl_s else math.nan


@dataclass(frozen=True)
class GenerationResult:
    """The answer to one request, with what is needed to repeat it and what it cost.

    `budget_tokens` is None where eviction was off; `kept_tokens` counts the cached tokens at the
    end, the mean over layers and heads where they differ; `coverage` is the kept share of the score
    at the last eviction, None if none was defined, and `coverages` that at every one (NaN where it
    is not defined). With `min_coverage`, `guardrail` tells whether the budget had to rise ("met",
    "raised", or "exhausted" where the slot ended that) and `budget_raised_tokens` by how much of
    `budget_tokens`.

    `kv_bytes` are used by the request's rows, `kv_bytes_allocated` is the size of a slot (where
    heads differ, a layer is as long as its longest head), `kv_bytes_dense` would be used without
    eviction. `evictions` counts the eviction steps, the prompt's included.

    `prompt_tokens` counts a session's earlier turns, too; `cached_tokens` of them were not read
    anew, since an earlier turn or a shared prefix had left them. `session_turn` counts a session's
    turns from 1, None without one.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None
    prompt_tokens: int
    seed: int
    eviction_seed: int
    budget_tokens: int | None
    kept_tokens: int
    coverage: float | None
    coverages: tuple[float, ...]
    guardrail: Outcome | None
    budget_raised_tokens: int
    kv_bytes: int
    kv_bytes_allocated: int
    kv_bytes_dense: int
    evictions: int
    cached_tokens: int
    session_turn: int | None
    timings: Timings

    @property
    def outputs(self) -> tuple[GenerationResult]:
        """The answers to the request, as TensorRT-LLM calls them: this one."""
        return (self,)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for json.dumps(allow_nan=False); NaN and infinities become None.

        Seeds stay integers of up to 64 bits: read them with a parser that keeps such integers.
        """
        values: dict[str, Any] = plain(asdict(self))
        values["timings"]["mean_itl_s"] = plain(self.timings.mean_itl_s)
        return values


def plain(value: Any) -> Any:
    """Return `value` with only dict, list, str, int, float, bool and None inside."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
