"""The same tribe gives the same bytes, whatever the concurrency, the latencies and the interruptions."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.front_door import kill, results, rows, sparta, started, tribe
from tests.loopback import start_loopback

SCENARIO: dict[str, Any] = {
    "any_model": True,
    "models": {
        "model-0": {"latency_s": 0.001, "latency": "exponential"},
        "model-1": {"latency_s": 0.03, "latency": "exponential", "skill": 2},
        "model-2": {"latency_s": 0.005, "latency": "exponential", "skill": -2},
    },
    "rules": [{"match": {"probability": 0.1}, "fault": "502"}, {"match": {"every": 40}, "fault": "reset"}],
}
TRIBES: dict[str, dict[str, Any]] = {
    "all judges": {},
    "drawn judges, two rounds": {"judging": {"judges_per_duel": 2, "rounds": 2, "temperature": 0.7}},
    "two iterations": {"iterations": 2, "reputation": {"update": "sequential", "variant": "dynamic"}},
}


@pytest.mark.parametrize("name", TRIBES)
def test_one_at_a_time_64_at_a_time_and_killed_give_the_same_bytes(tmp_path: Path, name: str) -> None:
    with start_loopback(SCENARIO, tmp_path) as server:
        file = tribe(tmp_path, server.base_url, members=5, instructions=16, **TRIBES[name])
        runs = [tmp_path / f"run-{number}" for number in range(3)]
        slow = ["--set", "members.m0.concurrency=1"]
        fast = ["--set", "members.m0.concurrency=64"]
        one = sparta("run", "--tribe", file, "--run-dir", runs[0], *slow)
        many = sparta("run", "--tribe", file, "--run-dir", runs[1], *fast)
        process = started("run", "--tribe", file, "--run-dir", runs[2], *fast)
        journal = runs[2] / "iteration_000" / "judgments.jsonl"
        while process.poll() is None and not (journal.exists() and journal.stat().st_size > 4000):
            time.sleep(0.005)
        kill(process)
        again = sparta("resume", runs[2], *slow)
    assert [one.code, many.code, again.code] == [0, 0, 0], one.err + many.err + again.err
    assert results(runs[0]) == results(runs[1]) == results(runs[2])
    orders = [[row["duel"] for row in rows(run / "iteration_000" / "responses.jsonl")] for run in runs[:2]]
    assert orders[0] != orders[1]
