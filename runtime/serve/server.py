"""Runs the endpoint, and ends it in bounded time whatever its clients do."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from fastapi import FastAPI

from kvsift.runtime.scheduler import Scheduler

#: Seconds that a stopping server gives open requests, then those who do not read their answers.
EXIT_TIMEOUT, READ_TIMEOUT = 10, 5


class Server(uvicorn.Server):
    """uvicorn, which on its own would let an open stream go on for as long as it is.

    After EXIT_TIMEOUT seconds what still runs is cancelled, so that its stream ends as it should;
    READ_TIMEOUT later the connections of those who do not read are cut.
    """

    def __init__(self, app: FastAPI, scheduler: Scheduler) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                timeout_graceful_shutdown=EXIT_TIMEOUT + READ_TIMEOUT,
            )
        )
        self._scheduler = scheduler

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the open requests and the application."""
        asyncio.get_running_loop().call_later(EXIT_TIMEOUT, self._scheduler.stop)
        await super().shutdown(sockets)
