"""The commands of `kvsift eval`, also `python -m kvsift.runtime.evaluation`.

The only module here that builds: it makes the evaluation engine and one eviction model per variant.
"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import onnx_ir as ir
import onnxruntime as ort
import typer

import kvsift
from kvsift.builder.errors import EngineError, KvsiftError, PackageError, UsageError
from kvsift.builder.eviction_model import eviction_model
from kvsift.builder.package import Limits, ModelConfig, load_manifest
from kvsift.builder.policies import resolve
from kvsift.builder.targets.ort import BuildOptions, build
from kvsift.builder.weights import default_model, open_model
from kvsift.runtime.evaluation import fidelity, needles, runner, texts
from kvsift.runtime.evaluation.lab import Lab
from kvsift.runtime.evaluation.store import Store
from kvsift.runtime.evaluation.variants import ONE_SHOT, PAPER, STREAM, Spec, Variant, pick

#: What the evaluation engine's own policy is: the one whose window serves all others.
READER = {"head_reduce": "mean_prob"}

app = typer.Typer(
    help="Measure quality.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Out = Annotated[Path, typer.Option("--out", "-o", help="Directory of engine and results.")]
Model = Annotated[Path | None, typer.Option("--model", help="Model directory or GGUF file.")]
Samples = Annotated[int, typer.Option("--samples", help="Samples of each kind of text, up to 64.")]
Prompt = Annotated[int, typer.Option("--prompt", help="Tokens of the prompt.")]
Density = Annotated[list[float], typer.Option("--density", help="Kept share; repeatable.")]
Seeds = Annotated[int, typer.Option("--seeds", help="Eviction seeds of sampled variants.")]
Prose = Annotated[Path | None, typer.Option("--prose", help="Essays' wheel, .json or .txt file.")]
Names = Annotated[list[str], typer.Option("--variant", help="Only this variant; repeatable.")]
Reference = Annotated[str, typer.Option("--reference", help="Variant that others are compared to.")]
Threads = Annotated[int, typer.Option("--threads", help="Threads; 0: ONNX Runtime's choice.")]


@app.command("fidelity")
def fidelity_command(
    out: Out,
    samples: Samples = 32,
    model: Model = None,
    prompt: Prompt = 1024,
    follow: Annotated[int, typer.Option("--follow", help="Tokens that follow.")] = 128,
    density: Density = [0.5, 0.2],  # noqa: B006
    seeds: Seeds = 4,
    prose: Prose = None,
    variant: Names = [],  # noqa: B006
    reference: Reference = PAPER,
    threads: Threads = 0,
) -> None:
    """KL to the full cache after one eviction at the prompt's end.

    Example: kvsift eval fidelity --samples 32 --out results
    """
    settings = fidelity.Settings(prompt, follow, follow, 1, tuple(density), seeds)
    _fidelity(
        "fidelity", out, samples, model, settings, ONE_SHOT, variant, prose, reference, threads
    )


@app.command("stream")
def stream_command(
    out: Out,
    samples: Samples = 32,
    model: Model = None,
    prompt: Prompt = 1024,
    follow: Annotated[int, typer.Option("--follow", help="Tokens that follow.")] = 512,
    density: Density = [0.2],  # noqa: B006
    seeds: Seeds = 2,
    prose: Prose = None,
    variant: Names = [],  # noqa: B006
    reference: Reference = PAPER,
    threads: Threads = 0,
) -> None:
    """KL to the full cache while decoding evicts a block each 32 tokens, in four parts.

    Example: kvsift eval stream --samples 32 --out results
    """
    if follow % 128:
        raise UsageError(f"follow must be a multiple of 128, got {follow}; 512 is the default")
    settings = fidelity.Settings(prompt, follow, 32, 4, tuple(density), seeds)
    _fidelity("stream", out, samples, model, settings, STREAM, variant, prose, reference, threads)


@app.command("needles")
def needles_command(
    out: Out,
    samples: Samples = 32,
    model: Model = None,
    prompt: Prompt = 1024,
    density: Density = [0.5, 0.2],  # noqa: B006
    seeds: Seeds = 4,
    prose: Prose = None,
    variant: Names = [],  # noqa: B006
    reference: Reference = PAPER,
    threads: Threads = 0,
) -> None:
    """Share of planted secrets that greedy decoding finds after the eviction.

    Example: kvsift eval needles --samples 32 --out results
    """
    lab, variants = _prepare(out, model, prompt + 128, ONE_SHOT, variant, threads)
    template = needles.load_template(out / "engine")
    text = texts.load_prose(prose)
    haystacks = texts.prose_samples(lab.tokenizer, text, _prose_name(prose), samples, prompt)
    settings = {"prompt": prompt, "densities": density, "seeds": seeds} | _common(lab, variants)
    store = Store(out / "needles.jsonl", settings)

    def measure(sample: texts.Sample) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        needle = needles.make_needle(lab.tokenizer, template, sample, prompt)
        runs = needles.measure(lab, needle, variants, density, seeds)
        return runs, {"answer": needle.answer, "depth": needle.depth}

    runner.run(store, haystacks, measure)
    print(_report(out, "needles", store, settings, "correct", "accuracy", reference))


@app.command("tables")
def tables_command(out: Out, reference: Reference = PAPER) -> None:
    """Print the fidelity and needle results of a directory side by side.

    Example: kvsift eval tables --out results
    """
    print(runner.summary(out, reference), end="")


def _fidelity(
    title: str,
    out: Path,
    samples: int,
    model: Path | None,
    settings: fidelity.Settings,
    specs: list[Spec],
    only: list[str],
    prose: Path | None,
    reference: str,
    threads: int,
) -> None:
    size = settings.prompt + settings.follow
    lab, variants = _prepare(out, model, size + 64, specs, only, threads)
    essays = texts.prose_samples(
        lab.tokenizer, texts.load_prose(prose), _prose_name(prose), samples, size
    )
    code = texts.code_samples(lab.tokenizer, samples, size)
    recorded = asdict(settings) | _common(lab, variants)
    store = Store(out / f"{title}.jsonl", recorded)

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

    runner.run(store, runner.alternate(essays, code), measure)
    print(_report(out, title, store, recorded, "kl", "KL (nats)", reference))


def _report(
    out: Path,
    title: str,
    store: Store,
    settings: dict[str, Any],
    metric: str,
    label: str,
    reference: str,
) -> str:
    return runner.write_reports(out, title, store, settings, metric, label, reference)


def _prepare(
    out: Path, model: Path | None, capacity: int, specs: list[Spec], only: list[str], threads: int
) -> tuple[Lab, list[Variant]]:
    """Return the evaluation engine, built if it is not there, and the variants."""
    engine = out / "engine"
    source = open_model(default_model() if model is None else model)
    try:
        found = load_manifest(engine)
        if found.model != source.config:
            raise UsageError(f"{engine} is of another model; choose another --out")
    except PackageError:
        limits = Limits(max_input=4096, max_output=1024, max_batch=1, density=0.2, max_density=1.0)
        print(f"building the evaluation engine in {engine}", file=sys.stderr)
        options = BuildOptions(all_logits=True, force=True)
        build(source, resolve("nexus", options=READER), limits, engine, options)
    lab = Lab(engine, capacity, threads or None)
    return lab, [_variant(lab.manifest.model, spec) for spec in pick(specs, only)]


def _variant(config: ModelConfig, spec: Spec) -> Variant:
    options = dict(spec.options) or None
    policy = resolve(spec.eviction, selector=spec.selector, scope=spec.scope, options=options)
    if not policy.evicts:
        return Variant(spec, policy, None)
    made = ir.to_proto(eviction_model(config, policy))
    return Variant(spec, policy, made.SerializeToString())


def _prose_name(path: Path | None) -> str:
    return texts.ESSAYS_WHEEL if path is None else path.name


def _common(lab: Lab, variants: list[Variant]) -> dict[str, Any]:
    """Return what else must be equal for results to belong together."""
    return {
        "kvsift": kvsift.__version__,
        "onnxruntime": ort.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "weights": lab.manifest.files["model.data"].sha256[:16],
        "variants": {v.name: v.policy.model_dump() for v in variants},
    }


def main() -> None:
    """Run the commands; an error is one line, exit code 2 for bad usage and 1 for failure."""
    try:
        app()
    except KvsiftError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)


if __name__ == "__main__":
    main()
