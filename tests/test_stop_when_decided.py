"""Stopping once a duel is decided: the same winners as all judges, fewer questions."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from sparta_api.config.tribe import TribeConfig
from sparta_api.duels.matchmaking import Matchup
from sparta_api.duels.panel import Panel
from sparta_api.duels.rows import OpenDuel, Outcome
from sparta_api.judging.bench import Bench
from sparta_api.runs.outcome import first_reputation
from tests.front_door import kill, results, rows, sparta, started, tribe
from tests.loopback.process import LoopbackProcess
from tests.test_pairwise import _until_lines

MEMBERS = 8
FROZEN: dict[str, Any] = {"reputation": {"freeze": True}}


def play(server: LoopbackProcess, directory: Path, judging: dict[str, Any], **changes: Any) -> Path:
    run = directory / "run"
    settings = {"members": MEMBERS, "instructions": 24, **FROZEN, **changes}
    ended = sparta(
        "run", "--tribe", tribe(directory, server.base_url, judging=judging, **settings), "--run-dir", run, "--yes"
    )
    assert ended.code == 0, ended.err
    return run


def winners(run: Path) -> list[tuple[int, list[str], str | None]]:
    return [(duel["duel"], duel["fighters"], duel["winner"]) for duel in rows(run / "iteration_000" / "duels.jsonl")]


@pytest.mark.parametrize(
    ("judging", "preferences"),
    [
        ({}, {}),
        ({"mode": "pairwise"}, {}),
        ({"scale": [1, 3]}, {"min_margin": 1.0}),
        ({"scale": [0, 1]}, {"min_margin": 0.9}),
        ({"judges_per_duel": 5}, {}),
    ],
)
def test_the_winner_is_that_of_all_judges(tmp_path: Path, judging: dict[str, Any], preferences: dict[str, Any]) -> None:
    scale = judging.get("scale", [1, 10])
    scenario = {"any_model": True, "default_model": {"noise": 3.0}, "judge": {"scale": scale}}
    with LoopbackProcess(scenario, tmp_path / "server") as server:
        full = play(server, tmp_path / "full", judging, preferences=preferences)
        short = play(server, tmp_path / "short", {**judging, "stop_when_decided": True}, preferences=preferences)
    assert winners(full) == winners(short)
    everything = {
        (r["duel"], r["judge"], r["fighter"], *(r.get("order") or ())): r
        for r in rows(full / "iteration_000" / "judgments.jsonl")
    }
    asked = {
        (r["duel"], r["judge"], r["fighter"], *(r.get("order") or ())): r
        for r in rows(short / "iteration_000" / "judgments.jsonl")
    }
    assert set(asked) < set(everything)
    duels = rows(short / "iteration_000" / "duels.jsonl")
    assert sum(2 * len(duel["skipped"]) for duel in duels) == len(everything) - len(asked)
    matchups = rows(short / "iteration_000" / "matchups.jsonl")
    for duel, matchup in zip(duels, matchups, strict=True):
        assert [*duel["judges"], *duel["skipped"]] == matchup["judges"]
    status = json.loads(sparta("status", short, "--json").out)
    assert status["questions_spared"] == len(everything) - len(asked) > 0


Vote = tuple[float, float] | None
VOTES: tuple[Vote, ...] = (None, (10, 1), (1, 10), (8, 4), (3, 5), (6, 6))


@pytest.mark.parametrize("min_margin", [0.0, 2.0, 6.0])
@pytest.mark.parametrize(
    "weights", [(100.0, 100.0, 100.0, 100.0), (60.0, 250.5, 100.0, 90.0), (500.0, 90.0, 90.0, 90.0)]
)
def test_no_vote_that_is_left_out_could_have_changed_the_winner(weights: tuple[float, ...], min_margin: float) -> None:
    """Every way in which four judges can vote or abstain."""
    judges = [f"j{n}" for n in range(len(weights))]
    places: dict[str, Any] = {"base_url": "http://127.0.0.1:9/v1", "model": "m"}
    members = [{"name": name, **places} for name in ("a", "b")]
    members += [{"name": j, "initial_reputation": w, **places} for j, w in zip(judges, weights, strict=True)]
    config = TribeConfig.model_validate(
        {
            "instructions": {"path": "x"},
            "members": members,
            "judging": {"stop_when_decided": True},
            "preferences": {"min_margin": min_margin},
            **FROZEN,
        }
    )
    reputation = first_reputation(config)
    panel = Panel(config, Bench(config, 0), reputation.reputations)
    skipped = 0
    for votes in product(VOTES, repeat=len(judges)):
        said = dict(zip(judges, votes, strict=True))
        outcome = outcome_of(panel, said)
        everything = {judge: vote for judge, vote in said.items() if vote is not None}
        assert sorted([*outcome.judges, *outcome.abstained, *(outcome.skipped or ())]) == judges
        assert (outcome.void is None) == bool(everything)
        if everything:
            asked = reputation.update(("a", "b"), outcome.judges)
            assert asked.winner == reputation.update(("a", "b"), everything).winner, said
        skipped += len(outcome.skipped or ())
    assert skipped > 0


def outcome_of(panel: Panel, said: dict[str, Vote]) -> Outcome:
    matchup, duel = Matchup(0, "q", ("a", "b"), tuple(said)), OpenDuel()
    while asks := panel.missing(matchup, duel, ()):
        assert len({ask.judge for ask in asks}) == 1
        for ask in asks:
            vote = said[ask.judge]
            duel.scores[ask.judge, ask.shown, ask.round] = None if vote is None else (vote[ask.shown == ("b",)],)
    return panel.outcome(matchup, duel)


def test_weights_of_judges_and_verifiers_count(tmp_path: Path) -> None:
    """One judge outweighs all others, and a verifier votes first."""
    members: list[dict[str, Any]] = [{"name": f"m{n}", "model": f"model-{n}"} for n in range(4)]
    members += [{"name": "chief", "model": "model-c", "roles": ["judge"], "initial_reputation": 5000.0}]
    verifiers = {"limit": {"kind": "word_limit", "field": "limit", "weight": 40}}
    found = {}
    with LoopbackProcess({"any_model": True, "default_model": {"noise": 3.0}}, tmp_path / "server") as server:
        for name, stop in (("full", False), ("short", True)):
            judging = {"verifiers": verifiers, "stop_when_decided": stop}
            path = tribe(tmp_path / name, server.base_url, members=members, judging=judging, **FROZEN)
            data = [{"id": f"q{n}", "prompt": f"Explain {n}.", "limit": 10 + n} for n in range(20)]
            (path.parent / "instructions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
            ended = sparta("run", "--tribe", path, "--run-dir", tmp_path / name / "run", "--yes")
            assert ended.code == 0, ended.err
            found[name] = winners(tmp_path / name / "run")
    assert found["full"] == found["short"]
    duels = rows(tmp_path / "short" / "run" / "iteration_000" / "duels.jsonl")
    assert all("limit" in duel["judges"] for duel in duels)
    assert any(duel["skipped"] for duel in duels)


def test_results_do_not_depend_on_concurrency_or_kills(tmp_path: Path) -> None:
    judging = {"stop_when_decided": True}
    scenario = {"any_model": True, "default_model": {"latency_s": 0.01, "noise": 3.0}}
    with LoopbackProcess(scenario, tmp_path / "server") as server:
        one = play(server, tmp_path / "one", judging, defaults={"base_url": server.base_url, "concurrency": 1})
        many = play(server, tmp_path / "many", judging, defaults={"base_url": server.base_url, "concurrency": 64})
        path = tribe(tmp_path / "cut", server.base_url, members=MEMBERS, instructions=24, judging=judging, **FROZEN)
        cut = tmp_path / "cut" / "run"
        for lines in (10, 90):
            process = started("run", "--tribe", path, "--run-dir", cut, "--yes")
            _until_lines(cut / "iteration_000" / "judgments.jsonl", lines)
            kill(process)
        assert sparta("resume", cut).code == 0
    assert results(one) == results(many) == results(cut)
    journals = [rows(run / "iteration_000" / "judgments.jsonl") for run in (one, many, cut)]
    asked = [sorted((row["duel"], row["judge"], row["fighter"]) for row in journal) for journal in journals]
    assert asked[0] == asked[1] == asked[2]


def test_ratings_that_count_winners_alone_stay_the_same_too(tmp_path: Path) -> None:
    reputation = {"judge_weight": "uniform", "model": "bradley_terry", "freeze": False}
    with LoopbackProcess({"any_model": True}, tmp_path / "server") as server:
        full = play(server, tmp_path / "full", {}, reputation=reputation)
        short = play(server, tmp_path / "short", {"stop_when_decided": True}, reputation=reputation)
    assert winners(full) == winners(short)
    assert (full / "ratings.json").read_bytes() == (short / "ratings.json").read_bytes()
    assert any(duel["skipped"] for duel in rows(short / "iteration_000" / "duels.jsonl"))


def test_weights_that_move_are_refused(tmp_path: Path) -> None:
    path = tribe(tmp_path, "http://127.0.0.1:9/v1", judging={"stop_when_decided": True})
    ended = sparta("run", "--tribe", path, "--run-dir", tmp_path / "run", "--yes")
    assert ended.code == 2
    assert "judging.stop_when_decided needs judges whose votes weigh the same throughout" in ended.err
