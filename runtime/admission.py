"""A request before it runs: its ids, seeds, budget and session, checked against the engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from kvsift.builder.errors import CapacityError, SessionError, UsageError
from kvsift.runtime.guardrail import check_coverage
from kvsift.runtime.prompts import encode
from kvsift.runtime.request import Request
from kvsift.runtime.seeds import resolve_seeds
from kvsift.runtime.sequence import Sequence
from kvsift.runtime.shares import check_rows, check_shares
from kvsift.runtime.streaming import check_scratch

if TYPE_CHECKING:  # the engine calls this
    from kvsift.runtime.engine import Engine


def admit(engine: Engine, index: int, request: Request, numbers: Iterator[int]) -> Sequence:
    """Return what `Engine.prepare` does; `numbers` counts the requests without a session.

    The session is claimed last, so that a request that is refused leaves it as it was.
    """
    if not isinstance(request, Request):
        raise UsageError(f"a request must be a Request, got {request!r:.60}; write Request(...)")
    name, talk = request.session_id, None
    if name is not None:
        talk = engine.conversations.find(name)
        turns = talk.turns if talk else 0
        # Else a session that another process held would begin anew without a word.
        if request.session_turn not in (None, turns + 1):
            raise SessionError(
                f"session {name!r} has {turns} turns here, so turn {request.session_turn} is not "
                "its next; make a request when the turn before has ended, or begin a session with "
                "turn 1 and the whole conversation"
            )
    ids = encode(request, engine.tokenizer, engine.manifest, goes_on=talk is not None)
    check_coverage(request.eviction.min_coverage, engine.manifest.policy)
    check_shares(request.eviction, engine.manifest)
    limits, model, eviction = engine.manifest.limits, engine.manifest.model, request.eviction
    asked = request.sampling.seed, eviction.eviction_seed
    if talk is None:
        seeds = resolve_seeds(*asked, engine.manifest.seed, next(numbers))
    else:
        seeds, ids = talk.next_seeds(*asked), talk.prompt(ids, model)
        eviction = replace(eviction, pin=talk.all_pins(eviction.pin))
    new_tokens = request.sampling.max_tokens
    if engine.manifest.policy.scope == "prefill" and new_tokens > limits.max_output:
        raise CapacityError(
            f"max_tokens is {new_tokens} and the engine was built with --max-output "
            f"{limits.max_output}; lower it or rebuild"
        )
    budget = engine.budgets.units(len(ids), eviction, new_tokens, next_turn=talk is not None)
    made = Sequence(
        index=index,
        prompt=ids,
        sampling=request.sampling,
        seeds=seeds,
        eviction=eviction,
        budget=budget,
        tokenizer=engine.tokenizer,
        eos_token_ids=model.eos_token_ids,
        max_positions=model.max_positions,
        session_id=name,
        conversation=talk,
    )
    guarded = made.guardrail is not None
    rows = len(ids) - (talk.rows.seen - talk.rows.longest if talk else 0)
    check_scratch(
        engine.manifest,
        engine.new_slot(made, 0, 0),
        rows,
        turn=talk is not None,
        guarded=guarded,
        bounded=engine.bounded,
    )
    if engine.row_limits is not None:
        reach = min(model.max_positions, len(ids) + new_tokens)
        if guarded and eviction.layer_budgets is not None:  # as far as the budget may rise
            made.budget = engine.budgets.ceiling(len(ids), new_tokens)
        check_rows(engine.new_slot(made, 0, 0), engine.row_limits, reach)
        made.budget = budget
    if name is not None:
        engine.conversations.claim(name, talk)
        made.holds_session = True
    return made
