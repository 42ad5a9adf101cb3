"""The Triton model without a server: its repository, configuration, and what requests mean."""

from __future__ import annotations

import json
import os
import re
import shutil
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from commands import is_error, kvsift
from engines import Engines

from kvsift.builder.errors import UsageError
from kvsift.runtime.triton import repository
from kvsift.runtime.triton.config import Settings, config_text
from kvsift.runtime.triton.fields import INPUTS, OUTPUTS
from kvsift.runtime.triton.metrics import FAMILIES
from kvsift.runtime.triton.repository import write_repository
from kvsift.runtime.triton.requests import NoPromptError, parse, tensors
from kvsift.runtime.triton.server import TritonServer, bundled


@pytest.fixture(scope="module")
def package(engines: Engines) -> Path:
    return engines.package("nexus", options={"block_size": 16, "min_budget_tokens": 0})


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_command_writes_a_whole_repository(package: Path, tmp_path: Path) -> None:
    done = kvsift("triton", package, "-o", tmp_path / "models", "--max-batch", 3,
                  "--kv-memory", "1GiB", "--session-ttl", 60)  # fmt: skip
    assert done.exit_code == 0, done.output
    model = tmp_path / "models" / "kvsift"
    engine = {f"1/engine/{name}" for name in files(package)}
    assert files(model) == {"config.pbtxt", "README.md", "1/model.py"} | engine
    weights = model / "1" / "engine" / "model.data"
    assert weights.samefile(package / "model.data")
    text = (model / "config.pbtxt").read_text()
    assert 'key: "max_batch" value: { string_value: "3" }' in text
    assert 'key: "kv_memory" value: { string_value: "1073741824" }' in text
    readme = (model / "README.md").read_text()
    assert "kvsift tritonserver models\n" in readme
    assert "/v2/models/kvsift/generate" in readme
    assert "$" not in readme.replace('"$PWD"/', "")


def test_copies_names_and_models_beside(package: Path, tmp_path: Path) -> None:
    for options in (["--copy"], ["--name", "other", "--no-batch-dimension"]):
        assert kvsift("triton", package, "-o", tmp_path, *options).exit_code == 0
    copied = tmp_path / "kvsift" / "1" / "engine" / "model.data"
    assert not copied.samefile(package / "model.data")
    assert copied.read_bytes() == (package / "model.data").read_bytes()
    assert "max_batch_size: 0" in (tmp_path / "other" / "config.pbtxt").read_text()
    is_error(kvsift("triton", package, "-o", tmp_path), 2, "exists", "--force")
    assert kvsift("triton", package, "-o", tmp_path, "--force").exit_code == 0
    assert sorted(os.listdir(tmp_path)) == ["kvsift", "other"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--name", "a/b"], "model name 'a/b' is not valid"),
        (["--max-batch", 0], "max_batch must be >= 1, got 0"),
        (["--max-queue", -1], "max_queue must be >= 0, got -1"),
        # With these the server would find that the model cannot be loaded.
        (["--max-batch", 1025], "max_batch must be in [1, 1024], got 1025"),
        (["--threads", 1025], "threads must be in [1, 1024], got 1025"),
        (["--kv-memory", "1K"], "kv_memory is 1024 bytes, but one sequence needs"),
    ],
)
def test_wrong_options(package: Path, tmp_path: Path, options: list[Any], words: str) -> None:
    is_error(kvsift("triton", package, "-o", tmp_path / "models", *options), 2, words)
    assert not (tmp_path / "models").exists()


def test_what_is_no_engine_or_no_model_is_left_alone(package: Path, tmp_path: Path) -> None:
    is_error(kvsift("triton", tmp_path, "-o", tmp_path / "models"), 1, "no engine")
    (tmp_path / "kvsift").mkdir()
    (tmp_path / "kvsift" / "notes").write_text("mine")
    is_error(kvsift("triton", package, "-o", tmp_path, "--force"), 2, "no Triton model")
    assert files(tmp_path) == {"kvsift/notes"}


def test_an_engine_of_links_and_a_repository_of_an_odd_name(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "linked").mkdir()
    for name in files(package):
        (tmp_path / "linked" / name).symlink_to(
            os.path.relpath(package / name, tmp_path / "linked")
        )
    (tmp_path / "my models").mkdir()
    monkeypatch.chdir(tmp_path / "my models")
    assert kvsift("triton", "../linked", "-o", ".").exit_code == 0
    engine = Path("kvsift", "1", "engine")
    assert all((engine / name).samefile(package / name) for name in files(package))
    assert not any((engine / name).is_symlink() for name in files(package))
    readme = Path("kvsift", "README.md").read_text()
    assert "kvsift tritonserver 'my models'\n" in readme
    assert """-v "$PWD"/'my models':/models:ro""" in readme


@pytest.mark.parametrize("inside", [".", "models"])
def test_a_repository_inside_its_engine(package: Path, tmp_path: Path, inside: str) -> None:
    shutil.copytree(package, tmp_path / "engine")
    output = tmp_path / "engine" / inside
    is_error(kvsift("triton", tmp_path / "engine", "-o", output), 2, "is part of the engine")
    assert files(tmp_path / "engine") == files(package)


def test_a_failure_leaves_the_repository_as_it_was(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_repository(package, tmp_path)
    before = {name: (tmp_path / name).stat().st_ino for name in files(tmp_path)}

    def full(*_: Any) -> str:
        raise OSError("no space left")

    monkeypatch.setattr(repository, "config_text", full)
    with pytest.raises(OSError, match="no space"):
        write_repository(package, tmp_path, force=True)
    assert {name: (tmp_path / name).stat().st_ino for name in files(tmp_path)} == before


def test_settings_survive_the_configuration() -> None:
    settings = Settings(max_batch=7, kv_memory=2**33, threads=None, max_queue=9, session_ttl=60)
    text = config_text("m", settings, batched=True)
    rows = [line for line in text.splitlines() if line.startswith("parameters")]
    parsed = {row.split('"')[1]: {"string_value": row.split('"')[3]} for row in rows}
    assert Settings.from_config({"parameters": parsed}) == settings
    parsed["max_batch"]["string_value"] = "many"
    with pytest.raises(UsageError, match=r"max_batch in config\.pbtxt must be an integer"):
        Settings.from_config({"parameters": parsed})


def asked(**values: Any) -> Any:
    """Parse a request whose tensors hold `values`, as Triton hands them over."""
    kinds = {"BOOL": np.bool_, "FP32": np.float32, "INT32": np.int32, "UINT64": np.uint64}
    made = {}
    for field in INPUTS:
        if field.name in values:
            value = values[field.name]
            items = value if isinstance(value, list) else [value]
            if field.dtype == "STRING":
                items = [item.encode() if isinstance(item, str) else item for item in items]
            made[field.name] = np.array([items], kinds.get(field.dtype, np.object_))
    return parse(made, {})


def test_every_input_reaches_the_request() -> None:
    request = asked(
        text_input="hi", max_tokens=5, stream=True, stop_words=["a", ""], bad_words=["b"],
        temperature=0.7, top_k=4, top_p=0.9, min_p=0.1, repetition_penalty=1.1,
        presence_penalty=0.3, frequency_penalty=-0.2, seed=2**64 - 1, ignore_eos=True,
        return_log_probs=True, density=0.2, eviction_seed=3, pin=[0, 2, 5, 9],
        return_eviction_stats=True, min_coverage=0.9, session_id="s", session_turn=2,
    )  # fmt: skip
    sampling, eviction = request.request.sampling, request.request.eviction
    assert (sampling.stop, sampling.bad_words, sampling.seed) == (("a",), ("b",), 2**64 - 1)
    # What was meant, not the nearest fp32: a budget is rounded up.
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.7, 0.9, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.3, -0.2)
    assert (sampling.repetition_penalty, sampling.top_k, sampling.logprobs) == (1.1, 4, 0)
    assert (eviction.density, eviction.eviction_seed) == (0.2, 3)
    assert eviction.pin == ((0, 2), (5, 9))
    assert (eviction.min_coverage, request.request.session_id, request.request.session_turn) == (
        0.9,
        "s",
        2,
    )
    assert (request.stream, request.stats, request.ids, request.echo) == (True, True, False, "hi")
    used = {"text_input", "input_ids", "random_seed", "budget_tokens", "exclude_input_in_output"}
    assert asked(input_ids=[1], budget_tokens=4).request.eviction.budget_tokens == 4
    assert asked(text_input="hi", exclude_input_in_output=True).echo == ""
    assert used <= {field.name for field in INPUTS}


def test_a_request_without_a_prompt_is_a_health_check() -> None:
    with pytest.raises(NoPromptError):
        asked(max_tokens=1)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"max_token": 3}, "unknown input 'max_token'.*did you mean 'max_tokens'"),
        ({"stream": "yes"}, "stream must be true or false, got 'yes'"),
        ({"text_input": 3}, "text_input must be a text, got 3"),
        ({"max_tokens": "3"}, "max_tokens must be an integer, got '3'"),
    ],
)
def test_parameters_are_checked(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse({"text_input": np.array([b"x"], np.object_)} if "text_input" not in parameters
              else {}, parameters)  # fmt: skip


def test_text_that_is_none() -> None:
    with pytest.raises(UsageError, match=r"text_input is not UTF-8 text \(byte 1\)"):
        asked(text_input=[b"a\xff"])


@pytest.mark.parametrize("batched", [True, False])
def test_outputs_have_the_shapes_of_the_configuration(batched: bool) -> None:
    made = tensors({"text_output": "é", "log_probs": [-1.0, -2.0], "kv_bytes": 2**40}, batched)
    lead = (1,) if batched else ()
    assert {name: array.shape for name, array in made.items()} == {
        "text_output": (*lead, 1),
        "log_probs": (*lead, 2),
        "kv_bytes": (*lead, 1),
    }
    assert made["text_output"].reshape(-1)[0] == "é".encode()
    assert list(made) == [f.name for f in OUTPUTS if f.name in made]


def test_without_the_server_its_fix_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'kvsift\[triton\]'"):
        bundled()
    with pytest.raises(UsageError, match="no Triton Inference Server"):
        TritonServer(tmp_path)
    is_error(kvsift("tritonserver", tmp_path / "none"), 2, "no model repository")


def test_numpy_that_the_server_cannot_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would answer with wrong numbers, and nobody would know."""
    server = tmp_path / "tritonserver" / "bin" / "tritonserver"
    server.parent.mkdir(parents=True)
    server.touch()
    spec = ModuleSpec("pytriton", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    monkeypatch.setattr(np, "__version__", "2.1.0")
    with pytest.raises(UsageError, match=r"corrupts tensors of numpy 2\.1\.0; pip install"):
        bundled()


PAGE = (Path(__file__).parent.parent / "docs" / "triton.md").read_text(encoding="utf-8")


def test_the_page_lists_every_input_output_and_metric() -> None:
    for field in (*INPUTS, *OUTPUTS):
        kind = f"{field.dtype}{' list' if field.many else ''}"
        assert f"| `{field.name}` | {kind} | {field.meaning} |\n" in PAGE
    for family in FAMILIES:
        assert f"| `{family.name}` | {family.kind.lower()} | {family.meaning} |\n" in PAGE
    rows = re.findall(r"^\| `(\w+)` \| (?:[A-Z]+\d*|counter|gauge|histogram)", PAGE, re.MULTILINE)
    assert len(rows) == len(INPUTS) + len(OUTPUTS) + len(FAMILIES)


def test_the_manifest_is_a_deployment_and_a_service_that_fit() -> None:
    text = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert text
    deployment, service = yaml.safe_load_all(text[1])
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    labels = pod["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels == service["spec"]["selector"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == ports
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)
    command = container["livenessProbe"]["exec"]["command"][-1]
    with pytest.raises(NoPromptError, match="text_input"):
        asked(**json.loads(command.split("'")[1]))
    assert "grep -q text_input" in command
