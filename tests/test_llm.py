"""The Python interface: shapes of its arguments, and that importing it costs nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import write_hf

import kvsift
from kvsift import LLM, EvictionParams, GenerationResult, KvsiftError, SamplingParams
from kvsift.builder.errors import EngineError, UsageError
from kvsift.builder.package import Limits
from kvsift.builder.policies import resolve
from kvsift.builder.targets.ort import build
from kvsift.builder.weights import open_model
from kvsift.runtime.request import Request
from kvsift.runtime.sessions import ort as ort_session

SHORT = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("llm")
    policy = resolve("nexus", options={"block_size": 16, "min_budget_tokens": 0})
    limits = Limits(
        max_input=512, max_output=64, max_batch=2, density=0.5, max_density=0.5, chunk=64
    )
    build(open_model(write_hf(root / "model")), policy, limits, root / "engine")
    return root / "engine"


@pytest.fixture(scope="module")
def llm(engine: Path) -> LLM:
    return LLM(engine, threads=1)


def texts(results: list[GenerationResult]) -> list[str]:
    return [result.text for result in results]


def test_prompts_come_as_text_ids_or_lists_of_them(llm: LLM) -> None:
    (one,) = llm.generate("to be or not", SHORT)
    ids = llm.engine.tokenizer.encode("to be or not").ids
    assert len(one.token_ids) == 6
    assert texts(llm.generate(ids, SHORT)) == [one.text]
    assert texts(llm.generate([ids, ids], SHORT)) == [one.text] * 2
    assert texts(llm.generate(["to be or not"], SHORT)) == [one.text]
    three = llm.generate(["to be or not", "and then", ids], SHORT)  # more than slots
    assert texts(three)[::2] == [one.text] * 2
    assert llm.generate([], SHORT) == []


def test_parameters_are_for_all_or_one_each(llm: LLM) -> None:
    lengths = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 5)]
    evict = [EvictionParams(eviction_seed=n) for n in (1, 2)]
    results = llm.generate(["a b c", "d e f"], lengths, evict)
    assert [len(r.token_ids) for r in results] == [2, 5]
    assert [r.eviction_seed for r in results] == [1, 2]
    both = llm.generate(["a b c", "d e f"], SHORT, EvictionParams(eviction_seed=7))
    assert [r.eviction_seed for r in both] == [7, 7]


def test_stream_gives_the_same_text_in_pieces(llm: LLM) -> None:
    pieces = list(llm.stream("to be or not", SHORT))
    assert len(pieces) > 1
    assert "".join(pieces) == llm.generate("to be or not", SHORT)[0].text


def test_bad_words_are_not_said(llm: LLM) -> None:
    said = llm.generate("tell me", SHORT)[0]
    assert said.token_ids
    word = llm.engine.tokenizer.decode(said.token_ids[:1])
    again = llm.generate("tell me", SamplingParams(max_tokens=6, ignore_eos=True, bad_words=word))
    assert said.token_ids[0] not in again[0].token_ids


def test_arrays_of_ids_are_prompts(llm: LLM) -> None:
    ids = [[5, 6, 7], [8, 9, 10]]
    wanted = texts(llm.generate(ids, SHORT))
    assert texts(llm.generate(np.array(ids), SHORT)) == wanted
    assert texts(llm.generate(np.array(ids[0]), SHORT)) == wanted[:1]


def test_an_open_stream_leaves_the_engine_to_others(llm: LLM) -> None:
    wanted = llm.generate("to be or not", SHORT)[0].text
    other = llm.generate("another one", SHORT)[0].text
    stream = llm.stream("to be or not", SHORT)
    first = next(stream)
    assert llm.generate("another one", SHORT)[0].text == other
    assert first + "".join(stream) == wanted
    with pytest.raises(EngineError, match="answering the requests of a scheduler; submit to that"):
        llm.engine.generate([])


def test_a_dropped_stream_is_cancelled(llm: LLM) -> None:
    before = llm.scheduler.stats().cancelled
    endless = SamplingParams(max_tokens=1 << 40, ignore_eos=True)
    streams = [llm.stream("to be or not", endless) for _ in range(llm.engine.max_batch)]
    assert all(map(next, streams))
    del streams
    assert len(llm.generate("to be or not", SHORT)[0].token_ids) == 6
    assert llm.scheduler.stats().cancelled == before + llm.engine.max_batch


def test_chat_renders_the_template(llm: LLM) -> None:
    talk = [{"role": "user", "content": "hello"}]
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    (answer,) = llm.chat(talk, SHORT)
    assert texts(llm.generate(text, SHORT)) == [answer.text]
    assert "".join(llm.stream(talk, SHORT)) == answer.text
    assert texts(llm.chat([talk, talk], SHORT)) == [answer.text] * 2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m.generate(["a", "b"], [SHORT]), "1 entries for 2 prompts"),
        (lambda m: m.generate("a", {"max_tokens": 3}), "SamplingParams"),
        (lambda m: m.generate("a", SHORT, [SHORT]), "EvictionParams"),
        (lambda m: m.generate(["a", ""]), "empty prompt"),
        (lambda m: m.generate([[1, 2], []]), "empty prompt"),
        (lambda m: m.generate([999]), "999 is outside the vocabulary"),
        (lambda m: m.generate(None), "got None"),
        (lambda m: m.generate([1.5]), r"got 1\.5 "),
        (lambda m: m.generate([[1.5]]), r"got 1\.5 "),
        (lambda m: m.generate(["a", 3]), "text or a list of token ids, got 3 "),
        (lambda m: m.generate([3, "a"]), "token id must be an integer, got 'a'"),
        (lambda m: m.generate(b"abc"), "decode bytes"),
        (lambda m: m.generate("a\ud800"), r"character 1 .*ud800"),
        (lambda m: m.chat([]), "no messages"),
        (lambda m: m.chat(5), "no messages in 5"),
        (lambda m: m.chat([5]), "no messages in 5"),
        (lambda m: list(m.stream(None)), "got None"),
        (lambda m: list(m.stream("a", {"seed": 1})), "SamplingParams"),
        (lambda m: list(m.stream("")), "empty prompt"),
        (lambda m: LLM(None), "engine_dir must be a path, got None"),
        (lambda m: LLM(3), "engine_dir must be a path, got 3"),
        (lambda m: LLM("~nobody-of-that-name/x"), "names no home directory"),
        (lambda m: m.generate({"prompt": "a"}), "a list of token ids, got {'prompt'"),
        (lambda m: m.generate(np.array(5)), "a list of token ids, got array"),
        (lambda m: m.chat(["hi"], pin_roles="user"), "message 0 has no role"),
        (lambda m: m.chat([{"role": "user", "content": "a"}], pin_roles=5), "pin_roles must be"),
        (
            lambda m: m.chat([{"role": "user", "content": "\ud800"}], pin_roles="user"),
            "the prompt is not valid text",
        ),
        (lambda m: m.scheduler.submit("a"), "must be a Request, got 'a'"),
        (lambda m: Request("a", {"seed": 1}), "sampling must be SamplingParams, got {'seed': 1}"),
        (lambda m: m.add_prefix(None), "got None"),
        (lambda m: m.engine.prefixes.remove(None), "got None"),
        (lambda m: setattr(m.engine.prefixes, "max_bytes", None), "max_bytes must be an integer"),
        (lambda m: LLM(m.engine.directory, max_queue=-1), "max_queue"),
        (lambda m: LLM(m.engine.directory, prefill_chunks=0), "prefill_chunks"),
        (lambda m: LLM(m.engine.directory, threads=0), "threads"),
        (lambda m: LLM(m.engine.directory, threads="2"), "threads"),
        (lambda m: LLM(m.engine.directory, threads=100_000), "threads"),
        (lambda m: LLM(m.engine.directory, max_batch=0), "max_batch"),
        (lambda m: LLM(m.engine.directory, max_batch="4"), "max_batch"),
    ],
)
def test_wrong_arguments_are_usage_errors(llm: LLM, call: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call(llm)


def test_missing_onnxruntime_is_named_with_the_fix(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ort_session, "ort", None)
    with pytest.raises(EngineError, match=r"pip install 'onnxruntime>=1\.28'"):
        LLM(engine)


def test_import_loads_nothing_heavy_and_knows_its_names() -> None:
    program = (
        "import sys, kvsift; assert 'LLM' in dir(kvsift)\n"
        "print(*(m for m in ('onnxruntime', 'onnx', 'numpy', 'typer') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
    assert issubclass(UsageError, KvsiftError)
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        kvsift.LMM  # noqa: B018
