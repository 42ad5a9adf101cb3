"""build_engine as a user meets it: exit codes, one-line errors, no half packages."""

from __future__ import annotations

import errno
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from commands import build, invoke, is_error, start
from tiny import write_hf

from kvsift.builder import cli as build_cli
from kvsift.builder.choices import default_name
from kvsift.builder.linear import WeightFile
from kvsift.builder.package import load_manifest
from kvsift.cli import app as kvsift_app
from kvsift.runtime import console

#: Runs the command slowed down, so that a signal finds it at work.
SLOW_BUILD = """
import sys, time
from kvsift.builder.linear import WeightFile
add = WeightFile.add
def slow(*args):
    print("writing", flush=True)
    time.sleep(0.3)
    return add(*args)
WeightFile.add = slow
from kvsift.builder.cli import main
main()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("model") / "tiny")


def test_build_prints_what_it_made(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "engine"
    done = build(model, "-o", out, "--density", "0.5", "--max-input", "256", "--kv-memory", "1GiB")
    assert done.exit_code == 0, done.output
    manifest = load_manifest(out)
    assert manifest.policy.name == "nexus"
    assert (manifest.limits.density, manifest.limits.max_input) == (0.5, 256)
    for word in ("ort (chosen by auto)", f"{manifest.parameters:,}", "KV per sequence, evicted"):
        assert word in done.stdout
    assert re.search(r"sequences that fit\s*│\s*[1-9]\d*", done.stdout)
    assert done.stderr == ""  # no progress where stderr is no terminal


def test_default_directory_is_named_after_model_and_policy(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert build(model, "--eviction", "full").exit_code == 0
    assert build(model, "--density", "0.25").exit_code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tiny-full", "tiny-nexus-0.25"]


def test_gguf_names_lose_their_quantisation(tmp_path: Path) -> None:
    file = tmp_path / "Some-1.5B-Chat.Q4_K_M.gguf"
    file.touch()
    policy = build_cli.resolve("nexus")
    assert default_name(file, policy, 0.2) == "Some-1.5B-Chat-nexus-0.2"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--eviction", "nexsu"], ["'nexsu'", "did you mean 'nexus'?"]),
        (["--scorer", "nexis"], ["scorer 'nexis'", "did you mean 'nexus'?"]),
        (["--density", "0"], ["density must be in (0, 1]", "got 0"]),
        (["--density", "1.5"], ["density must be in (0, 1]", "got 1.5"]),
        (["--density", "nan"], ["density must be in (0, 1]", "got nan"]),
        (["--max-density", "0.1"], ["--max-density must be at least --density"]),
        (["--eviction", "full", "--density", "0.5"], ["'full' keeps everything"]),
        (["--set", "windw=3"], ["option 'windw'", "did you mean 'window'?"]),
        (["--set", "window"], ["--set takes key=value", "'window'"]),
        (["--set", "window=0"], ["window=0"]),
        (["--set", "block_size=inf"], ["block_size must be a power of two", "inf"]),
        (["--set", "block_size=1.5"], ["block_size must be a power of two", "1.5"]),
        (["--set", "pyramid_beta=inf"], ["pyramid_beta=inf", "finite"]),
        (["--set", "layer_budgets=nan,1"], ["one positive weight per layer", "nan,1"]),
        (["--set", "layer_budgets=0,1"], ["one positive weight per layer", "0,1"]),
        (["--set", "layer_budgets=1e308,1e308"], ["one positive weight per layer"]),
        (["--set", "layer_budgets=1"], ["1 weights and the model 2 layers"]),
        (["--target", "ort", "--onnx-only"], ["--onnx-only is for --target tensorrt, got ort"]),
        (["--dtype", "float16"], ["--dtype float16 needs --target tensorrt", "leave out"]),
        (["--onnx-only", "--quantize", "int8"], ["--quantize int8", "MatMulNBits", "--target ort"]),
        (["--target", "tensorrt", "--attention", "gqa"], ["--attention gqa", "leave out"]),
        (["--target", "otr"], ["target 'otr'", "did you mean 'ort'?"]),
        (["--max-input", "513"], ["--max-input must be in [1, 512]", "513"]),
        (["--max-batch", "0"], ["--max-batch must be in [1, 1024]"]),
        (["--kv-memory", "lots"], ["8GiB", "'lots'"]),
        (["--kv-memory", "9" * 400], ["8GiB"]),
        (["--seed", "-1"], ["--seed must be in [0, 2^64)"]),
        (["-o", "~nobody-of-that-name/x"], ["-o", "names no home directory"]),
    ],
)
def test_build_refuses_bad_values(
    model: Path, tmp_path: Path, args: list[str], words: list[str]
) -> None:
    is_error(build(model, "-o", tmp_path / "out", *args), 2, *words)
    assert not (tmp_path / "out").exists()


def test_an_end_token_that_is_no_id_is_named(tmp_path: Path) -> None:
    wrong = write_hf(tmp_path / "model", eos_token_id=1)
    (wrong / "generation_config.json").write_text('{"eos_token_id": [{}, 2]}')
    is_error(build(wrong, "-o", tmp_path / "out"), 1, "eos_token_ids.0 is {}", "valid integer")


def test_a_damaged_tokenizer_stops_the_build(tmp_path: Path) -> None:
    damaged = write_hf(tmp_path / "model")
    file = damaged / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:1000])
    is_error(build(damaged, "-o", tmp_path / "out"), 1, str(file), "cannot be read", "copy it")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("app", "args", "hint"),
    [
        (build_cli.app, ["--evicton", "nexus"], "--eviction"),
        (build_cli.app, ["--dtype", "float61"], "float32"),
        (build_cli.app, ["--density", "much"], "--density"),
        (kvsift_app, ["generate", "x", "--temprature", "1"], "--temperature"),
        (kvsift_app, ["chatt"], "chat"),
    ],
)
def test_unknown_options_exit_2_with_a_suggestion(app: Any, args: list[str], hint: str) -> None:
    done = invoke(app, tuple(args))
    assert done.exit_code == 2
    assert hint in done.stderr
    assert done.stdout == ""


def test_missing_config_is_a_model_error(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    is_error(build(tmp_path / "model", "-o", tmp_path / "out"), 1, "config.json")


def test_build_keeps_what_exists(model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    is_error(build(model, "-o", tmp_path / "mine", "--force"), 2, "is no engine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_list_policies_needs_no_model() -> None:
    done = build("--list-policies")
    assert done.exit_code == 0
    for word in ("nexus", "full", "streaming", "random", "reservoir", "blocks of 32", "2606.23961"):
        assert word in done.stdout


def test_disk_full_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(WeightFile, "add", fail)
    is_error(build(model, "-o", tmp_path / "out"), 1, "No space left on device", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_unexpected_errors_are_one_line_and_debug_shows_where(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise ZeroDivisionError("by\nzero")

    monkeypatch.setattr(build_cli.dispatch, "build", fail)
    args = (model, "-o", tmp_path / "out")
    is_error(build(*args), 1, "unexpected ZeroDivisionError: by zero", "--debug")
    assert "Traceback" in build(*args, "--debug").stderr


@pytest.mark.parametrize(
    ("number", "code", "leftovers"),
    [(signal.SIGKILL, -signal.SIGKILL, True), (signal.SIGTERM, 143, False),
     (signal.SIGINT, 130, False)],
)  # fmt: skip
def test_a_killed_build_leaves_no_half_package(
    model: Path, tmp_path: Path, number: int, code: int, leftovers: bool
) -> None:
    building = start(SLOW_BUILD, [model, "-o", tmp_path / "out"])
    assert building.stdout is not None
    assert building.stdout.readline() == "writing\n"
    building.send_signal(number)
    _, stderr = building.communicate(timeout=60)
    assert building.returncode == code
    assert "Traceback" not in stderr
    assert not (tmp_path / "out").exists()
    assert bool(list(tmp_path.iterdir())) == leftovers  # a hidden directory at most
    assert build(model, "-o", tmp_path / "out").exit_code == 0
    load_manifest(tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "size"), [("8GiB", 8 << 30), ("512M", 512 << 20), ("1.5kb", 1536), ("4096", 4096)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert console.parse_size(text) == size
