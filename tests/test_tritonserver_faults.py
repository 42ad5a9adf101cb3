"""A real Triton server in trouble: reloads under load, killed processes, bad engines, queues."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpcclient
from engines import Engines
from triton_tools import (
    PACKAGE,
    PATIENCE,
    Client,
    children,
    eventually,
    regions,
    running,
    stubs,
    write_models,
)
from tritonclient.utils import InferenceServerException

from kvsift.builder.errors import EngineError
from kvsift.runtime.triton.config import Settings
from kvsift.runtime.triton.repository import write_repository
from kvsift.runtime.triton.server import TritonServer, free_ports

pytestmark = pytest.mark.triton
ASKED = {"text_input": "tell me more and more", "ignore_eos": True, "seed": 1, "stream": True}
LONG = ASKED | {"max_tokens": 1_000_000}
ABORT = -signal.SIGABRT


@pytest.fixture
def repository(engines: Engines, tmp_path: Path) -> Iterator[Path]:
    """A repository; what a test leaves in shared memory is an error."""
    yield write_models(engines, tmp_path / "models")
    assert regions() == set()


def test_unload_and_reload_under_load(repository: Path, tmp_path: Path) -> None:
    """Answers that have begun are finished; loading goes over gRPC, see docs/triton.md."""
    options = ["--model-control-mode=explicit", "--load-model=kvsift", "--load-model=flat"]
    with TritonServer(repository, log=tmp_path / "log", options=options) as server:
        client, other = Client(server), Client(server, "flat")
        control = grpcclient.InferenceServerClient(server.grpc)
        whole = client.grpc_text(**ASKED, max_tokens=900)
        for _ in range(2):
            begun = threading.Barrier(7)

            def ask(begun: threading.Barrier = begun) -> str:
                with client.grpc(**ASKED, max_tokens=900) as responses:
                    first = next(responses)["text_output"]
                    begun.wait(PATIENCE)
                    return first + "".join(r["text_output"] for r in responses)

            with ThreadPoolExecutor(6) as pool:
                texts = [pool.submit(ask) for _ in range(6)]
                # Four run at a time: with six begun, two have already been answered.
                begun.wait(PATIENCE)
                old = stubs(pid_of(server))
                control.unload_model("kvsift", client_timeout=PATIENCE)
                status, text = client.post("generate", {"text_input": "x"})
                assert (status, "no available versions" in text) == (404, True)
                assert other.generate(text_input="x", max_tokens=2)["num_output_tokens"] == 2
                control.load_model("kvsift", client_timeout=PATIENCE)
                assert [task.result(PATIENCE) for task in texts] == [whole] * 6
            eventually(lambda old=old: not any(map(running, old)))  # type: ignore[misc]
            assert client.grpc_text(**ASKED, max_tokens=900) == whole
        assert len(stubs(pid_of(server))) == len(stubs(pid_of(server), "flat")) == 1
        control.close()


def test_a_killed_model_is_reported_and_the_next_start_is_clean(
    repository: Path, tmp_path: Path
) -> None:
    with TritonServer(repository, log=tmp_path / "log") as server:
        client = Client(server)
        with client.grpc(**LONG) as responses:
            next(responses)
            os.kill(stubs(pid_of(server))[0], signal.SIGKILL)
            eventually(lambda: aborted(server) or unhealthy(client))
        if aborted(server):
            assert server.wait() == ABORT
        else:
            with (
                pytest.raises(InferenceServerException, match="not healthy"),
                client.grpc(**ASKED) as responses,
            ):
                list(responses)
            # The other model is not touched.
            assert Client(server, "flat").generate(text_input="x", max_tokens=2)
            with pytest.raises(EngineError, match="process of a model has died"):
                server.wait()
    assert server.shared_memory() == []
    with TritonServer(repository, log=tmp_path / "log") as server:
        assert Client(server).generate(text_input="x", max_tokens=2)["num_output_tokens"] == 2


def unhealthy(client: Client) -> bool:
    """Whether the server tells that a model's process has died."""
    with contextlib.suppress(OSError):  # it may abort while it answers
        return "not healthy" in client.post("generate", {"text_input": "x"})[1]
    return False


def aborted(server: TritonServer) -> bool:
    """Whether the server has ended: it does where a model dies that holds a lock of both."""
    assert server.process is not None
    return server.process.poll() is not None


def pid_of(server: TritonServer) -> int:
    assert server.process is not None
    return server.process.pid


@pytest.fixture
def command(repository: Path) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    """The command `kvsift tritonserver` as a process, once its models are ready."""
    ports = free_ports(3)
    options = [f"--{name}-port={port}" for name, port in
               zip(("http", "grpc", "metrics"), ports, strict=True)]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "kvsift.cli", "tritonserver", repository, *options],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    server = TritonServer(repository, http_port=ports[0], grpc_port=ports[1], metrics_port=ports[2])
    eventually(server.ready)
    assert regions(process.pid)
    yield process, Client(server)
    process.terminate()  # it takes its server along
    try:
        process.wait(PATIENCE)
    finally:
        process.kill()
    assert regions(process.pid) == set()


def test_the_command_ends_when_a_model_dies(
    command: tuple[subprocess.Popen[str], Client],
) -> None:
    """So its clients' connections end too, where the server alone would let them wait."""
    process, client = command
    with client.grpc(**LONG) as responses:
        next(responses)
        (server,) = children(process.pid)
        os.kill(stubs(server)[0], signal.SIGKILL)
        with pytest.raises(InferenceServerException):
            list(responses)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    died = rf"error: (the process of a model has died|tritonserver ended with {ABORT})"
    assert re.match(died, errors.splitlines()[-1])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=["ctrl-c", "hangup"])
def test_the_command_ends_with_its_terminal(
    command: tuple[subprocess.Popen[str], Client], number: signal.Signals
) -> None:
    process, client = command
    assert client.generate(text_input="x", max_tokens=2)["num_output_tokens"] == 2
    process.send_signal(number)
    process.send_signal(signal.SIGTERM)  # may not interrupt the end
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 0


def test_an_engine_that_cannot_run_is_named(repository: Path, tmp_path: Path) -> None:
    (repository / "kvsift" / "1" / "engine" / "kvsift.json").unlink()
    with pytest.raises(EngineError, match=r"failed to load 'kvsift'.*build one with build_engine"):
        TritonServer(repository, log=tmp_path / "log").start()


def test_status_codes_and_a_full_queue(engines: Engines, tmp_path: Path) -> None:
    """In the end of a server's life: with triton_grpc_error this release of Triton may crash."""
    repository = tmp_path / "models"
    narrow = Settings(max_batch=1, max_queue=1, threads=1)
    write_repository(engines.package("nexus", **PACKAGE), repository, settings=narrow)
    full = "1 requests wait for a slot and max_queue allows 1"
    with TritonServer(repository, log=tmp_path / "log") as server:
        client = Client(server)
        with client.grpc(**LONG) as first, client.grpc(**LONG) as second:
            next(first)
            eventually(lambda: one_waits(client))
            status, text = client.post("generate", {"text_input": "x"})
            assert (status, full in text) == (400, True), text
            del second
        eventually(lambda: client.outcome("cancelled") == 2)
        answer: dict[str, Any] = client.generate(text_input="x", max_tokens=2)
        assert answer["num_output_tokens"] == 2
        assert client.outcome("refused") == 1
        refused(client, "INVALID_ARGUMENT", "density must be in (0, 1], got 7", density=7.0)
    with TritonServer(repository, log=tmp_path / "log") as server:
        client = Client(server)
        with client.grpc(**LONG) as first, client.grpc(**LONG):
            next(first)
            eventually(lambda: one_waits(client))
            refused(client, "UNAVAILABLE", full)


def one_waits(client: Client) -> bool:
    """Whether one request runs and one waits; asked in this order, as the first has waited, too."""
    return (
        client.metric("kvsift_slots_in_use") == 1 and client.metric("kvsift_queued_requests") == 1
    )


def refused(client: Client, code: str, words: str, **values: Any) -> None:
    """Check the gRPC status of a request."""
    with (
        pytest.raises(InferenceServerException, match=code) as caught,
        client.grpc(strict=True, text_input="x", **values) as responses,
    ):
        list(responses)
    assert words in caught.value.message()
