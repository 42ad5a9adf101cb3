"""What the pages in docs/ say of names, options, defaults and files is what the code has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvsift.builder import names
from kvsift.builder.cli import _options
from kvsift.builder.policies import PRESETS, SCORERS, resolve
from kvsift.builder.policies.base import CommonOptions, Policy
from kvsift.builder.policies.selectors import SELECTORS
from kvsift.builder.states import STATES

ROOT = Path(__file__).parent.parent
POLICIES = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
#: Sections of docs/policies.md by heading.
SECTIONS = dict(
    re.findall(r"^#{2,3} (.+?)\n(.*?)(?=^#{2,3} |\Z)", POLICIES, flags=re.MULTILINE | re.DOTALL)
)
WORDS = {"on": 1, "off": 0}


def rows(section: str) -> Iterator[list[str]]:
    """Yield the cells of the rows of a section's tables, headings left out."""
    for line in SECTIONS[section].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            yield cells


def options(section: str) -> dict[str, str]:
    """Return option -> default of a section's tables, which have three columns."""
    return {cells[0].strip("`"): cells[1] for cells in rows(section) if len(cells) == 3}


def known_options() -> set[str]:
    """Return the name of every option of every policy."""
    models = [x.options for x in (*SCORERS.values(), *SELECTORS.values())]
    return {"block_size"}.union(*(m.model_fields for m in (*models, CommonOptions)))


def value_of(policy: Policy, option: str) -> Any:
    """Return the value that an option has in a policy; KeyError if it has no such option."""
    every = policy.model_dump() | policy.scorer_options | policy.selector_options
    return every[option]


def same(written: str, value: Any) -> bool:
    """Whether a default in the docs is the value."""
    if isinstance(value, str):
        return written == value
    return float(WORDS.get(written, written)) == value


def test_every_preset_has_one_section() -> None:
    headings = re.findall(r"^### (\w+)$", POLICIES, flags=re.MULTILINE)
    assert sorted(h for h in headings if h in PRESETS) == sorted(PRESETS)
    for name in PRESETS:
        for part in ("**Source:**", "**Use it**", "**Limits:**"):
            assert part in SECTIONS[name], f"{name} has no {part}"
    assert all(p.source.removeprefix("arXiv ") in SECTIONS[p.name] for p in PRESETS.values())


@pytest.mark.parametrize("name", PRESETS)
def test_defaults_in_a_section_are_those_of_the_policy(name: str) -> None:
    policy, written = resolve(name), options(name)
    wrong = {o: (d, value_of(policy, o)) for o, d in written.items()
             if not same(d, value_of(policy, o))}  # fmt: skip
    assert not wrong
    assert set(PRESETS[name].defaults) <= set(written)


@pytest.mark.parametrize("name", SCORERS)
def test_a_section_has_every_option_of_its_scorer(name: str) -> None:
    owner = {"position": "streaming", "uniform": "random"}.get(name, name)
    assert set(SCORERS[name].options.model_fields) <= set(options(owner))


@pytest.mark.parametrize("name", SELECTORS)
def test_a_selector_has_every_option_and_default(name: str) -> None:
    fields = SELECTORS[name].options.model_fields | dict(CommonOptions.model_fields)
    written = options(name)
    assert set(SELECTORS[name].options.model_fields) <= set(written)
    assert all(same(default, fields[o].default) for o, default in written.items())


def test_common_options_and_defaults() -> None:
    written = options("Budgets") | options("reservoir")
    assert set(CommonOptions.model_fields) <= set(written)
    for option, field in CommonOptions.model_fields.items():
        assert same(written[option], field.default), option


def test_the_table_of_policies_is_what_the_registry_has() -> None:
    table = {c[0].strip("`"): c[1:] for c in rows("How a policy is put together")}
    assert table.keys() == PRESETS.keys()
    for name, cells in table.items():
        policy = resolve(name)
        made = [policy.scorer, policy.selector, policy.scope]
        unit, sets = str(policy.block_size), "head" if policy.per_head else "layer"
        made += [unit, sets] if policy.evicts else ["-", "-"]
        assert cells == [*made, policy.layout], name


def test_the_table_of_pairs_is_what_the_registry_has() -> None:
    lines = [x for x in SECTIONS["Which pairs are possible"].splitlines() if x.startswith("| ")]
    header, *body = ([c.strip() for c in line.strip("|").split("|")] for line in lines)
    pairs = {
        (scorer, selector): cell
        for names_, *cells in body
        for scorer in names_.split(", ")
        for selector, cell in zip(header[1:], cells, strict=True)
    }
    assert len(pairs) == len(SCORERS) * len(SELECTORS)
    for (scorer, selector), cell in pairs.items():
        try:
            resolve("nexus", scorer=scorer, selector=selector)
            works = True
        except ValueError:
            works = False
        assert works == cell.startswith("yes"), f"{scorer} x {selector}"


@pytest.mark.parametrize("page", [*sorted(p.name for p in ROOT.glob("docs/*.md")), "README.md"])
def test_quoted_options_exist_and_take_the_quoted_value(page: str) -> None:
    folder = ROOT if page == "README.md" else ROOT / "docs"
    text = (folder / page).read_text(encoding="utf-8")
    for option, value in re.findall(r"--set\s+([\w-]+)(?:=([^\s`]+))?", text):
        if (option, value) == ("option", "value"):  # the pattern itself
            continue
        assert option.replace("-", "_") in known_options(), f"--set {option}"
        if not value:
            continue
        given = _options([f"{option}={value}"])
        taken = [n for n in PRESETS if n != "full" and takes(n, given)]
        assert taken, f"no policy takes --set {option}={value}"


def takes(name: str, given: dict[str, Any]) -> bool:
    """Whether a policy takes the options."""
    try:
        resolve(name, options=given)
    except ValueError:
        return False
    return True


def test_layer_weights_come_from_the_command_line() -> None:
    given = _options(["layer_budgets=3,2,1"])
    assert resolve("snapkv", options=given).layer_budgets == (3.0, 2.0, 1.0)
    with pytest.raises(ValueError, match=r"layer_budgets='3,x': .*such as 3,2,1"):
        resolve("snapkv", options=_options(["layer_budgets=3,x"]))


def test_files_that_the_architecture_names_exist() -> None:
    named = set(re.findall(r"`([\w.-]+(?:/[\w.-]+)+)`", ARCHITECTURE))
    assert len(named) > 40
    assert not sorted(name for name in named if not (ROOT / name).exists())
    linked = re.findall(r"\]\((?!https:)([^)#]+)", ARCHITECTURE + POLICIES)
    assert not [link for link in linked if not (ROOT / "docs" / link).exists()]


def test_the_architecture_names_every_input_output_and_state() -> None:
    tensors = [v for k, v in vars(names).items() if k.isupper()]
    tensors += [f(0).replace(".0", ".i") for f in (names.past_key, names.present_value)]
    tensors += [names.state_in(state, 0).replace(".0", ".i") for state in STATES]
    assert not [t for t in tensors if f"`{t}`" not in ARCHITECTURE]
    assert len(ARCHITECTURE.splitlines()) < 200


def test_links_inside_the_policy_page_have_a_target() -> None:
    targets = {h.lower().replace(" ", "-") for h in re.findall(r"^#+ (.+)$", POLICIES, re.M)}
    links = set(re.findall(r"\]\(#([^)]+)\)", POLICIES))
    assert links
    assert links <= targets
