"""The `kvsift` command: generate, chat, doctor, trace, bench, eval, serve, triton."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsift.builder.errors import KvsiftError, UsageError
from kvsift.runtime import console

if TYPE_CHECKING:  # imported late, so that --help and --version answer at once
    from kvsift.runtime.engine import Request
    from kvsift.runtime.llm import LLM
    from kvsift.runtime.params import EvictionParams, SamplingParams
    from kvsift.runtime.results import GenerationResult

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Run engines that evict their KV cache. Build one with build_engine.",
)

Engine = Annotated[Path, typer.Argument(help="Directory made by build_engine.", metavar="ENGINE")]
MaxTokens = Annotated[int, typer.Option(help="Longest answer, tokens.")]
Temperature = Annotated[float, typer.Option(help="0: greedy.")]
TopK = Annotated[int, typer.Option(help="Sample among the k likeliest; 0: off.")]
TopP = Annotated[float, typer.Option(help="Sample among the likeliest that sum to p; 1: off.")]
MinP = Annotated[float, typer.Option(help="Least share of the likeliest's probability; 0: off.")]
Penalty = Annotated[float, typer.Option(help="Above 1: repeat less.")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; repeatable.")]
Seed = Annotated[int | None, typer.Option(help="Sampling seed, 64 bits; default: the engine's.")]
EvictionSeed = Annotated[int | None, typer.Option(help="Default: the sampling seed.")]
Density = Annotated[
    float | None, typer.Option(help="Share of the prompt to keep; default: the engine's.")
]
BudgetTokens = Annotated[int | None, typer.Option(help="Tokens to keep, instead of a density.")]
MinBudget = Annotated[int | None, typer.Option(help="Smallest budget that a density may give.")]
PinRole = Annotated[
    list[str] | None,
    typer.Option(metavar="ROLE", help="Never evict what this role says; repeatable."),
]
MinCoverage = Annotated[
    float | None,
    typer.Option(help="Raise the budget until evictions keep this share of the attention mass."),
]
Shares = Annotated[
    str | None,
    typer.Option(metavar="WEIGHTS", help="Shares of the layers, such as 3,2,1, or pyramid."),
]
HeadShares = Annotated[
    str | None, typer.Option(metavar="WEIGHTS", help="Shares of a layer's KV heads, such as 2,1.")
]
KvMemory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Most memory of all KV caches, such as 2GiB."),
]
Threads = Annotated[int | None, typer.Option(help="Threads; default: one per core.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
System = Annotated[str | None, typer.Option(help="Text of the system turn.")]


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=console.version_option, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command(epilog="Example: kvsift generate engines/nexus --chat --prompt 'Who was Ada?'")
@console.command
def generate(
    context: typer.Context,
    engine: Engine,
    prompt: Annotated[str | None, typer.Option(help="The prompt; default: read stdin.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="Make the prompt a user's turn.")
    ] = False,
    system: System = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0,
    stop: Stop = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the end of the text.")
    ] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="Alternatives per token in --json; 0: the token's own.")
    ] = None,
    seed: Seed = None,
    eviction_seed: EvictionSeed = None,
    density: Density = None,
    budget_tokens: BudgetTokens = None,
    min_budget_tokens: MinBudget = None,
    pin: Annotated[
        list[str] | None,
        typer.Option(metavar="A:B", help="Never evict prompt tokens A to B-1; repeatable."),
    ] = None,
    pin_role: PinRole = None,
    min_coverage: MinCoverage = None,
    layer_budgets: Shares = None,
    head_budgets: HeadShares = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write what evictions keep to a file; see kvsift trace.")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Run a trace again and compare what evictions keep.")
    ] = None,
    kv_memory: KvMemory = None,
    threads: Threads = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare the files' hashes with the manifest first.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Print the text as it comes.")
    ] = True,
    debug: Debug = False,
) -> None:
    """Continue a prompt; the text goes to stdout, figures to stderr."""
    from kvsift.runtime.params import EvictionParams, SamplingParams
    from kvsift.runtime.recorder import recording

    if logprobs is not None and not as_json:
        raise UsageError(f"--logprobs {logprobs} is shown in JSON only; add --json")
    for name, given in (("--system", system), ("--pin-role", pin_role)):
        if given is not None and not chat:
            raise UsageError(f"{name} needs the chat template; add --chat")
    if replay is not None:
        from kvsift.cli_trace import replay_trace
        from kvsift.runtime.engine import Engine as Runner

        console.only_with(context, "--replay", "engine", "replay", "threads", "verify", "debug")
        runner = Runner(engine, max_batch=1, threads=threads, verify=verify)
        return replay_trace(runner, replay)
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=stop or (),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        seed=seed,
    )
    evict = EvictionParams(
        density=density,
        budget_tokens=budget_tokens,
        min_budget_tokens=min_budget_tokens,
        eviction_seed=eviction_seed,
        pin=[console.parse_span(text) for text in pin or ()],
        min_coverage=min_coverage,
        layer_budgets=console.parse_weights("--layer-budgets", layer_budgets),
        head_budgets=console.parse_weights("--head-budgets", head_budgets),
    )
    text = console.read_prompt(prompt, prompt_file)
    llm = _load(engine, threads, kv_memory, verify)
    request = _request(llm, text, system, chat, sampling, evict, pin_role or ())
    with recording(llm.engine, trace):
        result = _run(llm, request, show=stream and not as_json)
    if as_json:
        ascii_only = sys.stdout.encoding.lower() != "utf-8"
        print(json.dumps(result.to_dict(), ensure_ascii=ascii_only, allow_nan=False), flush=True)
        return
    print("" if stream else result.text, flush=True)
    print(_figures(result), file=sys.stderr)


@app.command(name="chat", epilog="Example: kvsift chat engines/nexus --temperature 0.7")
@console.command
def chat_command(
    engine: Engine,
    system: System = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0,
    seed: Seed = None,
    eviction_seed: EvictionSeed = None,
    density: Density = None,
    budget_tokens: BudgetTokens = None,
    min_budget_tokens: MinBudget = None,
    pin_role: PinRole = None,
    min_coverage: MinCoverage = None,
    session: Annotated[
        Path | None, typer.Option(help="File that keeps the session from one call to the next.")
    ] = None,
    kv_memory: KvMemory = None,
    threads: Threads = None,
    debug: Debug = False,
) -> None:
    """Talk with a model; /exit or Ctrl-D ends, Ctrl-C stops an answer.

    Each turn goes on from the cache of the last one: what has been evicted is gone.
    """
    from kvsift.cli_chat import converse
    from kvsift.runtime.params import EvictionParams, SamplingParams

    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    evict = EvictionParams(
        density=density,
        budget_tokens=budget_tokens,
        min_budget_tokens=min_budget_tokens,
        eviction_seed=eviction_seed,
        min_coverage=min_coverage,
    )
    converse(_load(engine, threads, kv_memory), system, sampling, evict, pin_role or (), session)


@app.command(epilog="Example: kvsift doctor")
@console.command
def doctor(debug: Debug = False) -> None:
    """Tell what this machine can build and run, and how to get what is missing."""
    from kvsift.builder.weights import default_model
    from kvsift.runtime.doctor import Check, examine

    try:
        model = Check("default model", True, str(default_model()))
    except KvsiftError as error:
        model = Check("default model", False, "not installed", str(error), needed=False)
    checks = [*examine(), model]
    rows = [[c.name, c.mark, c.found, c.fix] for c in checks]
    console.print_table("kvsift doctor", ["what", "", "found", "fix"], rows)
    if not all(c.good for c in checks if c.needed):
        raise typer.Exit(console.EXIT_FAILURE)


console.add_group(app, "trace", "kvsift.cli_trace", "Show, draw and compare traces.")
console.add_group(app, "bench", "kvsift.runtime.bench.__main__", "Measure speed and memory.")
console.add_group(app, "eval", "kvsift.runtime.evaluation.__main__", "Measure quality.")
console.add_group(app, "serve", "kvsift.runtime.serve.__main__", "Answer OpenAI clients over HTTP.")
console.add_group(
    app, "triton", "kvsift.runtime.triton.__main__", "Write a model repository for Triton."
)
console.add_group(
    app, "tritonserver", "kvsift.runtime.triton.run", "Run a model repository on the CPU."
)


def _load(engine: Path, threads: int | None, kv_memory: str | None, verify: bool = False) -> LLM:
    from kvsift.runtime.llm import LLM

    return LLM(engine, max_batch=1, kv_memory=kv_memory, threads=threads, verify=verify)


def _request(
    llm: LLM,
    text: str,
    system: str | None,
    chat: bool,
    sampling: SamplingParams,
    evict: EvictionParams,
    pin_roles: list[str] | tuple[str, ...] = (),
) -> Request:
    from kvsift.runtime.engine import Request

    if not chat:
        return Request(text, sampling, evict)
    if not text:
        raise UsageError("empty prompt: there is nothing to answer; give some text")
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return llm.chat_request(messages, sampling, evict, pin_roles=pin_roles)


def _run(llm: LLM, request: Request, show: bool) -> GenerationResult:
    """Run one request; Ctrl-C leaves the text so far and ends the line."""
    result: GenerationResult | None = None
    try:
        for update in llm.updates(request):
            result = update.result
            if show:
                _write(update.text)
    except KeyboardInterrupt:
        if show:
            print(flush=True)
        raise typer.Exit(console.EXIT_INTERRUPT) from None
    assert result is not None
    return result


def _write(text: str) -> None:
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()


def _figures(result: GenerationResult) -> str:
    """Return one line of figures about a finished request."""
    times, size = result.timings, console.size_text
    parts = [f"{result.prompt_tokens} prompt tokens"]
    if times.ttft_s > 0:
        parts[0] += f" at {result.prompt_tokens / times.ttft_s:.0f}/s"
    parts.append(f"{len(result.token_ids)} new tokens")
    if times.itl_s:
        parts[1] += f" at {1 / times.mean_itl_s:.1f}/s"
    kept = f"kept {result.kept_tokens}"
    if result.budget_tokens is not None:
        raised = result.budget_raised_tokens
        more = f", {raised} of it added for coverage" if raised else ""
        kept += f" (budget {result.budget_tokens}{more}, {result.evictions} evictions)"
    if result.guardrail == "exhausted":
        kept += ", coverage below the minimum: the slot is full"
    parts.append(kept)
    parts.append(f"KV {size(result.kv_bytes)} of {size(result.kv_bytes_dense)} dense")
    parts.append(f"seed {result.seed}, eviction seed {result.eviction_seed}")
    return f"[{result.finish_reason}: {'; '.join(parts)}]"


def main() -> None:
    """Run the command."""
    app(prog_name="kvsift")


if __name__ == "__main__":
    main()
