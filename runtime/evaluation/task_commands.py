"""`kvsift eval ruler`, `sessions` and `agreement`: questions with answers, and another's word."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from kvsift.builder.errors import UsageError
from kvsift.runtime.evaluation import (
    agreement,
    builds,
    kvpress_peer,
    plots,
    report,
    ruler,
    ruler_run,
    runner,
    sessions,
    suites,
    texts,
)
from kvsift.runtime.evaluation.needles import load_template
from kvsift.runtime.evaluation.options import (
    Density,
    Follow,
    Model,
    Names,
    Out,
    Prompt,
    Prose,
    Reference,
    Seeds,
    Suite,
    Threads,
    counted,
)
from kvsift.runtime.evaluation.store import Store

Tasks = Annotated[list[str], typer.Option("--task", help="Only this task; repeatable.")]
Slots = Annotated[int, counted("--slots", "Answers decoded together.", 1)]


def ruler_command(
    out: Out,
    length: Annotated[int, typer.Option("--length", help="Tokens, 1024 to 65536.")] = 1024,
    samples: Annotated[int, counted("--samples", "Samples of each task.", 1)] = 32,
    task: Tasks = [],  # noqa: B006
    query_aware: Annotated[
        bool, typer.Option(help="Evict with the question in the prompt, or before it is known.")
    ] = True,
    max_new: Annotated[int, counted("--max-new", "Longest answer; 0: RULER's own.", 0)] = 0,
    model: Model = None,
    density: Density = [0.5, 0.2, 0.1],  # noqa: B006
    seeds: Seeds = 1,
    suite: Suite = "policies",
    variant: Names = [],  # noqa: B006
    reference: Reference = None,
    slots: Slots = 16,
    threads: Threads = 0,
) -> None:
    """Accuracy on RULER's tasks, with standard errors and paired differences to the full cache.

    Example: kvsift eval ruler --length 1024 --task niah_single_2 --no-query-aware --out results
    """
    every = ruler.tasks(task)
    specs = suites.pick(suites.suite(suite), variant)
    chosen = suites.reference(reference, specs)
    lab, variants = builds.prepare(out, model, length, specs, threads, slots)
    made = {
        t.name: ruler.questions(t, out / "engine", length, samples, out / "ruler") for t in every
    }
    by_name = {t.name: t for t in every}
    title = f"ruler-{length}-{'aware' if query_aware else 'unaware'}"
    settings = {"length": length, "densities": density, "seeds": seeds, "max_new": max_new}
    settings |= {"query_aware": query_aware} | builds.recorded(lab, variants)
    store = Store(out / f"{title}.jsonl", settings)

    def measure(sample: ruler.Question) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        asked = by_name[sample.kind]
        jobs = ruler_run.jobs(variants, density, seeds, sample.index)
        longest = min(max_new or asked.answer_tokens, asked.answer_tokens)
        runs = ruler_run.measure(lab, asked, sample, jobs, query_aware, longest)
        more = {"tokens": len(sample.context) + len(sample.question), "wanted": sample.answers}
        return runs, more

    runner.run(store, runner.alternate(*made.values()), measure)
    samples_done = store.sorted()
    text = ruler_run.markdown(samples_done, density, length, query_aware, chosen)
    runner.write(out, title, {"settings": settings, "samples": samples_done}, text)
    print(text)
    found = report.cells([*samples_done, *ruler_run.together(samples_done)], "score")
    every_kind = [*dict.fromkeys(s["kind"] for s in samples_done), ruler_run.ALL]
    named = (
        f"RULER, {length} tokens, question {'evicted with' if query_aware else 'after'} the text"
    )
    for d in density:
        columns = [report.Column(kind, found, kind, d) for kind in every_kind]
        path, heading = out / f"{title}-{d:g}.png", f"{named}, density {d:g}"
        plots.maybe(partial(plots.grid, path, columns, "accuracy", heading))


def sessions_command(
    out: Out,
    samples: Annotated[int, typer.Option("--samples", help="Conversations, up to 64.")] = 32,
    turns: Annotated[int, counted("--turns", "Turns after which it ends.", 2)] = 8,
    turn_tokens: Annotated[int, counted("--turn-tokens", "Tokens of each turn's text.", 16)] = 160,
    budget: Annotated[int, counted("--budget", "Tokens that stay after every turn.", 32)] = 192,
    model: Model = None,
    seeds: Seeds = 1,
    prose: Prose = None,
    suite: Suite = "policies",
    variant: Names = [],  # noqa: B006
    reference: Reference = None,
    threads: Threads = 0,
) -> None:
    """Turns of true eviction: is a fact of the first turn still found, turns later?

    Example: kvsift eval sessions --turns 8 --budget 192 --out results
    """
    specs = suites.pick(suites.suite(suite), variant)
    chosen = suites.reference(reference, specs)
    capacity = turns * (turn_tokens + 64) + 128
    text = texts.load_prose(prose)
    lab, variants = builds.prepare(out, model, capacity, specs, threads)
    template = load_template(out / "engine")
    name = texts.prose_name(prose)
    size = turns * turn_tokens
    essays = texts.prose_samples(lab.tokenizer, text, name, samples, size)
    talks = [
        sessions.conversation(lab.tokenizer, template, essay, turns, turn_tokens)
        for essay in essays
    ]
    if (longest := max(t.tokens for t in talks)) > capacity:
        raise UsageError(f"a conversation has {longest} tokens, at most {capacity}; fewer --turns")
    asked = [t for t in (1, 2, 4, 8, 16, 32, 64) if t < turns] + [turns]
    settings = {"turns": turns, "turn_tokens": turn_tokens, "budget": budget, "seeds": seeds}
    settings |= {"asked": asked} | builds.recorded(lab, variants)
    store = Store(out / "sessions.jsonl", settings)

    def measure(talk: sessions.Conversation) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        jobs = ruler_run.jobs(variants, [1.0], seeds, talk.index)
        runs = sessions.measure(lab, talk, jobs, budget, asked)
        return runs, {"answer": talk.answer, "tokens": talk.tokens}

    runner.run(store, talks, measure)
    tables = sessions.markdown(store.sorted(), asked, budget, chosen)
    runner.write(out, "sessions", {"settings": settings, "samples": store.sorted()}, tables)
    print(tables)
    columns = [
        report.Column(f"after turn {t}", report.cells(store.samples, "found", i), "prose", 1.0)
        for i, t in enumerate(asked)
    ]
    heading = f"The fact of turn 1 found, {budget} tokens held, n = {len(store.samples)}"
    plots.maybe(lambda: plots.grid(out / "sessions.png", columns, "share found", heading))


def agreement_command(
    out: Out,
    samples: Annotated[int, typer.Option("--samples", help="Samples, up to 64.")] = 32,
    task: Annotated[
        str | None, typer.Option("--task", help="A task of RULER; without one, KL on prose.")
    ] = None,
    prompt: Prompt = 1024,
    follow: Follow = 64,
    max_new: Annotated[int, counted("--max-new", "Longest answer.", 1)] = 24,
    model: Model = None,
    density: Density = [0.5, 0.2],  # noqa: B006
    prose: Prose = None,
    variant: Names = [],  # noqa: B006
    threads: Threads = 0,
) -> None:
    """Ours and kvpress on the same samples, for every policy that both have.

    Example: kvsift eval agreement --samples 32 --out results
    """
    kvpress_peer.check()
    specs = suites.pick(list(kvpress_peer.SHARED.values()), variant)
    asked = None if task is None else ruler.tasks([task])[0]
    prose_text = texts.load_prose(prose) if asked is None else ""
    slots = 1 if asked is None else len(specs) * len(density)
    room = prompt + max(follow, 64)
    lab, variants = builds.prepare(out, model, room, specs, threads, slots)
    peer = kvpress_peer.KvpressPeer(lab.manifest, builds.tensors(model), threads or 2)
    settings = {"prompt": prompt, "densities": density} | builds.recorded(lab, variants)
    if asked is None:
        title, metric = "agreement-kl", "kl"
        store = Store(out / f"{title}.jsonl", settings | {"follow": follow})
        name = texts.prose_name(prose)
        essays = texts.prose_samples(lab.tokenizer, prose_text, name, samples, prompt + follow)
        runner.run(
            store,
            essays,
            lambda s: (agreement.fidelity(lab, peer, s, variants, density, prompt), {}),
        )
    else:
        title, metric = f"agreement-{asked.name}", "score"
        store = Store(out / f"{title}.jsonl", settings | {"max_new": max_new})
        made = ruler.questions(asked, out / "engine", prompt, samples, out / "ruler")
        runner.run(
            store,
            made,
            lambda s: (agreement.ruler(lab, peer, asked, s, variants, density, max_new), {}),
        )
    text = agreement.markdown(store.sorted(), density, metric)
    runner.write(out, title, {"settings": settings, "samples": store.sorted()}, text)
    print(text)
