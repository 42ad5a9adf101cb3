"""Chats as sessions: each turn adds what the template puts behind the last answer."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import is_error, kvsift, start
from engines import Engines
from kept import POLICIES

from kvsift import LLM
from kvsift.builder.errors import SessionError, UsageError
from kvsift.runtime.chat import ChatTemplate
from kvsift.runtime.conversation_file import load_conversation
from kvsift.runtime.dialogue import next_turn
from kvsift.runtime.engine import Engine
from kvsift.runtime.params import SamplingParams
from kvsift.runtime.prefixes import Prefixes

#: A template that puts a system turn before everything and forgets the thoughts of answers.
THINKING = (
    "<s>system\nbe good</s>{% for m in messages %}<s>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
SHORT = SamplingParams(max_tokens=6, ignore_eos=True)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def package(engines: Engines) -> Path:
    return engines.package("nexus", **POLICIES["nexus"])


@pytest.fixture
def llm(package: Path) -> Iterator[LLM]:
    with LLM(package, threads=1) as made:
        yield made


def test_the_next_turn_closes_the_answer_and_goes_on() -> None:
    render = ChatTemplate(THINKING).render
    assert next_turn(render, user("hi")) == "</s><s>user\nhi</s><s>assistant\n"
    refuse = ChatTemplate("{% for m in messages %}{{ m.role }}{% endfor %}").render
    with pytest.raises(UsageError, match="rewrites answers, so a session cannot go on"):
        next_turn(refuse, user("hi"))


def test_turns_make_the_text_of_the_whole_conversation(llm: LLM) -> None:
    said: list[dict[str, str]] = [{"role": "system", "content": "be kind"}]
    for text in ("hello", "and you", "bye"):
        told = [*said, *user(text)]
        new = told if len(said) == 1 else user(text)
        (result,) = llm.chat(new, SHORT, session_id="t")
        said = [*told, {"role": "assistant", "content": result.text}]
    held = llm.engine.conversations.get("t")
    text = llm.engine.tokenizer.decode(list(held.tokens), skip_special_tokens=False)
    assert text + "<|im_end|>\n" == llm.template.render(said, add_generation_prompt=False)


def test_a_template_that_forgets_thoughts_does_not_make_the_cache_forget(llm: LLM) -> None:
    llm.template = ChatTemplate(THINKING)
    for text in ("hello", "and you"):
        llm.chat(user(text), SHORT, session_id="t")
    held = llm.engine.conversations.get("t")
    text = llm.engine.tokenizer.decode(list(held.tokens), skip_special_tokens=False)
    assert text.count("be good") == 1
    assert text.index("<s>user\nhello</s>") < text.index("</s><s>user\nand you</s>")


def test_roles_are_pinned_where_they_speak(llm: LLM) -> None:
    told = [{"role": "system", "content": "remember the number four"}, *user("hello")]
    llm.chat(told, SHORT, pin_roles="system", session_id="t")
    llm.chat(user("what was it"), SHORT, pin_roles=["system", "user"], session_id="t")
    held = llm.engine.conversations.get("t")
    pinned = [llm.engine.tokenizer.decode(list(held.tokens[a:b])) for a, b in held.pins]
    assert [text.strip() for text in pinned] == ["remember the number four", "what was it"]


def test_every_way_to_ask_goes_on_with_a_session(llm: LLM) -> None:
    (first,) = llm.generate("to be or not", SHORT, session_id="s")
    assert first.session_turn == 1
    assert len("".join(llm.stream(" and so", SHORT, session_id="s"))) > 0
    assert llm.generate_async(" on", SHORT, session_id="s").result(60).session_turn == 3
    assert llm.generate("x", SHORT)[0].session_turn is None
    with pytest.raises(UsageError, match="session_id 's' is for one prompt, got 2"):
        llm.generate(["a", "b"], SHORT, session_id="s")
    output = llm.generate_async("x", SamplingParams(max_tokens=5000, ignore_eos=True),
                                session_id="s")  # fmt: skip
    with pytest.raises(SessionError, match="busy"):
        llm.chat(user("hi"), session_id="s")
    output.abort()


def test_prefixes_of_messages(llm: LLM) -> None:
    system = {"role": "system", "content": "be kind to everyone " * 8}
    alone = llm.chat([system, *user("hello")], SHORT)[0]
    llm.add_prefix([system])
    results = [llm.chat([system, *user(text)], SHORT)[0] for text in ("hello", "bye")]
    assert results[0].text == alone.text
    assert results[0].cached_tokens == 0
    assert results[1].cached_tokens == len(
        llm.engine.tokenizer.encode(llm.template.render([system], False)).ids
    )
    assert isinstance(llm.engine.prefixes, Prefixes)


def test_chat_keeps_the_conversation(package: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.session"
    talk = "hello\n\nand you\n" + "word " * 1200 + "\nbye\n/exit\nnever read\n"
    args = ["--max-tokens", "4", "--system", "be kind", "--pin-role", "system"]
    done = kvsift("chat", package, *args, "--session", file, input=talk)
    assert done.exit_code == 0, done.output
    assert done.stderr.count("error: the prompt has") == 1  # the overlong turn did not happen
    engine = Engine(package, threads=1)
    held = load_conversation(file, engine.manifest)
    said = engine.tokenizer.decode(list(held.tokens))
    assert held.turns == 3
    assert [said.count(x) for x in ("be kind", "hello", "and you", "bye", "word")] == [
        1,
        1,
        1,
        1,
        0,
    ]
    assert len(held.pins) == 1
    again = kvsift("chat", package, *args, "--session", file, input="more\n")
    assert again.exit_code == 0, again.output
    assert f"{len(held.tokens)} tokens so far" in again.stderr
    assert load_conversation(file, engine.manifest).turns == 4


#: Saves a session, says so, and waits to be killed in the middle of the next turn.
TALK = """
import sys, time
from kvsift import LLM, SamplingParams
engine, file, turns = sys.argv[1], sys.argv[2], int(sys.argv[3])
params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.9, seed=5)
llm = LLM(engine, threads=1)
first = 0
if turns < 0:
    llm.engine.load_session(file, "s")
    first, turns = -turns, 5
for turn in range(first, turns):
    text = f"{turn}: " + "the rain in spain stays mainly in the plain " * 4
    print(*llm.generate(text, params, session_id="s")[0].token_ids, flush=True)
if first == 0:
    llm.engine.save_session("s", file)
    print("saved", flush=True)
    llm.generate_async("go on", SamplingParams(max_tokens=10**6, ignore_eos=True), session_id="s")
    time.sleep(600)
"""


def test_a_killed_process_goes_on_where_it_saved(package: Path, tmp_path: Path) -> None:
    def run(*args: Any) -> list[str]:
        command = [sys.executable, "-c", TALK, str(package), *map(str, args)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def run_and_kill(turns: int, file: Path) -> list[str]:
        running = start(TALK, [package, file, turns])
        assert running.stdout is not None
        lines = []
        while (line := running.stdout.readline().strip()) != "saved":
            assert running.poll() is None, running.communicate()[1]
            lines.append(line)
        time.sleep(0.2)
        running.send_signal(signal.SIGKILL)
        running.wait(60)
        return lines

    whole = run_and_kill(5, tmp_path / "whole")
    half = run_and_kill(3, tmp_path / "half")
    assert half == whole[:3]
    assert run(tmp_path / "half", -3) == whole[3:]
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["half", "whole"]


def test_chat_refuses_the_session_of_another_engine(
    engines: Engines, package: Path, tmp_path: Path
) -> None:
    file = tmp_path / "s"
    assert (
        kvsift("chat", package, "--session", file, "--max-tokens", 2, input="hi\n").exit_code == 0
    )
    other = engines.package("streaming")
    is_error(kvsift("chat", other, "--session", file, input="hi\n"), 2, "saved by another engine")
