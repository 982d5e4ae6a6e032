"""What training costs: held to the limits before it starts, counted once, and what back ends declare of themselves."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from sparta_api.config.file import load_tribe
from sparta_api.config.tribe import CommandTrainer, OpenAITrainer, TinkerTrainer, TogetherTrainer, TrlTrainer
from sparta_api.data.rundir import RunDirectory
from sparta_api.errors import ConfigError
from sparta_api.runs.bill import Costs, job_costs, read_bill
from sparta_api.trainers.deployments import DeploymentLedger
from sparta_api.trainers.factory import build_trainer
from sparta_api.trainers.protocol import Capabilities, Estimate
from sparta_api.trainers.together_client import TogetherPrices
from tests.emulators.process import EmulatorProcess
from tests.forked import forked
from tests.front_door import sparta, tribe
from tests.training_jobs import KEY_ENV

COMMAND = {"backend": "command", "command": ["true", "{preferences}"]}
PRICED = {"input": 1, "output": 1}
SECTIONS: dict[str, type[Any]] = {
    "trl": TrlTrainer,
    "together": TogetherTrainer,
    "openai": OpenAITrainer,
    "tinker": TinkerTrainer,
    "command": CommandTrainer,
}


@pytest.fixture(scope="module")
def together() -> Iterator[EmulatorProcess]:
    with EmulatorProcess("together") as process:
        yield process


def limited(root: Path, trainer: dict[str, Any], url: str = "http://127.0.0.1:9/v1") -> Path:
    """A tribe whose members learn with that trainer under a limit."""
    return tribe(
        root,
        url,
        members=3,
        defaults={"price": PRICED},
        limits={"max_cost_usd": 5},
        trainers={"mine": trainer},
        training={"trainer": "mine"},
    )


@pytest.mark.parametrize(
    ("trainer", "missing"),
    [
        ({"backend": "together"}, "trainers.mine.deployment.price_per_hour"),
        ({"backend": "together", "deployment": {"config": "projects/p/configs/c"}}, None),
        ({"backend": "together", "deployment": {"price_per_hour": 3}}, None),
        ({"backend": "openai"}, "trainers.mine.price_per_million_tokens"),
        ({"backend": "openai", "price_per_million_tokens": 25}, None),
        (
            {"backend": "openai", "deploy": {"command": ["x"]}},
            "trainers.mine.price_per_million_tokens and trainers.mine.deploy.price_per_hour",
        ),
        ({"backend": "tinker"}, "trainers.mine.price_per_million_tokens"),
        (COMMAND, "trainers.mine.price_per_job"),
        ({**COMMAND, "price_per_job": 0}, None),
        ({"backend": "trl"}, None),
    ],
)
def test_a_limit_on_money_wants_a_trainer_whose_cost_can_be_known(
    tmp_path: Path, trainer: dict[str, Any], missing: str | None
) -> None:
    path = limited(tmp_path, trainer)
    text = f"limits.max_cost_usd needs to know what trainer 'mine' costs; give {missing}"
    if missing:
        with pytest.raises(ConfigError, match=rf"tribe\.yaml:\d+: .*{re.escape(text)}"):
            load_tribe(path, keys=False)
    else:
        load_tribe(path, keys=False)
    load_tribe(path, ["limits.max_cost_usd=null"], keys=False)


def test_a_price_that_turns_out_unknown_stops_before_the_job(together: EmulatorProcess, tmp_path: Path) -> None:
    together.change(clear=True, estimate={"estimation_available": False, "unavailable_reason": "multimodal_dataset"})
    remote = {"backend": "together", "base_url": together.base_url, "api_key_env": KEY_ENV, "base_model": "org/base"}
    path = limited(tmp_path, {**remote, "deployment": {"price_per_hour": 1}}, f"{together.base_url}/v1")
    run, env = tmp_path / "run", {"SPARTA_TRAINING_PACE": "0.002"}
    ended = forked("run", "--tribe", path, "--run-dir", run, "--yes", env=env)
    assert ended.code == 4 and "is not known" in ended.err and "multimodal_dataset" in ended.err, ended.err
    assert together.look()["jobs"] == []
    ended = forked("resume", run, "--set", "trainers.mine.price_per_million_tokens=1000000", env=env)
    assert ended.code == 4 and "before passing limits.max_cost_usd" in ended.err, ended.err
    assert together.look()["jobs"] == []


def test_members_that_ask_at_once_learn_the_same_price(together: EmulatorProcess) -> None:
    together.change(clear=True)
    settings = TogetherTrainer.model_validate(
        {
            "backend": "together",
            "base_url": together.base_url,
            "api_key_env": KEY_ENV,
            "deployment": {"config": "projects/proj-public/configs/cr_1", "hours": 2},
        }
    )

    async def ask() -> list[float | None]:
        prices = TogetherPrices("mine", settings)
        return await asyncio.gather(*(prices.price() for _ in range(3)))

    assert asyncio.run(ask()) == [7.0, 7.0, 7.0]
    assert together.look()["calls"].count("hardware") == 1


def test_costs_count_jobs_that_exist_and_those_that_failed() -> None:
    job = Estimate(1.5, deployment_usd=2.0).facts
    unknown = Estimate(None, deployment_usd=2.0).facts
    assert job_costs({**job, "status": "refused"}) == Costs(), "no job was created"
    assert job_costs({**job, "job": "ft-1"}) == Costs(1.5, 2.0)
    assert job_costs({**job, "job": "ft-2", "previous": [{**job, "job": "ft-1"}]}) == Costs(3.0, 4.0)
    assert job_costs({**unknown, "job": "ft-1"}) == Costs(0.0, 2.0, partial=True)


def test_what_goes_on_without_the_run_is_told_and_what_no_trainer_knows_is_not_forgotten(tmp_path: Path) -> None:
    path = limited(tmp_path, {**COMMAND, "price_per_job": 0})
    run = RunDirectory(tmp_path)
    (tmp_path / "run.json").write_bytes(orjson.dumps({"id": "r", "base_dir": str(tmp_path)}))
    job = run.iteration(0).job("m1")
    job.parent.mkdir(parents=True)
    job.write_bytes(orjson.dumps({"backend": "together", "job": "ft-7", "status": "running", "url": "http://x/ft-7"}))
    ledger = DeploymentLedger(tmp_path)
    ledger.begin("sparta-1", backend="together", trainer="gone", member="m0")
    ledger.record("sparta-1", state="up", model="slug/sparta-1")
    bill = read_bill(run, load_tribe(path, keys=False).resolved)
    assert [entry["since"][:2] for entry in bill.up] == ["20"]
    up, going_on = bill.sentences(tmp_path)
    assert "slug/sparta-1" in up and f"sparta-api cleanup {tmp_path}" in up
    assert "member 'm1': job ft-7 (http://x/ft-7)" in going_on
    ended = sparta("cleanup", tmp_path)
    assert ended.code == 3 and "nothing is up" not in ended.out
    assert "slug/sparta-1 was brought up by the trainer 'gone'" in ended.err
    assert "ft-7" in ended.out and "not ended here" in ended.out


@pytest.mark.parametrize("backend", SECTIONS)
def test_back_ends_declare_what_their_sections_say(backend: str, tmp_path: Path) -> None:
    base = COMMAND if backend == "command" else {"backend": backend}
    section = SECTIONS[backend].model_validate(base)
    trainer = build_trainer("mine", section, tmp_path)
    declared: Capabilities = trainer.capabilities
    keys = set(SECTIONS[backend].model_fields)
    assert ("learning_rate" in keys) == (declared.learning_rate == "absolute")
    assert ("learning_rate_multiplier" in keys) == (declared.learning_rate == "multiplier")
    assert {"lora": "full", "rank": "rank"}.get(
        next(iter({"lora", "rank"} & keys), ""), "none"
    ) == declared.lora_shape or (backend == "command")
    extras = {"rpo_alpha", "simpo_gamma", "length_normalized", "sft_weight"}
    assert extras & keys == extras & set(declared.loss_extras)
    for key in ("learning_rate", "learning_rate_multiplier", "lora", *sorted(extras)):
        if key not in keys:
            with pytest.raises(ValueError, match=key):
                SECTIONS[backend].model_validate({**base, key: 1})
