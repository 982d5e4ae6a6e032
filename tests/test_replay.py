"""`sparta-api replay`: the same digits without changes, and those of a real run with them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparta_api.data.rundir import RunDirectory
from sparta_api.diagnosis.replay import Replayed, replay
from sparta_api.errors import ConfigError
from tests.front_door import REPOSITORY, rows, sparta, tribe
from tests.loopback import LoopbackProcess, start_loopback

MODELS = {f"model-{n}": {"skill": n - 2.0, "bias": 0.4 * n, "noise": 2.5} for n in range(5)}
FAULTS = [
    {"match": {"role": "fight", "model": "model-1", "every": 7}, "fault": "400_content_filter"},
    {
        "match": {"role": "judge", "model": "model-2", "every": 3},
        "fault": {"kind": "edit", "message": {"content": "no"}},
    },
]
AT_RANDOM = {"random_match_prob": 1.0}
FILES = ("duels.jsonl", "preferences.jsonl")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackProcess]:
    with start_loopback({"models": MODELS}, tmp_path_factory.mktemp("loopback")) as loopback:
        yield loopback


def play(server: LoopbackProcess, directory: Path, **changes: Any) -> RunDirectory:
    """A run whose matchups do not depend on reputations, so that others would have had the same ones."""
    path = tribe(directory, server.base_url, members=5, instructions=20, matchmaking=AT_RANDOM, **changes)
    ended = sparta("run", "--tribe", path, "--run-dir", directory / "run", "--yes")
    assert ended.code == 0, ended.err
    return RunDirectory(directory / "run")


def same(one: Path, other: Path, iterations: int = 1) -> bool:
    """Whether two directories hold the same verdicts, preferences and ratings, to the byte."""
    names = [f"iteration_{number:03d}/{name}" for number in range(iterations) for name in FILES]
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in [*names, "ratings.json"])


@pytest.fixture(scope="module")
def plain(server: LoopbackProcess, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run whose prompt template and configuration are gone."""
    directory = tmp_path_factory.mktemp("plain")
    template = directory / "mine.j2"
    shutil.copy(REPOSITORY / "prompts" / "score.j2", template)
    run = play(server, directory, judging={"prompt": "mine.j2"})
    template.unlink()
    (directory / "tribe.yaml").unlink()
    return run


def test_a_replay_without_changes_is_the_run(tmp_path: Path) -> None:
    with start_loopback({"models": MODELS, "rules": FAULTS}, tmp_path / "server") as faulty:
        run = play(faulty, tmp_path, iterations=2)
    played = [row for number in range(2) for row in rows(run.iteration(number).duels)]
    assert any(row["void"] for row in played) and any(row["abstained"] for row in played)
    result = replay(run, [], tmp_path / "again")
    assert same(run.root, tmp_path / "again", iterations=2)
    assert result.reputation_before == result.reputation_after
    assert [one.flipped for one in result.iterations] == [0, 0]
    assert sum(one.duels for one in result.iterations) == sum(row["void"] is None for row in played)
    assert all(one.pairs_before == one.pairs_after for one in result.iterations)


@pytest.mark.parametrize(
    "changes",
    [
        {"reputation": {"model": "bradley_terry", "judge_weight": "agreement"}},
        {"reputation": {"model": "glicko2"}, "preferences": {"min_margin": 1.0}},
        {"reputation": {"freeze": True, "warm_start": {"m0": 1, "m1": 2, "m2": 3, "m3": 5, "m4": 8}}},
    ],
    ids=lambda changes: "+".join(f"{section}.{key}" for section, keys in changes.items() for key in keys),
)
def test_a_replay_with_changes_is_the_run_that_had_them(
    server: LoopbackProcess, plain: RunDirectory, tmp_path: Path, changes: dict[str, dict[str, Any]]
) -> None:
    wanted = play(server, tmp_path, **changes)
    overrides = [
        f"{section}.{key}={json.dumps(value)}" for section, keys in changes.items() for key, value in keys.items()
    ]
    result = replay(plain, overrides, tmp_path / "again")
    assert same(wanted.root, tmp_path / "again")
    assert set(result.changed) >= {key.partition("=")[0] for key in overrides if "warm_start" not in key}


def test_flips_are_tied_or_averaged_without_asking_again(server: LoopbackProcess, tmp_path: Path) -> None:
    models = {**MODELS, "model-3": {"position_bias": 6.0}}
    with start_loopback({"models": models}, tmp_path / "server") as biased:
        average, tie = (
            play(biased, tmp_path / kind, judging={"mode": "pairwise", "on_flip": kind}) for kind in ("average", "tie")
        )
    assert not same(average.root, tie.root)
    replay(average, ["judging.on_flip=tie"], tmp_path / "again")
    assert same(tie.root, tmp_path / "again")


def test_judges_that_were_spared_stay_unasked(server: LoopbackProcess, tmp_path: Path) -> None:
    staged = {"judging": {"stop_when_decided": True}, "reputation": {"freeze": True}}
    run = play(server, tmp_path, **staged)
    skipped = [row["skipped"] for row in rows(run.iteration(0).duels)]
    assert any(skipped)
    replay(run, [], tmp_path / "same")
    assert same(run.root, tmp_path / "same")
    replay(run, ["members.m0.initial_reputation=300"], tmp_path / "heavy")
    for before, after in zip(skipped, rows(tmp_path / "heavy" / "iteration_000" / "duels.jsonl"), strict=True):
        assert not after["abstained"] and set(before) <= {*after["skipped"]}


def test_the_papers_ablations_come_as_a_table_and_as_json(plain: RunDirectory) -> None:
    ended = sparta("replay", plain.root, "--set", "reputation.freeze=true", "--set", "preferences.min_margin=2")
    assert ended.code == 0, ended.err
    assert "reputation.freeze, preferences.min_margin" in ended.out
    assert all(name in ended.out for name in ("m0", "m4", "100.0", "flipped", "pairs now"))
    told = sparta("replay", plain.root, "--set", "preferences.min_margin=2", "--json")
    figures = json.loads(told.out)
    assert figures["changed"] == ["preferences.min_margin"]
    one = figures["iterations"][0]
    assert one["ties_after"] > one["ties_before"] and one["pairs_after"] < one["pairs_before"]
    assert one["flipped"] == one["ties_after"] - one["ties_before"] and one["reversed"] == 0
    assert figures["reputation_before"] == figures["reputation_after"]


def test_what_needs_requests_is_refused_by_name(plain: RunDirectory) -> None:
    ended = sparta(
        "replay", plain.root, "--set", "seed=9", "--set", "judging.max_tokens=99", "--set", "reputation.min_k=4"
    )
    assert ended.code == 2 and ended.out == ""
    assert "cannot change seed, judging.max_tokens: that would need new requests" in ended.err
    with pytest.raises(ConfigError, match="did you mean 'model'"):
        replay(plain, ["reputation.modle=glicko2"])
    with pytest.raises(ConfigError, match="not a run directory"):
        replay(RunDirectory(REPOSITORY / "tests"), ["reputation.min_k=4"])


def test_the_results_go_to_a_new_directory_only(plain: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name a new directory"):
        replay(plain, [], plain.root)
    out = tmp_path / "new" / "one"
    assert isinstance(replay(plain, ["reputation.min_k=9"], out), Replayed)
    assert "min_k: 9" in (out / "tribe.yaml").read_text()
    pairs = rows(out / "iteration_000" / "preferences.jsonl")
    assert pairs and set(pairs[0]) >= {"prompt", "chosen", "rejected"}


def test_a_run_that_stopped_is_replayed_as_far_as_it_came(plain: RunDirectory, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(plain.root, run)
    files = RunDirectory(run).iteration(0)
    files.index.unlink()
    files.preferences.unlink()
    lines = files.duels.read_bytes().splitlines(keepends=True)
    files.duels.write_bytes(b"".join(lines[:17]) + lines[17][:20])
    result = replay(RunDirectory(run), ["reputation.model=glicko2"])
    assert result.iterations[0].duels == 17
    assert result.iterations[0].pairs_before is None


def test_models_go_on_exactly_where_a_run_stopped(server: LoopbackProcess, tmp_path: Path) -> None:
    changes = {"judge_weight": "agreement", "model": "bradley_terry"}
    whole = play(server, tmp_path / "whole", reputation=changes)
    path = tribe(
        tmp_path / "cut", server.base_url, members=5, instructions=20, matchmaking=AT_RANDOM, reputation=changes
    )
    run = tmp_path / "cut" / "run"
    stopped = sparta("run", "--tribe", path, "--run-dir", run, "--yes", "--set", "limits.max_requests=110")
    assert stopped.code == 4, stopped.err
    assert 0 < len(rows(run / "iteration_000" / "duels.jsonl")) < 20
    assert sparta("resume", run, "--set", "limits.max_requests=null").code == 0
    assert same(whole.root, run)
