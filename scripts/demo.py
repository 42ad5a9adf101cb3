"""Build a dense and an evicted engine of the default model and ask both about a long document.

Run by `make demo`; writes the engines to ./demo and exits 1 if one answers wrongly or the evicted
one takes another share of memory than it should. Usage: python scripts/demo.py [EVICTION_SEED].
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvsift import LLM, EvictionParams, GenerationResult, SamplingParams
from kvsift.builder.errors import PackageError
from kvsift.builder.package import load_manifest
from kvsift.runtime.console import size_text
from kvsift.runtime.sizes import token_bytes

DENSITY = 0.2
#: Said twice in a row, so that one of them lies in one block of 32 tokens.
FACT = "{0} Once more: {0}".format("The secret code of the lighthouse is 7481.")
QUESTION = "What is the secret code of the lighthouse?"
SECRET = "7481"
#: Lines of the document: with the question 65 blocks, of which a density of 0.2 keeps 13.
LINES = 152
MATERIALS = "copper,iron,brass,oak,pine,glass,clay,wool,linen,leather,cork,slate,tin"
THINGS = "nails,hinges,handles,boxes,plates,ropes,bottles,buttons,hooks,spoons,wheels"
STATES = (
    "in good order,worn but usable,sorted by size,wrapped in paper,ready to be sold,"
    "waiting for repair,kept for the spring,marked with chalk,covered with dust"
)
PLACES = "shelf,cupboard,drawer,crate,barrel,corner,rack"
WALLS = "north,east,south,west"
ENGINES = {
    "dense": (Path("demo/full"), ["--eviction", "full"]),
    "evicted": (Path("demo/nexus"), ["--eviction", "nexus", "--density", str(DENSITY)]),
}


@dataclass(frozen=True)
class Answer:
    """What an engine said and what it took."""

    result: GenerationResult
    block_bytes: int
    scratch_bytes: int

    @property
    def most_kv_bytes(self) -> int:
        """The most that the request's cache holds: its budget and the block that fills up."""
        r = self.result
        if r.budget_tokens is None:
            return r.kv_bytes_dense
        return r.budget_tokens * (r.kv_bytes // r.kept_tokens) + self.block_bytes


def document() -> str:
    """Return the inventory of a storehouse with the fact as a line in its middle."""

    def pick(words: str, number: int) -> str:
        return words.split(",")[number % (words.count(",") + 1)]

    # The strides share no factor with the numbers of words, so that no line comes twice.
    lines = [
        f"{pick(MATERIALS, i * 5)} {pick(THINGS, i * 7)}: {pick(STATES, i * 4)}; "
        f"{pick(PLACES, i * 2)}, {pick(WALLS, i * 3)} wall"
        for i in range(LINES)
    ]
    return "\n".join([*lines[: LINES // 2], FACT, *lines[LINES // 2 :]])


def ensure(directory: Path, options: list[str]) -> None:
    """Build an engine with the command line, unless it is there already."""
    try:
        load_manifest(directory)
        print(f"{directory} is there already")
        return
    except PackageError:
        pass
    arguments = [*options, "-o", str(directory)]
    if directory.exists():
        arguments.append("--force")
    print(f"$ build_engine {' '.join(arguments)}", flush=True)
    script = Path(sysconfig.get_path("scripts")) / "build_engine"
    if subprocess.run([str(script), *arguments]).returncode:
        sys.exit(1)


def ask(directory: Path, seed: int) -> Answer:
    """Ask an engine the question about the document, greedily, through the chat template."""
    llm = LLM(directory, max_batch=1)
    engine, manifest = llm.engine, llm.engine.manifest

    messages = [{"role": "user", "content": f"{document()}\n\n{QUESTION}"}]
    (result,) = llm.chat(
        messages, SamplingParams(max_tokens=24), EvictionParams(eviction_seed=seed)
    )
    block = manifest.policy.block_size * token_bytes(manifest)
    return Answer(result, block, engine.scratch.nbytes)


def problems(dense: Answer, evicted: Answer) -> list[str]:
    """Return what is wrong with the answers or the memory they took."""
    found = [
        f"the {name} engine's answer does not contain {SECRET}: {answer.result.text!r}"
        for name, answer in (("dense", dense), ("evicted", evicted))
        if SECRET not in answer.result.text
    ]
    held, most = evicted.result.kv_bytes, evicted.most_kv_bytes
    expected = DENSITY * evicted.result.kv_bytes_dense + evicted.block_bytes
    if abs(most - expected) > 0.05 * expected:
        found.append(f"the evicted cache takes {most} bytes, not {expected:.0f} within 5 %")
    if held > most:
        found.append(f"the evicted cache holds {held} bytes, more than its {most}")
    return found


def show(dense: Answer, evicted: Answer) -> None:
    """Print both answers side by side with what they took."""
    table = Table(title=QUESTION)
    for name in ("", "dense", f"nexus, density {DENSITY}"):
        table.add_column(name, overflow="fold")
    a, b = dense.result, evicted.result

    def row(name: str, value: Callable[[Answer], str]) -> None:
        table.add_row(name, value(dense), value(evicted))

    def rate(count: float, seconds: float) -> str:
        return f"{count / seconds:.1f}" if seconds > 0 else "-"

    row("answer", lambda x: x.result.text.strip())
    row("prompt tokens", lambda x: str(x.result.prompt_tokens))
    row("cached tokens at the end", lambda x: str(x.result.kept_tokens))
    row("prefill tokens/s", lambda x: rate(x.result.prompt_tokens, x.result.timings.ttft_s))
    row("decode tokens/s", lambda x: rate(1, x.result.timings.mean_itl_s))
    row("KV bytes per sequence", lambda x: f"{x.most_kv_bytes:,} ({size_text(x.most_kv_bytes)})")
    row("of them used at the end", lambda x: f"{x.result.kv_bytes:,}")
    row("scratch bytes, once", lambda x: f"{x.scratch_bytes:,} ({size_text(x.scratch_bytes)})")
    Console().print(table, highlight=False)
    share = evicted.most_kv_bytes / dense.most_kv_bytes
    note = (
        f"The text is an inventory with the answer in its middle. Evicted KV bytes are {share:.3f} "
        f"of dense: {DENSITY} and one block of room. The scratch reads prompts and belongs to the "
        f"engine, not to a sequence. {a.prompt_tokens} tokens are short: the gain in decode speed "
        f"grows with the context. Eviction seed {b.eviction_seed}."
    )
    print(textwrap.fill(note, 96))


def main() -> int:
    """Run the demo; 0 if both answers are right and the memory is as promised."""
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    for directory, options in ENGINES.values():
        ensure(directory, options)
    dense, evicted = (ask(directory, seed) for directory, _ in ENGINES.values())
    show(dense, evicted)
    found = problems(dense, evicted)
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
