"""A real Triton server with a tiny model: answers, streams, errors, cancellation, metrics."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from engines import Engines, prompt
from triton_tools import PACKAGE, PATIENCE, Client, eventually, regions, write_models
from tritonclient.grpc import InferInput
from tritonclient.utils import InferenceServerException

from kvsift.runtime.engine import Engine
from kvsift.runtime.params import EvictionParams, SamplingParams
from kvsift.runtime.request import Request
from kvsift.runtime.results import GenerationResult
from kvsift.runtime.triton.fields import OUTPUTS
from kvsift.runtime.triton.metrics import FAMILIES
from kvsift.runtime.triton.server import TritonServer

pytestmark = pytest.mark.triton
TEXT = "the cat sat on the mat and looked at the other cat " * 3
LONG = {"text_input": TEXT, "max_tokens": 1_000_000, "ignore_eos": True, "stream": True}
EXCLUDE = {"exclude_input_in_output": True}


@pytest.fixture(scope="module")
def server(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("triton")
    repository = write_models(engines, folder / "models")
    with TritonServer(repository, log=folder / "server.log") as running:
        assert regions()
        yield running
    assert regions() == set()


@pytest.fixture(scope="module")
def client(server: TritonServer) -> Client:
    return Client(server)


@pytest.fixture(scope="module")
def engine(engines: Engines) -> Engine:
    return engines("nexus", **PACKAGE)


def solo(engine: Engine, asked: dict[str, Any]) -> GenerationResult:
    """Run a request alone, as the inputs of the Triton model say."""
    values = dict(asked)
    given = values.pop("input_ids", None) or values.pop("text_input")
    names = {"stop_words": "stop"}
    sampling: dict[str, Any] = {}
    eviction: dict[str, Any] = {}
    for name, value in values.items():
        where = eviction if name in EvictionParams.__dataclass_fields__ else sampling
        where[names.get(name, name)] = value
    return engine.generate(
        [Request(given, SamplingParams(**sampling), EvictionParams(**eviction))]
    )[0]


def mixed(count: int) -> list[dict[str, Any]]:
    """Return requests that differ in length, seed, sampling and budget."""
    asked = []
    for i in range(count):
        one: dict[str, Any] = {"max_tokens": 20 + 13 * i % 60, "ignore_eos": True, "seed": i}
        if i % 3:
            one |= {"temperature": 0.9, "top_k": 40, "top_p": 0.95}
        if i % 2:
            one |= {"density": [0.3, 0.7][i // 2 % 2], "eviction_seed": 7 * i}
        one["text_input"] = " ".join(f"word {n} of {i}" for n in range(3 + 5 * i % 30))
        asked.append(one)
    return asked


@pytest.mark.parametrize("way", ["grpc", "http"])
def test_twenty_streams_give_exactly_the_solo_texts(
    client: Client, engine: Engine, way: str
) -> None:
    asked = mixed(20)
    expected = [solo(engine, one).text for one in asked]

    def ask(one: dict[str, Any]) -> str:
        if way == "grpc":
            return client.grpc_text(**one, stream=True)
        return "".join(event["text_output"] for event in client.generate_stream(**one))

    with ThreadPoolExecutor(20) as pool:
        assert list(pool.map(ask, asked)) == expected
    assert len(set(expected)) == 20


@pytest.mark.parametrize("model", ["kvsift", "flat"])
def test_one_response_holds_everything(server: TritonServer, engine: Engine, model: str) -> None:
    client = Client(server, model)
    asked = {"text_input": TEXT, "max_tokens": 12, "seed": 3, "temperature": 0.8, "density": 0.3}
    expected = solo(engine, asked | {"logprobs": 0})
    answer = client.generate(**asked, return_log_probs=True, return_eviction_stats=True)
    logs = answer.pop("log_probs")
    assert expected.logprobs is not None
    assert logs == pytest.approx([step.logprob for step in expected.logprobs], rel=1e-5)
    assert answer.pop("coverage") == pytest.approx(expected.coverage, rel=1e-5)
    assert answer == {
        "model_name": model,
        "model_version": "1",
        "text_output": TEXT + expected.text,  # the prompt belongs to it, as users know it
        "finish_reason": expected.finish_reason,
        "num_input_tokens": expected.prompt_tokens,
        "num_output_tokens": len(expected.token_ids),
        "kept_tokens": expected.kept_tokens,
        "cached_tokens": 0,
        "kv_bytes": expected.kv_bytes,
        "eviction_seed": expected.eviction_seed,
    }
    assert client.generate(**asked, **EXCLUDE)["text_output"] == expected.text
    with client.grpc(**asked, **EXCLUDE) as responses:
        assert [r["text_output"] for r in responses] == [expected.text]


def test_token_ids_go_in_and_come_out(client: Client, engine: Engine) -> None:
    ids = prompt(80, seed=5)
    asked = {"input_ids": ids, "max_tokens": 9, "ignore_eos": True, "seed": 2}
    expected = solo(engine, asked)
    answer = client.generate(**asked)
    assert answer["output_ids"] == list(expected.token_ids)
    assert answer["text_output"] == expected.text
    with client.grpc(**asked, stream=True) as responses:
        pieces = list(responses)
    assert pieces[-1]["output_ids"] == list(expected.token_ids)
    assert "".join(piece["text_output"] for piece in pieces) == expected.text


def test_lists_seeds_and_pins(client: Client, engine: Engine) -> None:
    asked = {"text_input": TEXT, "max_tokens": 40, "ignore_eos": True, "density": 0.3, "seed": 1}
    whole = solo(engine, asked)
    stop = whole.text[5:8]
    answer = client.generate(**asked, **EXCLUDE, stop_words=["never said", stop])
    assert answer["text_output"] == whole.text[: whole.text.index(stop)]
    assert answer["finish_reason"] == "stop"
    # What TensorRT-LLM's clients send for none.
    answer = client.generate(**asked, **EXCLUDE, stop_words="", bad_words="")
    assert answer["text_output"] == whole.text
    said = [engine.tokenizer.decode([token]) for token in whole.token_ids]
    bad = next(piece for piece in said if piece.isascii() and piece.isalpha())
    banned = solo(engine, asked | {"bad_words": bad})
    assert client.generate(**asked, **EXCLUDE, bad_words=bad)["text_output"] == banned.text
    assert banned.text != whole.text
    pinned = solo(engine, asked | {"pin": [(20, 30)], "density": 0.9})
    answer = client.generate(**(asked | EXCLUDE | {"pin": [20, 30], "density": 0.9}))
    assert answer["text_output"] == pinned.text
    seed = 2**64 - 3
    asked.pop("seed")
    drawn = solo(engine, asked | {"temperature": 1.0, "seed": seed})
    for name in ("seed", "random_seed"):
        answer = client.generate(**asked, **EXCLUDE, temperature=1.0, **{name: seed})
        assert answer["text_output"] == drawn.text, name


def test_parameters_do_as_inputs(client: Client, engine: Engine) -> None:
    expected = solo(engine, {"text_input": TEXT, "max_tokens": 7, "seed": 6})
    parameters = {"max_tokens": 7, "seed": 6, "stream": False, "exclude_input_in_output": True}
    answer = client.generate(text_input=TEXT, parameters=parameters)
    assert answer["text_output"] == expected.text


def test_what_the_openai_frontend_of_triton_sends(client: Client, engine: Engine) -> None:
    """Its own process is not in the test; it sends these inputs, all of shape [1, 1] or [1, n]."""
    sent = {"text_input": TEXT, "stream": False, "max_tokens": 16, "stop_words": ["zzzz", "yyyy"],
            "top_p": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "seed": 4,
            "temperature": 1.0}  # fmt: skip
    with client.grpc(**sent) as responses:
        answers = list(responses)
    expected = solo(engine, {"text_input": TEXT, "max_tokens": 16, "seed": 4, "temperature": 1.0})
    assert len(answers) == 1
    assert answers[0]["text_output"] == TEXT + expected.text


def test_outputs_are_those_of_the_table(client: Client) -> None:
    answer = client.generate(
        input_ids=prompt(200), max_tokens=3, return_log_probs=True, return_eviction_stats=True
    )
    outputs = {field.name for field in OUTPUTS} - {"session_turn"}
    assert set(answer) - {"model_name", "model_version"} == outputs


def test_a_session_goes_on_where_it_was(client: Client, engine: Engine) -> None:
    asked = {"max_tokens": 40, "ignore_eos": True, "seed": 3, "density": 0.3}
    turns = [TEXT, " and then?", " tell me more"]
    expected = [
        engine.generate(
            [Request(turn, SamplingParams(max_tokens=40, ignore_eos=True, seed=3),
                     EvictionParams(density=0.3), session_id="solo")]
        )[0]
        for turn in turns
    ]  # fmt: skip
    for number, (turn, result) in enumerate(zip(turns, expected, strict=True), start=1):
        values = asked | EXCLUDE | {"text_input": turn, "session_id": "mine"}
        answer = client.generate(**values, session_turn=number, return_eviction_stats=True)
        assert answer["text_output"] == result.text
        assert answer["session_turn"] == result.session_turn == number
        assert answer["cached_tokens"] == result.cached_tokens
        assert answer["num_input_tokens"] == result.prompt_tokens
    assert expected[-1].cached_tokens > 0


def test_a_turn_that_is_not_next_is_refused(client: Client) -> None:
    """So a conversation whose replica was lost does not begin anew without a word."""
    for session, turn, words in (("new", 4, "has 0 turns here"), ("two", 1, "has 1 turns here")):
        if session == "two":
            client.generate(text_input=TEXT, max_tokens=2, session_id=session)
        body = {"text_input": "x", "session_id": session, "session_turn": turn}
        status, text = client.post("generate", body)
        assert (status, words in text) == (400, True), text


BAD = {
    "negative max_tokens": ({"max_tokens": -1}, "max_tokens must be >= 0, got -1"),
    "density": ({"density": 7.0}, "density must be in (0, 1], got 7; 0.2 keeps a fifth"),
    "both budgets": ({"density": 0.5, "budget_tokens": 9}, "exclude each other"),
    "temperature": ({"temperature": -0.5}, "temperature must be in [0, inf), got -0.5"),
    "odd pin": ({"pin": [1, 2, 3]}, "pin must hold pairs"),
    "too long": ({"text_input": "x y " * 600}, "shorten it"),
    "empty": ({"text_input": ""}, "empty prompt"),
    "two prompts": ({"input_ids": [5]}, "got both; give one of them"),
    "no session": ({"session_turn": 2}, "session_turn 2 is of no session"),
    "long session": ({"session_id": "s" * 300}, "session_id must be a text of 1 to 256"),
    "token id": ({"text_input": None, "input_ids": [5, 9999]}, "token id 9999 is outside"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_told_what_is_wrong(client: Client, case: str) -> None:
    given, words = BAD[case]
    asked = {
        key: value for key, value in ({"text_input": "x"} | given).items() if value is not None
    }
    for action in ("generate", "generate_stream"):
        status, text = client.post(action, asked)
        assert status == 400, text
        message = json.loads(text.removeprefix("data: "))["error"]
        assert words in message
        assert "\n" not in message
    with pytest.raises(InferenceServerException) as caught, client.grpc(**asked) as responses:
        list(responses)
    assert words in caught.value.message()
    assert client.generate(text_input="x", max_tokens=2)["num_output_tokens"] == 2


def test_refused_requests_are_counted(client: Client) -> None:
    client.settled()  # earlier requests are counted a moment after their answers
    refused = client.outcome("refused")
    for _ in range(3):
        assert client.post("generate", {"text_input": "x", "max_tokens": -1})[0] == 400
    eventually(lambda: client.outcome("refused") == refused + 3)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"text_input": "x", "max_token": 5}, 400, "did you mean 'max_tokens'?"),
        ({"max_tokens": 5}, 400, "got neither"),
        # Triton itself refuses what it cannot read as the input's type, with its own status.
        ({"text_input": "x", "max_tokens": "many"}, 500, "Unable to parse"),
        ({"text_input": "x", "max_tokens": [1, 2]}, 400, "batch size does not match"),
    ],
)
def test_requests_that_only_http_can_make(
    client: Client, body: dict[str, Any], status: int, words: str
) -> None:
    found, text = client.post("generate", body)
    assert (found, words in text) == (status, True), text


def test_a_wrong_type_over_grpc(client: Client) -> None:
    tensor = InferInput("max_tokens", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.array([[3.0]], np.float32))
    with (
        pytest.raises(InferenceServerException, match="expects 'INT32'"),
        client.grpc(extra=[tensor], text_input="x") as responses,
    ):
        list(responses)


def test_cancelling_frees_the_slot(client: Client, engine: Engine) -> None:
    client.settled()
    cancelled = client.outcome("cancelled")
    with client.grpc(**LONG) as responses:
        first = next(responses)
    assert "finish_reason" not in first
    eventually(lambda: client.outcome("cancelled") == cancelled + 1)
    # HTTP: the client hangs up.
    connection = http.client.HTTPConnection(client.server.http, timeout=PATIENCE)
    connection.request("POST", "/v2/models/kvsift/generate_stream", json.dumps(LONG))
    answer = connection.getresponse()
    assert answer.read(20)
    answer.close()
    connection.close()
    eventually(lambda: client.outcome("cancelled") == cancelled + 2)
    eventually(lambda: client.metric("kvsift_slots_in_use") == 0)
    assert client.metric("kvsift_kv_used_bytes") == 0
    asked = {"text_input": TEXT, "max_tokens": 30, "ignore_eos": True, "seed": 8}
    assert client.grpc_text(**asked, **EXCLUDE) == solo(engine, asked).text


def test_metrics_add_up(client: Client, engine: Engine) -> None:
    names = [family.name for family in FAMILIES if family.kind == "COUNTER"][1:]
    latencies = ("kvsift_time_to_first_token_seconds", "kvsift_inter_token_latency_seconds")
    names += [f"{name}_count" for name in (*latencies, "kvsift_coverage")]
    client.settled()
    before = {name: client.metric(name) for name in names}
    ended = {name: client.outcome(name) for name in ("stop", "length")}
    asked = mixed(8)
    results = [solo(engine, one) for one in asked]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda one: client.generate(**one), asked))
    tokens = sum(len(result.token_ids) for result in results)
    dense = sum(result.kv_bytes_dense - result.kv_bytes for result in results)
    expected = {
        "kvsift_prompt_tokens_total": sum(result.prompt_tokens for result in results),
        "kvsift_generated_tokens_total": tokens,
        "kvsift_evictions_total": sum(result.evictions for result in results),
        "kvsift_evicted_tokens_total": dense / engine.kv_bytes_per_token,
        "kvsift_time_to_first_token_seconds_count": 8,
        "kvsift_inter_token_latency_seconds_count": tokens - 8,
        "kvsift_coverage_count": sum(result.coverage is not None for result in results),
    }
    assert expected["kvsift_evictions_total"] > 0
    eventually(lambda: {name: client.metric(name) - before[name] for name in names} == expected)
    assert client.outcome("length") == ended["length"] + 8
    assert client.outcome("stop") == ended["stop"]
    assert client.metric("kvsift_slots") == engine.max_batch
    assert client.metric("kvsift_kv_capacity_bytes") == engine.cache.nbytes
