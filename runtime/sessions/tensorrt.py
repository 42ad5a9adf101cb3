"""The TensorRT session: caches stay on the device, decode steps are recorded and replayed.

Everything is enqueued on the device's one stream, and a step waits for it once, at its end. What
the device is, is the device's own matter (`runtime/devices`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

from numpy.typing import DTypeLike

from kvsift.builder import names
from kvsift.builder.errors import EngineError
from kvsift.builder.package import PLAN, Manifest, TensorSpec
from kvsift.runtime.cache import KEY, VALUE, Array, KVCache
from kvsift.runtime.device_cache import DeviceCache
from kvsift.runtime.devices import Context, Device, Graph
from kvsift.runtime.devices.mirror import Mirror, Pair
from kvsift.runtime.devices.tensors import RING, numpy_type
from kvsift.runtime.sessions import Kept, Step, StepOutput
from kvsift.runtime.sessions.profiles import Fit, check_slots, fit

#: What padding holds, where it is not 0.
PADDING = {names.EVICT_SLOTS: -1, names.UNIT_IDS: -1}
#: A decode step of one shape is recorded after it has come so often.
RECORD_AFTER = 2


@dataclass
class Plan:
    """Bindings of the steps of one shape over one cache, and the recorded step if there is one.

    `sent` and `received` are bytes of the step's inputs and outputs; `stamp` tells whether the
    memory still lies where it did.
    """

    context: Context
    inputs: dict[str, Pair]
    outputs: dict[str, Pair]
    sent: int
    received: int
    stamp: tuple[int, ...]
    uses: int = 0
    graph: Graph | None = None


class TensorRTSession:
    """Runs a package's engine on a device, the machine's GPU unless another one is given.

    Raises EngineError when TensorRT is missing, or the engine was made by another TensorRT or for
    another GPU.
    """

    def __init__(self, directory: Path, manifest: Manifest, device: Device | None = None) -> None:
        self._manifest = manifest
        self._device = device or open_device(directory)
        try:
            check_build(directory, manifest, self._device)
            self._device.load(directory)
        except EngineError:
            self._device.release()
            raise
        self._sent, self._received, self._moves = (Mirror(self._device) for _ in range(3))
        self._plans: WeakKeyDictionary[DeviceCache, dict[Fit, Plan]] = WeakKeyDictionary()
        self._contexts: dict[int, Context] = {}
        self._cached = _cached_tensors(manifest)

    def new_cache(self, slots: int, capacity: int) -> DeviceCache:
        """Return an empty cache on the device; CapacityError if the engine has fewer slots."""
        check_slots(self._manifest, slots)
        cache = DeviceCache(self._device, self._moves, self._manifest, slots, capacity)
        self._plans[cache] = {}
        return cache

    def run(self, cache: KVCache, step: Step) -> StepOutput:
        """Run one step in place on the first B slots of `cache`."""
        assert isinstance(cache, DeviceCache), "a cache of another session"
        shape = fit(self._manifest, cache.capacities, cache.slots, step)
        plan = self._plan(cache, shape)
        self._write(plan, step)
        plan.uses += 1
        if plan.graph is not None:
            self._device.replay(plan.graph)
        else:
            self._enqueue(plan)
        self._device.synchronize()
        self._moves.reset()
        output = self._read(plan, step)
        if shape.is_generation and plan.graph is None and plan.uses == RECORD_AFTER:
            # The context has just run with these shapes, so that nothing is set up in the record.
            plan.graph = self._device.record(partial(self._enqueue, plan))
        return output

    def release(self) -> None:
        """Give back everything on the device; the session and its caches end here."""
        for cache, plans in self._plans.items():
            for plan in plans.values():
                self._drop(plan)
            cache.release()
        self._plans.clear()
        self._contexts.clear()
        for mirror in (self._sent, self._received, self._moves):
            mirror.release()
        self._device.release()

    def _enqueue(self, plan: Plan) -> None:
        """Enqueue all of a step: its inputs, the engine, its outputs."""
        self._sent.upload(plan.sent)
        plan.context.run()
        self._received.download(plan.received)

    def _plan(self, cache: DeviceCache, shape: Fit) -> Plan:
        """Return the plan of a shape, made anew where memory has moved since.

        Prompts differ too much to be known again: all bind the one context of their profile.
        """
        known = self._plans[cache]
        old = known.get(shape)
        if old is not None and old.stamp == self._stamp(cache):
            return old
        if old is not None:
            self._drop(old)
        sizes = dict(shape.sizes)
        inputs, sent = self._sent.lay_out(self._specs(self._manifest.inputs, sizes))
        outputs, received = self._received.lay_out(self._specs(self._manifest.outputs, sizes))
        context = old.context if old else self._context(shape)
        for spec in (*self._manifest.inputs, *self._manifest.outputs):
            pair = inputs.get(spec.name) or outputs.get(spec.name)
            if pair:
                context.bind(spec.name, pair.address, pair.shape)
            else:
                name, layer = self._cached[spec.name]
                address = cache.tensors.by_name[name].bases[layer]
                context.bind(spec.name, address, _shape(spec, sizes))
        plan = Plan(context, inputs, outputs, sent, received, self._stamp(cache))
        if shape.is_generation:
            known[shape] = plan
        return plan

    def _context(self, shape: Fit) -> Context:
        """Return a context: a recorded step's own, since no other shape may be bound to it."""
        if shape.is_generation:
            return self._device.context(shape.index)
        if shape.index not in self._contexts:
            self._contexts[shape.index] = self._device.context(shape.index)
        return self._contexts[shape.index]

    def _stamp(self, cache: DeviceCache) -> tuple[int, ...]:
        return cache.tensors.stamp, self._sent.stamp, self._received.stamp

    def _specs(
        self, specs: tuple[TensorSpec, ...], sizes: dict[str, int]
    ) -> dict[str, tuple[tuple[int, ...], DTypeLike]]:
        """Return shape and type of every tensor that is not the cache's."""
        return {
            spec.name: (_shape(spec, sizes), numpy_type(spec.dtype))
            for spec in specs
            if spec.name not in self._cached
        }

    def _write(self, plan: Plan, step: Step) -> None:
        """Put a step's numbers into the plan's inputs, and padding behind them."""
        given: dict[str, Array] = {
            names.INPUT_IDS: step.input_ids,
            names.POSITION_IDS: step.position_ids,
            names.N_NEW: step.n_new,
            names.PAST_LENS: step.past_lens,
        }
        if step.evictions is not None:
            given |= step.evictions.feed()
        for name, pair in plan.inputs.items():
            pair.array.fill(PADDING.get(name, 0))
            if name in given:
                pair.array[tuple(map(slice, given[name].shape))] = given[name]

    def _read(self, plan: Plan, step: Step) -> StepOutput:
        """Return copies of what the step has made, without the padding."""
        made = {name: pair.array for name, pair in plan.outputs.items()}
        x, kept = step.evictions, None
        if x is not None:
            count, units = len(x.slots), x.unit_ids.shape[-1]
            scores = made.get(names.SCORES)
            kept = Kept(
                made[names.KEEP][:, :count, :, :units].copy(),
                made[names.KEEP_LEN][:, :count].copy(),
                made[names.COVERAGE][:, :count].copy(),
                None if scores is None else scores[:, :count, :, :units].copy(),
            )
        return StepOutput(made[names.LOGITS][: len(step.input_ids)].copy(), kept)

    def _drop(self, plan: Plan) -> None:
        if plan.graph is not None:
            self._device.drop(plan.graph)
            plan.graph = None


def open_device(directory: Path) -> Device:
    """Return the machine's GPU, to run the engine of a package.

    Raises EngineError when the package has no engine yet, or TensorRT or cuda-python is missing.
    """
    if not (directory / PLAN).is_file():
        raise EngineError(
            f"{directory} has no {PLAN} (it was built with --onnx-only); make it with "
            f"sh trtexec.sh in that directory, or rebuild with build_engine --target tensorrt"
        )
    from kvsift.runtime.devices.tensorrt import TensorRTDevice

    return TensorRTDevice()


def check_build(directory: Path, manifest: Manifest, device: Device) -> None:
    """Raise EngineError when the device cannot run the package's engine; the message has the fix.

    Nothing is compared that the package does not know, such as the GPU of a plan by trtexec.
    """
    built = manifest.tensorrt
    assert built is not None
    again = "rebuild it on this machine with build_engine --target tensorrt"
    if built.version is not None and built.version != device.version:
        raise EngineError(
            f"{directory / PLAN} was made by TensorRT {built.version} and this machine has "
            f"{device.version}; pip install tensorrt=={built.version}, or {again}"
        )
    if built.gpu is not None and built.gpu != device.name:
        raise EngineError(
            f"{directory / PLAN} was made for {built.gpu} and this machine has {device.name}; "
            f"{again}"
        )
    cached, aliased = _cached_tensors(manifest), {after: before for before, after in built.aliased}
    for spec in manifest.outputs:
        before = aliased.get(spec.name, "")
        if spec.name in cached and cached.get(before) != cached[spec.name]:
            raise EngineError(f"{directory} does not write {spec.name!r} in place; rebuild it")


def _cached_tensors(manifest: Manifest) -> dict[str, tuple[str, int]]:
    """Return the cache's tensor and layer behind the names of the engine's inputs and outputs."""
    found = {names.Q_RING_IN: (RING, 0), names.Q_RING_OUT: (RING, 0)}
    for i in range(manifest.model.num_layers):
        found |= {names.past_key(i): (KEY, i), names.present_key(i): (KEY, i)}
        found |= {names.past_value(i): (VALUE, i), names.present_value(i): (VALUE, i)}
        for state in manifest.policy.states:
            found |= {names.state_in(state, i): (state, i), names.state_out(state, i): (state, i)}
    return found


def _shape(spec: TensorSpec, sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(d if isinstance(d, int) else sizes[d] for d in spec.shape)
