"""The peak memory of one process that loads an engine and answers one request.

`python -m kvsift.runtime.bench.peak ENGINE CONTEXT OUTPUT BATCH DENSITY THREADS` prints bytes.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from kvsift.builder.errors import EngineError
from kvsift.runtime.bench import text
from kvsift.runtime.bench.contestants import Ours
from kvsift.runtime.engine import Engine


def peak_bytes(
    engine: Path, context: int, output: int, batch: int, density: float, threads: int
) -> int:
    """Return the largest resident memory of such a process; EngineError if it fails."""
    values = [engine, context, output, batch, density, threads]
    command = [sys.executable, "-m", "kvsift.runtime.bench.peak", *map(str, values)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        raise EngineError(f"the memory run failed: {last}; --no-peak leaves it out")
    return int(done.stdout.split()[-1])


def main() -> None:
    """Run once and print the peak."""
    directory, context, output, batch, density, threads = sys.argv[1:]
    engine = Engine(directory, max_batch=int(batch), threads=int(threads))
    prompt = text.prompt(engine.tokenizer, int(context))
    Ours(engine, float(density)).run(prompt, int(output), int(batch))
    print(_peak())


def _peak() -> int:
    """Return the largest resident memory of this process so far, in bytes.

    ru_maxrss counts what the process held before exec, too: on Linux that is its parent's memory.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        held = status.read_text(encoding="utf-8").split("VmHWM:")[1]
        return int(held.split()[0]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    main()
