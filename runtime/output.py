"""What `LLM.generate_async` returns, under the names that TensorRT-LLM gives these things."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kvsift.runtime.request import Update
from kvsift.runtime.results import FinishReason, GenerationResult
from kvsift.runtime.ticket import Ticket


@dataclass(frozen=True)
class CompletionOutput:
    """An answer as far as it has come.

    `text` and `token_ids` are all so far, `text_diff` and `token_ids_diff` what the last step
    added. `finish_reason` and `result` are None until it has ended.
    """

    text: str
    token_ids: tuple[int, ...]
    text_diff: str
    token_ids_diff: tuple[int, ...]
    result: GenerationResult | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer ended, None while it goes on."""
        return self.result.finish_reason if self.result else None

    @property
    def outputs(self) -> tuple[CompletionOutput]:
        """The answers to the request: this one."""
        return (self,)


class RequestOutput:
    """A request that runs: await it for its GenerationResult, or iterate over what comes.

    `async for` and `for` yield a CompletionOutput per step that brought something, and one at the
    end; without `streaming` only that last one. `result(timeout)` blocks, `abort()` ends it early.
    All raise the request's error. Iterating again starts from the beginning.
    """

    def __init__(self, ticket: Ticket, streaming: bool, owner: object) -> None:
        self._ticket = ticket
        self._streaming = streaming
        self._owner = owner  # an LLM that nobody holds ends its requests

    def __repr__(self) -> str:
        return f"<RequestOutput {self.request_id}, finished={self.finished}>"

    @property
    def request_id(self) -> int:
        """Number of the request in its LLM."""
        return self._ticket.index

    @property
    def prompt(self) -> str | None:
        """The prompt's text, None if it was given as token ids."""
        prompt = self._ticket.request.prompt
        return prompt if isinstance(prompt, str) else None

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """Token ids of the prompt."""
        return self._ticket.prompt_token_ids

    @property
    def finished(self) -> bool:
        """Whether the request has ended."""
        return self._ticket.done

    @property
    def outputs(self) -> tuple[CompletionOutput]:
        """The answer as far as it has come, alone in a tuple."""
        answer = CompletionOutput("", (), "", ())
        for answer in _growing(self._ticket.updates):  # noqa: B007 (the last one counts)
            pass
        return (answer,)

    def abort(self) -> None:
        """Cancel the request; its result then says "cancelled"."""
        self._ticket.cancel()

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Wait up to `timeout` seconds for the result; TimeoutError while the request runs."""
        return self._ticket.result(timeout)

    async def aresult(self) -> GenerationResult:
        """Wait for the result without blocking the event loop."""
        return await self._ticket

    def __await__(self) -> Generator[Any, None, GenerationResult]:
        return self._ticket.__await__()

    def __iter__(self) -> Iterator[CompletionOutput]:
        for output in _growing(self._ticket):
            if self._streaming or output.result is not None:
                yield output

    async def __aiter__(self) -> AsyncIterator[CompletionOutput]:
        grow = _grower()
        async for update in self._ticket:
            output = grow(update)
            if output is not None and (self._streaming or output.result is not None):
                yield output


def _growing(updates: Iterable[Update]) -> Iterator[CompletionOutput]:
    """Yield the answer after each update that brings something."""
    grow = _grower()
    for update in updates:
        output = grow(update)
        if output is not None:
            yield output


def _grower() -> Callable[[Update], CompletionOutput | None]:
    """Return a function from the next update to the answer so far, None if nothing is new."""
    pieces: list[str] = []
    tokens: list[int] = []

    def grow(update: Update) -> CompletionOutput | None:
        pieces.append(update.text)
        tokens.extend(update.token_ids)
        if not (update.text or update.token_ids or update.result):
            return None
        return CompletionOutput(
            "".join(pieces), tuple(tokens), update.text, update.token_ids, update.result
        )

    return grow
