"""Load-test engines behind the Triton server with aiperf, one after the other, and print a table.

Usage: python scripts/triton_load.py --aiperf .venv-aiperf/bin/aiperf NAME=ENGINE_DIR ...

Runs where kvsift[triton] is installed; aiperf (pip install aiperf==0.13.0) wants an environment of
its own. Every engine gets the same prompts: consecutive pieces of Python's language reference.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvsift.runtime.bench.text import prompt
from kvsift.runtime.triton.config import Settings
from kvsift.runtime.triton.repository import write_repository
from kvsift.runtime.triton.server import TritonServer

ROWS = (
    ("time_to_first_token", "TTFT ms"),
    ("inter_token_latency", "ITL ms"),
    ("request_latency", "request ms"),
)
RATES = (("output_token_throughput", "output tokens/s"), ("request_throughput", "requests/s"))
REPORT = "profile_export_aiperf.json"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("engines", nargs="+", metavar="NAME=DIR")
    parser.add_argument("--aiperf", default="aiperf", help="the aiperf program")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--input-tokens", type=int, default=2000)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, help="threads of the engine")
    parser.add_argument("--json", type=Path, help="file for aiperf's reports")
    return parser.parse_args()


def write_inputs(folder: Path, engine: Path, asked: argparse.Namespace) -> tuple[Path, Path]:
    """Write the prompts and the payload's template; return their paths."""
    tokenizer = Tokenizer.from_file(str(engine / "tokenizer.json"))
    size = asked.input_tokens
    ids = prompt(tokenizer, size * asked.requests)
    texts = [tokenizer.decode(ids[i * size : (i + 1) * size]) for i in range(asked.requests)]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    template = folder / "payload.jinja"
    payload = '"stream": true, "ignore_eos": true, "seed": 1'
    template.write_text(
        f'{{"text_input": {{{{ text|tojson }}}}, "max_tokens": {asked.output_tokens}, {payload}}}'
    )
    return prompts, template


def measure(
    server: TritonServer, engine: Path, folder: Path, asked: argparse.Namespace
) -> dict[str, Any]:
    """Run aiperf against a running server and return its report."""
    prompts, template = write_inputs(folder, engine, asked)
    command = [
        asked.aiperf, "profile", "--model", "kvsift", "--url", f"http://{server.http}",
        "--endpoint-type", "template", "--streaming",
        "--custom-endpoint", "/v2/models/kvsift/generate_stream",
        "--extra-inputs", f"payload_template:{template}",
        "--extra-inputs", "response_field:text_output",
        "--input-file", str(prompts), "--custom-dataset-type", "single_turn",
        "--tokenizer", str(engine), "--ui", "none",
        "--request-count", str(asked.requests), "--concurrency", str(asked.concurrency),
        "--artifact-dir", str(folder / "report"),
    ]  # fmt: skip
    print("+", " ".join(command), file=sys.stderr, flush=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    report: dict[str, Any] = json.loads((folder / "report" / REPORT).read_text())
    return report


def main() -> int:
    """Measure every engine and print the figures side by side."""
    asked = arguments()
    reports = {}
    for given in asked.engines:
        name, _, path = given.partition("=")
        engine = Path(path).resolve()
        with tempfile.TemporaryDirectory() as folder:
            settings = Settings(max_batch=asked.concurrency, threads=asked.threads)
            repository = Path(folder, "models")
            write_repository(engine, repository, settings=settings)
            with TritonServer(repository, log=Path(folder, "server.log")) as server:
                reports[name] = measure(server, engine, Path(folder), asked)
    if asked.json:
        asked.json.write_text(json.dumps(reports, indent=1) + "\n")
    print("| |", " | ".join(reports), "|")
    print("|---" * (1 + len(reports)) + "|")
    for key, title in ROWS:
        cells = [f"{r[key]['p50']:.1f} / {r[key]['p90']:.1f}" for r in reports.values()]
        print(f"| {title}, p50 / p90 |", " | ".join(cells), "|")
    for key, title in RATES:
        print(f"| {title} |", " | ".join(f"{r[key]['avg']:.2f}" for r in reports.values()), "|")
    return 0


if __name__ == "__main__":
    sys.exit(main())
