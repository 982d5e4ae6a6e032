"""The whole story through the command line: two iterations with real DPO of a tiny model in each."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.front_door import Ended, results, rows, sparta, tribe
from tests.loopback import LoopbackProcess, start_loopback
from tests.tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.trl,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs the local extra"),
]
MEMBERS = ("m0", "m1", "m2")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackProcess]:
    with start_loopback(
        {"models": {f"model-{n}": {} for n in range(len(MEMBERS))}}, tmp_path_factory.mktemp("loopback")
    ) as loopback:
        yield loopback


@pytest.fixture(scope="module")
def story(server: LoopbackProcess, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended, Path]:
    """A finished run: its tribe.yaml, how it ended, its directory."""
    directory = tmp_path_factory.mktemp("story")
    make_tiny_model(directory / "tiny")
    (directory / "heldout.jsonl").write_text('{"id": "h", "prompt": "Explain tea."}\n', encoding="utf-8")
    path = tribe(
        directory,
        server.base_url,
        members=len(MEMBERS),
        instructions=8,
        iterations=2,
        heldout={"path": "heldout.jsonl"},
        trainers={
            "local": {
                "backend": "trl",
                "base_model": "tiny",
                "learning_rate": 1e-3,
                "max_length": 256,
                "lora": {"r": 4, "alpha": 8},
            }
        },
        training={"trainer": "local"},
    )
    run = directory / "run"
    return path, sparta("run", "--tribe", path, "--run-dir", run), run


def test_it_ends_well(story: tuple[Path, Ended, Path]) -> None:
    _, ended, run = story
    assert ended.code == 0, ended.err
    state = json.loads((run / "run.json").read_text())
    assert state["state"] == "done"
    assert state["completed"] == 2


def test_every_member_learns_from_all_pairs_in_both_iterations(story: tuple[Path, Ended, Path]) -> None:
    _, _, run = story
    for number in (0, 1):
        pairs = len(rows(run / f"iteration_{number:03d}" / "preferences.jsonl"))
        assert pairs > 0
        for member in MEMBERS:
            job = json.loads((run / f"iteration_{number:03d}" / "training" / member / "job.json").read_text())
            assert job["status"] == "succeeded"
            assert job["pairs"] + sum(job["dropped"].values()) == pairs
            assert (Path(job["result"]["serve"]) / "adapter_model.safetensors").stat().st_size > 0


def test_the_second_iteration_continues_the_first(story: tuple[Path, Ended, Path]) -> None:
    _, _, run = story
    for member in MEMBERS:
        first, second = (
            json.loads((run / f"iteration_{n:03d}" / "training" / member / "spec.json").read_text()) for n in (0, 1)
        )
        assert first["parent"] is None
        assert second["parent"].endswith(f"iteration_000/training/{member}/adapter")


def test_tuned_members_answer_under_new_names(story: tuple[Path, Ended, Path], server: LoopbackProcess) -> None:
    _, _, run = story
    models = json.loads((run / "models.json").read_text())["members"]
    names = {name: [entry["model"] for entry in models[name]["history"]] for name in MEMBERS}
    played = {row["model"] for row in rows(run / "iteration_001" / "responses.jsonl")}
    assert played == {names[name][0] for name in MEMBERS}
    assert all(models[name]["model"] == names[name][1] for name in MEMBERS)
    assert len({model for both in names.values() for model in both}) == 2 * len(MEMBERS)
    judged = {row["model"] for row in rows(run / "iteration_001" / "judgments.jsonl")}
    assert judged == played


def test_the_report_tells_training_and_where_the_adapters_lie(story: tuple[Path, Ended, Path]) -> None:
    _, ended, run = story
    assert "--lora-modules" in ended.out
    assert "Explain tea." in ended.out
    for member in MEMBERS:
        assert str(run / "iteration_001" / "training" / member / "adapter") in ended.out.replace("\n", "")


def test_a_finished_run_is_left_as_it_is(story: tuple[Path, Ended, Path], server: LoopbackProcess) -> None:
    path, ended, run = story
    before, asked = results(run), len(server.requests())
    again = sparta("run", "--tribe", path, "--run-dir", run)
    assert again.code == 0
    assert again.out == ended.out
    assert results(run) == before
    assert len(server.requests()) == asked


def test_adapters_that_a_server_has_forgotten_are_loaded_again(story: tuple[Path, Ended, Path], tmp_path: Path) -> None:
    _, _, run = story
    scenario = {
        "models": {f"model-{n}": {} for n in range(len(MEMBERS))},
        "rules": [{"match": {"nth": 30}, "fault": "forget_adapters", "times": 1}],
    }
    with start_loopback(scenario, tmp_path / "server") as server:
        path = tribe(tmp_path, server.base_url, members=len(MEMBERS), instructions=12)
        config = yaml.safe_load(path.read_text())
        for member in config["members"]:
            member["adapter"] = str(run / "iteration_000" / "training" / member["name"] / "adapter")
        path.write_text(yaml.safe_dump(config))
        ended = sparta("run", "--tribe", path, "--run-dir", tmp_path / "run")
        loads = [row["path"] for row in server.requests("/load_lora_adapter")]
    assert ended.code == 0, ended.err
    assert len(loads) > len(MEMBERS)
    played = {row["model"] for row in rows(tmp_path / "run" / "iteration_000" / "responses.jsonl")}
    assert len(played) == len(MEMBERS)
    assert not any(model.startswith("model-") for model in played)
