"""plugins/cpu: kernels on the CPU behave as on a GPU, and each fault is found by a build."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import kernel_builds
import numpy as np
import pytest

HERE = Path(__file__).parent
SOURCES = (HERE / "cudacpu_faults.cu", kernel_builds.PLUGINS / "cpu/runtime.cpp")
SCHEDULES = (0, 1, 2, 7)


def call(kind: str, function: str, *numbers: int, schedule: int = 0) -> tuple[dict[str, Any], str]:
    """Call a function in a process of its own; what it printed, and the sanitizer's report."""
    library = kernel_builds.library(kind, SOURCES, "cudacpu")
    command = [sys.executable, str(HERE / "cudacpu_run.py"), str(library), str(schedule), function]
    done = kernel_builds.run_sanitized(kind, [*command, *map(str, numbers)])
    out: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
    assert done.returncode == 0 or "Sanitizer" in done.stderr, done.stderr
    return out, done.stderr


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_functions(schedule: int) -> None:
    out, _ = call("plain", "run_functions", schedule=schedule)
    assert out["code"] == 0
    rows = np.array(out["out"]).reshape(64, 16)
    for t, row in enumerate(rows):
        lane = t % 32
        ballot = np.array([sum(1 << i for i in range(0, 32, 3))]).astype(np.uint32).view(np.int32)
        want = [3, max(lane - 2, lane if lane < 2 else 0), lane + 2 if lane < 30 else lane]
        want += [lane ^ 5, lane ^ 1, int(ballot[0]), 1, 496, 31 + 100, 32, 1, 2016]
        assert row[:12].tolist() == want
        assert row[12] == (0 if schedule == 1 else 5)  # the block that ran last
        assert row[13:].tolist() == [99975, 100097, 4 + 40 + 3100]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warps", [0, 1])
def test_barriers_order_threads(warps: int, schedule: int) -> None:
    out, _ = call("plain", "run_reverse", warps, 1, schedule=schedule)
    want = [t ^ 31 for t in range(64)] if warps else list(range(63, -1, -1))
    assert out["out"] == want


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (0, "some threads exited before __syncthreads at .*cudacpu_faults.cu:[0-9]+"),
        (1, "barrier divergence: threads wait at .*cudacpu_faults.cu:[0-9]+ and at"),
        (2, "deadlock in block 0: thread 0 waits at .* thread 5 waits at"),
        (3, "a lane calls a warp function whose mask lacks it"),
    ],
)
def test_divergence_is_reported(kind: int, message: str) -> None:
    out, _ = call("plain", "run_diverge", kind)
    assert out["code"] == 719  # cudaErrorLaunchFailure
    assert re.search(message, out["message"]), out["message"]


def test_bad_launches_are_refused() -> None:
    assert "invalid launch configuration" in call("plain", "run_threads", 1025)[0]["message"]
    assert call("plain", "run_threads", 1024)[0]["code"] == 0


def test_shared_memory_starts_as_nan() -> None:
    out, _ = call("plain", "run_uninitialised")
    assert out["out"] == [-1.0] * 64


@pytest.mark.slow
@pytest.mark.parametrize("warps", [0, 1])
def test_tsan_finds_a_missing_barrier(warps: int) -> None:
    out, report = call("tsan", "run_reverse", warps, 1)
    assert out["code"] == 0
    assert "Sanitizer" not in report
    _, report = call("tsan", "run_reverse", warps, 0)
    assert "WARNING: ThreadSanitizer: data race" in report
    assert "cudacpu_faults.cu" in report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "error"), [(0, "heap-buffer-overflow"), (1, "global-buffer-overflow"), (2, "heap-")]
)
def test_asan_finds_an_overrun(which: int, error: str) -> None:
    out, report = call("asan", "run_overrun", which, 0)
    assert out["code"] == 0
    assert "Sanitizer" not in report
    _, report = call("asan", "run_overrun", which, 1)
    assert f"AddressSanitizer: {error}" in report
    assert "cudacpu_faults.cu" in report
