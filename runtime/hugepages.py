"""Huge pages for what a library allocates: weights are read from end to end in every decode step.

Where the kernel leaves huge pages to programs that ask (`madvise`, the default of most
distributions), ONNX Runtime's weights lie in pages of 4 KiB, and a decode step waits for address
translation: docs/benchmarks.md has what asking is worth.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

Span = tuple[int, int]

PAGE = 2 << 20
_MAPS = Path("/proc/self/maps")
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
#: Linux's values; `mmap` knows the first, and nothing in Python the second (Linux 6.1).
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


def on_request() -> bool:
    """Whether this kernel gives huge pages to those who ask for them."""
    try:
        return "[madvise]" in _ENABLED.read_text()
    except OSError:
        return False


@contextmanager
def huge_pages() -> Iterator[None]:
    """Move what is allocated inside the block into huge pages, as far as the kernel can.

    Does nothing where huge pages are always on, off or unknown; never raises for their sake.
    """
    if not on_request():
        yield
        return
    before = _anonymous()
    yield
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, end in new_spans(before, _anonymous()):
        start, end = -(-start // PAGE) * PAGE, end // PAGE * PAGE
        if start < end:
            # A refusal, for want of free huge pages say, leaves small ones: nothing is lost.
            libc.madvise(start, end - start, _MADV_HUGEPAGE)
            libc.madvise(start, end - start, _MADV_COLLAPSE)


def new_spans(before: list[Span], after: list[Span]) -> list[Span]:
    """Return the parts of `after` that are not in `before`; both ascending, without overlaps."""
    made = []
    for start, end in after:
        for old_start, old_end in before:
            if old_end <= start or old_start >= end:
                continue
            if start < old_start:
                made.append((start, old_start))
            start = old_end
        if start < end:
            made.append((start, end))
    return made


def _anonymous() -> list[Span]:
    """Return the private writable memory of the process that belongs to no file."""
    spans = []
    for line in _MAPS.read_text().splitlines():
        fields = line.split()
        if fields[1] == "rw-p" and fields[5:] in ([], ["[heap]"]):
            start, end = (int(x, 16) for x in fields[0].split("-"))
            spans.append((start, end))
    return spans
