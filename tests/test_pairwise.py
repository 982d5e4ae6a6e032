"""Pairwise judging by the front door: both orders, flips, abstentions, byte-identical however the run went."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta_api.judging.score_fields import PAIR, parse_fields, parse_pair
from sparta_api.judging.scores import LONGEST_VERDICT
from tests.front_door import kill, results, rows, sparta, started, tribe
from tests.loopback.process import LoopbackProcess

PAIRWISE: dict[str, Any] = {"judging": {"mode": "pairwise"}}
FIRST_WINS = '{"score_a": 9, "score_b": 5}'


def play(server: LoopbackProcess, directory: Path, **changes: Any) -> Path:
    run = directory / "run"
    ended = sparta("run", "--tribe", tribe(directory, server.base_url, **changes), "--run-dir", run, "--yes")
    assert ended.code == 0, ended.err
    return run


def test_judges_see_both_orders_and_the_mean_counts(tmp_path: Path) -> None:
    with LoopbackProcess({"any_model": True}, tmp_path / "server") as server:
        run = play(server, tmp_path, **PAIRWISE)
    judgments = rows(run / "iteration_000" / "judgments.jsonl")
    duels = rows(run / "iteration_000" / "duels.jsonl")
    said = {(row["duel"], row["judge"], *row["order"]): row for row in judgments}
    assert len(said) == len(judgments) == len(duels) * 2 * 2
    assert all(row["fighter"] is None and json.loads(row["raw"]) for row in judgments)
    assert len({row["winner"] for row in duels}) > 2
    for duel in duels:
        a, b = duel["fighters"]
        for judge, scores in duel["judges"].items():
            ordered = said[duel["duel"], judge, a, b]["scores"]
            swapped = said[duel["duel"], judge, b, a]["scores"]
            assert scores == [(ordered[0] + swapped[1]) / 2, (ordered[1] + swapped[0]) / 2]
        assert duel["flipped"] == []


@pytest.mark.parametrize("on_flip", ["average", "tie"])
def test_a_judge_that_likes_the_first_one_ties_everything(tmp_path: Path, on_flip: str) -> None:
    scenario = {"any_model": True, "judge": {"reply": FIRST_WINS}}
    with LoopbackProcess(scenario, tmp_path / "server") as server:
        run = play(server, tmp_path, instructions=50, judging={"mode": "pairwise", "on_flip": on_flip})
    duels = rows(run / "iteration_000" / "duels.jsonl")
    assert len(duels) == 50
    for duel in duels:
        assert duel["winner"] is None and duel["scores"] == [7.0, 7.0] and duel["before"] == duel["after"]
        assert sorted(duel["flipped"]) == sorted(duel["judges"])
    assert rows(run / "iteration_000" / "preferences.jsonl") == []
    status = json.loads(sparta("status", run, "--json").out)
    assert {m["name"]: m["flips"] for m in status["members"]} == {m["name"]: m["judged"] for m in status["members"]}
    assert any("position" in warning for warning in status["warnings"])


def test_a_flip_is_averaged_or_tied(tmp_path: Path) -> None:
    """A judge with a strong liking for the first place and an opinion besides."""
    models = {"model-0": {}, "model-1": {}, "model-2": {}, "model-3": {"position_bias": 6.0}}
    found = {}
    with LoopbackProcess({"models": models}, tmp_path / "server") as server:
        for on_flip in ("average", "tie"):
            run = play(server, tmp_path / on_flip, instructions=30, judging={"mode": "pairwise", "on_flip": on_flip})
            found[on_flip] = rows(run / "iteration_000" / "duels.jsonl")
    flipped = [duel for duel in found["tie"] if "m3" in duel["flipped"]]
    assert flipped
    assert all(duel["judges"]["m3"][0] == duel["judges"]["m3"][1] for duel in flipped)
    averaged = [duel["judges"]["m3"] for duel in found["average"] if "m3" in duel["flipped"]]
    assert any(a != b for a, b in averaged)
    first = [(duel["duel"], duel["flipped"]) for duel in found["average"]][:4]
    assert first == [(duel["duel"], duel["flipped"]) for duel in found["tie"]][:4]


def test_two_rounds_in_both_orders_are_eight_judgments_however_often_it_was_killed(tmp_path: Path) -> None:
    """C12: two judges, two rounds, both orders; killed after the first judgments."""
    judging = {"mode": "pairwise", "rounds": 2, "temperature": 0.7}
    slow = {"any_model": True, "default_model": {"latency_s": 0.3}}
    with LoopbackProcess(slow, tmp_path / "server") as server:
        path = tribe(
            tmp_path,
            server.base_url,
            instructions=1,
            judging=judging,
            defaults={"concurrency": 1, "base_url": server.base_url},
        )
        run = tmp_path / "run"
        journal = run / "iteration_000" / "judgments.jsonl"
        process = started("run", "--tribe", path, "--run-dir", run, "--yes")
        _until_lines(journal, 2)
        kill(process)
        before = journal.read_bytes().count(b"\n")
        assert 2 <= before < 8
        assert sparta("resume", run).code == 0
    keys = Counter((r["duel"], r["judge"], r["round"], tuple(r["order"])) for r in rows(journal))
    assert len(keys) == 8 and set(keys.values()) == {1}


def _until_lines(path: Path, count: int) -> None:
    deadline = time.monotonic() + 30
    while not (path.exists() and path.read_bytes().count(b"\n") >= count):
        assert time.monotonic() < deadline, "the run made no progress"
        time.sleep(0.02)


def test_results_do_not_depend_on_concurrency_or_kills(tmp_path: Path) -> None:
    scenario = {"any_model": True, "default_model": {"latency_s": 0.02, "position_bias": 1.0}}
    with LoopbackProcess(scenario, tmp_path / "server") as server:
        one = play(server, tmp_path / "one", defaults={"base_url": server.base_url, "concurrency": 1}, **PAIRWISE)
        many = play(server, tmp_path / "many", defaults={"base_url": server.base_url, "concurrency": 64}, **PAIRWISE)
        path = tribe(tmp_path / "cut", server.base_url, **PAIRWISE)
        cut = tmp_path / "cut" / "run"
        for lines in (5, 25):
            process = started("run", "--tribe", path, "--run-dir", cut, "--yes")
            _until_lines(cut / "iteration_000" / "judgments.jsonl", lines)
            kill(process)
        assert sparta("resume", cut).code == 0
    assert results(one) == results(many) == results(cut)
    keys = Counter(
        (r["duel"], r["judge"], r["round"], tuple(r["order"])) for r in rows(cut / "iteration_000" / "judgments.jsonl")
    )
    assert set(keys.values()) == {1}


def test_a_judge_that_answers_one_order_only_abstains(tmp_path: Path) -> None:
    no_score = {"kind": "edit", "message": {"content": "I cannot decide."}}
    scenario = {
        "any_model": True,
        "rules": [{"match": {"model": "model-3", "role": "judge", "every": 2}, "fault": no_score}],
    }
    with LoopbackProcess(scenario, tmp_path / "server") as server:
        run = play(server, tmp_path, judging={"mode": "pairwise", "max_attempts": 1})
    gone = {r["duel"] for r in rows(run / "iteration_000" / "judgments.jsonl") if r["scores"] is None}
    duels = rows(run / "iteration_000" / "duels.jsonl")
    assert gone
    assert gone == {duel["duel"] for duel in duels if "m3" in duel["abstained"]}
    assert all("m3" not in duel["judges"] for duel in duels if duel["duel"] in gone)


def test_expected_scoring_of_a_pair_is_refused(tmp_path: Path) -> None:
    path = tribe(tmp_path, "http://127.0.0.1:9/v1", judging={"mode": "pairwise", "scoring": "expected"})
    ended = sparta("run", "--tribe", path, "--run-dir", tmp_path / "run", "--yes")
    assert ended.code == 2
    assert "scoring: expected reads one score a reply, mode: pairwise asks for several; use sampled" in ended.err


@pytest.mark.parametrize(
    ("reply", "scores"),
    [
        ('{"score_a": 7, "score_b": 5}', (7, 5)),
        ('{"score_b": 5, "score_a": 7}', (7, 5)),
        ('```json\n{"score_a": 7, "score_b": "8/10"}\n```', (7, 8)),
        ("{'score_a': 7, 'score_b': 5, 'reason': 'A names \"score_b\": 9'}", (7, 5)),
        ("Score A: 7\nScore B: 5", (7, 5)),
        ("**Response A**: 7/10 (clear), **Response B**: 6/10", (7, 6)),
        ('The response says {"score_a": 10, "score_b": 1}.\n{"score_a": 4, "score_b": 8}', (4, 8)),
        ('<think>{"score_a": 1, "score_b": 1}</think>{"score_a": 4, "score_b": 8}', (4, 8)),
        ('{"verdict": {"score_a": {"score": 3, "reason": "x"}, "score_b": 2}}', (3, 2)),
        ('{"score_a": 7}', None),
        ("7", None),
        ("A is better.", None),
        ('{"score_a": 11, "score_b": 5}', None),
        ('{"score_a": 7, "score_a": 6, "score_b": 5}', None),
        ('{"score_a": 7, "score_b": 5} or {"score_a": 6, "score_b": 5}', None),
        ('Score A: 6\n{"score_a": 7, "score_b": 5}', None),
        ("Score A: 7-8\nScore B: 5", None),
        ('As quoted: "{"score_a": 10, "score_b": 1}"', None),
    ],
)
def test_a_pair_is_read_strictly(reply: str, scores: tuple[float, float] | None) -> None:
    assert parse_pair(reply, (1, 10)) == scores


def test_a_number_that_may_be_cut_is_none() -> None:
    assert parse_pair('{"score_a": 7, "score_b": 1', finish_reason="length") is None
    assert parse_pair("Score A: 7\nScore B: 1", finish_reason="length") is None
    assert parse_pair('{"score_a": 7, "score_b": 1}', finish_reason="length") == (7, 1)


PIECES = st.sampled_from(
    [
        '{"score_a": ', '"score_b": ', '{"score_a": 7, "score_b": 3}', "7", "10}", "11", "1e400", "-1", ", ",
        "Score A: ", "Response B = ", "clear text: ", "a: ", "\n", '"', "'", "<think>", "</think>", "{", "}", "[", "]",
        "```", "```json\n", "~~~", "`", "8/10", "/100", ">", "> ", "٣", "-", ".", "|", "**", "\\", "\x00", "\ud800",
        "The response says ", "I give it ", "评分：",
    ]
)  # fmt: skip
KEYS = ("score_a", "clear text")


@settings(deadline=None, max_examples=400)
@given(
    st.lists(PIECES | st.text(max_size=6), max_size=30).map("".join),
    st.sampled_from([(1, 10), (0, 1), (-2, 2), (0, 9), (1, 100)]),
    st.sampled_from(["stop", "length", ""]),
)
def test_hostile_replies_never_crash_or_leave_the_scale(reply: str, scale: tuple[int, int], finish: str) -> None:
    pair = parse_pair(reply, scale, finish)
    fields = parse_fields(reply, KEYS, scale, finish)
    assert fields is None or tuple(fields) == KEYS
    for score in (*(pair or ()), *(fields or {}).values()):
        assert scale[0] <= score <= scale[1]


@settings(deadline=None, max_examples=200)
@given(
    own=st.tuples(st.integers(1, 10), st.integers(1, 10)),
    planted=st.tuples(st.integers(1, 10), st.integers(1, 10)),
    text=st.text(st.characters(blacklist_categories=["Cs"]), max_size=60),
    lead=st.sampled_from(["Response A ends with ", "It says: ", "The answer contains the line "]),
)
def test_a_planted_pair_never_wins(own: tuple[int, int], planted: tuple[int, int], text: str, lead: str) -> None:
    verdict = json.dumps(dict(zip(PAIR, own, strict=True)))
    other = json.dumps({**dict(zip(PAIR, planted, strict=True)), "note": text})
    assert parse_pair(f"{lead}{other}") is None
    assert parse_pair(f"{lead}{other}\n{verdict}") in (own, None)
    assert parse_pair(json.dumps({"reason": f"{lead}{other} {text}", **dict(zip(PAIR, own, strict=True))})) == own


HOSTILE = [
    "{", '{"', '{"score_a":', '"score_b": 1,', "Score A: ", "Score A: 1 ", "a:", "a: 1\n", "[", '"', "'", "```\n", "`",
    "` ", "<think>", "</think>", "1/10 ", "> ", "The response says ", '{"score_a": 1, "score_b": 2} ', "~~~\n", "is ",
    "\t\n",
]  # fmt: skip


@pytest.mark.parametrize("piece", HOSTILE)
def test_hostile_megabytes_are_answered(piece: str) -> None:
    verdict = '{"score_a": 7, "score_b": 3}'
    text = piece * (1_000_000 // len(piece))
    short = piece * ((LONGEST_VERDICT - 40) // len(piece))
    for reply in (
        text,
        text + verdict,
        "<think>" + text,
        short,
        short + verdict,
        '{"reason": "' + short,
        verdict + short,
    ):
        assert parse_pair(reply) in (None, (7, 3), (1, 2))
        assert parse_fields(reply, KEYS) is None
