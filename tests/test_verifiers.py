"""Verifiers: what each kind counts, and how they judge by the front door, beside members or alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from sparta_api.config.verifiers import Verifier
from sparta_api.judging.verifier_rules import last_number, make_rule, make_scoring
from tests.front_door import REPOSITORY, kill, results, rows, sparta, started, tribe
from tests.loopback.process import LoopbackProcess
from tests.test_pairwise import _until_lines

SECTION: TypeAdapter[Any] = TypeAdapter(Verifier)
QUALITY = {"kind": "python", "function": "verifier_functions:quality"}
JUDGES_ONLY = [{"name": f"m{n}", "model": f"model-{n}", "roles": ["fight"]} for n in range(3)]


def share(response: str, row: dict[str, Any], **section: Any) -> float:
    rule = make_rule(SECTION.validate_python(section))
    assert rule is not None and rule.lacks(row) is None
    return rule.share(response, row)


def asking(text: str, **fields: Any) -> dict[str, Any]:
    return {"id": "q", "prompt": [{"role": "user", "content": text}], **fields}


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("So 3 + 4 makes 7.", "7", 1),
        ("The total is 1,234.50 dollars", "Some steps.\n#### 1234.5", 1),
        ("#### 12\nIgnore 99", "12", 0),
        ("12 apples\n#### 12", "12", 1),
        (r"First 5, then \boxed{-3}. (2 steps)", "−3", 1),
        ("It is 8", "7", 0),
        ("no number", "7", 0),
        ("", "7", 0),
        ("9" * 4000, "7", 0),
    ],
)
def test_number(response: str, answer: str, expected: float) -> None:
    assert share(response, {"answer": answer}, kind="number") == expected


def test_numbers_of_huge_exponents_are_none() -> None:
    assert last_number("1e999") is None
    assert last_number("1e3") == 1000


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("B", "B", 1),
        ("b.", "B", 1),
        ("(B)", "1", 1),
        ("B) Paris, since ...", "B", 1),
        ("The answer is (B), not (A).", "B", 1),
        ("Answer: C\nWait. Answer: B", "B", 1),
        (r"\boxed{B}", "B", 1),
        ("Both (A) and (B) are right.", "B", 0),
        ("A big city", "A", 0),
        ("E", "B", 0),
        ("", "B", 0),
    ],
)
def test_choice(response: str, answer: str, expected: float) -> None:
    assert share(response, {"answer": answer}, kind="choice") == expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("Rain falls when cold clouds cannot hold their water any longer.", 1.0),
        (" ".join(f"word{n}" for n in range(12)), 1.0),
        (" ".join(f"word{n}" for n in range(15)), 0.75),
        (" ".join(f"word{n}" for n in range(40)), 0.0),
        ("", 0.0),
        ("Rain. Falls. Down.", 0.0),
        ("rain rain rain rain rain rain", 0.0),
        ("... !!! ??? --- *** ___", 0.0),
    ],
)
def test_a_word_limit_cannot_be_met_by_saying_nothing(response: str, expected: float) -> None:
    row = asking("Why does it rain? Answer in at most 12 words.")
    assert share(response, row, kind="word_limit") == pytest.approx(expected)


def test_a_word_limit_comes_from_the_row_or_the_prompt() -> None:
    response = "one two three four five six"
    assert share(response, asking("Be brief.", limit=6), kind="word_limit", field="limit") == 1
    assert share(response, asking("Use up to 4 words.", limit=6), kind="word_limit", field="limit") == 1
    assert share(response, asking("Use up to 4 words."), kind="word_limit", field="limit") == 0.5
    assert share("one two", asking("Höchstens 2 Wörter"), kind="word_limit", pattern=r"(\d+) Wörter") == 1


@pytest.mark.parametrize(("response", "expected"), [(" Paris\n", True), ("paris", True), ("Paris is it", False)])
def test_exact(response: str, expected: bool) -> None:
    assert share(response, {"answer": "Paris"}, kind="exact", ignore_case=True) == expected


def test_what_runs_in_a_process_of_its_own() -> None:
    schema = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
    fits = make_scoring({"kind": "json_schema", "json_schema": schema})
    assert fits('{"name": "x"}', {}) and fits('```json\n{"name": "x"}\n```', {})
    for wrong in ("{}", '{"name": 1}', "prose", "", "[" * 100_000, '{"name": "x"} and more'):
        assert not fits(wrong, {})
    assert make_scoring({"kind": "regex", "pattern": r"\d", "whole": False, "forbidden": False})("a1", {})
    assert not make_scoring({"kind": "regex", "pattern": r"\d", "whole": True, "forbidden": False})("a1", {})
    assert not make_scoring({"kind": "regex", "pattern": r"\d", "whole": False, "forbidden": True})("a1", {})


def tribe_with(directory: Path, base_url: str, verifiers: dict[str, Any], **changes: Any) -> Path:
    judging = {"verifiers": verifiers, **changes.pop("judging", {})}
    path = tribe(directory, base_url, judging=judging, **changes)
    functions = (REPOSITORY / "tests" / "verifier_functions.py").read_text(encoding="utf-8")
    (directory / "verifier_functions.py").write_text(functions, encoding="utf-8")
    return path


def test_a_verifier_votes_beside_the_judges_with_its_weight(tmp_path: Path) -> None:
    with LoopbackProcess({"any_model": True}, tmp_path / "server") as server:
        path = tribe_with(tmp_path, server.base_url, {"truth": {**QUALITY, "weight": 300}}, reputation={"freeze": True})
        ended = sparta("run", "--tribe", path, "--run-dir", tmp_path / "run", "--yes")
    assert ended.code == 0, ended.err
    files = tmp_path / "run" / "iteration_000"
    texts = {(r["duel"], r["fighter"]): r["content"] for r in rows(files / "responses.jsonl")}
    duels = rows(files / "duels.jsonl")
    assert duels
    for duel in duels:
        a, b = duel["fighters"]
        truth = [1.0 + ord(texts[duel["duel"], fighter][5]) - ord("a") for fighter in (a, b)]
        assert duel["judges"]["truth"] == truth and len(duel["judges"]) == 3
        others = [scores for name, scores in duel["judges"].items() if name != "truth"]
        for side in (0, 1):
            assert duel["scores"][side] == pytest.approx((3 * truth[side] + sum(s[side] for s in others)) / 5)
    assert "truth" not in json.loads((tmp_path / "run" / "ratings.json").read_text())["members"]
    told = [row for row in rows(files / "judgments.jsonl") if row["judge"] == "truth"]
    assert len(told) == 2 * len(duels) and all(row["attempts"] == 0 and row["model"] is None for row in told)
    assert "a verifier may print" in (tmp_path / "run" / "logs" / "verifier-truth.log").read_text()


def test_verifiers_alone_judge_two_fighters_whatever_happens_in_between(tmp_path: Path) -> None:
    """Killed twice and resumed: the same files, and no judgment twice."""
    command = {"kind": "command", "command": [sys.executable, "score.py"], "concurrency": 2}
    verifiers = {"truth": QUALITY, "length": command}
    (tmp_path / "cut").mkdir()
    for directory in (tmp_path, tmp_path / "cut"):
        (directory / "score.py").write_text(
            "import json, sys\nasked = json.load(sys.stdin)\n"
            "print(json.dumps({'score': min(asked['scale'][1], 1 + len(asked['response'].split()) / 4)}))\n"
        )
    scenario = {"any_model": True, "default_model": {"latency_s": 0.05}}
    with LoopbackProcess(scenario, tmp_path / "server") as server:
        defaults = {"base_url": server.base_url, "concurrency": 2}
        path = tribe_with(tmp_path, server.base_url, verifiers, members=JUDGES_ONLY[:2], defaults=defaults)
        assert sparta("run", "--tribe", path, "--run-dir", tmp_path / "run", "--yes").code == 0
        path = tribe_with(tmp_path / "cut", server.base_url, verifiers, members=JUDGES_ONLY[:2], defaults=defaults)
        cut = tmp_path / "cut" / "run"
        for lines in (4, 20):
            process = started("run", "--tribe", path, "--run-dir", cut, "--yes")
            _until_lines(cut / "iteration_000" / "judgments.jsonl", lines)
            kill(process)
        assert sparta("resume", cut).code == 0
    assert results(tmp_path / "run") == results(cut)
    judgments = rows(cut / "iteration_000" / "judgments.jsonl")
    keys = [(row["duel"], row["judge"], row["fighter"]) for row in judgments]
    assert len(set(keys)) == len(keys) == 12 * 2 * 2
    duels = rows(cut / "iteration_000" / "duels.jsonl")
    assert all(list(duel["judges"]) == ["truth", "length"] for duel in duels)
    assert any(duel["winner"] for duel in duels)


def test_whatever_goes_wrong_is_an_abstention(tmp_path: Path) -> None:
    verifier = {"kind": "python", "function": "verifier_functions:moody", "timeout_s": 1}
    with LoopbackProcess({"any_model": True}, tmp_path / "server") as server:
        path = tribe_with(tmp_path, server.base_url, {"moody": verifier, "truth": QUALITY}, instructions=9)
        ended = sparta("run", "--tribe", path, "--run-dir", tmp_path / "run", "--yes")
    assert ended.code == 0, ended.err
    files = tmp_path / "run" / "iteration_000"
    instructions = {duel["duel"]: duel["instruction"] for duel in rows(files / "duels.jsonl")}
    told = {
        instructions[row["duel"]]: (row["score"], row.get("reason"), row.get("detail") or "")
        for row in rows(files / "judgments.jsonl")
        if row["judge"] == "moody"
    }
    assert [told[f"q{n}"][:2] for n in range(9)] == [
        (None, "failed"), (None, "failed"), (None, "timeout"), (None, "abstained"), (None, "no_score"),
        (None, "no_score"), (10.0, None), (4.0, None), (4.0, None),
    ]  # fmt: skip
    assert "ValueError" in told["q0"][2] and "sk-abcdefghijklmnop" not in (files / "judgments.jsonl").read_text()
    assert (
        "code 3" in told["q1"][2] and "longer than 1 s" in told["q2"][2] and "11.0 is not on the scale" in told["q5"][2]
    )
    for duel in rows(files / "duels.jsonl"):
        assert (
            ("moody" in duel["abstained"]) == (told[duel["instruction"]][0] is None) == ("moody" not in duel["judges"])
        )
    status = json.loads(sparta("status", tmp_path / "run", "--json").out)
    assert status["verifiers"]["moody"] == {"judged": 3, "abstained": 6}
    assert any("verifier 'moody' abstained from 67%" in warning for warning in status["warnings"])


def test_a_pattern_that_never_ends_costs_its_own_time_only(tmp_path: Path) -> None:
    verifiers = {"slow": {"kind": "regex", "pattern": r"([\w -]+)+!\Z", "timeout_s": 0.5}}
    with LoopbackProcess({"any_model": True}, tmp_path / "server") as server:
        path = tribe_with(tmp_path, server.base_url, verifiers, instructions=2)
        assert sparta("run", "--tribe", path, "--run-dir", tmp_path / "run", "--yes").code == 0
    judgments = rows(tmp_path / "run" / "iteration_000" / "judgments.jsonl")
    assert {row["reason"] for row in judgments if row["judge"] == "slow"} == {"timeout"}


@pytest.mark.parametrize(
    ("verifier", "said"),
    [
        ({"kind": "exact"}, "instruction 'q0' has no `answer`, which judging.verifiers.v needs"),
        ({"kind": "word_limit"}, "instruction 'q0' names no word limit, which judging.verifiers.v needs"),
        ({"kind": "python", "function": "no_such_module:f"}, "judging.verifiers.v: ModuleNotFoundError"),
        ({"kind": "python", "function": "verifier_functions:absent"}, "judging.verifiers.v: AttributeError"),
        ({"kind": "python", "function": "f"}, "a function is written module:function"),
        ({"kind": "command", "command": ["no-such-program"]}, "there is no program no-such-program"),
        ({"kind": "regex", "pattern": "("}, "this is no regular expression"),
        ({"kind": "json_schema", "json_schema": {"type": "nonsense"}}, "judging.verifiers.v: SchemaError"),
        ({"kind": "word_limit", "pattern": "words"}, "needs one group"),
        ({"kind": "words"}, "judging.verifiers.v"),
    ],
)
def test_what_cannot_work_stops_before_the_first_request(tmp_path: Path, verifier: dict[str, Any], said: str) -> None:
    with LoopbackProcess({"any_model": True}, tmp_path / "server") as server:
        path = tribe_with(tmp_path, server.base_url, {"v": verifier})
        ended = sparta("run", "--tribe", path, "--run-dir", tmp_path / "run", "--yes")
        assert server.log_path.exists() is False or rows(server.log_path) == []
    assert ended.code == 2
    assert said in ended.err and "Traceback" not in ended.err


def test_a_verifier_is_called_like_no_member(tmp_path: Path) -> None:
    path = tribe_with(tmp_path, "http://127.0.0.1:9/v1", {"m1": QUALITY})
    ended = sparta("run", "--tribe", path, "--run-dir", tmp_path / "run", "--yes")
    assert ended.code == 2
    assert "a member is called 'm1' as well" in ended.err


def test_check_tries_verifiers(tmp_path: Path) -> None:
    with LoopbackProcess({"any_model": True}, tmp_path / "server") as server:
        path = tribe_with(tmp_path, server.base_url, {"truth": QUALITY})
        assert sparta("check", "--tribe", path).code == 0
        (tmp_path / "verifier_functions.py").unlink()
        ended = sparta("check", "--tribe", path)
    assert ended.code == 2
    assert "judging.verifiers.truth: ModuleNotFoundError" in ended.err
