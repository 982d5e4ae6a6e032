"""Together's dedicated deployments against a loopback emulator, through the real SDK."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from sparta_api.config.tribe import TogetherTrainer as Settings
from sparta_api.errors import TrainingError
from sparta_api.trainers.deployments import DeploymentLedger
from sparta_api.trainers.protocol import ServedModel, TrainedModel
from sparta_api.trainers.together_deploy import TogetherDeployments
from tests.emulators.process import EmulatorProcess
from tests.training_jobs import FAST, KEY_ENV, killed_at

MODEL = TrainedModel("together", "ft-1", "ml_1")
NEXT = TrainedModel("together", "ft-2", "ml_2")
STEPS = ("whoami", "list endpoints", "create endpoint", "list deployments", "create deployment", "deployment", "route")
CLEANUP = ("route", "scale", "deployment", "delete deployment", "delete endpoint")


@pytest.fixture(scope="module")
def emulator() -> Iterator[EmulatorProcess]:
    with EmulatorProcess("together") as process:
        yield process


@pytest.fixture
def service(emulator: EmulatorProcess) -> EmulatorProcess:
    emulator.change(clear=True)
    return emulator


def deployer(service: EmulatorProcess, root: Path, **settings: Any) -> TogetherDeployments:
    known = {"backend": "together", "base_url": service.base_url, "api_key_env": KEY_ENV}
    section = Settings.model_validate(known | settings)
    return TogetherDeployments("remote", section, "run-1", DeploymentLedger(root), FAST)


async def bring_up(
    service: EmulatorProcess, root: Path, *members: str, model: TrainedModel = MODEL, **settings: Any
) -> list[ServedModel]:
    up = deployer(service, root, **settings)
    try:
        return await asyncio.gather(*(up.deploy(model, "org/base", member, 0) for member in members))
    finally:
        await up.close()


async def take_down(service: EmulatorProcess, root: Path) -> list[str]:
    up = deployer(service, root)
    try:
        return await up.cleanup()
    finally:
        await up.close()


def ask(served: ServedModel) -> dict[str, Any]:
    body = {"model": served.model, "messages": [{"role": "user", "content": "Hello"}]}
    with urlopen(Request(f"{served.base_url}/chat/completions", json.dumps(body).encode())) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def test_a_deployed_model_answers_and_its_name_stays(service: EmulatorProcess, tmp_path: Path) -> None:
    (served,) = asyncio.run(bring_up(service, tmp_path, "plain"))
    assert ask(served)["model"] == served.model
    assert served.api_key_env == KEY_ENV
    (deployment,) = service.look()["deployments"]
    assert deployment["model"] == "projects/proj-emulated/models/ml_1"
    assert deployment["config"] == "projects/proj-public/configs/cr_1"
    assert deployment["inactiveTimeout"] == 60
    (again,) = asyncio.run(bring_up(service, tmp_path, "plain", model=NEXT))
    assert again == served
    (deployment,) = service.look()["deployments"]
    assert deployment["model"].endswith("ml_2")
    assert ask(served)["model"] == served.model


def test_what_is_up_is_only_checked(service: EmulatorProcess, tmp_path: Path) -> None:
    first = asyncio.run(bring_up(service, tmp_path, "plain"))
    assert asyncio.run(bring_up(service, tmp_path, "plain")) == first
    calls = service.look()["calls"]
    assert calls.count("create endpoint") == calls.count("create deployment") == 1


def test_a_stopped_deployment_is_started_again(service: EmulatorProcess, tmp_path: Path) -> None:
    (served,) = asyncio.run(bring_up(service, tmp_path, "plain"))
    (deployment,) = service.look()["deployments"]
    path = f"{service.base_url}/v2/projects/p/endpoints/{deployment['endpointId']}/deployments/{deployment['id']}"
    off = json.dumps({"autoscaling": {"minReplicas": 0, "maxReplicas": 0}}).encode()
    urlopen(Request(path, off, method="PATCH")).close()
    for _ in range(2):
        urlopen(path).close()
    with pytest.raises(HTTPError):
        ask(served)
    assert asyncio.run(bring_up(service, tmp_path, "plain")) == [served]
    assert ask(served)["model"] == served.model


@pytest.mark.parametrize(("order", "most"), [("parallel", 6), ("serial", 3)])
def test_serial_never_pays_for_two_replicas_of_a_member(
    service: EmulatorProcess, tmp_path: Path, order: str, most: int
) -> None:
    members = ("a", "b", "c")
    asyncio.run(bring_up(service, tmp_path, *members, deployments=order))
    served = asyncio.run(bring_up(service, tmp_path, *members, model=NEXT, deployments=order))
    seen = service.look()
    assert len({model.model for model in served}) == 3
    assert len(seen["deployments"]) == 3
    assert seen["most_replicas"] == most


@pytest.mark.parametrize("fault", ["hang", "hang after"])
def test_killed_at_any_step_there_is_one_deployment(service: EmulatorProcess, tmp_path: Path, fault: str) -> None:
    for step in STEPS:
        service.change(clear=True)
        root = tmp_path / step
        assert killed_at(service, step, fault, partial(bring_up, service, root, "plain"))
        assert DeploymentLedger(root).up("together", "remote"), f"killed at {step}, the ledger knows"
        (served,) = asyncio.run(bring_up(service, root, "plain"))
        assert ask(served)["model"] == served.model
        seen = service.look()
        assert (len(seen["endpoints"]), len(seen["deployments"])) == (1, 1), f"killed at {step}"


@pytest.mark.parametrize("fault", ["ghost", "drop", "503"])
def test_creates_that_fail_are_not_doubled(service: EmulatorProcess, tmp_path: Path, fault: str) -> None:
    service.change(faults={"create endpoint": [fault], "create deployment": [fault]})
    asyncio.run(bring_up(service, tmp_path, "plain"))
    seen = service.look()
    assert (len(seen["endpoints"]), len(seen["deployments"])) == (1, 1)


def test_cleanup_takes_down_what_the_ledger_knows_wherever_it_was_killed(
    service: EmulatorProcess, tmp_path: Path
) -> None:
    for step in CLEANUP:
        service.change(clear=True)
        root = tmp_path / step
        asyncio.run(bring_up(service, root, "a", "b"))
        assert killed_at(service, step, "hang after", partial(take_down, service, root))
        left = DeploymentLedger(root).up("together", "remote")
        assert len(left) > 0
        assert len(asyncio.run(take_down(service, root))) == len(left)
        seen = service.look()
        assert (seen["endpoints"], seen["deployments"]) == ([], []), f"killed at {step}"
        assert asyncio.run(take_down(service, root)) == []


def test_one_that_cannot_be_taken_down_does_not_keep_the_others_up(service: EmulatorProcess, tmp_path: Path) -> None:
    asyncio.run(bring_up(service, tmp_path, "a", "b", "c"))
    service.change(faults={"delete endpoint": ["403"]})
    with pytest.raises(TrainingError, match=r"taking sparta-.* down at .* failed \(403"):
        asyncio.run(take_down(service, tmp_path))
    assert len(service.look()["endpoints"]) == len(DeploymentLedger(tmp_path).up("together", "remote")) == 1
    assert len(asyncio.run(take_down(service, tmp_path))) == 1
    assert service.look()["endpoints"] == []


def test_a_failed_deployment_says_why_and_how_to_get_rid_of_it(service: EmulatorProcess, tmp_path: Path) -> None:
    service.change(deployment_statuses=["PROVISIONING", "FAILED"], job_message="no capacity")
    with pytest.raises(TrainingError) as caught:
        asyncio.run(bring_up(service, tmp_path, "plain"))
    for word in ("plain", "FAILED", "no capacity", f"sparta-api cleanup {tmp_path}"):
        assert word in str(caught.value)
    service.change(deployment_statuses=[])
    assert len(asyncio.run(take_down(service, tmp_path))) == 1
    assert service.look()["deployments"] == []


def test_a_deployment_that_does_not_come_up_is_given_up(service: EmulatorProcess, tmp_path: Path) -> None:
    service.change(deployment_statuses=["PROVISIONING"])
    with pytest.raises(TrainingError, match="is PROVISIONING"):
        asyncio.run(bring_up(service, tmp_path, "plain", deployment={"ready_timeout_s": 0.05}))


def test_what_is_up_is_told_from_the_ledger_alone(service: EmulatorProcess, tmp_path: Path) -> None:
    assert deployer(service, tmp_path).up() == []
    served = asyncio.run(bring_up(service, tmp_path, "a", "b"))
    assert sorted(deployer(service, tmp_path).up()) == sorted(model.model for model in served)
    asyncio.run(take_down(service, tmp_path))
    assert deployer(service, tmp_path).up() == []
    assert not deployer(service, tmp_path).keep and deployer(service, tmp_path, deployment={"keep": True}).keep
