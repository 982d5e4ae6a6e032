"""Rubrics and reference answers by the front door."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparta_api.judging.score_fields import parse_fields
from tests.front_door import rows, sparta, tribe
from tests.loopback.process import LoopbackProcess

RUBRIC = [
    {"name": "correct", "description": "States nothing that is wrong.", "weight": 3},
    {"name": "plain words", "description": "A child understands it."},
]
SCENARIO = {"any_model": True, "log_bodies": True}


def play(server: LoopbackProcess, directory: Path, **changes: Any) -> Path:
    run = directory / "run"
    ended = sparta("run", "--tribe", tribe(directory, server.base_url, **changes), "--run-dir", run, "--yes")
    assert ended.code == 0, ended.err
    return run


def asked(server: LoopbackProcess, role: str = "judge") -> list[dict[str, Any]]:
    return [row["body"] for row in rows(server.log_path) if row.get("role") == role]


def test_every_criterion_is_scored_and_the_weighted_mean_counts(tmp_path: Path) -> None:
    with LoopbackProcess(SCENARIO, tmp_path / "server") as server:
        run = play(server, tmp_path, judging={"rubric": RUBRIC})
        bodies = asked(server)
    judgments = rows(run / "iteration_000" / "judgments.jsonl")
    assert judgments
    for row in judgments:
        (criteria,) = row["criteria"]
        assert list(criteria) == ["correct", "plain words"] and json.loads(row["raw"]) == criteria
        assert row["score"] == (3 * criteria["correct"] + criteria["plain words"]) / 4
    assert any(row["criteria"][0]["correct"] != row["criteria"][0]["plain words"] for row in judgments)
    prompt = bodies[0]["messages"][0]["content"]
    assert "- correct: States nothing that is wrong.\n- plain words: A child understands it.\n" in prompt
    assert prompt.count('{"correct": n, "plain words": n}') == 2
    schema = bodies[0]["response_format"]["json_schema"]["schema"]
    assert schema["required"] == ["correct", "plain words"]


def test_a_pair_is_scored_by_a_rubric_too(tmp_path: Path) -> None:
    judging = {"rubric": RUBRIC, "mode": "pairwise"}
    with LoopbackProcess(SCENARIO, tmp_path / "server") as server:
        run = play(server, tmp_path, judging=judging)
    for row in rows(run / "iteration_000" / "judgments.jsonl"):
        said = json.loads(row["raw"])
        assert row["scores"][0] == (3 * said["correct_a"] + said["plain words_a"]) / 4
        assert row["scores"][1] == (3 * said["correct_b"] + said["plain words_b"]) / 4
        assert row["criteria"][1] == {"correct": said["correct_b"], "plain words": said["plain words_b"]}


def test_a_missing_criterion_is_asked_for_again_and_then_no_score(tmp_path: Path) -> None:
    fault = {"kind": "edit", "message": {"content": '{"correct": 7}'}}
    rules = [
        {"match": {"model": "model-3", "role": "judge"}, "fault": fault},
        {
            "match": {"model": "model-2", "role": "judge", "attempts": 1, "contains": "Explain"},
            "fault": fault,
            "times": 1,
        },
    ]
    with LoopbackProcess({**SCENARIO, "rules": rules}, tmp_path / "server") as server:
        run = play(server, tmp_path, judging={"rubric": RUBRIC, "max_attempts": 2})
    judgments = rows(run / "iteration_000" / "judgments.jsonl")
    theirs = [row for row in judgments if row["judge"] == "m3"]
    assert theirs and all(row["score"] is None and row["attempts"] == 2 for row in theirs)
    assert [row["attempts"] for row in judgments if row["judge"] == "m2"].count(2) == 1
    assert all("m3" not in duel["judges"] for duel in rows(run / "iteration_000" / "duels.jsonl"))


@pytest.mark.parametrize(
    ("reply", "scores"),
    [
        ('{"correct": 7, "plain words": 3}', (7, 3)),
        ('{"correct": {"score": 7, "reason": "fine"}, "plain words": "3/10"}', (7, 3)),
        ('{"scores": {"correct": 7, "plain words": 3}}', (7, 3)),
        ("Correct: 7\n- **Plain words:** 3/10 (long)", (7, 3)),
        ('{"correct": 7}', None),
        ('{"correct": 7, "plain words": null}', None),
        ('{"correct": 7, "plain words": 0}', None),
        ('{"score": 7}', None),
        ("7, 3", None),
    ],
)
def test_a_sheet_is_read_strictly(reply: str, scores: tuple[float, float] | None) -> None:
    found = parse_fields(reply, ("correct", "plain words"), (1, 10))
    assert found == (None if scores is None else dict(zip(("correct", "plain words"), scores, strict=True)))


def test_a_rubric_that_does_not_fit_the_reply_is_refused(tmp_path: Path) -> None:
    many = [{"name": f"criterion {n}", "description": "x"} for n in range(9)]
    for rubric, said in ((many, "raise judging.max_tokens"), ([RUBRIC[0], RUBRIC[0]], "two criteria called 'correct'")):
        path = tribe(tmp_path, "http://127.0.0.1:9/v1", judging={"rubric": rubric})
        ended = sparta("run", "--tribe", path, "--run-dir", tmp_path / "run", "--yes")
        assert ended.code == 2
        assert said in ended.err and "Traceback" not in ended.err


def with_answers(path: Path, answers: dict[int, str]) -> Path:
    data = [
        {"id": f"q{n}", "prompt": f"Name thing {n}."} | ({"answer": a} if (a := answers.get(n)) else {})
        for n in range(6)
    ]
    (path.parent / "instructions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data), encoding="utf-8")
    return path


def test_judges_see_the_answer_and_fighters_do_not(tmp_path: Path) -> None:
    answers = {n: f"gold-{n}-answer" for n in range(6)}
    with LoopbackProcess(SCENARIO, tmp_path / "server") as server:
        path = with_answers(tribe(tmp_path, server.base_url, judging={"reference": True}), answers)
        assert sparta("run", "--tribe", path, "--run-dir", tmp_path / "run", "--yes").code == 0
        judged, fought = asked(server), asked(server, "fight")
    for body in judged:
        prompt = body["messages"][0]["content"]
        number = prompt.partition("Name thing ")[2][0]
        assert f"# Reference answer\n\ngold-{number}-answer\n" in prompt
    assert judged and fought and "gold-" not in json.dumps(fought)


def test_an_instruction_without_an_answer_stops_the_run_before_it_starts(tmp_path: Path) -> None:
    path = with_answers(tribe(tmp_path, "http://127.0.0.1:9/v1", judging={"reference": True}), {0: "a", 1: "b", 3: "d"})
    ended = sparta("run", "--tribe", path, "--run-dir", tmp_path / "run", "--yes")
    assert ended.code == 2
    assert "instruction 'q2' has no `answer`, which judging.reference shows to judges" in ended.err
    assert not (tmp_path / "run" / "run.json").exists()


def test_an_optional_reference_shows_where_there_is_one(tmp_path: Path) -> None:
    with LoopbackProcess(SCENARIO, tmp_path / "server") as server:
        path = with_answers(tribe(tmp_path, server.base_url, judging={"reference": "optional"}), {0: "gold"})
        assert sparta("run", "--tribe", path, "--run-dir", tmp_path / "run", "--yes").code == 0
        shown = ["Reference answer" in body["messages"][0]["content"] for body in asked(server)]
    assert 0 < sum(shown) < len(shown)
