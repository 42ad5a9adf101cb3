"""`kvsift bench serve` on a tiny model: what it counts, not how fast it is."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines import Engines, request
from typer.testing import CliRunner

from kvsift.builder.errors import UsageError
from kvsift.cli import app
from kvsift.runtime.bench import serve
from kvsift.runtime.results import Timings
from kvsift.runtime.scheduler import Scheduler
from kvsift.runtime.stats import SchedulerStats


def test_a_run_prints_both_rates_and_their_ratios(engines: Engines, tmp_path: Path) -> None:
    file = tmp_path / "serve.json"
    package = engines.package("nexus", options={"block_size": 8})
    done = CliRunner().invoke(
        app,
        ["bench", "serve", str(package), "--requests", "3", "--prompt-tokens", "200",
         "--max-tokens", "40", "--rounds", "2", "--threads", "1", "--json", str(file),
         "--kv-memory", "1GiB"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    record = json.loads(file.read_text())
    one, many = record["one"], record["together"]
    assert (one["requests"], many["requests"]) == (1, 3)
    for key in ("decode_rate", "end_to_end_rate", "step_rate", "ttft_mean_s", "itl_median_s"):
        assert one[key] > 0 < many[key]
    assert many["ttft_max_s"] >= many["ttft_mean_s"]
    assert many["itl_max_s"] >= many["itl_median_s"]
    assert record["decode_ratio"] == pytest.approx(many["decode_rate"] / one["decode_rate"])
    assert (len(record["rounds"]), record["settings"]["slots"]) == (2, 3)
    assert re.search(r"3 together decode \d+\.\d\d times the tokens/s of one", done.stdout)
    assert "tokens/s end to end" in done.stdout


class Recorded:
    """A scheduler whose requests took the times that a test gives."""

    def __init__(self, timings: list[Timings]) -> None:
        self.timings = timings
        self.count = SchedulerStats()

    def stats(self) -> SchedulerStats:
        return self.count.copy()

    def submit_all(self, requests: Any, unlimited: bool) -> list[Any]:
        self.count.decoded_tokens += 7
        self.count.decode_s += 3.5
        return [SimpleNamespace(result=partial(self._result, t)) for t in self.timings]

    def _result(self, timings: Timings) -> Any:
        return SimpleNamespace(timings=timings, token_ids=(0,) * (1 + len(timings.itl_s)))


def test_the_rate_counts_what_comes_while_all_decode() -> None:
    first = Timings(1.0, (1.0, 1.0, 1.0, 1.0), 5.0)  # at 1, 2, 3, 4, 5
    second = Timings(2.5, (1.0, 0.25, 2.25), 6.0)  # at 2.5, 3.5, 3.75, 6
    scheduler: Any = Recorded([first, second])
    found = serve.run(scheduler, [request(5), request(6)])
    assert found.decode_rate == 5 / 2.5  # 3, 3.5, 3.75, 4 and 5, from 2.5 on
    assert found.step_rate == 2
    assert (found.ttft_mean_s, found.ttft_max_s, found.itl_max_s) == (1.75, 2.5, 2.25)
    assert found.itl_median_s == 1
    scheduler = Recorded([first])
    assert serve.run(scheduler, [request(5)]).decode_rate == 1


def test_prompts_differ(engines: Engines) -> None:
    found = serve.prompts(engines("nexus"), 3, 50)
    assert [len(ids) for ids in found] == [50] * 3
    assert found[0] != found[1] != found[2]


def test_requests_that_never_run_together_are_no_measurement(engines: Engines) -> None:
    engine = engines("nexus", max_batch=1)
    with Scheduler(engine) as scheduler, pytest.raises(UsageError, match="never decoded side by"):
        serve.run(scheduler, [request(50, 10), request(60, 10)])
