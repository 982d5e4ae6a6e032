"""Whole runs of the rehearsal tribe against the emulated services, by the commands that a user gives."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.emulators.process import EmulatorProcess
from tests.forked import Forked, forked
from tests.front_door import REPOSITORY, Ended, results

TRIBE = REPOSITORY / "examples" / "rehearsal" / "tribe.yaml"
SERVICES = {"together": "together", "openai": "openai_tuning"}
ENDED = {"together": "completed", "openai": "succeeded"}
KEY = "rehearsal-key-0815"
MEMBERS = 3
EXPECTED_OF_JOBS = [1] * MEMBERS * 2


@dataclass(frozen=True)
class Hosted:
    """One emulated service, and the commands that a user gives against it."""

    trainer: str
    service: EmulatorProcess

    @property
    def other(self) -> str:
        """The back end that cannot go on from what this one made."""
        return next(name for name in SERVICES if name != self.trainer)

    @property
    def env(self) -> dict[str, str]:
        origin = self.service.base_url.removesuffix("/v1")
        return {"REHEARSAL_URL": origin, "REHEARSAL_KEY": KEY, "SPARTA_TRAINING_PACE": "0.002"}

    def fresh(self, **state: Any) -> None:
        """A service that knows nothing, whose jobs are short."""
        self.service.change(clear=True, job_statuses=["running", ENDED[self.trainer]], **state)

    def run(self, directory: Path, *more: str) -> Ended:
        few = ("--set", "instructions.per_iteration=4")
        known = ("--tribe", TRIBE, "--trainer", self.trainer, "--yes", "--run-dir", directory)
        return forked("run", *known, *few, *more, env=self.env)

    def resume(self, directory: Path, *changes: str) -> Ended:
        return forked("resume", directory, *sets(*changes), env=self.env)

    def stopped(self, signum: int, directory: Path, operation: str, skip: int, *changes: str) -> Ended:
        """Resumes until the service holds the operation for the `skip`th time, and stops it there."""
        self.service.change(faults={operation: ["ok"] * skip + ["hang after"]})
        process = Forked("resume", directory, *sets(*changes), env=self.env)
        self.service.wait(lambda seen: seen["hanging"] == operation)
        process.signal(signum)
        ended = process.end()
        self.service.change(faults={})
        return ended

    def status(self, directory: Path) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(forked("status", directory, "--json").out)
        return found

    def jobs(self) -> list[int]:
        """How many jobs the service has of every key."""
        jobs = self.service.look()["jobs"]
        return sorted(Counter(job.get("suffix") or job["user_provided_suffix"] for job in jobs).values())

    def up(self) -> int:
        return len(self.service.look().get("deployments", []))


def sets(*changes: str) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


def statuses(directory: Path, iteration: int = 0) -> Counter[str]:
    """How the training jobs of an iteration stand."""
    paths = (directory / f"iteration_{iteration:03d}").rglob("job.json")
    return Counter(json.loads(path.read_text()).get("status", "none") for path in paths)


@pytest.fixture(scope="module", params=SERVICES)
def hosted(request: pytest.FixtureRequest) -> Iterator[Hosted]:
    with EmulatorProcess(SERVICES[request.param]) as process:
        yield Hosted(request.param, process)


@pytest.fixture(scope="module")
def undisturbed(hosted: Hosted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that nothing disturbs."""
    hosted.fresh()
    directory = tmp_path_factory.mktemp(hosted.trainer) / "run"
    ended = hosted.run(directory)
    assert ended.code == 0, ended.err
    return directory


def test_two_iterations_continue_each_other_and_leave_nothing_up(hosted: Hosted, undisturbed: Path) -> None:
    seen = hosted.service.look()
    assert hosted.jobs() == EXPECTED_OF_JOBS
    assert hosted.up() == 0
    parents = {job["id"]: job["parent"] for job in seen["jobs"]}
    made_by = {job.get("fine_tuned_model") or job["id"]: job["id"] for job in seen["jobs"]}
    for member in json.loads((undisturbed / "models.json").read_text())["members"].values():
        first, second = member["history"]
        assert parents[made_by[second["train"]]] == made_by[first["train"]]
        assert seen["chats"][first["model"]] > 0, "the tuned model played the second iteration"
    files = [path for path in undisturbed.rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def test_the_figures_count_training_and_deployments(hosted: Hosted, undisturbed: Path) -> None:
    found = hosted.status(undisturbed)
    costs = found["training_costs"]
    assert costs["training_usd"] > 0 and not costs["partial"]
    hours = 0.5 * 3.5 * MEMBERS * 2 if hosted.trainer == "together" else 0
    assert costs["deployments_usd"] == pytest.approx(hours)
    asked = sum(member["cost_usd"] for member in found["members"])
    assert found["spent_usd"] == pytest.approx(asked + costs["training_usd"] + hours)
    assert found["up"] == []


def test_stopped_in_every_way_it_comes_to_the_same_with_as_many_jobs(
    hosted: Hosted, undisturbed: Path, tmp_path: Path
) -> None:
    run, wanted = tmp_path / "run", hosted.status(undisturbed)["training_costs"]
    hosted.fresh()

    ended = hosted.run(run, *sets("limits.max_cost_usd=0.0025"))
    assert (ended.code, hosted.jobs()) == (4, []), ended.err
    assert "max_cost_usd" in ended.err

    hosted.service.change(faults={"create job": ["ok", "400"]})
    ended = hosted.resume(run, "limits.max_cost_usd=1000")
    assert ended.code == 3 and ended.err.count("did not create the job") == 1, ended.err
    assert hosted.jobs() == [1] * (MEMBERS - 1), "the others were not stopped"
    assert statuses(run) == {"succeeded": MEMBERS - 1, "refused": 1}

    hosted.stopped(signal.SIGKILL, run, "create job", 0)
    assert hosted.jobs() == [1] * MEMBERS and statuses(run)["creating"] == 1
    hosted.stopped(signal.SIGKILL, run, "job", 1)

    ended = hosted.stopped(signal.SIGINT, run, "chat", 4)
    assert ended.code == 130
    up = [entry["model"] for entry in hosted.status(run)["up"]]
    assert len(up) == hosted.up() == (MEMBERS if hosted.trainer == "together" else 0)
    assert all(model in ended.err for model in up) and ("sparta-api cleanup" in ended.err) == bool(up), ended.err

    ended = hosted.resume(run, f"training.trainer={hosted.other}")
    assert ended.code == 3 and "cannot continue" in ended.err, ended.err
    lines = forked("cleanup", run, env=hosted.env).out.splitlines()
    assert lines == ["nothing is up"] if not up else len(lines) == MEMBERS
    assert hosted.up() == 0

    again = json.dumps(yaml.safe_load(TRIBE.read_text())["trainers"][hosted.trainer])
    hosted.stopped(signal.SIGKILL, run, "create job", 1, f"trainers.again={again}", "training.trainer=again")
    ended = hosted.resume(run)
    assert ended.code == 0, ended.err
    assert hosted.jobs() == EXPECTED_OF_JOBS and hosted.up() == 0
    assert results(run) == results(undisturbed)
    assert hosted.status(run)["training_costs"] == pytest.approx(wanted)
    (second,) = {json.loads(path.read_text())["trainer"] for path in (run / "iteration_001").rglob("job.json")}
    assert second == "again", "a trainer of the same kind goes on with the models"


def test_plan_and_check_tell_the_cost_and_ask_nobody_to_train(hosted: Hosted) -> None:
    hosted.fresh()
    limited = sets("limits.max_cost_usd=0.1")
    plan = forked("run", "--tribe", TRIBE, "--trainer", hosted.trainer, "--dry-run", *limited, env=hosted.env)
    checked = forked("check", "--tribe", TRIBE, *sets(f"training.trainer={hosted.trainer}"), env=hosted.env)
    assert (plan.code, checked.code) == (0, 0), plan.err + checked.err
    assert "unknown" not in plan.out and "more than limits.max_cost_usd (0.1)" in plan.out
    assert f"{hosted.trainer}: ok" in checked.out
    for printed in (plan.out, checked.out):
        assert printed.count(f"2 jobs with {hosted.trainer}") == MEMBERS
        deployed = "its deployment 1.75 USD an iteration (0.5 h at 3.50 USD)"
        assert printed.count(deployed) == (MEMBERS if hosted.trainer == "together" else 0), printed
    assert not {"upload", "create job"} & set(hosted.service.look()["calls"])
