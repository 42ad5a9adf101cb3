"""Starts the Triton Inference Server that the package nvidia-pytriton brings, for the CPU.

NVIDIA's container has a server of its own; this one serves machines without containers, and the
tests. The package's python backend is laid out for its own use, so it is arranged anew.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from kvsift.builder.errors import EngineError, UsageError

SHARED_MEMORY = Path("/dev/shm")
#: Seconds; a large model may take minutes to load.
START_TIMEOUT = 600.0
#: Seconds that a stopping server waits for running requests.
EXIT_TIMEOUT = 10
#: Seconds between two looks at the processes of models.
_WATCH_S = 1.0
_LOG_LINES = 12
_STUB = "triton_python_backend_stub"
#: A line of the log about a model, up to Python's traceback.
_FAILURE = re.compile(r"(failed to load .*?)(?:\\n\\nAt:|\"$)", re.MULTILINE)


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return ports that nothing listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((host, 0))
        return [one.getsockname()[1] for one in sockets]


def bundled() -> Path:
    """Return the folder with the bundled server; UsageError with the fix where it is absent."""
    found = importlib.util.find_spec("pytriton")
    folder = Path(found.origin).parent / "tritonserver" if found and found.origin else None
    stub = f"python_backend_stubs/{sys.version_info.major}.{sys.version_info.minor}"
    if folder is None or not (folder / "bin" / "tritonserver").is_file():
        raise UsageError(
            "no Triton Inference Server here; pip install 'kvsift[triton]' on Linux x86-64, "
            "or use NVIDIA's container"
        )
    if not np.__version__.startswith("1."):
        raise UsageError(
            f"the bundled server's python backend corrupts tensors of numpy {np.__version__}; "
            "pip install 'numpy<2'"
        )
    if not (folder / stub).is_dir():
        raise UsageError(
            f"the bundled server has no python backend for Python {sys.version.split()[0]}; "
            "use Python 3.11"
        )
    return folder


def lay_out_backend(folder: Path, target: Path) -> None:
    """Copy the python backend of the bundled server `folder` to `target` as the server wants it."""
    backend = target / "python"
    backend.mkdir(parents=True)
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        shutil.copy(folder / "backends" / "python" / name, backend)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = folder / "python_backend_stubs" / version / _STUB
    shutil.copy(stub, backend)
    (backend / stub.name).chmod(0o755)


def server_environment(folder: Path, base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which the server and its stub find their libraries and Python."""
    libraries = [
        str(folder.parent.parent / "nvidia_pytriton.libs"),
        str(sysconfig.get_config_var("LIBDIR")),
        base.get("LD_LIBRARY_PATH", ""),
    ]
    return {
        **base,
        "LD_LIBRARY_PATH": ":".join(filter(None, libraries)),
        # The stub's Python is the first on PATH.
        "PATH": f"{Path(sys.executable).parent}:{base.get('PATH', '')}",
    }


class TritonServer:
    """The bundled tritonserver as a child process, on loopback unless told otherwise.

    Give 0 for a port to take a free one. `start` returns once the models are ready, EngineError
    with the log's end if they do not become so; `stop` ends the server and leaves no shared memory
    behind, also if the server was killed. `options` go to tritonserver as they are.
    """

    def __init__(
        self,
        repository: Path,
        *,
        host: str = "127.0.0.1",
        http_port: int = 0,
        grpc_port: int = 0,
        metrics_port: int = 0,
        options: Sequence[str] = (),
        log: Path | None = None,
    ) -> None:
        self.folder = bundled()
        self.repository = repository
        self.host = host
        free = free_ports(3)
        self.http_port = http_port or free[0]
        self.grpc_port = grpc_port or free[1]
        self.metrics_port = metrics_port or free[2]
        self.options = list(options)
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None
        self._prefix = ""
        self._backends: Path | None = None
        #: A server with a dead model would wait for answers that never come.
        self._broken = False

    @property
    def http(self) -> str:
        """Address of the HTTP endpoints, without the scheme."""
        return f"{self.host}:{self.http_port}"

    @property
    def grpc(self) -> str:
        """Address of the gRPC endpoint."""
        return f"{self.host}:{self.grpc_port}"

    def command(self) -> list[str]:
        """Return the command line."""
        return [
            str(self.folder / "bin" / "tritonserver"),
            f"--model-repository={self.repository}",
            f"--backend-directory={self._backends}",
            f"--backend-config=python,shm-region-prefix-name={self._prefix}",
            f"--http-address={self.host}",
            f"--grpc-address={self.host}",
            f"--metrics-address={self.host}",
            f"--http-port={self.http_port}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-port={self.metrics_port}",
            f"--exit-timeout-secs={EXIT_TIMEOUT}",
            "--disable-auto-complete-config",  # it is complete, and this loads the model once
            *self.options,
        ]

    def launch(self) -> None:
        """Start the process and return at once."""
        # A prefix of its own, so that what a killed server leaves can be told from others'.
        self._prefix = f"kvsift_{os.getpid()}_{uuid.uuid4().hex[:12]}_"
        self._backends = Path(tempfile.mkdtemp(prefix="kvsift-triton-"))
        lay_out_backend(self.folder, self._backends)
        output = self.log.open("ab") if self.log else None
        with output or contextlib.nullcontext():
            self.process = subprocess.Popen(
                self.command(),
                env=server_environment(self.folder, os.environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                start_new_session=True,  # Ctrl-C reaches the server once, through `stop`
            )

    def start(self, timeout: float = START_TIMEOUT) -> None:
        """Start the server and wait until its models are ready."""
        self.launch()
        end = time.monotonic() + timeout
        while not self.ready():
            assert self.process is not None
            code = self.process.poll()
            if code is not None or time.monotonic() > end:
                what = f"ended with {code}" if code is not None else f"not ready in {timeout:.0f} s"
                self.stop()
                raise EngineError(f"tritonserver {what}; {self._why()}")
            time.sleep(0.1)

    def ready(self) -> bool:
        """Whether the server answers and all its models are loaded."""
        try:
            with urllib.request.urlopen(f"http://{self.http}/v2/health/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def wait(self) -> int:
        """Wait for the server to end and return its exit code.

        EngineError when the process of a model has died: the server stays up then and lets the
        clients of that model wait for ever.
        """
        assert self.process is not None
        before: set[int] = set()
        while (code := self.process.poll()) is None:
            # A stub that ends as it should is a zombie for a moment only.
            dead = self._zombies()
            if before & dead:
                self._broken = True
                raise EngineError(
                    "the process of a model has died (killed, out of memory or a fault; see the "
                    "output above), and its requests are lost; start the server again"
                )
            before = dead
            time.sleep(_WATCH_S)
        return code

    def _zombies(self) -> set[int]:
        """Return the processes of models that have ended without the server noticing."""
        assert self.process is not None
        found = set()
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, ValueError):
                name, rest = path.read_text().split("(", 1)[1].rsplit(")", 1)
                state, parent = rest.split()[:2]
                if state == "Z" and int(parent) == self.process.pid and name == _STUB[:15]:
                    found.add(int(path.parent.name))
        return found

    def stop(self) -> None:
        """End the server, after EXIT_TIMEOUT seconds by force, and remove what it shared."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill() if self._broken else self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(EXIT_TIMEOUT + 20)
            # Stubs belong to its session and may outlive it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
        for region in self.shared_memory():
            region.unlink(missing_ok=True)
        if self._backends is not None:
            shutil.rmtree(self._backends, ignore_errors=True)
            self._backends = None

    def shared_memory(self) -> list[Path]:
        """Return the shared memory regions of this server that exist now."""
        if not self._prefix or not SHARED_MEMORY.is_dir():
            return []
        return [path for path in SHARED_MEMORY.iterdir() if path.name.startswith(self._prefix)]

    def _why(self) -> str:
        """Return the end of the log on one line."""
        if self.log is None or not self.log.is_file():
            return "its output above says why"
        text = self.log.read_text(errors="replace")
        failures = _FAILURE.findall(text)
        last = max(failures, key=len) if failures else " | ".join(text.splitlines()[-_LOG_LINES:])
        return f"{last} (log: {self.log})"

    def __enter__(self) -> TritonServer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
