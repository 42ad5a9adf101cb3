"""The quick start of docs/triton.md, from `build_engine` to a streamed answer."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from triton_tools import PATIENCE, eventually, regions, running

from kvsift.runtime.triton.server import free_ports

pytestmark = pytest.mark.triton
PAGE = Path(__file__).parent.parent / "docs" / "triton.md"
#: Does what the commands ask of curl, on a machine that has none.
CURL = f"""#!{sys.executable}
import sys, time, urllib.error, urllib.request
address = next(word for word in sys.argv[1:] if word.startswith("localhost"))
data = sys.argv[sys.argv.index("-d") + 1].encode() if "-d" in sys.argv else None
for _ in range(90 if "--retry" in sys.argv else 1):
    try:
        print(urllib.request.urlopen("http://" + address, data, timeout=60).read().decode())
        sys.exit(0)
    except urllib.error.URLError:
        time.sleep(1)
sys.exit(7)
"""


def commands(ports: list[int]) -> str:
    """Return the quick start as a script, on these ports and without what is installed already."""
    section = PAGE.read_text(encoding="utf-8").split("## Quick start\n")[1]
    found = re.search(r"```sh\n(.*?)```", section, re.DOTALL)
    assert found
    lines = [line for line in found[1].splitlines() if not line.startswith("pip install ")]
    assert len(lines) == len(found[1].splitlines()) - 2
    text = "\n".join(lines).replace("localhost:8000", f"localhost:{ports[0]}")
    options = zip(("http", "grpc", "metrics"), ports, strict=True)
    given = " ".join(f"--{name}-port={port}" for name, port in options)
    started = text.replace(" &\n", f" {given} &\n")
    assert started != text
    return f"set -e\n{started}\n"


def test_the_quick_start(smollm2_gguf: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("build_engine", "kvsift"):
        shutil.copy(Path(sys.executable).parent / name, tools)
    if shutil.which("curl") is None:
        (tools / "curl").write_text(CURL)
        (tools / "curl").chmod(0o755)
    script = tmp_path / "quick_start.sh"
    script.write_text(commands(free_ports(3)))
    path = f"{tools}:{os.environ['PATH']}"
    # In a session of its own: the server that the script leaves running ends with it.
    process = subprocess.Popen(
        ["bash", script],
        cwd=tmp_path,
        env=os.environ | {"PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output = ""
        assert process.stdout is not None
        while '"finish_reason"' not in output:
            line = process.stdout.readline()
            assert line, f"{output}\n{process.stderr.read() if process.stderr else ''}"
            output += line
        assert process.wait(PATIENCE) == 0
    finally:
        group = members(process.pid)
        shared = any(map(regions, group))
        os.killpg(process.pid, signal.SIGTERM)
    events = [json.loads(e) for e in re.findall(r"^data: ({.*})$", output, re.MULTILINE)]
    assert len(events) > 5
    assert "".join(event["text_output"] for event in events).strip()
    assert (events[-1]["finish_reason"], events[-1]["num_output_tokens"]) == ("length", 24)
    eventually(lambda: not any(running(pid) for pid in group))
    assert shared
    assert not any(map(regions, group))


def members(session: int) -> list[int]:
    """Return the processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(path.name)) == session:
                found.append(int(path.name))
        except OSError:
            continue
    return found
