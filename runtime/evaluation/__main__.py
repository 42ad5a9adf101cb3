"""The commands of `kvsift eval`, also `python -m kvsift.runtime.evaluation`.

`builds` makes the evaluation engines and one eviction model per variant.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from kvsift.builder.errors import EngineError, KvsiftError, UsageError
from kvsift.runtime.evaluation import (
    builds,
    fidelity,
    needles,
    plots,
    report,
    runner,
    suites,
    task_commands,
    texts,
)
from kvsift.runtime.evaluation.lab import Lab
from kvsift.runtime.evaluation.options import (
    Density,
    Follow,
    Model,
    Names,
    Out,
    Prompt,
    Prose,
    Reference,
    Samples,
    Seeds,
    Suite,
    Threads,
)
from kvsift.runtime.evaluation.store import Store

app = typer.Typer(
    help="Measure quality.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command("fidelity")
def fidelity_command(
    out: Out,
    samples: Samples = 32,
    model: Model = None,
    prompt: Prompt = 1024,
    follow: Follow = 128,
    density: Density = [0.5, 0.2, 0.1],  # noqa: B006
    seeds: Seeds = 1,
    prose: Prose = None,
    suite: Suite = "policies",
    variant: Names = [],  # noqa: B006
    reference: Reference = None,
    threads: Threads = 0,
) -> None:
    """KL to the full cache, top-1 agreement and perplexity after one eviction at a prompt's end.

    Example: kvsift eval fidelity --samples 32 --out results
    """
    settings = fidelity.Settings(prompt, follow, follow, 1, tuple(density), seeds)
    _fidelity("fidelity", _Common(out, samples, model, prose, suite, variant, reference, threads),
              settings)  # fmt: skip


@app.command("ablate")
def ablate_command(
    out: Out,
    samples: Samples = 32,
    model: Model = None,
    prompt: Prompt = 1024,
    follow: Follow = 128,
    density: Density = [0.2],  # noqa: B006
    seeds: Seeds = 2,
    prose: Prose = None,
    suite: Suite = "ablation",
    variant: Names = [],  # noqa: B006
    reference: Reference = None,
    threads: Threads = 0,
) -> None:
    """KL to the full cache with one part of a method changed at a time, as paired differences.

    Example: kvsift eval ablate --samples 32 --out results
    """
    settings = fidelity.Settings(prompt, follow, follow, 1, tuple(density), seeds)
    _fidelity("ablate", _Common(out, samples, model, prose, suite, variant, reference, threads),
              settings)  # fmt: skip


@app.command("seeds")
def seeds_command(
    out: Out,
    samples: Samples = 16,
    model: Model = None,
    prompt: Prompt = 1024,
    follow: Follow = 128,
    density: Density = [0.5, 0.2],  # noqa: B006
    seeds: Seeds = 8,
    prose: Prose = None,
    suite: Suite = "sampled",
    variant: Names = [],  # noqa: B006
    threads: Threads = 0,
) -> None:
    """How far KL depends on the eviction seed, for a sample and for the mean of a whole run.

    Example: kvsift eval seeds --samples 16 --seeds 8 --out results
    """
    if seeds < 2:
        raise UsageError(f"seeds must be at least 2 to show a spread, got {seeds}")
    settings = fidelity.Settings(prompt, follow, follow, 1, tuple(density), seeds)
    _fidelity("seeds", _Common(out, samples, model, prose, suite, variant, None, threads),
              settings)  # fmt: skip


@app.command("stream")
def stream_command(
    out: Out,
    samples: Samples = 32,
    model: Model = None,
    prompt: Prompt = 1024,
    follow: Follow = 512,
    density: Density = [0.2],  # noqa: B006
    seeds: Seeds = 2,
    prose: Prose = None,
    suite: Suite = "stream",
    variant: Names = [],  # noqa: B006
    reference: Reference = None,
    threads: Threads = 0,
) -> None:
    """KL to the full cache while decoding evicts a block each 32 tokens, in four parts.

    Example: kvsift eval stream --samples 32 --out results
    """
    if follow % 128:
        raise UsageError(f"follow must be a multiple of 128, got {follow}; 512 is the default")
    settings = fidelity.Settings(prompt, follow, 32, 4, tuple(density), seeds)
    _fidelity("stream", _Common(out, samples, model, prose, suite, variant, reference, threads),
              settings)  # fmt: skip


@app.command("needles")
def needles_command(
    out: Out,
    samples: Samples = 32,
    model: Model = None,
    prompt: Prompt = 1024,
    density: Density = [0.5, 0.2],  # noqa: B006
    seeds: Seeds = 1,
    prose: Prose = None,
    suite: Suite = "policies",
    variant: Names = [],  # noqa: B006
    reference: Reference = None,
    threads: Threads = 0,
) -> None:
    """Share of planted secrets that greedy decoding finds after the eviction.

    Example: kvsift eval needles --samples 32 --out results
    """
    specs = suites.pick(suites.suite(suite), variant)
    chosen = suites.reference(reference, specs)
    text = texts.load_prose(prose)
    lab, variants = builds.prepare(out, model, prompt + 128, specs, threads)
    template = needles.load_template(out / "engine")
    haystacks = texts.prose_samples(lab.tokenizer, text, texts.prose_name(prose), samples, prompt)
    settings = {"prompt": prompt, "densities": density, "seeds": seeds}
    settings |= builds.recorded(lab, variants)
    store = Store(out / "needles.jsonl", settings)

    def measure(sample: texts.Sample) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        needle = needles.make_needle(lab.tokenizer, template, sample, prompt)
        runs = needles.measure(lab, needle, variants, density, seeds)
        return runs, {"answer": needle.answer, "depth": needle.depth}

    runner.run(store, haystacks, measure)
    print(runner.write_reports(out, "needles", store, settings, "correct", "accuracy", chosen))
    found = report.cells(store.samples, "correct")
    columns = [report.Column(f"density {d:g}", found, "prose", d) for d in density]
    title = f"Needles found, {prompt} tokens, n = {len(store.samples)}"
    plots.maybe(lambda: plots.grid(out / "needles.png", columns, "accuracy", title))


@app.command("tables")
def tables_command(out: Out, reference: Reference = None) -> None:
    """Print the fidelity and needle results of a directory side by side.

    Example: kvsift eval tables --out results
    """
    print(runner.summary(out, reference), end="")


app.command("ruler")(task_commands.ruler_command)
app.command("sessions")(task_commands.sessions_command)
app.command("agreement")(task_commands.agreement_command)


@dataclass(frozen=True)
class _Common:
    """What every run over texts is asked for."""

    out: Path
    samples: int
    model: Path | None
    prose: Path | None
    suite: str
    only: list[str]
    reference: str | None
    threads: int


def _fidelity(title: str, asked: _Common, settings: fidelity.Settings) -> None:
    size = settings.prompt + settings.follow
    specs = suites.pick(suites.suite(asked.suite), asked.only)
    reference = suites.reference(asked.reference, specs)
    text = texts.load_prose(asked.prose)
    lab, variants = builds.prepare(asked.out, asked.model, size + 64, specs, asked.threads)
    samples = _texts(lab, text, asked, size)
    recorded = asdict(settings) | builds.recorded(lab, variants)
    store = Store(asked.out / f"{title}.jsonl", recorded)

    def measure(sample: texts.Sample) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        runs = fidelity.measure(lab, sample, variants, settings)
        worst = fidelity.check_full(runs)
        if worst is not None and worst > fidelity.FULL_KL_LIMIT:
            raise EngineError(
                f"the full cache differs from itself by KL {worst:g} on {sample.kind} sample "
                f"{sample.index}, at most {fidelity.FULL_KL_LIMIT:g} is rounding: the "
                "measurement is broken"
            )
        return runs, {}

    runner.run(store, samples, measure)
    print(runner.write_reports(asked.out, title, store, recorded, "kl", "KL (nats)", reference))
    plots.maybe(lambda: _plot(asked.out, title, store, settings))


def _plot(out: Path, title: str, store: Store, settings: fidelity.Settings) -> None:
    found = report.cells(store.samples, "kl")
    kinds = sorted({s["kind"] for s in store.samples}, reverse=True)
    densities, path = settings.densities, out / f"{title}.png"
    label = "KL to the full cache (nats)"
    counts = {k: sum(s["kind"] == k for s in store.samples) for k in kinds}
    groups = {
        f"{k}, n = {counts[k]}": [report.Column(f"density {d:g}", found, k, d) for d in densities]
        for k in kinds
    }
    if title == "ablate":
        columns = [
            report.Column(f"{k}, density {d:g}", found, k, d) for k in kinds for d in densities
        ]
        heading = "One part changed at a time: a − b (below 0: a is nearer to the full cache)"
        plots.forest(path, columns, suites.CONTRASTS, f"difference of {label}", heading)
    elif title == "seeds":
        plots.seeds(path, groups, f"mean {label}", "Mean of a whole run, one point per seed")
    else:
        plots.dots(path, groups, label, f"Distance from the full cache: {title}", log=True)


def _texts(lab: Lab, prose: str, asked: _Common, size: int) -> list[texts.Sample]:
    """Return the samples of prose and of code in turn."""
    name = texts.prose_name(asked.prose)
    essays = texts.prose_samples(lab.tokenizer, prose, name, asked.samples, size)
    return runner.alternate(essays, texts.code_samples(lab.tokenizer, asked.samples, size))


def main() -> None:
    """Run the commands; an error is one line, exit code 2 for bad usage and 1 for failure."""
    try:
        app()
    except KvsiftError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)


if __name__ == "__main__":
    main()
