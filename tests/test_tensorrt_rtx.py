"""A real TensorRT builder, that of TensorRT for RTX, takes the graphs; it needs no GPU.

Its engines hold no plugins: `tensorrt-rtx` packages have op bodies in their place, and of
TensorRT's own form all but the plugin nodes is built.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
from commands import build, is_error
from engines import Engines
from plugin_host import library
from plugin_host import tensorrt as fetched

from kvsift.builder.errors import EngineError
from kvsift.builder.eviction import score_rows
from kvsift.builder.ops import DOMAIN
from kvsift.builder.package import GRAPH, PLAN, Manifest, load_manifest
from kvsift.builder.policies.nodes import ROWS
from kvsift.builder.progress import Bars
from kvsift.builder.targets import rtx
from kvsift.builder.targets.common import FLOATS, specs
from kvsift.builder.targets.job import Job

LIMITS = ("--max-input", 400, "--max-output", 64, "--max-batch", 2)
POLICIES = ("nexus", "snapkv", "nestedkv")


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the module importable, here and in the process that builds."""
    path = str(fetched("rtx"))
    monkeypatch.syspath_prepend(path)
    monkeypatch.setenv("PYTHONPATH", path, prepend=":")


def builds(engines: Engines, target: Path, model: str, policy: str, *options: object) -> None:
    """Build an engine and check what is told of it; prints its size and time."""
    args = ("--eviction", policy, "--target", "tensorrt-rtx", "-o", target, *options)
    done = build(engines.model(model), *args)
    assert done.exit_code == 0, done.stderr
    manifest = load_manifest(target)
    assert manifest.target == "tensorrt-rtx"
    assert manifest.tensorrt is not None
    assert manifest.tensorrt.version == "1.7.1.116"
    assert [p.name for p in manifest.tensorrt.profiles] == ["context", "generation"]
    # The engine holds the weights, two bytes each.
    assert manifest.files[PLAN].bytes > 2 * manifest.parameters
    told = {line.split("│")[1].strip(): line for line in done.stdout.splitlines() if "│" in line}
    assert {"built in", PLAN} <= told.keys()
    print(f"\n{model} {policy}: {told[PLAN]} {told['built in']}")


@pytest.mark.parametrize(
    "policy", ["nexus", "snapkv", pytest.param("nestedkv", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_tiny_models_build(engines: Engines, tmp_path: Path, family: str, policy: str) -> None:
    builds(engines, tmp_path / "engine", family, policy, *LIMITS)


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.parametrize("policy", POLICIES)
def test_smollm2_builds(engines: Engines, tmp_path: Path, smollm2_gguf: Path, policy: str) -> None:
    builds(engines, tmp_path / "engine", "smollm2", policy, "--max-input", 1024)


@pytest.fixture(scope="module")
def dense(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The job of a graph without evictions, whose plugin nodes are cut out."""
    target = tmp_path_factory.mktemp("dense") / "trt"
    args = ("--eviction", "full", "--onnx-only", "-o", target, *LIMITS)
    assert build(engines.model("llama"), *args).exit_code == 0
    return job_of(target, load_manifest(target))


def test_plugins_load_and_timings_are_kept(dense: Job, tmp_path: Path) -> None:
    """With the library, and the preview feature that its aliases need; twice, as builds are."""
    cache = tmp_path / "cache" / "timing"
    job = dense.model_copy(update={"library": library(), "timing_cache": cache})
    phases: dict[str, int] = {}
    for _ in range(2):
        rtx._run(job, lambda phase, done, steps: phases.update({phase: steps - done}))
        assert cache.is_file()
    assert phases
    assert set(phases.values()) == {0}  # each phase was seen to its end
    cache.write_bytes(b"no timings")  # of another version, say
    rtx._run(job, lambda phase, done, steps: None)
    assert cache.read_bytes() != b"no timings"


def test_what_tensorrt_refuses_is_said(dense: Job, tmp_path: Path) -> None:
    wrong = tmp_path / "lib.so"
    wrong.write_bytes(b"no library")
    with pytest.raises(
        EngineError, match=r"cannot load the plugins of .*lib\.so: .*build it again"
    ):
        rtx._run(dense.model_copy(update={"library": wrong}), lambda *told: None)
    model = ir.load(dense.onnx)
    next(node for node in model.graph if node.op_type == "Sigmoid").op_type = "Sigmund"
    other = dense.onnx.with_name("wrong.onnx")
    ir.save(model, other)
    with pytest.raises(EngineError, match=r"TensorRT 1\.7\S+ refuses the .*Sigmund"):
        rtx._run(dense.model_copy(update={"onnx": other}), lambda *told: None)
    small = tuple(
        profile.model_copy(update={"sizes": profile.sizes | {"B": (3, 2, 1)}})
        for profile in dense.profiles
    )
    with pytest.raises(EngineError, match=r"builds no engine: .*rofile"):
        rtx._run(dense.model_copy(update={"profiles": small}), lambda *told: None)


def test_a_stopped_build_ends_the_process_and_leaves_no_package(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: object, name: str, done: int, steps: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Bars, "phase", stop)
    args = ("--target", "tensorrt-rtx", "-o", tmp_path / "out" / "engine", *LIMITS)
    assert build(engines.model("llama"), *args).exit_code == 130
    assert list((tmp_path / "out").iterdir()) == []


def test_rtx_is_missing(engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rtx, "MODULES", ("tensorrt_rtx_absent",))
    done = build(engines.model("llama"), "--target", "tensorrt-rtx", "-o", tmp_path / "engine")
    is_error(done, 1, "TensorRT for RTX is not installed", "pip install tensorrt-rtx")


def test_more_units_than_can_be_sorted(engines: Engines, tmp_path: Path) -> None:
    args = ("--eviction", "snapkv", "--target", "tensorrt-rtx", "-o", tmp_path / "engine")
    is_error(build(engines.model("long"), *args), 2, "sorts at most 3840", "lower --max-input")


def job_of(directory: Path, manifest: Manifest) -> Job:
    """The build of a package's graph without its plugin nodes."""
    assert manifest.tensorrt is not None
    model = without_plugins(directory, manifest)
    onnx = directory / "cut.onnx"
    ir.save(model, onnx)
    return Job(
        onnx=onnx,
        plan=directory / PLAN,
        inputs=specs(model.graph.inputs),
        profiles=manifest.tensorrt.profiles,
    )


def without_plugins(directory: Path, manifest: Manifest) -> ir.Model:
    """The graph with every plugin node cut out: what it reads is an output, what it gives an input.

    What a node only hands on from the graph's own inputs needs no mention.
    """
    model = ir.load(directory / GRAPH)
    graph = model.graph
    fixed = {
        "L": manifest.model.num_layers,
        "R": score_rows(manifest.model, manifest.policy),
        "Hkv": manifest.model.num_kv_heads,
        "Hq": manifest.model.num_heads,
        "D": manifest.model.head_dim,
        "W": manifest.policy.window,
    }
    kinds = {"float32": ir.DataType.FLOAT, "int32": ir.DataType.INT32, "T": FLOATS[manifest.dtype]}
    given, read = [], list(graph.outputs)
    graph.outputs.clear()
    for node in list(graph):
        if node.domain != DOMAIN:
            continue
        for output, told in zip(node.outputs, ROWS[node.op_type].outputs, strict=True):
            if output.shape is None:
                draws = node.attributes["draws"].as_int() if "draws" in node.attributes else 0
                dims = [(fixed | {"n": draws}).get(d, d) for d in told.shape]
                output.shape, output.dtype = ir.Shape(dims), kinds[told.dtype]
            made = ir.Value(name=f"{output.name}_given", type=output.type, shape=output.shape)
            ir.convenience.replace_all_uses_with(output, made)
            given.append(made)
        for value, told in zip(node.inputs, ROWS[node.op_type].inputs, strict=True):
            assert value is not None
            if value.producer() is not None:
                value.dtype = kinds[told.dtype]
                read.append(value)
        graph.remove(node, safe=False)
    graph.inputs.extend(given)
    alive = {v for node in graph for v in node.outputs}
    graph.outputs.extend(dict.fromkeys(v for v in read if v in alive))
    return model


@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        *((policy, "bfloat16") for policy in (*POLICIES, "h2o", "expected_attention", "adakv")),
        ("nexus", "float16"),
        ("nexus", "float32"),
    ],
)
def test_all_but_plugins_builds(engines: Engines, tmp_path: Path, policy: str, dtype: str) -> None:
    target = tmp_path / "trt"
    args = ("--eviction", policy, "--onnx-only", "--dtype", dtype, "-o", target, *LIMITS)
    assert build(engines.model("qwen3"), *args).exit_code == 0
    manifest = load_manifest(target)
    job = job_of(target, manifest)
    rtx._run(job, lambda phase, done, steps: None)
    assert job.plan.stat().st_size > 2 * manifest.parameters
