"""Expected scoring where endpoints do not tell what it needs: scores come from the text, and that is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.front_door import rows, sparta, tribe
from tests.loopback.process import LoopbackProcess

EXPECTED: dict[str, Any] = {"judging": {"scoring": "expected"}}


def play(server: LoopbackProcess, directory: Path, *arguments: str, **changes: Any) -> list[dict[str, Any]]:
    """The judges of a run, as `sparta-api judges` shows them."""
    path, run = tribe(directory, server.base_url, **EXPECTED, **changes), directory / "run"
    ended = sparta("run", "--tribe", path, "--run-dir", run, "--yes", *arguments)
    assert ended.code == 0, ended.err
    judges: list[dict[str, Any]] = json.loads(sparta("judges", run, "--json").out)["judges"]
    return judges


@pytest.mark.parametrize(
    ("judge", "why"),
    [
        ({"logprobs": "none"}, "the endpoint returns no log-probabilities"),
        ({"label_mass": 0.3}, "30.0% of the probability lies on score labels, min_label_mass is 50%"),
    ],
)
def test_scores_from_the_text_are_counted_and_check_says_why(tmp_path: Path, judge: dict[str, Any], why: str) -> None:
    with LoopbackProcess({"any_model": True, "judge": judge}, tmp_path / "server") as server:
        found = sparta("check", "--tribe", tribe(tmp_path / "check", server.base_url, **EXPECTED))
        judges = play(server, tmp_path)
    assert found.code == 0, found.err
    told = [line for line in found.out.splitlines() if "judging.scoring: expected has no effect" in line]
    assert len(told) == 4 and all(why in line for line in told)
    judgments = rows(tmp_path / "run" / "iteration_000" / "judgments.jsonl")
    assert all(row["score"] == int(row["score"]) for row in judgments)
    assert sum(one["read_from_text"] for one in judges) == len(judgments) == sum(one["judgments"] for one in judges)


def test_probabilities_are_used_where_there_are_some(tmp_path: Path) -> None:
    with LoopbackProcess({"any_model": True}, tmp_path / "server") as server:
        found = sparta("check", "--tribe", tribe(tmp_path / "check", server.base_url, **EXPECTED))
        judges = play(server, tmp_path)
    assert "has no effect" not in found.out + found.err
    assert found.out.count("95%") == 4
    assert [one["read_from_text"] for one in judges] == [0, 0, 0, 0]
    judgments = rows(tmp_path / "run" / "iteration_000" / "judgments.jsonl")
    assert any(row["score"] != int(row["score"]) for row in judgments)


def test_a_judge_may_ask_for_fewer_alternatives(tmp_path: Path) -> None:
    fighters = [{"name": f"m{n}", "model": f"model-{n}", "roles": ["fight"]} for n in range(2)]
    judge = {"name": "judge", "model": "judge", "roles": ["judge"], "extra_body": {"top_logprobs": 3}}
    scenario = {"any_model": True, "judge": {"sharpness": 3.0, "label_mass": 1.0}}
    with LoopbackProcess(scenario, tmp_path / "server") as server:
        (found,) = play(server, tmp_path, members=[*fighters, judge])
    assert 0 < found["label_mass"] < 0.8
