"""What `kvsift serve` refuses, and how it ends, with the application in this process."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from commands import is_error, kvsift
from engines import Engines
from fastapi import FastAPI

from kvsift.runtime.llm import LLM
from kvsift.runtime.serve import refusals, server
from kvsift.runtime.serve.app import make_app
from kvsift.runtime.serve.server import Server

PACKAGE: dict[str, Any] = {
    "model": "deep",
    "limits": {"max_output": 1_000_000, "max_batch": 2},
    "options": {"block_size": 16, "min_budget_tokens": 0},
}
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "the cat on the mat"}]
BODY: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2}
ENDLESS = BODY | {"max_tokens": 1_000_000, "ignore_eos": True, "stream": True}
PATIENCE = 180.0


@pytest.fixture
def llm(engines: Engines) -> Iterator[LLM]:
    with LLM(engines.package("nexus", **PACKAGE), threads=1) as made:
        yield made


@pytest.fixture(scope="module")
def app(engines: Engines) -> Iterator[FastAPI]:
    with LLM(engines.package("nexus", **PACKAGE), threads=1) as made:
        yield make_app(made, "tiny")


JSON = "application/json"
Answer = tuple[int, dict[str, Any]]


def ask(app: FastAPI, method: str, path: str, body: Any = None, content_type: str = JSON) -> Answer:
    """Return the status and the JSON of an answer."""
    sent = run(app, method, path, body, content_type)
    text = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], json.loads(text)


def run(
    app: FastAPI, method: str, path: str, body: Any, content_type: str = JSON
) -> list[dict[str, Any]]:
    """Return what the application sends to a client that goes when it has sent its request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    news = iter([{"type": "http.request", "body": data}])
    sent: list[dict[str, Any]] = []

    async def receive() -> Any:
        return next(news, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        await asyncio.sleep(0)  # a transport may have to wait, too
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "method": method,
        "path": path, "query_string": b"", "headers": [(b"content-type", content_type.encode())],
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    return sent


def refused(answer: Answer, status: int, words: str) -> None:
    assert answer[0] == status, answer
    message = answer[1]["error"]["message"]
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"model":', "the body is no JSON (character 9)"),
        (b'{"model": "\xff"}', "error parsing the body"),
        (b"[" * 100_000, "error parsing the body"),
        (b"", "the body: Field required"),
        (b"[1]", "the body: Input should be a valid dictionary"),
    ],
)
def test_what_is_no_request(app: FastAPI, content: bytes, words: str) -> None:
    refused(ask(app, "POST", CHAT, content), 400, words)


def test_a_content_type_that_is_not_json(app: FastAPI) -> None:
    answer = ask(app, "POST", CHAT, BODY, "application/x-www-form-urlencoded")  # as curl -d does
    refused(answer, 400, "send the header Content-Type: application/json")


def test_paths_and_methods_that_there_are_not(app: FastAPI) -> None:
    refused(ask(app, "GET", "/v1/none"), 404, "Not Found")
    refused(ask(app, "GET", CHAT), 405, "Method Not Allowed")
    refused(ask(app, "GET", "/v1/models/other"), 404, "unknown model 'other'")
    card = ask(app, "GET", "/v1/models/tiny")[1]
    assert ask(app, "GET", "/v1/models")[1]["data"] == [card]
    assert card["id"] == "tiny"
    assert card["created"] > 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": True}, "max_tokens: Input should be a valid integer"),
        ({"max_tokens": "5"}, "max_tokens: Input should be a valid integer"),
        ({"temperature": "0.5"}, "temperature: Input should be a valid number"),
        ({"stream": "yes"}, "stream: Input should be a valid boolean"),
        ({"stop": 5}, "stop: must be a text or a list of texts"),
        ({"pin": [[0, 1, 2]]}, "pin must be a list of (start, end), got [0, 1, 2]"),
        ({"top_logprobs": 2}, "top_logprobs 2 needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "less than or equal to 20"),
        ({"tools": None}, "tools: unknown or not supported here; leave it out"),
    ],
)
def test_a_wrong_kind_of_value(app: FastAPI, change: dict[str, Any], words: str) -> None:
    refused(ask(app, "POST", CHAT, BODY | change), 400, words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": ["two", "prompts"]}, "prompt: must be one text or one list of token ids"),
        ({"prompt": [True]}, "prompt: must be one text or one list of token ids"),
        ({"logprobs": 21}, "less than or equal to 20"),
        # They would have to begin with those of the prompt.
        ({"echo": True, "logprobs": 1}, "log probabilities of a prompt are not given"),
    ],
)
def test_a_completion_that_is_not_given(app: FastAPI, change: dict[str, Any], words: str) -> None:
    body = {"model": "tiny", "prompt": "the cat", "max_tokens": 2} | change
    refused(ask(app, "POST", "/v1/completions", body), 400, words)


def test_a_body_without_end(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "MAX_BODY", 2000)
    refused(ask(app, "POST", CHAT, BODY | {"n": 2}), 400, "n: Input should be 1")
    long = [{"role": "user", "content": "x" * 2000}]
    refused(ask(app, "POST", CHAT, BODY | {"messages": long}), 413, "more than 2000 bytes")


def test_a_prompt_far_too_long_is_not_tokenized(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take seconds and gigabytes per ten megabytes of text."""
    app = make_app(llm, "tiny")
    long = BODY | {"messages": [{"role": "user", "content": "x" * 100_000}]}
    monkeypatch.setattr(llm.engine, "tokenizer", Untouched(llm.engine.tokenizer))
    for more in ({}, {"pin_roles": ["user"]}):
        refused(ask(app, "POST", CHAT, long | more), 400, "(--max-input) has 7200 at most")


class Untouched:
    """A tokenizer that must not be given a text."""

    def __init__(self, real: Any) -> None:
        self.get_vocab = real.get_vocab


def test_a_client_that_has_gone_before_its_stream_begins(llm: LLM) -> None:
    """Its request would hold a slot to the end of an answer that nobody reads."""
    assert run(make_app(llm, "tiny"), "POST", CHAT, ENDLESS) == []
    llm.scheduler.close(drain=True)
    stats = llm.scheduler.stats()
    assert (stats.submitted, stats.cancelled) == (1, 1)


def test_the_end_does_not_wait_for_open_streams(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "EXIT_TIMEOUT", 0)
    running = Server(make_app(llm, "tiny"), llm.scheduler)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = http.client.HTTPConnection(*listening.getsockname(), timeout=PATIENCE)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
        thread.start()
        client.request("POST", CHAT, json.dumps(ENDLESS), {"content-type": JSON})
        answer = client.getresponse()
        assert b"assistant" in answer.readline()
        running.should_exit = True
        events = [line.removeprefix("data: ") for line in answer.read().decode().splitlines()]
        thread.join(PATIENCE)
        assert not thread.is_alive()
        client.close()
    events = [event for event in events if event]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "cancelled"


def test_an_address_that_cannot_be_listened_on(engines: Engines) -> None:
    package = engines.package("nexus", **PACKAGE)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = kvsift("serve", package, "--port", port)
    is_error(done, 1, f"cannot listen on 127.0.0.1, port {port}: Address already in use")
    done = kvsift("serve", package, "--host", "no.invalid")
    is_error(done, 1, "cannot listen on no.invalid, port 8000")
