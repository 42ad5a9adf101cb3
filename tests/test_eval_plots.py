"""Plots of the evaluation: they are made of every suite's results, and fail with a hint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvsift.runtime import plotting
from kvsift.runtime.evaluation import plots, report, suites

PNG = b"\x89PNG"


def cells(names: list[str], densities: tuple[float, ...], kinds: tuple[str, ...]) -> report.Cells:
    return {
        (kind, name, density): {i: [0.1 * n + 0.01 * i, 0.1 * n] for i in range(3)}
        for kind in kinds
        for n, name in enumerate(names, start=1)
        for density in densities
    }


@pytest.mark.parametrize("suite", suites.SUITES)
def test_every_suite_has_its_plots(tmp_path: Path, suite: str) -> None:
    names = [s.name for s in suites.suite(suite)]
    found = cells(names, (0.5, 0.2), ("prose", "code"))
    columns = [report.Column(f"{d:g}", found, "prose", d) for d in (0.5, 0.2)]
    groups = {k: [report.Column("0.5", found, k, 0.5)] for k in ("prose", "code")}
    plots.dots(tmp_path / "dots.png", groups, "KL", "title", log=True)
    plots.forest(tmp_path / "forest.png", columns, suites.CONTRASTS, "KL", "title")
    plots.grid(tmp_path / "grid.png", columns, "accuracy", "title")
    plots.seeds(tmp_path / "seeds.png", groups, "KL", "title")
    for name in ("dots", "forest", "grid", "seeds"):
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == PNG


@pytest.mark.parametrize("name", ["full", "snapkv"])
def test_what_is_at_no_distance_needs_no_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    found: report.Cells = {("prose", name, 1.0): {0: [0.0]}}
    groups = {"prose": [report.Column("1", found, "prose", 1.0)]}
    plots.dots(tmp_path / "dots.png", groups, "KL", "title", log=True)
    assert not (tmp_path / "dots.png").exists()
    assert "nothing differs from the full cache" in capsys.readouterr().err
    plots.dots(tmp_path / "dots.png", groups, "KL", "title")
    assert (tmp_path / "dots.png").read_bytes()[:4] == PNG


def test_contrasts_are_of_one_suite_each() -> None:
    named = [{s.name for s in specs} for specs in suites.SUITES.values()]
    for question, pairs in suites.CONTRASTS.items():
        assert any({n for p in pairs for n in p} <= names for names in named), question


def test_without_matplotlib_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = plotting.importlib.util.find_spec

    def hidden(name: str, *args: Any) -> Any:
        return None if name == "matplotlib" else find(name, *args)

    monkeypatch.setattr(plotting.importlib.util, "find_spec", hidden)
    plots.maybe(lambda: pytest.fail("a plot without matplotlib"))
    assert "pip install 'kvsift[plot]'" in capsys.readouterr().err


def test_colours_differ_in_lightness_too() -> None:
    def luminance(colour: str) -> float:
        r, g, b = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    looks = [plotting.style(i) for i in range(2 * len(plotting.COLOURS))]
    assert len({(x["color"], x["marker"]) for x in looks}) == len(looks)
    looks = looks[: len(plotting.COLOURS)]
    assert len({x["marker"] for x in looks}) == len(looks)
    assert all(luminance(c) < 0.7 for c in plotting.COLOURS)


def test_the_spread_of_a_run_is_that_of_its_means() -> None:
    found = {("prose", "a", 0.2): {0: [1.0, 2.0, 3.0], 1: [3.0, 2.0, 1.0]}}
    cell = found["prose", "a", 0.2]
    assert report.run_means(cell) == [2.0, 2.0, 2.0]
    table = report.seed_table([report.Column("prose 0.2", found, "prose", 0.2)])
    assert "| `a` | prose 0.2 | 2.000 ± 0.000 | 1.000 | 0.0000 | 2.000 to 2.000 |" in table
