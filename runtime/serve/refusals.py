"""What clients get where they get no answer: status and body in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvsift.builder.errors import KvsiftError, QueueFullError, UsageError

#: Bytes of a request; the JSON of any prompt that a model can read is far below.
MAX_BODY = 64 << 20


class UnknownModelError(UsageError):
    """A model that is not served here."""


class BodyLimit:
    """Middleware that stops reading a request that is longer than MAX_BODY."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, its body counted."""
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MAX_BODY:
                raise HTTPException(413, f"the body has more than {MAX_BODY} bytes; shorten it")
            return message

        await self.app(scope, counted, send)


def add_refusals(app: FastAPI) -> None:
    """Let the application answer all errors in OpenAI's shape."""
    for kind in (KvsiftError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _refuse)
    app.add_middleware(BodyLimit)


def error_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return status and body of an error."""
    status, kind, message = 500, "server_error", str(error)
    if isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
        kind = "not_found_error" if status == 404 else "invalid_request_error"
    elif isinstance(error, RequestValidationError):
        status, kind, message = 400, "invalid_request_error", _what_is_wrong(error.errors()[0])
    elif isinstance(error, UnknownModelError):
        status, kind = 404, "not_found_error"
    elif isinstance(error, UsageError):
        status, kind = 400, "invalid_request_error"
    elif isinstance(error, QueueFullError):
        status, kind = 429, "rate_limit_error"
    return status, {"error": {"message": message, "type": kind, "param": None, "code": None}}


def _what_is_wrong(first: Mapping[str, Any]) -> str:
    """Return one line for what pydantic found."""
    if first["type"] == "json_invalid":
        return f"the body is no JSON (character {first['loc'][-1]}): {first['ctx']['error']}"
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    if first["type"] == "extra_forbidden":
        return f"{where}: unknown or not supported here; leave it out"
    return f"{where or 'the body'}: {first['msg']}"


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    status, content = error_body(error)
    kind = request.headers.get("content-type", "none")
    if isinstance(error, RequestValidationError) and "json" not in kind:
        content["error"]["message"] = (
            f"the body must be JSON and say so, got content type {kind!a:.60}; "
            "send the header Content-Type: application/json"
        )
    headers = error.headers if isinstance(error, HTTPException) else None
    return JSONResponse(content, status, headers)
