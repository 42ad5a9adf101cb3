"""A caller's hold on a submitted request: its news, its result, and the way to cancel it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from functools import partial
from typing import Any

from kvsift.runtime.request import Request, Update
from kvsift.runtime.results import GenerationResult

Waker = Callable[[], None]


class Ticket:
    """One request in a scheduler; usable from any thread and any event loop.

    Iterate over it, with `for` or `async for`, for every Update from the first on, as often as
    wished; the last one carries the result. `result()` blocks and `await ticket` waits for the
    GenerationResult. Both raise what made the request fail. A cancelled request has a result:
    its finish_reason is "cancelled" and its text what had been generated.
    """

    def __init__(self, index: int, request: Request, prompt: list[int]) -> None:
        #: Number of the request in its scheduler; its updates carry the same one.
        self.index = index
        self.request = request
        #: Token ids of the prompt.
        self.prompt_token_ids = tuple(prompt)
        # Reentrant: garbage collection may close a scheduler in a thread that is in here.
        self._changed = threading.Condition(threading.RLock())
        self._updates: list[Update] = []
        self._result: GenerationResult | None = None
        self._error: BaseException | None = None
        self._wakers: list[Waker] = []
        self._end_wakers: list[Waker] = []
        self._on_cancel: Callable[[Ticket], None] | None = None
        self.cancelled = False

    def __repr__(self) -> str:
        state = "cancelled" if self.cancelled else "open"
        if self.done:
            state = self._result.finish_reason if self._result else "failed"
        return f"<Ticket {self.index}: {len(self._updates)} updates, {state}>"

    @property
    def done(self) -> bool:
        """Whether the request has ended, in a result or an error."""
        return self._result is not None or self._error is not None

    @property
    def updates(self) -> list[Update]:
        """The news so far."""
        with self._changed:
            return list(self._updates)

    def cancel(self) -> None:
        """End the request before its next step; nothing happens if it has ended."""
        if self.done or self.cancelled:
            return
        self.cancelled = True
        if self._on_cancel is not None:
            self._on_cancel(self)

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Wait up to `timeout` seconds (None: for ever) for the result and return it.

        Raises the request's error, or TimeoutError while it still runs.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"request {self.index} still runs after {timeout} s")
        return self._outcome()

    def __iter__(self) -> Iterator[Update]:
        seen = 0
        while True:
            with self._changed:
                self._changed.wait_for(partial(self._has_news, seen))
                news, done = self._updates[seen:], self.done
            yield from news
            seen += len(news)
            if done:
                self._outcome()
                return

    async def __aiter__(self) -> AsyncIterator[Update]:
        seen = 0
        while True:
            await self._news(seen)
            with self._changed:
                news, done = self._updates[seen:], self.done
            for update in news:
                yield update
            seen += len(news)
            if done:
                self._outcome()
                return

    def __await__(self) -> Generator[Any, None, GenerationResult]:
        return self.aresult().__await__()

    async def aresult(self) -> GenerationResult:
        """Wait for the result without blocking the event loop; raises the request's error."""
        await self._news(None)
        return self._outcome()

    def push(self, update: Update) -> None:
        """Hand out news; with a result, the request has ended. For schedulers."""
        with self._changed:
            self._updates.append(update)
            self._result = update.result
            self._notify()

    def fail(self, error: BaseException) -> None:
        """End the request with an error. For schedulers."""
        with self._changed:
            if not self.done:
                self._error = error
                self._notify()

    def on_cancel(self, call: Callable[[Ticket], None]) -> None:
        """Set what `cancel` calls, in the caller's thread. For schedulers."""
        self._on_cancel = call

    def _outcome(self) -> GenerationResult:
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def _notify(self) -> None:
        """Wake all who wait; called with the lock held."""
        self._changed.notify_all()
        woken, self._wakers = self._wakers, []
        if self.done:
            woken, self._end_wakers = woken + self._end_wakers, []
        for wake in woken:
            wake()

    def _has_news(self, seen: int | None) -> bool:
        """Whether there are more than `seen` updates (None: no matter), or the end has come."""
        return self.done or (seen is not None and len(self._updates) > seen)

    async def _news(self, seen: int | None) -> None:
        """Wait on the running event loop until `_has_news`."""
        loop = asyncio.get_running_loop()
        while True:
            future = loop.create_future()

            def wake(future: asyncio.Future[None] = future) -> None:
                with contextlib.suppress(RuntimeError):  # that loop is closed: nobody waits
                    loop.call_soon_threadsafe(_settle, future)

            with self._changed:
                if self._has_news(seen):
                    return
                (self._end_wakers if seen is None else self._wakers).append(wake)
            try:
                await future
            except asyncio.CancelledError:  # who gives up waiting leaves nothing behind
                self._forget(wake)
                raise

    def _forget(self, wake: Waker) -> None:
        with self._changed:
            for wakers in (self._wakers, self._end_wakers):
                if wake in wakers:
                    wakers.remove(wake)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():  # the waiting task may have been cancelled
        future.set_result(None)
