"""The endpoint itself: routes, streams, errors."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from kvsift.builder.errors import KvsiftError, UsageError
from kvsift.runtime.llm import LLM
from kvsift.runtime.request import Request as EngineRequest
from kvsift.runtime.serve.answers import ChatShape, CompletionShape, Shape
from kvsift.runtime.serve.bodies import COMPLETION_TOKENS, ChatBody, Common, CompletionBody
from kvsift.runtime.serve.refusals import UnknownModelError, add_refusals, error_body
from kvsift.runtime.ticket import Ticket

#: Seconds between two looks at whether a waiting client has gone.
_WATCH_S = 0.25


def make_app(llm: LLM, name: str) -> FastAPI:
    """Return the application that serves `llm` as the model `name` and closes it at the end."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(llm.close)

    app = FastAPI(title="kvsift", lifespan=lifespan, docs_url=None, redoc_url=None)
    add_refusals(app)
    card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "kvsift"}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        _check_model(model, name)
        return card

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, http: Request) -> Response:
        _check_model(body.model, name)
        longest = llm.engine.manifest.limits.max_output
        asked = [n for n in (body.max_completion_tokens, body.max_tokens) if n is not None]
        request = await run_in_threadpool(
            llm.chat_request,
            body.plain_messages(),
            body.sampling(asked[0] if asked else longest, body.alternatives),
            body.eviction(),
            pin_roles=body.pin_roles or (),
            session_id=body.session_id,
        )
        return await _answer(llm, request, body, http, ChatShape(name, _decoder(llm)))

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, http: Request) -> Response:
        _check_model(body.model, name)
        if body.echo and (body.stream or not isinstance(body.prompt, str)):
            raise UsageError("echo is for a text prompt without stream; leave it out")
        if body.echo and body.logprobs is not None:  # they would have to begin with the prompt's
            raise UsageError("log probabilities of a prompt are not given; leave out echo")
        tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        request = EngineRequest(
            body.prompt,
            body.sampling(tokens, body.logprobs),
            body.eviction(),
            session_id=body.session_id,
        )
        echo = str(body.prompt) if body.echo else ""
        return await _answer(llm, request, body, http, CompletionShape(name, _decoder(llm)), echo)

    return app


def _decoder(llm: LLM) -> Any:
    return lambda token: llm.engine.tokenizer.decode([token], skip_special_tokens=False)


def _check_model(asked: str, name: str) -> None:
    if asked != name:
        raise UnknownModelError(f"unknown model {asked!r}; this server has {name!r}")


async def _answer(
    llm: LLM, request: EngineRequest, body: Common, http: Request, shape: Shape, echo: str = ""
) -> Response:
    """Run a request; what is wrong with it is told before a stream begins."""
    ticket = await run_in_threadpool(llm.scheduler.submit, request)
    if body.stream:
        return _Stream(ticket, shape, body.with_usage)
    waiting = asyncio.ensure_future(ticket.aresult())
    try:
        while not (await asyncio.wait({waiting}, timeout=_WATCH_S))[0]:
            if await http.is_disconnected():
                break
    finally:
        ticket.cancel()  # nothing happens where it has ended
    return JSONResponse(shape.whole(await waiting, echo))


class _Stream(StreamingResponse):
    """The events of a request, which is cancelled when its client has gone.

    Also when it went before the first event: the iterator, which never began then, cannot tell.
    """

    def __init__(self, ticket: Ticket, shape: Shape, with_usage: bool) -> None:
        super().__init__(_events(ticket, shape, with_usage), media_type="text/event-stream")
        self._ticket = ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ticket.cancel()  # nothing happens where it has ended


async def _events(ticket: Ticket, shape: Shape, with_usage: bool) -> AsyncIterator[str]:
    """Yield the events of a stream."""
    try:
        first = shape.first()
        if first is not None:
            yield _event(first)
        async for update in ticket:
            if update.text or update.result is not None:
                yield _event(shape.chunk(update.text, update.result))
            if update.result is not None and with_usage:
                yield _event(shape.final_usage(update.result))
        yield "data: [DONE]\n\n"
    except KvsiftError as error:  # too late for a status
        yield _event(error_body(error)[1])


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False, allow_nan=False)}\n\n"
