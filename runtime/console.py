"""What the commands share: errors on one line, exit codes, memory, numbers for people."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from kvsift.builder.errors import KvsiftError, UsageError
from kvsift.runtime.paths import user_path

P = ParamSpec("P")
R = TypeVar("R")

EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPT, EXIT_PIPE = 1, 2, 130, 141
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", re.IGNORECASE)


def command(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a command: errors become one line on stderr and an exit code.

    2 for UsageError, 1 for every other failure, 130 for Ctrl-C, 141 when the reader of stdout has
    gone. With --debug (a parameter `debug`) or KVSIFT_DEBUG=1 the traceback is shown as well.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        debug = bool(kwargs.get("debug")) or os.environ.get("KVSIFT_DEBUG") == "1"
        _mend_streams()
        try:
            return function(*args, **kwargs)
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except KeyboardInterrupt:
            print(file=sys.stderr)
            raise typer.Exit(EXIT_INTERRUPT) from None
        except BrokenPipeError:
            forget_stdout()
            raise typer.Exit(EXIT_PIPE) from None
        except Exception as error:
            if debug:
                traceback.print_exc()
            print(f"error: {_one_line(error)}", file=sys.stderr)
            raise typer.Exit(
                EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILURE
            ) from None

    return run


def add_group(app: typer.Typer, name: str, module: str, help: str) -> None:
    """Add the commands of the Typer object `app` in `module`, which is imported when they run.

    So that `--help` and `--version` of the whole answer at once.
    """

    @app.command(
        name,
        help=help,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    @command
    def group(context: typer.Context) -> None:
        commands: typer.Typer = importlib.import_module(module).app
        commands(context.args, prog_name=context.command_path)


def _mend_streams() -> None:
    """Make closed streams empty ones, and print what an encoding lacks as '?' rather than fail."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _one_line(error: Exception) -> str:
    """Return the message; errors that nobody foresaw say so and where to look."""
    text = " ".join(str(error).split())
    if isinstance(error, (KvsiftError, OSError)):
        return text
    if isinstance(error, MemoryError):
        return f"out of memory; {text or 'free some, or ask for less'}"
    return f"unexpected {type(error).__name__}: {text}; --debug shows where"


def forget_stdout() -> None:
    """Send what is still buffered for stdout nowhere: its reader has gone."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, sys.stdout.fileno())
    os.close(sink)


def parse_size(text: str) -> int:
    """Return the bytes of a size such as '8GiB', '512M' or '4096' (units are powers of 1024)."""
    match = _SIZE.fullmatch(text)
    if not match or not 0 < float(match[1]) < math.inf:
        raise UsageError(f"memory must be a size such as 8GiB or 512MiB, got {text!r}")
    return int(float(match[1]) * (1 << _UNITS[match[2].upper()]))


def size_text(count: float) -> str:
    """Return bytes for people: '82.5 MiB'."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def available_memory() -> int | None:
    """Return the bytes that a new process may use here, None if the system does not say.

    The least of the machine's available memory and what a control group leaves.
    """
    found = []
    with contextlib.suppress(OSError):
        info = Path("/proc/meminfo").read_text(encoding="ascii")
        found += [int(kib) << 10 for kib in re.findall(r"^MemAvailable:\s+(\d+) kB", info, re.M)]
    with contextlib.suppress(OSError, ValueError):  # no control group, or "max"
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        found.append(max(0, limit - int((group / "memory.current").read_text())))
    if not found and hasattr(os, "sysconf"):
        with contextlib.suppress(OSError, ValueError):
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(found, default=None)


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table on stdout; without a terminal nothing is cut off."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    table = Table(title=title, title_justify="left", show_header=any(columns))
    for number, name in enumerate(columns):
        table.add_column(name, overflow="fold", no_wrap=number == 0)
    for row in rows:
        table.add_row(*row)
    console.print(table, markup=False, highlight=False)


def version_option(show: bool) -> None:
    """Print the version and end, for an eager --version."""
    if show:
        from kvsift import __version__

        typer.echo(f"kvsift {__version__}")
        raise typer.Exit


def parse_value(text: str) -> Any:
    """Return an int, a float or the text itself, as `--set key=value` reads it."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def only_with(context: typer.Context, option: str, *allowed: str) -> None:
    """Raise UsageError if parameters other than the allowed ones stand beside an option.

    For an option that takes all else from a file: what is given twice would be ignored.
    """
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name not in allowed and source is not None and source.name == "COMMANDLINE":
            raise UsageError(
                f"{option} takes prompt and options from its file; leave out {parameter.opts[0]}"
            )


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """Return the prompt from the option, the file or stdin (less its final newline)."""
    if prompt is not None and file is not None:
        raise UsageError("--prompt and --prompt-file exclude each other; give one of them")
    if prompt is not None:
        return prompt
    source = "stdin" if file is None else str(file)
    try:
        if file is not None:
            text = user_path("--prompt-file", file).read_text(encoding="utf-8")
        elif sys.stdin.isatty():
            raise UsageError("no prompt; give --prompt TEXT or --prompt-file FILE, or pipe one in")
        else:
            text = sys.stdin.read()
    except OSError as error:
        raise UsageError(f"cannot read the prompt from {source}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"the prompt in {source} is not UTF-8 text; convert it") from None
    return text.removesuffix("\n")


def parse_span(text: str) -> tuple[int, int]:
    """Return the token positions (A, B) of a text A:B."""
    try:
        start, end = (int(part) for part in text.split(":"))
    except ValueError:
        raise UsageError(f"--pin takes token positions A:B such as 10:42, got {text!r}") from None
    return start, end


def parse_weights(option: str, text: str | None) -> Any:
    """Return the weights of a text such as 3,2,1, or one of the rules that have a name."""
    if text is None or text in ("uniform", "pyramid"):
        return text
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{option} takes weights such as 3,2,1, got {text!r}") from None


def typed_lines() -> Iterator[str]:
    """Yield what the user types until /exit or the end of input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (input() gains line editing by it)
    interactive = sys.stdin.isatty()
    if interactive:
        print("/exit or Ctrl-D ends, Ctrl-C stops an answer", file=sys.stderr)
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            if interactive:
                print(file=sys.stderr)
            return
        if line == "/exit":
            return
        if line:
            yield line
