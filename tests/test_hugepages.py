from __future__ import annotations

import ctypes
import mmap
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsift.runtime.hugepages import PAGE, huge_pages, new_spans, on_request

numbers = st.sets(st.integers(0, 60), max_size=20)


def spans(held: set[int]) -> list[tuple[int, int]]:
    """Return the runs of consecutive numbers."""
    return [
        (n, next(m for m in range(n, 62) if m not in held))
        for n in sorted(held - {m + 1 for m in held})
    ]


@given(numbers, numbers)
def test_new_spans_cover_what_is_new_and_nothing_else(before: set[int], after: set[int]) -> None:
    made = new_spans(spans(before), spans(after))
    assert [n for start, end in made for n in range(start, end)] == sorted(after - before)


def huge_kib(memory: mmap.mmap) -> int:
    """Return how much of the memory around a mapping's middle lies in huge pages."""
    middle = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + len(memory) // 2
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= middle < int(found[2], 16)
        if inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1])
    raise AssertionError("the mapping is not among the process's")


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages on request are Linux's")
def test_memory_of_the_block_moves_into_huge_pages_and_keeps_its_content() -> None:
    size = 24 * PAGE + 3 * mmap.PAGESIZE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with huge_pages():
        memory = mmap.mmap(-1, size, flags=flags)
        memory[:] = bytes(range(256)) * (size // 256)
    assert memory[:] == bytes(range(256)) * (size // 256)
    assert (huge_kib(memory) > 0) == on_request()
