"""What the tests of the Triton model share: a real server, clients for it, its process and memory.

Every call has a time limit: a server whose model has died may never answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from engines import Engines

from kvsift.runtime.triton.fields import INPUTS
from kvsift.runtime.triton.repository import write_repository
from kvsift.runtime.triton.server import TritonServer

#: Seconds; generous, since a busy machine may stand still for a while.
PATIENCE = 180.0
NUMPY = {
    "BOOL": (np.bool_, "BOOL"),
    "FP32": (np.float32, "FP32"),
    "INT32": (np.int32, "INT32"),
    "STRING": (np.object_, "BYTES"),
    "UINT64": (np.uint64, "UINT64"),
}
#: An engine whose answers can be so long (ten minutes) that a test surely interrupts them.
PACKAGE: dict[str, Any] = {
    "model": "deep",
    "limits": {"max_output": 1_000_000},
    "options": {"block_size": 16, "min_budget_tokens": 0},
}


def write_models(engines: Engines, folder: Path) -> Path:
    """Write a repository with the models kvsift and flat (no batch dimension)."""
    package = engines.package("nexus", **PACKAGE)
    write_repository(package, folder)
    write_repository(package, folder, name="flat", batched=False)
    return folder


class Client:
    """Calls one model of a running server."""

    def __init__(self, server: TritonServer, model: str = "kvsift") -> None:
        self.server = server
        self.model = model
        self.flat = model == "flat"

    def post(self, action: str, body: dict[str, Any]) -> tuple[int, str]:
        """Return status and body of an HTTP request to the model."""
        request = urllib.request.Request(
            f"http://{self.server.http}/v2/models/{self.model}/{action}",
            data=json.dumps(body).encode(),
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def generate(self, **body: Any) -> dict[str, Any]:
        """Return the answer of /generate, which must be 200."""
        status, text = self.post("generate", body)
        assert status == 200, text
        answer: dict[str, Any] = json.loads(text)
        assert "error" not in answer, text
        return answer

    def generate_stream(self, **body: Any) -> list[dict[str, Any]]:
        """Return the events of /generate_stream, which must be 200."""
        status, text = self.post("generate_stream", body | {"stream": True})
        assert status == 200, text
        return [json.loads(line[len("data: ") :]) for line in text.splitlines() if line]

    def tensors(self, **values: Any) -> list[grpcclient.InferInput]:
        """Return inputs for the gRPC client."""
        made = []
        for field in INPUTS:
            if field.name in values:
                kind, name = NUMPY[field.dtype]
                value = values.pop(field.name)
                data = np.array(value if isinstance(value, list) else [value], kind)
                if field.dtype == "STRING":
                    data = np.array([text.encode() for text in data], kind)
                data = data if self.flat else data[None]
                tensor = grpcclient.InferInput(field.name, list(data.shape), name)
                tensor.set_data_from_numpy(data)
                made.append(tensor)
        assert not values, values
        return made

    @contextmanager
    def grpc(
        self, strict: bool = False, extra: Sequence[Any] = (), **values: Any
    ) -> Iterator[Iterator[dict[str, Any]]]:
        """Start a gRPC stream; yields an iterator over its responses, which raises an error.

        Leaving early cancels the request. `strict` asks for status codes, `extra` are more inputs.
        """
        news: queue.Queue[Any] = queue.Queue()
        ended: list[bool] = []
        with grpcclient.InferenceServerClient(self.server.grpc) as client:
            client.start_stream(
                callback=lambda result, error: news.put((result, error)),
                headers={"triton_grpc_error": "true"} if strict else None,
            )
            try:
                inputs = [*self.tensors(**values), *extra]
                client.async_stream_infer(self.model, inputs, enable_empty_final_response=True)
                yield _responses(news, ended)
            finally:
                # The server crashes when a stream is cancelled that it has closed with a status.
                client.stop_stream(cancel_requests=not ended)

    def grpc_text(self, **values: Any) -> str:
        """Return the joined text of a gRPC stream."""
        with self.grpc(**values) as responses:
            return "".join(response["text_output"] for response in responses)

    def text(self) -> str:
        """Return all that the metrics port says of kvsift."""
        address = f"http://{self.server.host}:{self.server.metrics_port}/metrics"
        with urllib.request.urlopen(address, timeout=PATIENCE) as answer:
            lines = answer.read().decode().splitlines()
        return "\n".join(line for line in lines if line.startswith("kvsift"))

    def metrics(self, name: str) -> dict[str, float]:
        """Return the values of a metric by its labels other than the model."""
        rows = re.findall(rf"^{name}{{(.*?)}} (\S+)$", self.text(), re.MULTILINE)
        mine = f'model="{self.model}"'
        return {
            ",".join(part for part in labels.split(",") if part != mine): float(value)
            for labels, value in rows
            if mine in labels
        }

    def metric(self, name: str, labels: str = "") -> float:
        """Return one value of a metric."""
        return self.metrics(name)[labels]

    def settled(self) -> None:
        """Wait until the metrics stand still: they follow the model in a moment."""
        seen: list[str] = []

        def still() -> bool:
            time.sleep(1)
            seen.append(self.text())
            return len(seen) > 1 and seen[-1] == seen[-2]

        eventually(still)

    def outcome(self, name: str) -> float:
        """Return how many requests ended so."""
        return self.metric("kvsift_requests_total", f'outcome="{name}"')


def _responses(news: queue.Queue[Any], ended: list[bool]) -> Iterator[dict[str, Any]]:
    while True:
        result, error = news.get(timeout=PATIENCE)
        if error is not None:
            ended.append(True)
            raise error
        response = result.get_response()
        values = {o.name: result.as_numpy(o.name).reshape(-1).tolist() for o in response.outputs}
        if values:
            values["text_output"] = values["text_output"][0].decode()
            yield values
        if response.parameters["triton_final_response"].bool_param:
            ended.append(True)
            return


def eventually(true: Callable[[], bool]) -> None:
    """Wait until something holds; fails after PATIENCE."""
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.05)


def children(parent: int) -> dict[int, str]:
    """Return the command lines of a process's children by their ids."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may just have ended
            if int((path / "stat").read_text().rsplit(")", 1)[1].split()[1]) == parent:
                found[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ")
    return found


def stubs(server: int, model: str = "kvsift") -> list[int]:
    """Return the processes of a model of the tritonserver with this process id."""
    return [pid for pid, line in children(server).items() if f" {model}_0_0 " in line]


def running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def regions(launcher: int | None = None) -> set[str]:
    """Return the shared memory regions of servers that a process (this one) has started."""
    prefix = f"kvsift_{launcher or os.getpid()}_"
    return {name for name in os.listdir("/dev/shm") if name.startswith(prefix)}
