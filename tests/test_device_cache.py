"""The cache on a device against the one on the host: the same moves leave the same rows."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kernel_builds
import numpy as np
import pytest
from cpu_device import CpuDevice
from engines import Engines
from numpy.typing import NDArray
from nvcc import nvcc

from kvsift.builder.gpu import gpu_name
from kvsift.builder.package import Manifest, load_manifest
from kvsift.runtime.cache import KeptUnits
from kvsift.runtime.device_cache import DeviceCache
from kvsift.runtime.devices.cuda import CudaDevice
from kvsift.runtime.devices.mirror import Mirror
from kvsift.runtime.host_cache import HostCache

Ints = NDArray[np.int32]
BLOCK = 4
#: Policies whose caches hold keys and values; a query ring; sums of each row; queries' moments.
POLICIES: dict[str, dict[str, Any]] = {
    "streaming": {},
    "nexus": {"options": {"block_size": 8}},
    "h2o": {},
    "expected_attention": {},
}


GPU = pytest.param("gpu", marks=pytest.mark.skipif(gpu_name() is None, reason="needs a GPU"))


@pytest.fixture(params=["host", GPU])
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The host with kernels for the CPU and, where there is one, the machine's GPU."""
    if request.param == "gpu":
        made: Any = CudaDevice(gpu_kernels())
    else:
        made = CpuDevice(kernel_builds.library("plain"), lambda path: None)
    yield made
    made.release()


@pytest.fixture
def host() -> CpuDevice:
    return CpuDevice(kernel_builds.library("plain"), lambda path: None)


@functools.cache
def gpu_kernels() -> Path:
    """The kernels, compiled by nvcc for the GPU of this machine."""
    sys.path.append(str(kernel_builds.ROOT / "scripts"))
    import gpu_check

    capability = re.findall(r"\d+", str(gpu_name()))[-2:]  # "NVIDIA H200 (9.0)"
    return Path(gpu_check.build(str(nvcc()), "".join(capability)))


class Pair:
    """A cache of either kind, of which every call goes to both."""

    def __init__(self, device: Any, manifest: Manifest, slots: int, capacity: int) -> None:
        self.moves = Mirror(device)
        self.host = HostCache(manifest, slots, capacity)
        self.device = DeviceCache(device, self.moves, manifest, slots, capacity)
        self.heads, self.layers = manifest.model.num_kv_heads, manifest.model.num_layers

    def fill(self, rng: np.random.Generator) -> None:
        for slot, layer in np.ndindex(self.host.slots, self.layers):
            held = self.host.read(slot, layer)
            new = {n: rng.standard_normal(a.shape).astype(a.dtype) for n, a in held.items()}
            for cache in (self.host, self.device):
                cache.write(slot, layer, new)
            if (ring := self.host.read_queries(slot)) is not None:
                made = rng.standard_normal(ring.shape).astype(ring.dtype)
                for cache in (self.host, self.device):
                    cache.write_queries(slot, made)

    def compare(self, slot: int, lens: Ints) -> None:
        """Assert that the first `lens` [L, Hkv] rows and the memory of a slot agree."""
        for layer in range(self.layers):
            ours, theirs = self.device.read(slot, layer), self.host.read(slot, layer)
            assert ours.keys() == theirs.keys()
            for name, array in ours.items():
                want = theirs[name]
                assert array.shape == want.shape
                if array.ndim < 2 or name.startswith("query"):
                    assert np.array_equal(array, want), name
                    continue
                for head in range(self.heads):
                    end = lens[layer, head]
                    assert np.array_equal(array[head, :end], want[head, :end]), (name, head)
        rings = self.device.read_queries(slot), self.host.read_queries(slot)
        assert (rings[0] is None) == (rings[1] is None)
        if rings[0] is not None:
            assert np.array_equal(rings[0], rings[1])


def random_kept(rng: np.random.Generator, lens: Ints, rows: int) -> tuple[KeptUnits, Ints]:
    """Return random kept units of rows of `lens` [L, Rl], and how many rows they have."""
    layers = len(lens)
    every = [
        [
            np.sort(rng.permutation(n)[: rng.integers(1, n + 1)])
            for n in -(-np.broadcast_to(lens[layer], rows) // BLOCK)
        ]
        for layer in range(layers)
    ]
    counts = np.array([[len(u) for u in layer] for layer in every], np.int32)
    keep = np.zeros((layers, rows, counts.max()), np.int32)  # beyond the count is anything
    for (layer, row), count in np.ndenumerate(counts):
        keep[layer, row, :count] = every[layer][row]
    ends = np.broadcast_to(lens, counts.shape)[..., None]
    held = np.clip(ends - keep * BLOCK, 0, BLOCK)
    left = np.where(np.arange(counts.max()) < counts[..., None], held, 0).sum(-1)
    return KeptUnits(keep, counts), left.astype(np.int32)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("rows", [1, 2])
def test_moves_equal_the_host(engines: Engines, device: Any, name: str, rows: int) -> None:
    manifest = load_manifest(engines.package(name, **POLICIES[name]))
    rng = np.random.default_rng(rows)
    slots, scratch = Pair(device, manifest, 3, 24), Pair(device, manifest, 1, 16)
    for layer in range(2):
        for cache in (scratch.host, scratch.device):
            cache.grow(layer, 40 + 4 * layer)
    assert scratch.device.capacities == scratch.host.capacities == [40, 44]
    assert slots.device.nbytes == slots.host.nbytes
    scratch.fill(rng)
    slots.fill(rng)
    full = np.full((2, 2), 24, np.int32)
    lens = dict.fromkeys(range(3), full)
    for step in range(12):
        slot = int(rng.integers(3))
        if step % 3 == 0:
            seen = rng.integers(5, 41, (2, rows)).astype(np.int32)
            kept, left = random_kept(rng, seen, rows)
            kept.counts, left = np.minimum(kept.counts, 6), np.minimum(left, 24)
            for mine, theirs in ((slots.host, scratch.host), (slots.device, scratch.device)):
                mine.gather(theirs, 0, slot, kept, seen, BLOCK)
                mine.copy_memory(theirs, 0, slot)
        elif step % 3 == 1:
            before = lens[slot][:, :rows]
            kept, left = random_kept(rng, before, rows)
            for cache in (slots.host, slots.device):
                cache.gather(cache, slot, slot, kept, before, BLOCK)
        else:
            last = int(lens[slot].min()) // BLOCK - 1
            if last < 1:
                continue
            to = rng.integers(0, last, (2, rows)).astype(np.int32)
            for cache in (slots.host, slots.device):
                cache.move_block(slot, last, to, BLOCK)
            left = np.full((2, rows), last * BLOCK, np.int32)
        lens[slot] = np.broadcast_to(left, (2, 2))
        for each in range(3):
            slots.compare(each, lens[each])
    for cache in (slots.host, slots.device):
        cache.clear_memory(1)
    slots.compare(1, full * 0)
    for layer in range(2):
        slots.device.grow(layer, 32)
        slots.host.grow(layer, 32)
    for each in range(3):
        slots.compare(each, lens[each] * (each != 1))
    for cache in (scratch, slots):
        cache.device.release()
        cache.moves.release()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_rows_move_whole(engines: Engines, device: Any, dtype: str) -> None:
    manifest = load_manifest(engines.package("nexus", **POLICIES["nexus"]))
    manifest = manifest.model_copy(update={"dtype": dtype})
    moves = Mirror(device)
    cache = DeviceCache(device, moves, manifest, 2, 16)
    shape = cache.read(0, 0)["key"].shape
    rows = np.arange(np.prod(shape)).reshape(shape) % 251  # whole numbers that both types hold
    for layer in range(2):
        cache.write(1, layer, {"key": rows, "value": rows + 1})
    kept = KeptUnits(np.full((2, 1, 1), 2, np.int32), np.ones((2, 1), np.int32))
    cache.gather(cache, 1, 1, kept, np.full((2, 1), 11, np.int32), BLOCK)
    for layer in range(2):
        got = cache.read(1, layer)
        assert got["key"].dtype.name == dtype
        assert np.array_equal(got["key"][:, :3], rows[:, 8:11].astype(got["key"].dtype))
        assert np.array_equal(got["value"][:, :3], (rows + 1)[:, 8:11].astype(got["key"].dtype))
        assert not cache.read(0, layer)["key"].any()
    cache.release()
    moves.release()


def test_a_recorded_step_reads_what_is_there_when_it_runs(device: Any) -> None:
    """Upload, a copy on the device, download: recorded once, replayed with other numbers."""
    sent, received = Mirror(device), Mirror(device)
    (a, size), (b, _) = (m.lay_out({"x": ((8,), np.int32)}) for m in (sent, received))

    def work() -> None:
        sent.upload(size)
        device.copy(b["x"].address, a["x"].address, 32)
        received.download(size)

    b["x"].array.fill(-1)
    graph = device.record(work)
    device.synchronize()
    assert (b["x"].array == -1).all()  # recorded, not run
    for start in (0, 100):
        a["x"].array[:] = np.arange(start, start + 8)
        device.replay(graph)
        device.synchronize()
        assert b["x"].array.tolist() == list(range(start, start + 8))
    device.drop(graph)
    sent.release()
    received.release()


def test_one_kernel_moves_all_layers(engines: Engines, host: CpuDevice) -> None:
    pair = Pair(host, load_manifest(engines.package("h2o")), 3, 24)
    kept = KeptUnits(np.zeros((2, 1, 1), np.int32), np.ones((2, 1), np.int32))
    lens = np.full((2, 1), 9, np.int32)
    cache = pair.device
    cache.gather(cache, 1, 1, kept, lens, BLOCK)
    cache.move_block(1, 2, kept.keep[..., 0], BLOCK)
    # Keys with values, and the sums of each row.
    assert host.launches == ["kv_gather"] * 2 + ["kv_fill_holes"] * 2
    cache.grow(1, 28)  # the layers now lie apart
    cache.gather(cache, 1, 1, kept, lens, BLOCK)
    assert host.launches.count("kv_gather") == 2 + 2 * 2


def test_growth_keeps_no_old_memory(engines: Engines, host: CpuDevice) -> None:
    manifest = load_manifest(engines.package("nexus", **POLICIES["nexus"]))
    pair = Pair(host, manifest, 1, 16)
    before = host.bytes_now - pair.device.nbytes
    for capacity in (32, 64, 96):
        for layer in range(2):
            pair.device.grow(layer, capacity)
        host.synchronize()
        assert host.bytes_now == before + pair.device.nbytes
    assert host.bytes_most < before + 2 * pair.device.nbytes
