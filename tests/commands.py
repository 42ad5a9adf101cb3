"""Runs both commands, inside the test's process or in one that can be killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

from typer.testing import CliRunner, Result

from kvsift.builder import cli as build_cli
from kvsift.cli import app as kvsift_app


def invoke(app: Any, args: tuple[object, ...], **options: Any) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], **options)


def build(*args: object) -> Result:
    return invoke(build_cli.app, args)


def kvsift(*args: object, **options: Any) -> Result:
    return invoke(kvsift_app, args, **options)


def is_error(result: Result, code: int, *words: str) -> None:
    """Check the exit code and that stderr is one line with these words."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def start(program: str, args: list[object]) -> subprocess.Popen[str]:
    """Start a command in a process of its own, in which Ctrl-C works."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job passes on that SIGINT is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )
