"""The check of a new engine, with stand-ins for what needs a GPU: loading and inspecting it."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvsift.builder.errors import EngineError

PAIRS = (("past_key.0", "present_key.0"), ("q_ring_in", "q_ring_out"))


class Base:
    """Stands for the classes of TensorRT that the module derives from."""


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, imported with a stand-in for TensorRT."""
    name = "kvsift.builder.targets.plan"
    fake = ModuleType("tensorrt")
    severity = SimpleNamespace(ERROR=1, INTERNAL_ERROR=0)
    vars(fake).update(
        ILogger=type("ILogger", (Base,), {"Severity": severity}),
        IProgressMonitor=Base,
        LayerInformationFormat=SimpleNamespace(JSON="json"),
        __version__="10.16.1",
    )
    monkeypatch.setitem(sys.modules, "tensorrt", fake)
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


def engine(layers: list[dict[str, Any]], aliases: dict[str, str | None] | None) -> Any:
    """An engine with these layers; `aliases` None: one that cannot be asked."""

    def information(form: str) -> str:
        assert form == "json"
        return json.dumps({"Layers": layers})

    made = SimpleNamespace(
        create_engine_inspector=lambda: SimpleNamespace(get_engine_information=information)
    )
    if aliases is not None:
        made.get_aliased_input_tensor = aliases.get
    return made


def check(plan: Any, made: Any) -> None:
    def runtime(log: object) -> Any:
        assert log is plan.LOG
        return SimpleNamespace(deserialize_cuda_engine=lambda data: made)

    plan.trt.Runtime = runtime
    plan.check_engine(b"plan", PAIRS)


def layer(kind: str, source: str, target: str) -> dict[str, Any]:
    ends = {"Inputs": [{"Name": source}], "Outputs": [{"Name": target}]}
    return {"Name": f"{kind} of {source}", "LayerType": kind, **ends}


APPEND = layer("PluginV3", "past_key.0", "present_key.0")


@pytest.mark.parametrize("aliases", [None, {}, {after: before for before, after in PAIRS}])
def test_a_good_engine_passes(plan: Any, aliases: dict[str, str | None] | None) -> None:
    small = [layer("Reformat", "a", "b"), layer("Reformat", "q_ring_in", "c")]
    check(plan, engine([APPEND, *small], aliases))


def test_another_alias_is_refused(plan: Any) -> None:
    wrong = engine([APPEND], {"q_ring_out": "past_key.0"})
    with pytest.raises(EngineError, match=r"'q_ring_out' is the memory of 'past_key.0', not of"):
        check(plan, wrong)


def test_a_copied_cache_is_refused(plan: Any) -> None:
    wrong = engine([APPEND, layer("Reformat", "x", "present_key.0")], {})
    with pytest.raises(EngineError, match=r"would copy a cache .*'Reformat of x'; 1 in all"):
        check(plan, wrong)


def test_an_engine_that_does_not_load(plan: Any) -> None:
    plan.LOG.log(1, "no memory\nat all")
    plan.LOG.log(2, "a warning")
    with pytest.raises(EngineError, match=r"cannot load its own engine: no memory$"):
        check(plan, None)


def test_a_monitor_keeps_what_stops_the_build(plan: Any) -> None:
    """An exception must not pass through TensorRT's own code."""
    told: list[tuple[str, int, int]] = []

    def watch(phase: str, done: int, steps: int) -> None:
        told.append((phase, done, steps))
        if done == 2:
            raise KeyboardInterrupt

    monitor = plan.Monitor(watch)
    monitor.phase_start("outer", None, 3)
    monitor.phase_start("inner", "outer", 9)
    assert monitor.step_complete("inner", 0)
    assert monitor.step_complete("outer", 0)
    assert not monitor.step_complete("outer", 1)
    assert not monitor.step_complete("inner", 1)
    assert isinstance(monitor.stopped, KeyboardInterrupt)
    assert told == [("outer", 0, 3), ("outer", 1, 3), ("outer", 2, 3)]
