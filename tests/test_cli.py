"""kvsift as a user meets it: exit codes, one-line errors, clean ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from commands import build, is_error, kvsift, start
from tiny import write_hf

from kvsift import __version__
from kvsift.builder.package import MANIFEST, WEIGHTS, Manifest
from kvsift.runtime import doctor
from kvsift.runtime.engine import Engine
from kvsift.runtime.sizes import slot_tokens, token_bytes

PROMPT = "the rain in spain stays mainly in the plain " * 2
#: Runs the command slowed down, so that a signal finds it at work.
SLOW_GENERATE = """
import time
from kvsift.runtime.sessions.ort import OrtSession
run = OrtSession.run
def slow(*args):
    time.sleep(0.02)
    return run(*args)
OrtSession.run = slow
from kvsift.cli import main
main()
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = write_hf(tmp_path_factory.mktemp("model") / "tiny")
    directory = tmp_path_factory.mktemp("engine") / "nexus"
    done = build(model, "-o", directory, "--set", "block_size=16", "--set", "min_budget_tokens=0")
    assert done.exit_code == 0, done.output
    return directory


def test_generate_streams_text_and_reports_on_stderr(engine: Path) -> None:
    done = kvsift("generate", engine, "--prompt", PROMPT, "--max-tokens", "8", "--ignore-eos")
    assert done.exit_code == 0, done.output
    assert done.stdout.endswith("\n")
    assert "8 new tokens" in done.stderr
    assert done.stderr.count("\n") == 1
    same = kvsift(
        "generate", engine, "--max-tokens", "8", "--ignore-eos", "--no-stream", input=PROMPT + "\n"
    )
    assert same.stdout == done.stdout


def test_generate_json_is_one_object(engine: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    args = ("--max-tokens", "60", "--ignore-eos", "--json", "--logprobs", "2", "--seed", "5")
    done = kvsift("generate", engine, "--prompt-file", file, *args, "--budget-tokens", "80")
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    result = json.loads(done.stdout)
    assert len(result["token_ids"]) == len(result["logprobs"]) == 60
    assert (result["finish_reason"], result["seed"], result["eviction_seed"]) == ("length", 5, 5)
    assert result["budget_tokens"] == 80
    assert result["evictions"] > 0
    assert result["kv_bytes"] < result["kv_bytes_dense"]


def test_generate_chat_uses_the_template(engine: Path) -> None:
    args = ("--prompt", "hello there", "--max-tokens", "1", "--json")
    plain = json.loads(kvsift("generate", engine, *args).stdout)
    turn = json.loads(kvsift("generate", engine, *args, "--chat", "--system", "be kind").stdout)
    assert turn["prompt_tokens"] > plain["prompt_tokens"] + 5


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--prompt", ""], ["empty prompt"]),
        (["--prompt", "", "--chat"], ["empty prompt"]),
        (["--prompt", "word " * 600], ["512 positions"]),
        (["--prompt", "x", "--density", "nan"], ["density must be in (0, 1]", "got nan"]),
        (["--prompt", "x", "--temperature", "-1"], ["temperature"]),
        (["--prompt", "x", "--pin", "3"], ["--pin takes", "'3'"]),
        (["--prompt", "x", "--pin", "5:2"], ["start < end"]),
        (["--prompt", "x", "--pin", "0:99"], ["pin must end within the prompt"]),
        (["--prompt", "x", "--prompt-file", "y"], ["exclude each other"]),
        (["--prompt-file", "absent.txt"], ["absent.txt"]),
        (["--prompt", "x", "--system", "y"], ["--chat"]),
        (["--prompt", "x", "--logprobs", "1"], ["--json"]),
        (["--prompt", "x", "--threads", "0"], ["threads"]),
        (["--prompt", "x\udcff"], ["not valid text", "character 1"]),
    ],
)
def test_generate_refuses_bad_requests(engine: Path, args: list[str], words: list[str]) -> None:
    is_error(kvsift("generate", engine, *args), 2, *words)


@pytest.mark.parametrize(
    ("closed", "code", "words"), [("<&-", 2, "error: empty prompt"), (">&-", 0, "new tokens")]
)
def test_closed_streams_are_empty_ones(engine: Path, closed: str, code: int, words: str) -> None:
    prompt = "" if closed == "<&-" else "--prompt hi"
    main = "from kvsift.cli import main; main()"
    line = f'"$0" -c "{main}" generate "$1" --max-tokens 2 --threads 1 {prompt} {closed}'
    command = ["sh", "-c", line, sys.executable, str(engine)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
    assert words in done.stderr


def test_text_beyond_the_terminals_encoding_is_no_error(engine: Path) -> None:
    args = ["-c", "from kvsift.cli import main; main()", "generate", str(engine)]
    args += ["--prompt", "a", "--threads", "1", "--stop", "\u20ac", "--max-tokens", "20"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    for extra in ([], ["--json"]):
        command = [sys.executable, *args, "--ignore-eos", *extra]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        assert done.stdout.isascii()
    assert not json.loads(done.stdout)["text"].isascii()  # the case is really met


def test_generate_names_what_is_wrong_with_a_package(engine: Path, tmp_path: Path) -> None:
    is_error(kvsift("generate", tmp_path, "--prompt", "x"), 1, "is no engine", "build_engine")
    manifest = Manifest.model_validate_json((engine / MANIFEST).read_text())
    for change in ({"schema_version": 0}, {"ops_version": "0"}):
        old = tmp_path / "old"
        old.mkdir(exist_ok=True)
        text = manifest.model_copy(update=change).model_dump_json()
        (old / MANIFEST).write_text(text)
        is_error(kvsift("generate", old, "--prompt", "x"), 1, "rebuild it with build_engine")


def test_verify_finds_a_changed_weight(engine: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(engine, tmp_path / "damaged"))
    data = bytearray((damaged / WEIGHTS).read_bytes())
    data[len(data) // 2] ^= 1
    (damaged / WEIGHTS).write_bytes(data)
    args = ("generate", damaged, "--prompt", PROMPT, "--max-tokens", "1")
    assert kvsift(*args).exit_code == 0
    is_error(kvsift(*args, "--verify"), 1, "model.data has changed since it was built")
    assert kvsift("generate", engine, *args[2:], "--verify").exit_code == 0


def test_ctrl_c_ends_generate_cleanly(engine: Path) -> None:
    args = ["generate", engine, "--prompt", PROMPT, "--max-tokens", 400, "--ignore-eos"]
    running = start(SLOW_GENERATE, list(args))
    assert running.stdout is not None
    first = running.stdout.read(1)
    time.sleep(0.3)
    running.send_signal(signal.SIGINT)
    rest, stderr = running.communicate(timeout=60)
    assert running.returncode == 130
    assert len(first + rest) > 2
    assert rest.endswith("\n")
    assert stderr == ""


def test_broken_pipe_ends_quietly(engine: Path) -> None:
    args = ["generate", engine, "--prompt", PROMPT, "--max-tokens", 400, "--ignore-eos"]
    running = start(SLOW_GENERATE, list(args))
    assert running.stdout is not None
    running.stdout.read(1)
    os.close(running.stdout.fileno())
    assert running.wait(timeout=60) == 141
    assert running.stderr is not None
    assert running.stderr.read() == ""


def test_sizes_are_those_of_the_engine(engine: Path) -> None:
    running = Engine(engine, threads=1)
    assert running.cache.capacity == slot_tokens(running.manifest)
    assert running.cache.nbytes == (
        running.max_batch * slot_tokens(running.manifest) * token_bytes(running.manifest)
    )
    assert slot_tokens(running.manifest) < slot_tokens(running.manifest, dense=True)


def test_version() -> None:
    for done in (kvsift("--version"), build("--version")):
        assert (done.exit_code, done.stdout) == (0, f"kvsift {__version__}\n")


def test_doctor_passes_here_and_names_every_lack() -> None:
    done = kvsift("doctor")
    assert done.exit_code == 0, done.output
    for name in (
        "onnxruntime",
        "attention, gqa",
        "attention, portable",
        "tensorrt",
        "default model",
    ):
        assert name in done.stdout
    assert all(check.good or check.fix for check in doctor.examine())


def test_doctor_fails_when_attention_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvsift.runtime import selftest

    expected = selftest._expected

    def leaky(q: Any, k: Any, v: Any, keys: Any, values: Any, past: tuple[int, ...]) -> Any:
        """What a runtime computes that ignores one cached row."""
        return expected(q, k, v, keys, values, tuple(max(0, p - 1) for p in past))

    monkeypatch.setattr(selftest, "_expected", leaky)
    selftest.attention_error.cache_clear()
    done = kvsift("doctor")
    selftest.attention_error.cache_clear()
    assert done.exit_code == 1
    assert "wrong results" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("bench", "--help"), 0, "decode"),
        (("eval", "--help"), 0, "fidelity"),
        (("bench", "nothing"), 2, "nothing"),
        (("bench", "decode", "--batch", "0"), 2, "error: --batch must be"),
        (("bench", "profile", "--engine", "nowhere"), 1, "error: nowhere is no engine"),
        (("eval", "tables", "--out", "nowhere"), 2, "error: nowhere has no finished run"),
    ],
)
def test_groups_of_commands(arguments: tuple[str, ...], code: int, said: str) -> None:
    done = kvsift(*arguments)
    assert done.exit_code == code, done.output
    assert said in done.output


def test_groups_are_not_imported_until_they_run() -> None:
    program = "import sys, kvsift.cli; assert 'onnxruntime' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
