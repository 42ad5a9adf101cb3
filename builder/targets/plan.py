"""Builds TensorRT's engine from an ONNX file: the only module of the builder with its calls.

It imports TensorRT when it is imported. For TensorRT for RTX, whose module has the same names, that
module is put in its place first (`rtx_worker.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import tensorrt as trt

from kvsift.builder import names
from kvsift.builder.errors import EngineError
from kvsift.builder.ops import OPS_VERSION
from kvsift.builder.package import Profile, TensorSpec
from kvsift.builder.targets.inspection import cache_copies
from kvsift.builder.targets.job import Job, Watch
from kvsift.builder.targets.profiles import shapes


class Log(trt.ILogger):
    """Keeps what TensorRT says of errors, for the message of the exception."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.errors: list[str] = []

    def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
        """Keep an error; drop the rest."""
        if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
            self.errors.append(msg)


class Monitor(trt.IProgressMonitor):
    """Tells `watch` how far the outermost phase is; stops the build when that raises."""

    def __init__(self, watch: Watch) -> None:
        trt.IProgressMonitor.__init__(self)
        self._watch = watch
        self._outer: dict[str, int] = {}
        #: What ended the build, such as Ctrl-C: an exception must not pass through C++.
        self.stopped: BaseException | None = None

    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
        """Note the steps of a phase without a parent."""
        if not parent_phase:
            self._outer[phase_name] = num_steps
            self._tell(phase_name, 0)

    def step_complete(self, phase_name: str, step: int) -> bool:
        """Report a step; return whether the build goes on."""
        if phase_name in self._outer:
            self._tell(phase_name, step + 1)
        return self.stopped is None

    def phase_finish(self, phase_name: str) -> None:
        """Report that a phase has ended."""
        if phase_name in self._outer:
            self._tell(phase_name, self._outer.pop(phase_name))

    def _tell(self, phase: str, done: int) -> None:
        try:
            self._watch(phase, done, self._outer.get(phase, done))
        except BaseException as error:
            self.stopped = error


#: One for the whole process: TensorRT keeps the first that it is given.
LOG = Log()


def build_plan(job: Job, watch: Watch) -> str:
    """Write the engine and return TensorRT's version.

    Raises EngineError with TensorRT's own words when it refuses the graph or the build fails, or
    when the engine would copy a cache in every step.
    """
    LOG.errors.clear()
    if job.library is not None:
        load_plugins(job.library)
    builder = trt.Builder(LOG)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    _parse(network, job.onnx)
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if job.library is not None:
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    for profile in job.profiles:
        config.add_optimization_profile(_profile(builder, profile, job.inputs))
    cache = _timing_cache(config, job.timing_cache)
    monitor = Monitor(watch)
    config.progress_monitor = monitor
    plan = builder.build_serialized_network(network, config)
    if monitor.stopped is not None:
        raise monitor.stopped
    if plan is None:
        raise EngineError(f"TensorRT {trt.__version__} builds no engine: {_reason()}")
    if job.aliased:
        check_engine(plan, job.aliased)
    job.plan.write_bytes(memoryview(plan))  # type: ignore[arg-type]  # a buffer, untold by the stub
    if job.timing_cache is not None:
        _save_timing_cache(cache, job.timing_cache)
    return str(trt.__version__)


def load_plugins(library: Path) -> None:
    """Load the plugin library unless its plugins are known already; EngineError if it cannot."""
    registry: trt.IPluginRegistry = trt.get_plugin_registry()
    if registry.get_creator("KvAppend", OPS_VERSION, "") is not None:
        return
    if registry.load_library(str(library)) is None:
        raise EngineError(
            f"TensorRT {trt.__version__} cannot load the plugins of {library}: {_reason()}; build "
            "it again with this TensorRT's headers (docs/tensorrt.md)"
        )


def check_engine(plan: trt.IHostMemory, aliased: Sequence[tuple[str, str]]) -> None:
    """Raise EngineError if the engine keeps a cache apart from its input, or copies it."""
    engine = trt.Runtime(LOG).deserialize_cuda_engine(plan)  # type: ignore[arg-type]
    if engine is None:
        raise EngineError(f"TensorRT {trt.__version__} cannot load its own engine: {_reason()}")
    # TensorRT before 10.15 cannot be asked, and may not tell of a plugin's aliases.
    ask: Any = getattr(engine, "get_aliased_input_tensor", lambda name: None)
    for before, after in aliased:
        found = ask(after)
        if found not in (None, "", before):
            raise EngineError(
                f"the engine's output {after!r} is the memory of {found!r}, not of {before!r}: "
                f"TensorRT {trt.__version__} did not keep the plugin's alias; try another version"
            )
    inspector = engine.create_engine_inspector()
    text = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
    # A ring or a state may be copied: TensorRT does so where it likes, and they are small.
    ends = (names.past_key(0)[:-1], names.past_value(0)[:-1])
    large = {name for pair in aliased if pair[0].startswith(ends) for name in pair}
    copies = cache_copies(json.loads(text), large)
    if copies:
        raise EngineError(
            f"the engine would copy a cache in every step (layer {copies[0]!r}; {len(copies)} in "
            f"all); try another version than TensorRT {trt.__version__}, or build without "
            "this check by --onnx-only and trtexec.sh"
        )


def _parse(network: trt.INetworkDefinition, path: Path) -> None:
    parser = trt.OnnxParser(network, LOG)
    if parser.parse(_decomposable(path), str(path)):
        return
    if parser.num_errors:
        error: trt.ParserError = parser.get_error(0)
        where = f"node {error.node_name()!r} ({error.node_operator()})"
        what = where if error.node_operator() else "graph"
        raise EngineError(f"TensorRT {trt.__version__} refuses the {what}: {error.desc()}")
    raise EngineError(f"TensorRT {trt.__version__} refuses the graph: {_reason()}")


def _decomposable(path: Path) -> bytes:
    """Return the model, weights outside, with attention that TensorRT may write as several kernels.

    Where it has no fused one, as for float32, it refuses the graph else. The file itself does not
    say so: the attribute is TensorRT's own, and ONNX's operator has none of that name.
    """
    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        if node.op_type == "Attention":
            node.attribute.append(onnx.helper.make_attribute("TRT_decomposable", 1))
    return bytes(model.SerializeToString())


def _profile(
    builder: trt.Builder, profile: Profile, inputs: Sequence[TensorSpec]
) -> trt.IOptimizationProfile:
    made = builder.create_optimization_profile()
    for spec in inputs:
        if (sizes := shapes(profile, spec)) is not None:
            made.set_shape(spec.name, *(trt.Dims(list(size)) for size in sizes))
    return made


def _timing_cache(config: trt.IBuilderConfig, path: Path | None) -> trt.ITimingCache:
    """Attach what earlier builds measured, or an empty cache where it does not fit."""
    known = path.read_bytes() if path is not None and path.is_file() else b""
    cache = config.create_timing_cache(known)
    if cache is None or not config.set_timing_cache(cache, False):
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)
    return cache


def _save_timing_cache(cache: trt.ITimingCache, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(memoryview(cache.serialize()))  # type: ignore[arg-type]
    part.replace(path)


def _reason() -> str:
    return LOG.errors[0].splitlines()[0] if LOG.errors else "no reason given"
