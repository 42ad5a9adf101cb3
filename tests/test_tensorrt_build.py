"""What surrounds TensorRT's builder: the machine, the job, the package, errors, progress.

TensorRT itself is a stand-in here; tests/test_tensorrt_rtx.py has a real one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from commands import build, is_error
from engines import Engines

from kvsift.builder import gpu, plugin_library
from kvsift.builder.errors import EngineError
from kvsift.builder.package import GRAPH, PLAN, WEIGHTS, load_manifest
from kvsift.builder.targets import dispatch, tensorrt
from kvsift.builder.targets.common import BuildOptions
from kvsift.builder.targets.inspection import cache_copies
from kvsift.builder.targets.job import Job, Watch

VERSION, GPU = "10.16.1", "NVIDIA Test (9.0)"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Job]:
    """A machine with TensorRT, a GPU and the plugin library; returns the jobs it was given."""
    library = tmp_path / plugin_library.NAME
    library.touch()
    jobs: list[Job] = []

    def build_plan(job: Job, watch: Watch) -> str:
        assert job.onnx.is_file()
        jobs.append(job)
        watch("Building", 1, 2)
        job.plan.write_bytes(b"plan")
        return VERSION

    module, plan = ModuleType("tensorrt"), ModuleType("plan")
    vars(module)["Builder"] = object
    vars(plan)["build_plan"] = build_plan
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    monkeypatch.setitem(sys.modules, "kvsift.builder.targets.plan", plan)
    monkeypatch.setattr(tensorrt, "gpu_name", lambda: GPU)
    monkeypatch.setenv(plugin_library.VARIABLE, str(library))
    return jobs


def test_auto_builds_for_tensorrt_where_it_can(
    engines: Engines, tmp_path: Path, machine: list[Job]
) -> None:
    done = build(engines.model("tiny"), "-o", tmp_path / "engine", "--max-input", 400)
    assert done.exit_code == 0, done.stderr
    assert "tensorrt (chosen by auto), 10.16.1, NVIDIA Test (9.0)" in done.stdout
    manifest = load_manifest(tmp_path / "engine")
    assert manifest.target == "tensorrt"
    assert manifest.dtype == "bfloat16"
    assert manifest.tensorrt is not None
    assert (manifest.tensorrt.version, manifest.tensorrt.gpu) == (VERSION, GPU)
    assert (tmp_path / "engine" / PLAN).read_bytes() == b"plan"
    assert not {GRAPH, WEIGHTS, tensorrt.SCRIPT} & set(manifest.files)  # the engine holds them
    (job,) = machine
    assert job.library == tmp_path / plugin_library.NAME
    assert job.aliased == manifest.tensorrt.aliased
    assert job.profiles == manifest.tensorrt.profiles
    assert job.inputs == manifest.inputs
    assert job.timing_cache is not None
    assert job.timing_cache.parts[-2] == "kvsift"


@pytest.mark.parametrize("options", [["--quantize", "int8"], ["--attention", "portable"]])
def test_auto_is_ort_for_its_own_options(
    engines: Engines, tmp_path: Path, machine: list[Job], options: list[str]
) -> None:
    done = build(engines.model("tiny"), "-o", tmp_path / "engine", *options)
    assert done.exit_code == 0, done.stderr
    assert load_manifest(tmp_path / "engine").target == "ort"
    assert not machine


def test_what_is_missing_is_named(
    engines: Engines, tmp_path: Path, machine: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = (engines.model("tiny"), "-o", tmp_path / "engine", "--target", "tensorrt")
    monkeypatch.setenv(plugin_library.VARIABLE, str(tmp_path / "absent.so"))
    is_error(build(*args), 1, "no plugin library", "absent.so", "KVSIFT_CUDA=ON")
    monkeypatch.setattr(tensorrt, "gpu_name", lambda: None)
    is_error(build(*args), 1, "none is found here", "cuda-python", "--onnx-only", "container")
    # The wheel of type stubs alone makes `import tensorrt` an empty package.
    monkeypatch.setitem(sys.modules, "tensorrt", ModuleType("tensorrt"))
    is_error(build(*args), 1, "TensorRT's Python module is not installed", "--onnx-only")
    assert not (tmp_path / "engine").exists()
    assert dispatch.choose("auto", BuildOptions()) == "ort"


def test_a_failed_engine_leaves_no_package(
    engines: Engines, tmp_path: Path, machine: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(job: Job, watch: Watch) -> str:
        raise EngineError("TensorRT refuses the graph: out of paper")

    vars(sys.modules["kvsift.builder.targets.plan"])["build_plan"] = fail
    is_error(
        build(engines.model("tiny"), "-o", tmp_path / "out" / "engine", "--target", "tensorrt"),
        1,
        "out of paper",
    )
    assert list((tmp_path / "out").iterdir()) == []


def test_onnx_only_prints_the_command_and_writes_it(engines: Engines, tmp_path: Path) -> None:
    target = tmp_path / "an engine"
    done = build(engines.model("tiny"), "-o", target, "--target", "tensorrt", "--onnx-only")
    assert done.exit_code == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    library = "KVSIFT_PLUGIN_LIBRARY=/path/to/libkvsift_trt.so.1"
    assert last.endswith(f"{library} sh '{target}/trtexec.sh'")
    manifest = load_manifest(target)
    script = (target / tensorrt.SCRIPT).read_text()
    assert script.startswith("#!/bin/sh\n")
    for word in ("--onnx=model.onnx", "--saveEngine=engine.plan", "--stronglyTyped"):
        assert word in script
    for option in ("min", "opt", "max"):
        assert script.count(f"--{option}Shapes=") == 2
    for spec in manifest.inputs:  # all have a symbolic dimension
        assert script.count(f"{spec.name}:") == 6


@pytest.mark.parametrize("found", [True, False])
def test_the_script_hands_trtexec_its_words(engines: Engines, tmp_path: Path, found: bool) -> None:
    """A shell runs it, with a program in the place of trtexec."""
    target = tmp_path / "engine"
    assert build(engines.model("tiny"), "-o", target, "--onnx-only").exit_code == 0
    program = tmp_path / "bin" / "trtexec"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\npwd\nfor word in "$@"; do echo "$word"; done\n')
    program.chmod(0o755)
    environment = {"PATH": f"{program.parent}:/usr/bin:/bin"}
    if found:
        environment[plugin_library.VARIABLE] = "/a path/lib.so"
    done = subprocess.run(
        ["sh", str(target / tensorrt.SCRIPT), "--verbose"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if not found:
        assert done.returncode != 0
        assert plugin_library.VARIABLE in done.stderr
        return
    where, *words = done.stdout.splitlines()
    assert where == str(target)
    assert words[0] == "--dynamicPlugins=/a path/lib.so"
    assert words[-1] == "--verbose"
    assert all(word.startswith("--") for word in words)
    assert [w for w in words if w.startswith("--profile=")] == ["--profile=0", "--profile=1"]


def test_copies_of_a_cache_are_found() -> None:
    def layer(name: str, kind: str, inputs: list[str], outputs: list[str]) -> dict[str, object]:
        return {
            "Name": name,
            "LayerType": kind,
            "Inputs": [{"Name": x, "Dimensions": [1, 2, 640, 64]} for x in inputs],
            "Outputs": [{"Name": x} for x in outputs],
        }

    layers = [
        layer("append", "PluginV3", ["past_key.0", "rows"], ["present_key.0"]),
        layer("attend", "fused_mha", ["q", "present_key.0"], ["o"]),
        layer("small", "Reformat", ["o"], ["o2"]),
        "a name, as without details",
    ]
    caches = {"past_key.0", "present_key.0"}
    assert cache_copies({"Layers": layers}, caches) == []
    layers.append(layer("out", "Reformat", ["x"], ["present_key.0"]))
    layers.append(layer("in", "Shuffle", ["past_key.0"], ["y"]))
    assert cache_copies({"Layers": layers}, caches) == ["out", "in"]


@pytest.mark.parametrize(
    ("error", "expected"), [(0, "NVIDIA Test (9.0)"), (35, None)], ids=["device", "no driver"]
)
def test_gpu_name(monkeypatch: pytest.MonkeyPatch, error: int, expected: str | None) -> None:
    def properties(device: int) -> tuple[int, SimpleNamespace]:
        assert device == 0
        return error, SimpleNamespace(name=b"NVIDIA Test\0\0", major=9, minor=0)

    runtime = ModuleType("cuda.bindings.runtime")
    vars(runtime)["cudaError_t"] = SimpleNamespace(cudaSuccess=0)
    vars(runtime)["cudaGetDeviceProperties"] = properties
    bindings = ModuleType("cuda.bindings")
    vars(bindings)["runtime"] = runtime
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    assert gpu.gpu_name() == expected
