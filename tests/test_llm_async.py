"""Many callers of one LLM: coroutines, threads, streams, and how it ends."""

from __future__ import annotations

import asyncio
import gc
import itertools
import re
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import Engines, prompt

from kvsift import LLM, SamplingParams
from kvsift.builder.errors import EngineError, QueueFullError, UsageError

WAIT = 300  # seconds that nothing here takes
SHORT = SamplingParams(max_tokens=9, ignore_eos=True, seed=1)
ENDLESS = SamplingParams(max_tokens=1 << 40, ignore_eos=True, seed=1)
PROMPTS = [prompt(40 + 60 * i, seed=i) for i in range(8)]


@pytest.fixture(scope="module")
def llm(engines: Engines) -> Iterator[LLM]:
    package = engines.package("nexus", options={"block_size": 8, "min_budget_tokens": 0})
    with LLM(package, threads=1, max_batch=3, max_queue=20) as made:
        yield made


def run(coroutine: object) -> None:
    asyncio.run(asyncio.wait_for(coroutine, WAIT))  # type: ignore[arg-type]


def test_awaiting_gives_what_generate_gives(llm: LLM) -> None:
    want = llm.generate(PROMPTS, SHORT)

    async def ask() -> None:
        outputs = [llm.generate_async(p, SHORT) for p in PROMPTS]
        results = await asyncio.gather(*outputs)
        assert [r.token_ids for r in results] == [r.token_ids for r in want]
        assert [r.kept_tokens for r in results] == [r.kept_tokens for r in want]
        for output, result in zip(outputs, results, strict=True):
            assert output.finished
            assert output.result(0) is result is await output.aresult()
            assert output.outputs[0].text == result.outputs[0].text == result.text
            assert output.prompt is None
        assert [list(o.prompt_token_ids) for o in outputs] == PROMPTS
        assert len({o.request_id for o in outputs}) == len(PROMPTS)

    run(ask())


def test_a_stream_grows_to_the_result(llm: LLM) -> None:
    async def read(tokens: list[int]) -> None:
        request = llm.generate_async(tokens, SHORT, streaming=True)
        outputs = [output async for output in request]
        result = await request
        for before, after in itertools.pairwise(outputs):
            assert after.text == before.text + after.text_diff
            assert after.token_ids == before.token_ids + after.token_ids_diff
            assert before.finish_reason is before.result is None
        assert [len(o.token_ids) for o in outputs] == list(range(1, 10))
        last = outputs[-1].outputs[0]
        assert last.result is result
        assert (last.text, last.token_ids) == (result.text, result.token_ids)
        assert last.finish_reason == "length"
        assert [o async for o in request] == outputs == list(request)
        quiet = llm.generate_async(tokens, SHORT)
        assert [o.token_ids async for o in quiet] == [result.token_ids]

    async def all_of_them() -> None:
        await asyncio.gather(*map(read, PROMPTS))

    run(all_of_them())


def test_messages_are_prompts_too(llm: LLM) -> None:
    talk = [{"role": "user", "content": "hello"}]
    (want,) = llm.chat(talk, SHORT)
    output = llm.generate_async(talk, SHORT)
    assert output.result(WAIT).token_ids == want.token_ids
    assert output.prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_an_aborted_request_is_cancelled_and_keeps_what_it_said(llm: LLM) -> None:
    async def ask() -> None:
        request = llm.generate_async(PROMPTS[0], ENDLESS, streaming=True)
        async for output in request:
            if len(output.token_ids) == 5:
                request.abort()
        result = await request
        assert result.finish_reason == output.finish_reason == "cancelled"
        assert len(result.token_ids) >= 5
        assert result.text == output.text

    run(ask())


def test_threads_share_it(llm: LLM) -> None:
    want = [r.token_ids for r in llm.generate(PROMPTS, SHORT)]
    got: dict[int, object] = {}

    def ask(index: int) -> None:
        if index % 2:
            got[index] = llm.generate(PROMPTS[index], SHORT)[0].token_ids
        else:
            text = "".join(llm.stream(PROMPTS[index], SHORT))
            (result,) = llm.generate(PROMPTS[index], SHORT)
            assert text == result.text
            got[index] = result.token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert [got[i] for i in range(len(PROMPTS))] == want


def test_bad_and_surplus_requests_are_refused_at_once(llm: LLM) -> None:
    with pytest.raises(UsageError, match="empty prompt"):
        llm.generate_async("")
    with pytest.raises(UsageError, match="SamplingParams"):
        llm.generate_async("a", {"seed": 1})  # type: ignore[arg-type]
    many = [llm.generate_async([5, 6], ENDLESS) for _ in range(23)]
    with pytest.raises(QueueFullError, match="max_queue"):
        llm.generate_async([5, 6], SHORT)
    many_more = threading.Thread(target=llm.generate, args=([[5, 6]] * 30, SHORT))
    many_more.start()  # who waits for all of them is never refused
    for request in many:
        request.abort()
    many_more.join(WAIT)
    assert not many_more.is_alive()
    assert {r.result(WAIT).finish_reason for r in many} == {"cancelled"}


def test_closing_ends_what_runs(engines: Engines) -> None:
    with LLM(engines.package("nexus"), threads=1) as llm:
        open_one = llm.generate_async([5, 6], ENDLESS)
    assert open_one.result(WAIT).finish_reason == "cancelled"
    with pytest.raises(EngineError, match="is closed"):
        llm.generate("a", SHORT)


def test_an_llm_that_nobody_holds_is_freed(engines: Engines) -> None:
    llm = LLM(engines.package("nexus"), threads=1)
    request = llm.generate_async([5, 6], SHORT)
    engine, thread = weakref.ref(llm.engine), llm.scheduler._thread
    del llm
    gc.collect()
    assert request.result(WAIT).finish_reason == "length"  # the request holds it
    del request
    gc.collect()
    thread.join(WAIT)
    gc.collect()
    assert engine() is None


def test_the_examples_of_the_readme_run(
    engines: Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```", readme, re.S | re.M)
    assert len(examples) >= 2
    program = "\n".join(examples[:2]).replace("ENGINE_DIR", str(engines.package("nexus")))
    names: dict[str, object] = {}
    exec(compile(program, "README.md", "exec"), names)
    llm = names["llm"]
    assert isinstance(llm, LLM)
    assert len(capsys.readouterr().out) > 100
    assert llm.scheduler.stats().finished == 3
    llm.close()
