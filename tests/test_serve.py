"""`kvsift serve`, called by OpenAI's own client."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from commands import is_error, kvsift
from engines import Engines
from openai import OpenAI

from kvsift.runtime.llm import LLM
from kvsift.runtime.params import EvictionParams, SamplingParams
from kvsift.runtime.results import GenerationResult

PACKAGE: dict[str, Any] = {
    "model": "deep",
    "limits": {"max_output": 1_000_000, "max_batch": 2},
    "options": {"block_size": 16, "min_budget_tokens": 0},
}
MESSAGES: Any = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "Say something about the cat on the mat, and the other cat."},
]
PATIENCE = 180.0


@pytest.fixture(scope="module")
def llm(engines: Engines) -> Iterator[LLM]:
    with LLM(engines.package("nexus", **PACKAGE), threads=1) as made:
        yield made


@pytest.fixture(scope="module")
def server(engines: Engines) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command as a process, with the address that it prints."""
    options = ["--port", "0", "--model-name", "tiny", "--threads", "1", "--max-queue", "20"]
    package = str(engines.package("nexus", **PACKAGE))
    process = subprocess.Popen(
        [sys.executable, "-m", "kvsift.cli", "serve", package, *options],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    found = re.search(r"model 'tiny' at (http://127\.0\.0\.1:\d+/v1)", line)
    assert found, line + process.stderr.read()
    yield process, found[1]
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def client(server: tuple[subprocess.Popen[str], str]) -> OpenAI:
    return OpenAI(base_url=server[1], api_key="none", timeout=PATIENCE, max_retries=0)


def eventually(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.05)


def solo(llm: LLM, max_tokens: int, seed: int, **eviction: Any) -> GenerationResult:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed, logprobs=2)
    return llm.chat(MESSAGES, sampling, EvictionParams(**eviction))[0]


def ask(client: OpenAI, seed: int, **more: Any) -> Any:
    values = {"max_tokens": 30, "extra_body": {"density": 0.6}} | more
    return client.chat.completions.create(model="tiny", messages=MESSAGES, seed=seed, **values)


def test_a_chat(client: OpenAI, llm: LLM) -> None:
    expected = solo(llm, 30, 5, density=0.6)
    answer = ask(client, 5, logprobs=True, top_logprobs=2)
    choice, usage = answer.choices[0], answer.usage
    assert choice.message.content == expected.text
    assert choice.finish_reason == expected.finish_reason
    assert usage.prompt_tokens == expected.prompt_tokens
    assert usage.completion_tokens == len(expected.token_ids)
    assert usage.kept_tokens == expected.kept_tokens < usage.total_tokens
    assert usage.kv_bytes == expected.kv_bytes < usage.kv_bytes_dense
    assert usage.coverage == pytest.approx(expected.coverage)
    assert expected.logprobs is not None
    steps = choice.logprobs.content
    assert [s.logprob for s in steps] == pytest.approx([s.logprob for s in expected.logprobs])
    assert [len(s.top_logprobs) for s in steps] == [2] * len(expected.token_ids)
    assert answer.model == "tiny"


def test_streams_at_the_same_time_give_the_solo_texts(client: OpenAI, llm: LLM) -> None:
    expected = [solo(llm, 30, seed, density=0.6) for seed in range(6)]

    def stream(seed: int) -> tuple[str, Any, Any]:
        options = {"include_usage": True}
        chunks = list(ask(client, seed, stream=True, stream_options=options))
        assert chunks[0].choices[0].delta.role == "assistant"
        said = [c.choices[0].delta.content or "" for c in chunks if c.choices]
        reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
        assert reasons[:-1] == [None] * (len(reasons) - 1)
        assert not chunks[-1].choices
        return "".join(said), reasons[-1], chunks[-1].usage.kept_tokens

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(stream, range(6)))
    assert answers == [(r.text, r.finish_reason, r.kept_tokens) for r in expected]
    assert len({text for text, _, _ in answers}) == 6


def test_completions(client: OpenAI, llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=16, temperature=0.0, seed=2, logprobs=1)
    expected = llm.generate("the cat sat", sampling)[0]
    values: Any = {"model": "tiny", "prompt": "the cat sat", "temperature": 0, "seed": 2}
    answer = client.completions.create(**values, echo=True)
    assert answer.choices[0].text == "the cat sat" + expected.text
    answer = client.completions.create(**values, logprobs=1)
    assert answer.choices[0].text == expected.text
    logs = answer.choices[0].logprobs
    assert expected.logprobs is not None
    assert logs.token_logprobs == pytest.approx([s.logprob for s in expected.logprobs])
    assert "".join(logs.tokens)[logs.text_offset[3] :].startswith(logs.tokens[3])
    chunks = list(client.completions.create(**values, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    ids = llm.engine.tokenizer.encode("the cat sat").ids
    assert client.completions.create(**(values | {"prompt": ids})).choices[0].text == expected.text


def test_a_session_goes_on(client: OpenAI, llm: LLM) -> None:
    first = {"max_tokens": 12, "seed": 1, "model": "tiny", "extra_body": {"session_id": "s"}}
    client.chat.completions.create(messages=MESSAGES, **first)  # type: ignore[call-overload]
    again = client.chat.completions.create(  # type: ignore[call-overload]
        messages=[{"role": "user", "content": "And then?"}], **first
    )
    assert again.usage.session_turn == 2
    assert again.usage.prompt_tokens_details.cached_tokens > 20


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": -1}, "max_tokens must be >= 0, got -1"),
        ({"extra_body": {"density": 7}}, "density must be in (0, 1], got 7"),
        ({"extra_body": {"densty": 0.5}}, "densty: unknown or not supported here"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools: unknown or not"),
        ({"n": 2}, "n: Input should be 1"),
        ({"temperature": -1}, "temperature must be in [0, inf)"),
        ({"messages": [{"role": "user", "content": "x y " * 900}]}, "--max-input 600"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "send text only"),
        ({"messages": []}, "messages: List should have at least 1 item"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong(
    client: OpenAI, change: dict[str, Any], words: str
) -> None:
    values: Any = {"model": "tiny", "messages": MESSAGES} | change
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**values, stream=stream)
        assert words in caught.value.body["message"]  # type: ignore[index]
        assert "\n" not in caught.value.message


def test_an_unknown_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="unknown model 'gpt'; this server has 'tiny'"):
        client.chat.completions.create(model="gpt", messages=MESSAGES)
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_clients_that_go_free_their_slots(client: OpenAI) -> None:
    """Of two slots: without that, the answers after six endless requests would not come."""
    endless: Any = {"max_tokens": 1_000_000, "extra_body": {"ignore_eos": True, "density": 0.6}}
    for _ in range(3):
        stream = ask(client, 1, stream=True, **endless)
        next(stream)
        stream.close()
    impatient = client.with_options(timeout=0.3)
    for _ in range(3):
        with pytest.raises(openai.APITimeoutError):
            ask(impatient, 1, **endless)
    assert ask(client, 1).choices[0].message.content


def test_too_many_requests(client: OpenAI) -> None:
    endless: Any = {"max_tokens": 1_000_000, "extra_body": {"ignore_eos": True}, "stream": True}
    streams: list[Any] = []

    def one_too_many() -> None:
        while len(streams) < 40:
            streams.append(ask(client, 1, **endless))

    with pytest.raises(openai.RateLimitError, match="max_queue allows 20"):
        one_too_many()
    # Two run and twenty wait, less what the test before has left running.
    assert 15 < len(streams) <= 22
    for stream in streams:
        stream.close()
    eventually(lambda: answers(client))


def answers(client: OpenAI) -> bool:
    try:
        return bool(ask(client, 1).choices)
    except openai.RateLimitError:
        return False


def test_health_and_the_end(server: tuple[subprocess.Popen[str], str], client: OpenAI) -> None:
    process, address = server
    with urllib.request.urlopen(address.replace("/v1", "/health"), timeout=PATIENCE) as answer:
        assert json.load(answer) == {"status": "ok"}
    assert ask(client, 2).choices
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(PATIENCE) in (0, -signal.SIGINT, 130)


def test_without_its_packages_the_fix_is_named(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "kvsift.runtime.serve.server", raising=False)
    done = kvsift("serve", engines.package("nexus", **PACKAGE))
    is_error(done, 2, "pip install 'kvsift[serve]'")
