"""The Triton model without a server: a double of Triton's python module stands for it."""

from __future__ import annotations

import importlib
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from engines import Engines

from kvsift.runtime.triton.config import Settings, config_text

PACKAGE: dict[str, Any] = {
    "model": "deep",
    "limits": {"max_output": 1_000_000, "max_batch": 1},
    "options": {"block_size": 16, "min_budget_tokens": 0},
}
PATIENCE = 180.0
FINAL = 1


class Metric:
    """A metric that counts."""

    def __init__(self, labels: dict[str, str], **_: Any) -> None:
        self.labels = labels
        self.value = 0.0

    def increment(self, value: float) -> None:
        self.value += value

    observe = set = increment


class Family:
    COUNTER = GAUGE = HISTOGRAM = 0

    def __init__(self, name: str, **_: Any) -> None:
        self.name = name
        self.made: list[Metric] = []
        FAMILIES.append(self)

    def Metric(self, **options: Any) -> Metric:  # noqa: N802 (Triton calls it so)
        self.made.append(Metric(**options))
        return self.made[-1]


FAMILIES: list[Family] = []


class Tensor:
    def __init__(self, name: str, data: Any) -> None:
        self.name, self.data = name, data

    def as_numpy(self) -> Any:
        return self.data


class TritonError(Exception):
    UNAVAILABLE, INVALID_ARG, CANCELLED, INTERNAL = (
        "unavailable",
        "invalid",
        "cancelled",
        "internal",
    )

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class Response:
    def __init__(self, output_tensors: Any = (), error: TritonError | None = None) -> None:
        self.outputs = {tensor.name: tensor.data for tensor in output_tensors}
        self.error = error


class Sender:
    """Keeps responses; `fails` of them cannot be sent, as when the shared memory is full."""

    def __init__(self, fails: int = 0) -> None:
        self.fails = fails
        self.sent: list[Response] = []
        self.gone = False
        self.ended = threading.Event()

    def send(self, response: Response | None = None, flags: int = 0) -> None:
        assert not self.ended.is_set(), "a response after the last"
        if response is not None and not response.error and self.fails:
            self.fails -= 1
            raise TritonError("Failed to increase the shared memory pool size")
        if response is not None:
            self.sent.append(response)
        if flags & FINAL:
            self.ended.set()

    def is_cancelled(self) -> bool:
        return self.gone


class Asked:
    def __init__(self, sender: Sender, parameters: dict[str, Any], **inputs: Any) -> None:
        self.sender = sender
        self.given = parameters
        self.inputs = {n: Tensor(n, np.array([[v]])) for n, v in inputs.items()}

    def get_response_sender(self) -> Sender:
        return self.sender

    def parameters(self) -> str:
        return json.dumps(self.given)


class Logger:
    @staticmethod
    def log_error(_: str) -> None:
        pass


@pytest.fixture
def model(engines: Engines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    backend = ModuleType("triton_python_backend_utils")
    found: dict[str, Any] = {
        "TRITONSERVER_RESPONSE_COMPLETE_FINAL": FINAL, "Tensor": Tensor, "Logger": Logger,
        "InferenceResponse": Response, "TritonError": TritonError, "MetricFamily": Family,
        "TritonModelException": TritonError,
        "get_input_tensor_by_name": lambda request, name: request.inputs.get(name),
    }  # fmt: skip
    for name, value in found.items():
        setattr(backend, name, value)
    monkeypatch.setitem(sys.modules, backend.__name__, backend)
    monkeypatch.delitem(sys.modules, "kvsift.runtime.triton.model", raising=False)
    FAMILIES.clear()
    made = importlib.import_module("kvsift.runtime.triton.model").TritonPythonModel()
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "engine").symlink_to(engines.package("nexus", **PACKAGE))
    assert "max_batch_size: 1" in config_text("m", Settings(), batched=True)
    config = {"max_batch_size": 1}
    made.initialize({"model_config": json.dumps(config), "model_repository": str(tmp_path),
                     "model_version": "1", "model_name": "m"})  # fmt: skip
    yield made
    made.finalize()
    sys.modules.pop("kvsift.runtime.triton.model", None)


def ask(model: Any, fails: int = 0, parameters: Any = None, **inputs: Any) -> Sender:
    sender = Sender(fails)
    given = {"text_input": b"the cat", "max_tokens": 4} | inputs
    model.execute([Asked(sender, parameters or {}, **given)])
    assert sender.ended.wait(PATIENCE)
    return sender


def outcomes(model: Any) -> dict[str, float]:
    """Return how requests ended, once the metrics thread has written it all."""
    model.metrics.stop()
    (family,) = [family for family in FAMILIES if family.name == "kvsift_requests_total"]
    model.metrics.stop = lambda: None
    return {m.labels["outcome"]: m.value for m in family.made if m.value}


def test_an_answer(model: Any) -> None:
    (response,) = ask(model).sent
    assert response.outputs["num_output_tokens"].item() == 4
    assert outcomes(model) == {"length": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_cannot_be_sent_is_an_error_and_the_end(model: Any, stream: bool) -> None:
    """Else its client would wait for ever, and the model could never be unloaded."""
    sender = ask(model, fails=1, stream=stream)
    error = sender.sent[-1].error
    assert error
    assert error.code == TritonError.INTERNAL
    assert "shared memory" in str(error)
    assert outcomes(model) == {"failed": 1}


def test_an_identifier_is_no_unknown_input(model: Any) -> None:
    """Triton's generate endpoint has it."""
    (response,) = ask(model, parameters={"id": "mine"}).sent
    assert not response.error
    (response,) = ask(model, parameters={"ids": "mine"}).sent
    assert "unknown input 'ids'" in str(response.error)
