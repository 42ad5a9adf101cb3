"""The registry of eviction policies: one file per policy, found by name.

Each module here with a `PRESET` is a policy, each with a `SCORER` adds a scorer.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from kvsift.builder.errors import UsageError, unknown_name
from kvsift.builder.policies.base import (
    TOKEN_INTERVAL,
    CommonOptions,
    Options,
    Policy,
    Preset,
    Scope,
    Scorer,
)
from kvsift.builder.policies.selectors import SELECTORS

SCORERS: dict[str, Scorer] = {}
PRESETS: dict[str, Preset] = {}


def register(module: ModuleType) -> None:
    """Make a module's `SCORER` and `PRESET` known, replacing those of the same name."""
    if hasattr(module, "SCORER"):
        SCORERS[module.SCORER.name] = module.SCORER
    if hasattr(module, "PRESET"):
        PRESETS[module.PRESET.name] = module.PRESET


for _found in pkgutil.iter_modules(__path__):
    register(importlib.import_module(f"{__name__}.{_found.name}"))


def resolve(
    eviction: str,
    *,
    scorer: str | None = None,
    selector: str | None = None,
    scope: Scope | None = None,
    options: dict[str, Any] | None = None,
) -> Policy:
    """Return the policy of a preset name, with its scorer, selector, scope or options replaced.

    `options` are the `--set key=value` pairs of the scorer, the selector and `CommonOptions`.
    Raises UsageError for an unknown name, an option outside its range, or a pair that cannot work.
    """
    if eviction not in PRESETS:
        raise unknown_name("eviction", eviction, PRESETS)
    preset = PRESETS[eviction]
    if preset.scope == "none":
        if scorer or selector or options or scope not in (None, "none"):
            raise UsageError(f"eviction {eviction!r} keeps everything: it takes no options")
        return Policy(name=eviction, scorer="none", selector="none", scope="none")
    if scope == "none":
        raise UsageError("scope 'none' evicts nothing; use --eviction full")
    score = _lookup("scorer", scorer or preset.scorer, SCORERS)
    select = _lookup("selector", selector or preset.selector, SELECTORS)
    if select.name == "reservoir" and not score.positive:
        raise UsageError(
            f"selector 'reservoir' samples by positive weights, and scorer {score.name!r} has "
            f"none; use --selector topk, or a scorer of: "
            f"{', '.join(sorted(s.name for s in SCORERS.values() if s.positive))}"
        )
    given = {**preset.defaults, **(options or {})}
    if select.name == "reservoir" and str(given.get("draws")) in ("inf", "infinity"):
        given.pop("draws")
        select = SELECTORS["topk"]
    block_size = _block_size(score, given.pop("block_size", score.default_block_size))
    models = (score.options, select.options, CommonOptions)
    known = [name for model in models for name in model.model_fields]
    for key in given:
        if key not in known:
            raise unknown_name("option", key, [*known, "block_size"])
    window = score.window(_parse(score.options, given))
    if "recent_units" not in given:
        given["recent_units"] = -(-window.rows // block_size)
    scorer_options, selector_options, common = (_parse(model, given) for model in models)
    assert isinstance(common, CommonOptions)
    if select.name == "reservoir" and score.goes_negative(scorer_options):
        raise UsageError(
            f"selector 'reservoir' samples by positive weights, and scorer {score.name!r} gives "
            f"negative ones with these options; use --selector topk or its default options"
        )
    per_head = score.per_head(scorer_options)
    if select.per_head_lengths and not per_head:
        raise UsageError(
            f"selector {select.name!r} lets heads compete, and scorer {score.name!r} gives one "
            f"score for all of them here; use --selector topk, or --set head_reduce=per_head "
            f"where the scorer has it"
        )
    own_lengths = select.per_head_lengths or common.row_lengths == "head"
    if own_lengths and not per_head:
        raise UsageError(
            f"row_lengths=head gives heads budgets of their own, and scorer {score.name!r} gives "
            f"one score for all of them here; use row_lengths=layer, or head_reduce=per_head where "
            f"the scorer has it"
        )
    interval = common.decode_interval or (block_size if block_size > 1 else TOKEN_INTERVAL)
    if interval % block_size:
        raise UsageError(
            f"decode_interval must be a multiple of the block size {block_size}, got {interval}"
        )
    return Policy(
        name=eviction,
        scorer=score.name,
        selector=select.name,
        scope=scope or preset.scope,
        block_size=block_size,
        window=window.rows,
        window_heads=window.heads,
        per_head=per_head,
        layout="head" if own_lengths else "sequence",
        states=score.states,
        needs_order=score.needs_order,
        score_is_mass=score.mass,
        scorer_options=scorer_options.model_dump(),
        selector_options=selector_options.model_dump(),
        **common.model_dump(exclude={"decode_interval"}),
        decode_interval=interval,
    )


def _lookup(kind: str, name: str, known: dict[str, Any]) -> Any:
    if name not in known:
        raise unknown_name(kind, name, known)
    return known[name]


def _block_size(scorer: Scorer, value: Any) -> int:
    try:
        size = int(value)
    except (TypeError, ValueError, OverflowError):
        size = 0
    size = 0 if isinstance(value, float) and value != size else size
    if not 1 <= size <= 1024 or size & (size - 1):
        raise UsageError(f"block_size must be a power of two from 1 to 1024, got {value!r}")
    if size > 1 and not scorer.blocks:
        raise UsageError(
            f"scorer {scorer.name!r} scores single tokens: block_size must be 1, got {size}"
        )
    return size


def _parse(model: type[Options], given: dict[str, Any]) -> Options:
    mine = {key: value for key, value in given.items() if key in model.model_fields}
    try:
        return model.model_validate(mine)
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # a rule about several options
            raise UsageError(first["msg"].removeprefix("Value error, ")) from None
        key = ".".join(str(part) for part in first["loc"])
        what = first["msg"].removeprefix("Value error, ").lower()
        raise UsageError(f"option {key}={first['input']!r}: {what}") from None
