"""The Triton model: requests into the scheduler, its news out as responses.

Triton's python backend calls `initialize`, `execute` and `finalize` on one thread of a process of
its own. `execute` hands a request to the scheduler and returns; one asyncio thread sends all
responses; one more touches the metrics (`metrics.py`).
"""

from __future__ import annotations

import asyncio
import json
import threading
import traceback
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb

from kvsift.builder.errors import KvsiftError, QueueFullError, UsageError
from kvsift.runtime.engine import Engine
from kvsift.runtime.scheduler import Scheduler
from kvsift.runtime.ticket import Ticket
from kvsift.runtime.triton.config import Settings
from kvsift.runtime.triton.fields import INPUTS
from kvsift.runtime.triton.metrics import Metrics
from kvsift.runtime.triton.requests import (
    Asked,
    NoPromptError,
    last,
    parse,
    piece,
    tensors,
)

#: Seconds between two looks at whether a client has gone.
_WATCH_S = 0.1
_FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """What Triton's python backend drives."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the engine; TritonModelException with one line where that fails."""
        config = json.loads(args["model_config"])
        self.batched = int(config["max_batch_size"]) > 0
        try:
            settings = Settings.from_config(config)
            version = Path(args["model_repository"], args["model_version"])
            engine = Engine(
                version / settings.engine_dir,
                max_batch=settings.max_batch,
                kv_memory=settings.kv_memory,
                threads=settings.threads,
            )
            engine.conversations.ttl_s = settings.session_ttl
            if settings.session_memory is not None:
                engine.conversations.max_bytes = settings.session_memory
            self.scheduler = Scheduler(engine, max_queue=settings.max_queue)
        except KvsiftError as error:
            raise pb.TritonModelException(str(error)) from None
        self.metrics = Metrics(pb, args["model_name"], self.scheduler)
        self.metrics.start()
        self.open: dict[Any, Ticket] = {}
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="kvsift-responses")
        self.thread.start()
        self.watch = asyncio.run_coroutine_threadsafe(self._watch(), self.loop)

    def execute(self, requests: list[Any]) -> None:
        """Hand requests to the scheduler; their answers come from the other thread."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                asked = parse(_inputs(request), json.loads(request.parameters() or "{}"))
                ticket = self.scheduler.submit(asked.request)
            except Exception as error:
                if not isinstance(error, NoPromptError):
                    self.metrics.refused()
                _refuse(sender, error)
                continue
            asyncio.run_coroutine_threadsafe(self._answer(sender, asked, ticket), self.loop)

    def finalize(self) -> None:
        """End what runs, then the threads; Triton calls it after the last request was answered."""
        self.scheduler.close()
        self.watch.cancel()
        asyncio.run_coroutine_threadsafe(self._drain(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
        self.metrics.stop()

    async def _answer(self, sender: Any, asked: Asked, ticket: Ticket) -> None:
        """Send the responses of one request; the last one always goes out."""
        self.open[sender] = ticket
        try:
            async for update in ticket:
                if update.result is None:
                    if asked.stream and update.text:
                        _send(sender, tensors(piece(update.text), self.batched), final=False)
                    continue
                if update.result.finish_reason == "cancelled":
                    _refuse(sender, CancelledError("the request was cancelled"))
                else:
                    outputs = last(asked, update.text, update.result)
                    _send(sender, tensors(outputs, self.batched))
                self.metrics.finished(update.result)
        except Exception as error:  # one request's failure is not the others'
            self.metrics.failed()
            ticket.cancel()
            _refuse(sender, error)
        finally:
            del self.open[sender]

    async def _watch(self) -> None:
        """Cancel the requests whose clients have gone."""
        while True:
            for sender, ticket in list(self.open.items()):
                if sender.is_cancelled():
                    ticket.cancel()
            await asyncio.sleep(_WATCH_S)

    async def _drain(self) -> None:
        """Wait until every answer has been sent."""
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)


class CancelledError(Exception):
    """The client has gone."""


def _inputs(request: Any) -> dict[str, Any]:
    """Return the given inputs by name."""
    found = {}
    for field in INPUTS:
        tensor = pb.get_input_tensor_by_name(request, field.name)
        if tensor is not None:
            found[field.name] = tensor.as_numpy()
    return found


def _send(
    sender: Any,
    outputs: dict[str, Any],
    final: bool = True,
) -> None:
    """Send one response."""
    made = [pb.Tensor(name, array) for name, array in outputs.items()]
    sender.send(pb.InferenceResponse(output_tensors=made), flags=_FINAL if final else 0)


def _refuse(sender: Any, error: Exception) -> None:
    """Send an error as the last response; where that has no room, that there are no more."""
    made = pb.TritonError(_message(error), _code(error))
    try:
        sender.send(pb.InferenceResponse(error=made), flags=_FINAL)
    except Exception:
        pb.Logger.log_error(traceback.format_exc())
        sender.send(flags=_FINAL)


def _code(error: Exception) -> Any:
    """Return Triton's code of an error."""
    if isinstance(error, QueueFullError):
        return pb.TritonError.UNAVAILABLE
    if isinstance(error, UsageError):
        return pb.TritonError.INVALID_ARG
    if isinstance(error, CancelledError):
        return pb.TritonError.CANCELLED
    return pb.TritonError.INTERNAL


def _message(error: Exception) -> str:
    """Return one line for the client; what nobody foresaw goes to the server's log too."""
    if isinstance(error, (KvsiftError, CancelledError)):
        return str(error)
    pb.Logger.log_error("".join(traceback.format_exception(error)))
    return f"unexpected {type(error).__name__}: {' '.join(str(error).split())}; see the server log"
