"""What clients may send: OpenAI's fields, and those of this engine.

A field that is not listed is refused: ignoring `tools` or `response_format` would promise what is
not kept.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from kvsift.builder.errors import UsageError
from kvsift.runtime.params import EvictionParams, SamplingParams

#: OpenAI's default of /v1/completions; a chat's answer may be as long as the engine allows.
COMPLETION_TOKENS = 16
#: OpenAI's limit of alternatives per token; each of them is an object in the answer.
MAX_ALTERNATIVES = 20
#: Strict: "5" is no number, and true is not 1.
_CONFIG = ConfigDict(extra="forbid", strict=True)


def _one_of(allowed: str) -> WrapValidator:
    """Return what says `allowed` of a union, where pydantic would name its first part only."""

    def check(value: Any, inner: ValidatorFunctionWrapHandler) -> Any:
        try:
            return inner(value)
        except ValidationError:
            raise PydanticCustomError("kind", "must be " + allowed) from None

    return WrapValidator(check)


class StreamOptions(BaseModel):
    """Whether a stream ends with the usage."""

    model_config = _CONFIG

    include_usage: bool = False


class Common(BaseModel):
    """The fields of both endpoints; ranges are checked by SamplingParams and EvictionParams."""

    model_config = _CONFIG

    model: str
    max_tokens: int | None = None
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    n: Literal[1] | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stop: Annotated[str | list[str] | None, _one_of("a text or a list of texts")] = None
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    seed: int | None = None
    #: Read and not used, as it says nothing about the answer.
    user: str | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool | None = None
    density: float | None = None
    budget_tokens: int | None = None
    min_coverage: float | None = None
    eviction_seed: int | None = None
    pin: list[list[int]] | None = None
    session_id: str | None = None

    def sampling(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """Return the sampling parameters; UsageError for a value out of range."""
        names = (
            "temperature", "top_p", "stop", "presence_penalty", "frequency_penalty", "seed",
            "top_k", "min_p", "repetition_penalty", "bad_words", "ignore_eos",
        )  # fmt: skip
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        # Clients draw seeds from all 64-bit integers; only the bits count.
        if "seed" in given:
            given["seed"] %= 2**64
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **given)

    def eviction(self) -> EvictionParams:
        """Return the eviction parameters; UsageError for a value out of range."""
        names = ("density", "budget_tokens", "min_coverage", "eviction_seed", "pin")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return EvictionParams(**given)

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatBody(Common):
    """A request to /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, le=MAX_ALTERNATIVES)
    #: Roles whose messages are never evicted.
    pin_roles: list[str] | None = None

    def plain_messages(self) -> list[dict[str, Any]]:
        """Return the messages with their text parts joined; UsageError for other parts."""
        return [
            message | {"content": _text(number, message.get("content"))}
            for number, message in enumerate(self.messages)
        ]

    @property
    def alternatives(self) -> int | None:
        """How many alternatives per token to report, None for no log probabilities.

        UsageError for alternatives without them.
        """
        if self.top_logprobs is not None and not self.logprobs:
            raise UsageError(
                f"top_logprobs {self.top_logprobs} needs logprobs; set that to true, too"
            )
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(Common):
    """A request to /v1/completions."""

    prompt: Annotated[str | list[int], _one_of("one text or one list of token ids")]
    logprobs: int | None = Field(None, le=MAX_ALTERNATIVES)
    echo: bool | None = False


def _text(number: int, content: Any) -> Any:
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise UsageError(f"message {number} has a part of type {kind!r}; send text only")
        texts.append(str(part.get("text", "")))
    return "".join(texts)
