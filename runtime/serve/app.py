"""The endpoint itself: routes, streams, errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse

from kvsift.builder.errors import KvsiftError, QueueFullError, UsageError
from kvsift.runtime.llm import LLM
from kvsift.runtime.request import Request as EngineRequest
from kvsift.runtime.serve.answers import ChatShape, CompletionShape, Shape
from kvsift.runtime.serve.bodies import COMPLETION_TOKENS, ChatBody, Common, CompletionBody
from kvsift.runtime.ticket import Ticket

#: Seconds between two looks at whether a waiting client has gone.
_WATCH_S = 0.25


class UnknownModelError(UsageError):
    """A model that is not served here."""


def make_app(llm: LLM, name: str) -> FastAPI:
    """Return the application that serves `llm` as the model `name` and closes it at the end."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(llm.close)

    app = FastAPI(title="kvsift", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_exception_handler(KvsiftError, _refuse)
    app.add_exception_handler(RequestValidationError, _refuse)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "kvsift"}]}

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
        return StreamingResponse(
            _events(ticket, shape, body.with_usage), media_type="text/event-stream"
        )
    waiting = asyncio.ensure_future(ticket.aresult())
    try:
        while not (await asyncio.wait({waiting}, timeout=_WATCH_S))[0]:
            if await http.is_disconnected():
                break
    finally:
        ticket.cancel()  # nothing happens where it has ended
    return JSONResponse(shape.whole(await waiting, echo))


async def _events(ticket: Ticket, shape: Shape, with_usage: bool) -> AsyncIterator[str]:
    """Yield the events of a stream; leaving early, as when the client goes, cancels it."""
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
        yield _event(_error(error)[1])
    finally:
        ticket.cancel()


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False, allow_nan=False)}\n\n"


async def _refuse(_: Request, error: Exception) -> JSONResponse:
    status, content = _error(error)
    return JSONResponse(content, status)


def _error(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return status and body of an error, in OpenAI's shape."""
    status, kind, message = 500, "server_error", str(error)
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        message = f"{where or 'the body'}: {first['msg']}"
        status, kind = 400, "invalid_request_error"
    elif isinstance(error, UnknownModelError):
        status, kind = 404, "not_found_error"
    elif isinstance(error, UsageError):
        status, kind = 400, "invalid_request_error"
    elif isinstance(error, QueueFullError):
        status, kind = 429, "rate_limit_error"
    return status, {"error": {"message": message, "type": kind, "param": None, "code": None}}
