"""Put the results of `kvsift eval` and `kvsift bench` into docs/benchmarks.md, between its marks.

Usage: python scripts/update_benchmarks.py RESULTS_DIR ... Each result that is found in one of the
directories replaces what stands between `<!-- NAME -->` and `<!-- end NAME -->`; plots go to
docs/figures. What is not found stays as it is; results of another model are refused.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvsift.runtime.bench import sweep_report
from kvsift.runtime.evaluation import agreement, report, ruler_run, sessions, suites

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
FIGURES = ROOT / "docs" / "figures"
#: Weights of the default model, as the results of `kvsift eval` name them.
WEIGHTS = "0e8b177ff2f1b74a"
Found = dict[str, Any]


def fidelity(found: Found) -> str:
    columns = _columns(found, "kl")
    head = (
        f"KL to the full cache in nats over the next {found['settings']['follow']} tokens, prompts "
        f"of {found['settings']['prompt']} tokens, {_counts(found)}, standard errors over samples."
    )
    agreed = _columns(found, "agreement")
    return "\n\n".join(
        (
            head,
            report.overview(columns),
            "Paired differences to `nexus`; below zero is nearer to the full cache:",
            report.differences(columns, "nexus"),
            "<details><summary>Top-1 agreement and perplexity</summary>",
            "Share of positions at which the likeliest token is that of the full cache:",
            report.overview(agreed),
            "Mean negative log probability of the text (perplexity is its exponential):",
            report.overview(_columns(found, "nll")),
            "</details>",
        )
    )


def stream(found: Found) -> str:
    settings, samples = found["settings"], found["samples"]
    size = settings["follow"] // settings["bins"]
    kinds = sorted({s["kind"] for s in samples}, reverse=True)
    parts = [
        (f"{part * size + 1} to {(part + 1) * size}", report.cells(samples, "kl", part))
        for part in range(settings["bins"])
    ]
    columns = [
        report.Column(f"{kind}, {tokens}", cells, kind, d)
        for d in settings["densities"]
        for kind in kinds
        for tokens, cells in parts
    ]
    pairs = [p for name in ("selector", "prefill_selector", "walk") for p in suites.CONTRASTS[name]]
    head = (
        f"KL to the full cache in nats by the position of the token after the prompt, "
        f"{_counts(found)}, density {', '.join(f'{d:g}' for d in settings['densities'])}; a block "
        "is evicted each 32 tokens, teacher-forced."
    )
    return "\n\n".join(
        (
            head,
            report.overview(columns),
            "a minus b, paired (below zero: a is nearer to the full cache):",
            report.contrast_table(columns, pairs),
        )
    )


def ablate(found: Found) -> str:
    columns = _columns(found, "kl")
    head = f"KL in nats, a minus b (below zero: a is nearer to the full cache), {_counts(found)}."
    tables = []
    for question, pairs in suites.CONTRASTS.items():
        table = report.contrast_table(columns, pairs)
        if table:
            tables.append(f"{question[:1].upper()}{question[1:]}:\n\n{table}")
    return "\n\n".join((head, report.overview(columns), *tables))


def seeds(found: Found) -> str:
    return f"KL in nats, {_counts(found)}.\n\n{report.seed_table(_columns(found, 'kl'))}"


def ruler(found: Found) -> str:
    samples, densities = found["samples"], found["settings"]["densities"]
    tasks = _tasks(found)
    every = [*samples, *ruler_run.together(samples)]
    cells = report.cells(every, "score")
    whole = [report.Column(f"density {d:g}", cells, ruler_run.ALL, d) for d in densities]
    head = (
        f"Accuracy over {len(samples)} samples ({', '.join(tasks)}; {len(samples) // len(tasks)} "
        f"each), standard errors over samples: 0 where all samples agree. {_kept(found)}"
    )
    each = []
    for d in densities:
        columns = [report.Column(task, cells, task, d) for task in tasks]
        each.append(f"Density {d:g}:\n\n{report.overview(columns)}")
    return "\n\n".join(
        (
            head,
            report.overview(whole),
            "Paired differences to the full cache:",
            report.differences(whole, "full"),
            "Paired differences to `nexus`; above zero is better than it:",
            report.differences(whole, "nexus"),
            "<details><summary>Task by task</summary>",
            *each,
            "</details>",
        )
    )


def session(found: Found) -> str:
    settings = found["settings"]
    made = sessions.markdown(found["samples"], settings["asked"], settings["budget"], "nexus")
    return re.sub(r"^#+ (.*)$", r"\1:", made, flags=re.M).strip()


def agreed(found: Found) -> str:
    metric = "kl" if "kl" in found["samples"][0]["runs"][0] else "score"
    made = agreement.markdown(found["samples"], found["settings"]["densities"], metric)
    return re.sub(r"^#+ (.*)$", r"\1:", made, flags=re.M).strip()


def run(found: Found) -> str:
    speed, held = sweep_report.speed(found["rows"]), sweep_report.memory(found["rows"])
    machine = found["machine"]
    gb_s, settings = found["rows"][-1]["bandwidth_gb_s"], found["settings"]
    where = (
        f"{machine['threads']} threads, load {machine['load_1min']:.1f} before, {gb_s:.1f} GB/s "
        f"read bandwidth, {settings['rounds']} rounds; sequences that fit in "
        f"{settings['memory'] / 2**30:g} GiB."
    )
    return f"{where}\n\n{speed}\n\n{held}"


PARTS: dict[str, Callable[[Found], str]] = {
    "fidelity": fidelity,
    "stream": stream,
    "ablate": ablate,
    "seeds": seeds,
    "sessions": session,
    "ruler-1024-aware": ruler,
    "ruler-1024-unaware": ruler,
    "agreement-kl": agreed,
    "agreement-niah_single_2": agreed,
    "bench": run,
    "bench-peers": run,
    "paper": sweep_report.paper,
}


#: What `--variant` chooses from where it is given.
SUITE = {"stream": suites.STREAM, "ablate": suites.ABLATION, "seeds": suites.SAMPLED}
#: Heading of each part, and the command that made it, less `--out results` and what it varies.
HEADS: dict[str, tuple[str, str]] = {
    "fidelity": ("### Every policy", "eval fidelity --samples {n} --follow {follow}"),
    "stream": (
        "### While decoding evicts, too",
        "eval stream --samples {n} --follow {follow} --seeds {seeds}",
    ),
    "ablate": ("", "eval ablate --samples {n} --follow {follow} --seeds {seeds}"),
    "seeds": ("", "eval seeds --samples {n} --follow {follow} --seeds {seeds}"),
    "sessions": (
        "### Sessions: a fact told early and asked for later",
        "eval sessions --samples {n} --turns {turns} --budget {budget}",
    ),
    "ruler-1024-aware": (
        "### RULER at 1024 tokens, question in the prompt",
        "eval ruler {tasks} --samples {n} --max-new {max_new} --query-aware",
    ),
    "ruler-1024-unaware": (
        "### RULER at 1024 tokens, question after the eviction",
        "eval ruler {tasks} --samples {n} --max-new {max_new} --no-query-aware",
    ),
    "agreement-kl": ("", "eval agreement --samples {n} --follow 32"),
    "agreement-niah_single_2": (
        "",
        "eval agreement --samples {n} --task niah_single_2 --max-new 10",
    ),
    "bench": ("### Whole requests over density", "bench run --rounds {rounds} --peer none"),
    "bench-peers": (
        "### Whole requests beside peers",
        "bench run --rounds {rounds} --peer transformers --peer kvpress --peer openvino "
        "--openvino-python ov/bin/python --no-peak --name bench-peers",
    ),
    "paper": (
        "### The Nexus paper's two tables, on this model",
        "bench paper --rounds {rounds}",
    ),
}


def main() -> int:
    page, done = PAGE.read_text(encoding="utf-8"), []
    for folder in map(Path, sys.argv[1:]):
        if not folder.is_dir():
            sys.exit(f"error: there is no directory {folder}; give one that --out has named")
    for name, make in PARTS.items():
        for folder in map(Path, sys.argv[1:]):
            file, start, end = folder / f"{name}.json", f"<!-- {name} -->", f"<!-- end {name} -->"
            if not file.is_file() or start not in page:
                continue
            found = _read(file)
            text = f"{_head(name, found)}{make(found).strip()}{_figures(folder, name)}"
            before, after = page.split(start)[0], page.split(end)[1]
            page = f"{before}{start}\n\n{text}\n\n{end}{after}"
            done.append(name)
    PAGE.write_text(page, encoding="utf-8")
    print(f"updated: {', '.join(done) or 'nothing'}")
    return 0


def _read(file: Path) -> Found:
    try:
        found: Found = json.loads(file.read_text(encoding="utf-8"))
        weights = found.get("settings", {}).get("weights", WEIGHTS)
    except (ValueError, AttributeError) as error:
        sys.exit(f"error: {file} is no result ({error}); run its command again")
    if weights != WEIGHTS:
        sys.exit(f"error: {file} is of another model (weights {weights}); the page has {WEIGHTS}")
    return found


def _head(name: str, found: Found) -> str:
    """Return heading, command and date of a part."""
    heading, command = HEADS[name]
    kinds = [s["kind"] for s in found.get("samples", [])]
    settings = found.get("settings", {}) | {
        "n": max(map(kinds.count, kinds), default=0),
        "tasks": " ".join(f"--task {task}" for task in _tasks(found)),
    }
    words = [command.format(**settings), *_varied(name, settings, found.get("rows", []))]
    said = f"`kvsift {' '.join(words)}`, {found['date'][:10]}."
    return f"{heading}\n\n{said}\n\n" if heading else f"{said}\n\n"


def _varied(name: str, settings: Found, rows: list[Found]) -> list[str]:
    """Return the options that name contexts, densities and variants."""
    words = [f"--context {n}" for n in settings.get("contexts", [])]
    shares = settings.get("densities") or sorted({r["density"] for r in rows} - {1}, reverse=True)
    words += [f"--density {d:g}" for d in shares]
    variants = settings.get("variants", [])
    if set(variants) != {spec.name for spec in SUITE.get(name, [])} and name in SUITE:
        words += [f"--variant '{variant}'" for variant in variants]
    return words


def _figures(folder: Path, name: str) -> str:
    """Copy the plots of a result and return the links to them."""
    links = []
    for plot in sorted([*folder.glob(f"{name}.png"), *folder.glob(f"{name}-[0-9]*.png")]):
        FIGURES.mkdir(exist_ok=True)
        shutil.copy(plot, FIGURES / plot.name)
        links.append(f"\n\n![{plot.stem}](figures/{plot.name})")
    return "".join(links)


def _columns(found: Found, metric: str) -> list[report.Column]:
    cells = report.cells(found["samples"], metric)
    kinds = sorted({s["kind"] for s in found["samples"]}, reverse=True)
    return [
        report.Column(f"{kind} {d:g}", cells, kind, float(d))
        for kind in kinds
        for d in found["settings"]["densities"]
    ]


def _kept(found: Found) -> str:
    """Return which share of a prompt's tokens a density keeps, the mean over samples and variants.

    Prompts are no multiple of a block, and a few blocks are always kept.
    """
    shares: dict[float, list[float]] = {}
    for sample in found["samples"]:
        for one in sample["runs"]:
            if one["density"] < 1:
                shares.setdefault(one["density"], []).append(one["kept"] / sample["tokens"])
    said = [f"{100 * sum(of) / len(of):.1f} % at density {d:g}" for d, of in shares.items()]
    return f"Kept of the prompt's tokens: {', '.join(said)}."


def _tasks(found: Found) -> list[str]:
    return list(dict.fromkeys(s["kind"] for s in found.get("samples", [])))


def _counts(found: Found) -> str:
    kinds = [s["kind"] for s in found["samples"]]
    return ", ".join(f"{kinds.count(k)} samples of {k}" for k in sorted(set(kinds), reverse=True))


if __name__ == "__main__":
    sys.exit(main())
