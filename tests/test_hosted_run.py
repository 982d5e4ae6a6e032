"""Whole runs of the rehearsal tribe against the emulated services, by the command line."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.emulators.process import EmulatorProcess
from tests.front_door import REPOSITORY, kill, results, sparta, started

TRIBE = REPOSITORY / "examples" / "rehearsal" / "tribe.yaml"
SERVICES = {"together": "together", "openai": "openai_tuning"}
MEMBERS = 3
FEWER = ["--set", "instructions.per_iteration=6"]


@pytest.fixture(scope="module", params=SERVICES)
def hosted(request: pytest.FixtureRequest) -> Iterator[tuple[str, EmulatorProcess]]:
    with EmulatorProcess(SERVICES[request.param]) as process:
        yield request.param, process


def env(service: EmulatorProcess) -> dict[str, str]:
    origin = service.base_url.removesuffix("/v1")
    return {"REHEARSAL_URL": origin, "REHEARSAL_KEY": "rehearsal-key-0815", "SPARTA_TRAINING_PACE": "0.01"}


def run(trainer: str, directory: Path, *more: str) -> list[str]:
    return ["run", "--tribe", str(TRIBE), "--trainer", trainer, "--yes", "--run-dir", str(directory), *FEWER, *more]


def fresh(service: EmulatorProcess, trainer: str, **state: Any) -> None:
    """A service that knows nothing, whose jobs are short."""
    ended = {"together": "completed", "openai": "succeeded"}[trainer]
    service.change(clear=True, job_statuses=["running", ended], **state)


def killed(service: EmulatorProcess, operation: str, *arguments: str) -> None:
    """Runs the command until the service holds the operation, and kills it there."""
    process = started(*arguments, env=env(service))
    try:
        service.wait(lambda seen: seen["hanging"] == operation)
    finally:
        kill(process)
        service.change(faults={})


def keys(snapshot: dict[str, Any]) -> Counter[str]:
    """How many jobs there are of every key."""
    return Counter(job.get("suffix") or job["user_provided_suffix"] for job in snapshot["jobs"])


@pytest.fixture(scope="module")
def undisturbed(hosted: tuple[str, EmulatorProcess], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    trainer, service = hosted
    fresh(service, trainer)
    directory = tmp_path_factory.mktemp(trainer) / "run"
    ended = sparta(*run(trainer, directory), env=env(service))
    assert ended.code == 0, ended.err
    seen = service.look()
    assert sorted(keys(seen).values()) == [1] * MEMBERS * 2
    assert not seen.get("deployments"), "the end of the run takes them down"
    models = json.loads((directory / "models.json").read_text())["members"]
    for member in models.values():
        first, second = member["history"]
        parents = {job["id"]: job["parent"] for job in seen["jobs"]} | {
            job.get("fine_tuned_model"): job["parent"] for job in seen["jobs"]
        }
        names = {job.get("fine_tuned_model"): job["id"] for job in seen["jobs"]}
        assert parents[second["train"]] == names.get(first["train"], first["train"])
        assert seen["chats"][first["model"]] > 0, "the tuned model played the second iteration"
    assert not [path for path in directory.rglob("*") if path.is_file() and b"rehearsal-key-0815" in path.read_bytes()]
    return results(directory)


@pytest.mark.parametrize(("operation", "skip"), [("create job", 1), ("job", 2), ("chat", 30), ("create job", 5)])
def test_killed_and_resumed_it_comes_to_the_same_with_as_many_jobs(
    hosted: tuple[str, EmulatorProcess], undisturbed: dict[str, bytes], tmp_path: Path, operation: str, skip: int
) -> None:
    trainer, service = hosted
    fresh(service, trainer, faults={operation: ["ok"] * skip + ["hang after"]})
    directory = tmp_path / "run"
    killed(service, operation, *run(trainer, directory))
    ended = sparta("resume", directory, env=env(service))
    assert ended.code == 0, ended.err
    seen = service.look()
    assert sorted(keys(seen).values()) == [1] * MEMBERS * 2
    assert results(directory) == undisturbed


def test_a_failed_job_leaves_the_others_and_is_the_only_one_repeated(
    hosted: tuple[str, EmulatorProcess], undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    trainer, service = hosted
    fresh(service, trainer, faults={"create job": ["ok", "400"]})
    directory = tmp_path / "run"
    ended = sparta(*run(trainer, directory), env=env(service))
    assert ended.code == 3 and ended.err.count("did not create the job") == 1
    assert len(service.look()["jobs"]) == MEMBERS - 1
    done = [
        path.parent.name
        for path in directory.rglob("job.json")
        if json.loads(path.read_text())["status"] == "succeeded"
    ]
    assert len(done) == MEMBERS - 1
    ended = sparta("resume", directory, env=env(service))
    assert ended.code == 0, ended.err
    assert sorted(keys(service.look()).values()) == [1] * MEMBERS * 2
    assert results(directory) == undisturbed


def test_a_job_that_would_pass_the_limit_is_not_started(hosted: tuple[str, EmulatorProcess], tmp_path: Path) -> None:
    trainer, service = hosted
    fresh(service, trainer)
    directory = tmp_path / "run"
    ended = sparta(*run(trainer, directory, "--set", "limits.max_cost_usd=0.004"), env=env(service))
    assert ended.code == 4, ended.err
    assert len(service.look()["jobs"]) < MEMBERS
    assert "max_cost_usd" in ended.err
    assert sparta("resume", directory, "--set", "limits.max_cost_usd=1000", env=env(service)).code == 0
    assert sorted(keys(service.look()).values()) == [1] * MEMBERS * 2


def test_a_plan_names_the_jobs_and_their_cost_and_asks_nobody_to_train(hosted: tuple[str, EmulatorProcess]) -> None:
    trainer, service = hosted
    fresh(service, trainer)
    ended = sparta("run", "--tribe", TRIBE, "--trainer", trainer, "--dry-run", env=env(service))
    assert ended.code == 0, ended.err
    assert "unknown" not in ended.out and ended.out.count(f"2 jobs with {trainer}") == MEMBERS
    assert not {"upload", "create job", "chat"} & set(service.look()["calls"])


def test_check_asks_the_trainer_and_spends_nothing(hosted: tuple[str, EmulatorProcess]) -> None:
    trainer, service = hosted
    fresh(service, trainer)
    ended = sparta("check", "--tribe", TRIBE, "--set", f"training.trainer={trainer}", env=env(service))
    assert ended.code == 0, ended.err
    assert f"{trainer}: ok" in ended.out
    assert not {"upload", "create job"} & set(service.look()["calls"])


def test_a_trainer_that_cannot_continue_the_models_says_so(hosted: tuple[str, EmulatorProcess], tmp_path: Path) -> None:
    trainer, service = hosted
    fresh(service, trainer, faults={"chat": ["ok"] * 30 + ["hang after"]})
    directory = tmp_path / "run"
    killed(service, "chat", *run(trainer, directory))
    other = next(name for name in SERVICES if name != trainer)
    ended = sparta("resume", directory, "--set", f"training.trainer={other}", env=env(service))
    assert ended.code in (2, 3)
    assert "cannot continue" in ended.err, ended.err
    assert sparta("cleanup", directory, env=env(service)).code == 0
    assert not service.look().get("deployments")
