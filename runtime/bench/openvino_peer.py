"""OpenVINO GenAI on the same weights, in an environment of its own: a worker per setting."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvsift.builder.errors import EngineError
from kvsift.runtime.bench import openvino_worker
from kvsift.runtime.bench.contestants import Run

#: Precision of the arithmetic by that of the weights: floats as ours are, int8 as OpenVINO likes.
PRECISION = {"fp16": "f32", "int8": "default"}


@dataclass
class OpenVino:
    """OpenVINO GenAI, dense (density 1) or with its cache eviction and SnapKV's window.

    `python` has openvino-genai; `model` is a GGUF file. It takes whole blocks of the `kept` tokens
    of a prompt.
    """

    python: Path
    model: Path
    threads: int
    weights: str
    density: float
    kept: Callable[[int], int]
    name: str = field(init=False)
    weight_bytes: int | None = None
    token_bytes: int | None = None
    _process: subprocess.Popen[str] | None = None
    _holds: int = 0

    def __post_init__(self) -> None:
        self.name = "OpenVINO, dense" if self.density >= 1 else "OpenVINO, snapkv"

    def run(self, prompt: Sequence[int], output: int, batch: int) -> Run:
        """Generate for one sequence; the pipeline is loaded once for each number of kept tokens."""
        kept = self._blocks(len(prompt))
        if self._process is None or self._holds != kept:
            self.close()
            self._process, self._holds = self._start(kept), kept
        answer = self._ask(self._process, {"ids": list(prompt), "output": output})
        return Run(answer["ttft_s"], answer["itl_s"], kept or len(prompt) + output / 2)

    def close(self) -> None:
        """End the worker."""
        if self._process is not None:
            self._process.communicate()
            self._process = None

    def _blocks(self, prompt: int) -> int:
        """Return the tokens to keep in whole blocks, 0 for all."""
        block, kept = openvino_worker.BLOCK, self.kept(prompt)
        return 0 if self.density >= 1 or kept >= prompt else kept // block * block

    def _start(self, kept: int) -> subprocess.Popen[str]:
        arguments = [self.model, self.threads, kept, PRECISION[self.weights]]
        command = [str(self.python), openvino_worker.__file__, *map(str, arguments)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._read(process)
        return process

    def _ask(self, process: subprocess.Popen[str], question: dict[str, Any]) -> dict[str, Any]:
        assert process.stdin is not None
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        return self._read(process)

    def _read(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise EngineError(
            f"{self.python} cannot run OpenVINO GenAI on {self.model}; "
            "pip install openvino-genai openvino-tokenizers there"
        )
