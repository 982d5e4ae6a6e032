"""The OpenAI-style back end against a loopback emulator, through the real SDK."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from sparta_api.config.tribe import OpenAITrainer as Settings
from sparta_api.errors import TrainingError
from sparta_api.trainers import openai_style
from sparta_api.trainers.factory import build_deployer
from sparta_api.trainers.openai_style import OpenAITrainer
from sparta_api.trainers.protocol import ServedModel, TrainedModel
from tests.emulators.process import EmulatorProcess
from tests.training_jobs import FAST, KEY_ENV, job_file, killed_at, make_spec, pair, whole_job

STEPS = ("list files", "upload", "file", "list jobs", "create job", "job", "events", "checkpoints")


@pytest.fixture(scope="module")
def emulator() -> Iterator[EmulatorProcess]:
    with EmulatorProcess("openai_tuning") as process:
        yield process


@pytest.fixture
def service(emulator: EmulatorProcess) -> EmulatorProcess:
    emulator.change(clear=True)
    return emulator


def section(service: EmulatorProcess, **settings: Any) -> Settings:
    known = {"backend": "openai", "base_url": service.base_url, "api_key_env": KEY_ENV}
    return Settings.model_validate(known | settings)


def trainer(service: EmulatorProcess, **settings: Any) -> OpenAITrainer:
    return OpenAITrainer("remote", section(service, **settings), FAST)


def test_two_iterations_as_configured_and_the_model_answers_at_once(service: EmulatorProcess, tmp_path: Path) -> None:
    settings = {"beta": 0.2, "epochs": 3, "batch_size": 4, "learning_rate_multiplier": 0.5}
    spec = make_spec(tmp_path)
    first = asyncio.run(whole_job(trainer(service, **settings), spec))
    assert first.kind == "openai" and first.train == first.serve and first.train.startswith("ft:org/base-model:")
    second = asyncio.run(
        whole_job(trainer(service, **settings), make_spec(tmp_path, iteration=1, parent=first, member="other"))
    )
    one, two = service.look()["jobs"]
    assert (one["model"], two["model"]) == ("org/base-model", first.train)
    wanted = {"beta": 0.2, "n_epochs": 3, "batch_size": 4, "learning_rate_multiplier": 0.5}
    assert one["method"] == {"type": "dpo", "dpo": {"hyperparameters": wanted}}
    assert one["hyperparameters"] is None and one["seed"] == 7
    assert one["metadata"]["sparta_key"] == one["user_provided_suffix"] == spec.key
    kept = [(row["step"], row["model"]) for row in job_file(spec)["checkpoints"]]
    assert kept == [(step, f"{first.serve}:ckpt-step-{step}") for step in (3, 6)]
    body = json.dumps({"model": second.serve, "messages": [{"role": "user", "content": "Hello"}]}).encode()
    with urlopen(Request(f"{service.base_url}/chat/completions", body)) as answer:
        assert json.load(answer)["model"] == second.serve


@pytest.mark.parametrize("fault", ["hang", "hang after"])
def test_killed_at_any_step_there_is_one_job_and_one_file(service: EmulatorProcess, tmp_path: Path, fault: str) -> None:
    for step in STEPS:
        service.change(clear=True)
        spec = make_spec(tmp_path / step)
        assert killed_at(service, step, fault, partial(whole_job, trainer(service), spec))
        asyncio.run(whole_job(trainer(service), spec))
        seen = service.look()
        assert (len(seen["jobs"]), len(seen["files"])) == (1, 1), f"killed at {step} ({fault})"


@pytest.mark.parametrize("fault", ["ghost", "drop", "503", "cut", "429:0"])
@pytest.mark.parametrize(
    "server", [{}, {"filter_metadata": False}, {"keep_metadata": False}, {"list_lag": 2, "filter_metadata": False}]
)
def test_a_create_that_fails_leaves_one_job(
    service: EmulatorProcess, tmp_path: Path, fault: str, server: dict[str, Any]
) -> None:
    asyncio.run(whole_job(trainer(service), make_spec(tmp_path, run_id="somebody else's", member="other")))
    service.change(faults={"create job": [fault]}, **server)
    spec = make_spec(tmp_path)
    asyncio.run(whole_job(trainer(service), spec))
    assert len([job for job in service.look()["jobs"] if job["user_provided_suffix"] == spec.key]) == 1


def test_a_job_behind_a_hundred_others_is_found(service: EmulatorProcess, tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    service.change(filter_metadata=False)
    asyncio.run(whole_job(trainer(service), spec))
    job = service.look()["jobs"][0]
    (spec.directory / "job.json").unlink()
    for number in range(101):
        body = {"model": "m", "training_file": job["training_file"], "method": job["method"], "suffix": f"s{number}"}
        request = Request(f"{service.base_url}/fine_tuning/jobs", json.dumps(body).encode())
        urlopen(request).close()

    async def find() -> str | None:
        remote = trainer(service)
        try:
            return await remote.find(spec)
        finally:
            await remote.close()

    assert asyncio.run(find()) == job["id"]


def test_a_file_that_turns_out_bad_stops_before_the_job(service: EmulatorProcess, tmp_path: Path) -> None:
    service.change(file_statuses=["uploaded", "error"], file_report={"line": 3})
    with pytest.raises(TrainingError) as caught:
        asyncio.run(whole_job(trainer(service), make_spec(tmp_path)))
    seen = service.look()
    assert seen["jobs"] == [] and seen["calls"].count("file") == 2
    assert seen["files"][0]["id"] in str(caught.value) and '"line": 3' in str(caught.value)


def test_statuses_are_followed_to_the_end(service: EmulatorProcess, tmp_path: Path) -> None:
    service.change(job_statuses=["validating_files", "queued", "paused", "brand_new", "running", "succeeded"])
    assert asyncio.run(whole_job(trainer(service), make_spec(tmp_path))).kind == "openai"


def test_checkpoints_that_are_not_told_stop_nothing(service: EmulatorProcess, tmp_path: Path) -> None:
    service.change(faults={"checkpoints": ["404"]})
    spec = make_spec(tmp_path)
    assert asyncio.run(whole_job(trainer(service), spec)).kind == "openai"
    assert "checkpoints" not in job_file(spec)


def test_a_failed_job_says_why_and_where(service: EmulatorProcess, tmp_path: Path) -> None:
    service.change(job_statuses=["running", "failed"], job_message="the file violates the usage policy")
    with pytest.raises(TrainingError) as caught:
        asyncio.run(whole_job(trainer(service), make_spec(tmp_path)))
    for word in ("plain", "invalid_training_file", "the file violates the usage policy", "/v1/fine_tuning/jobs/ftjob-"):
        assert word in str(caught.value)


def test_a_refusal_names_member_and_sentence_and_is_not_repeated(service: EmulatorProcess, tmp_path: Path) -> None:
    sentence = "Preference fine-tuning is not available for model foo-mini"
    service.change(refuse={"status": 400, "message": sentence})
    spec = make_spec(tmp_path)
    with pytest.raises(TrainingError, match=f"member 'plain'.*{sentence}"):
        asyncio.run(whole_job(trainer(service), spec))
    assert service.look()["calls"].count("create job") == 1
    assert job_file(spec)["file"] == service.look()["files"][0]["id"]


def test_an_empty_account_is_not_asked_again(service: EmulatorProcess, tmp_path: Path) -> None:
    service.change(faults={"create job": ["429:9999"]})
    with pytest.raises(TrainingError, match="429"):
        asyncio.run(whole_job(trainer(service), make_spec(tmp_path)))
    assert service.look()["calls"].count("create job") == 1


def test_fewer_pairs_than_the_provider_takes_stop_before_the_upload(service: EmulatorProcess, tmp_path: Path) -> None:
    spec = make_spec(tmp_path, [pair(number) for number in range(9)] + [pair(9, "same", "same")])
    with pytest.raises(TrainingError, match=r"9 pairs, 1 dropped \(identical\).*at least 10"):
        asyncio.run(whole_job(trainer(service), spec))
    assert "upload" not in service.look()["calls"]
    asyncio.run(whole_job(trainer(service, minimum_pairs=9), spec))


def preflight(remote: OpenAITrainer, parent: TrainedModel | None = None) -> list[str]:
    async def ask() -> list[str]:
        try:
            return await remote.preflight("org/base-model", parent, "plain")
        finally:
            await remote.close()

    return asyncio.run(ask())


def test_announced_ends_are_checked_before_anything_is_sent(
    service: EmulatorProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert preflight(trainer(service)) == []
    day = (datetime.now(UTC) + timedelta(days=30)).date()
    service.change(shutdown_date=day.isoformat())
    assert f"shuts org/base-model down on {day}" in preflight(trainer(service))[0]
    service.change(shutdown_date="2026-01-01T00:00:00Z")
    with pytest.raises(TrainingError, match="shuts org/base-model down on 2026-01-01"):
        preflight(trainer(service))
    service.change(shutdown_date=None)
    monkeypatch.setattr(openai_style, "OPENAI_HOST", service.base_url)
    monkeypatch.setattr(openai_style, "_today", lambda: openai_style.LAST_NEW_JOB)
    assert "until 2027-01-06 only" in preflight(trainer(service))[0]
    monkeypatch.setattr(openai_style, "_today", lambda: openai_style.LAST_NEW_JOB + timedelta(days=1))
    with pytest.raises(TrainingError, match="takes no new fine-tuning jobs since 2027-01-06"):
        preflight(trainer(service))


def test_models_of_other_back_ends_are_refused(service: EmulatorProcess) -> None:
    with pytest.raises(TrainingError, match=r"cannot continue ft-1, a model of kind 'together'.*it continues openai"):
        preflight(trainer(service), TrainedModel("together", "ft-1", "ml_1"))
    assert "does not list ft:gone" in preflight(trainer(service), TrainedModel("openai", "ft:gone", "ft:gone"))[0]


@pytest.mark.parametrize("key", ["learning_rate", "lora", "rpo_alpha", "sft_weight", "precision", "warmup_ratio"])
def test_what_the_protocol_cannot_express_is_refused_in_the_file(key: str) -> None:
    with pytest.raises(ValueError, match=f"backend openai cannot express {key}"):
        Settings.model_validate({"backend": "openai", key: 1})


def test_estimates_come_from_the_price_in_the_file(service: EmulatorProcess, tmp_path: Path) -> None:
    async def ask(**settings: Any) -> Any:
        remote = trainer(service, **settings)
        found = (await remote.forecast("m", 10, 1_000_000), await remote.estimate(make_spec(tmp_path)))
        await remote.close()
        return found

    forecast, estimate = asyncio.run(ask(price_per_million_tokens=25, epochs=2))
    assert forecast.total_usd == 50 and 0 < estimate.total_usd < 0.1
    for deploy, usd in (({}, None), ({"price_per_hour": 3, "hours": 2}, 6), ({"price_per_hour": 0}, 0)):
        (forecast, _) = asyncio.run(ask(price_per_million_tokens=25, deploy={"command": ["x"], **deploy}))
        assert (forecast.usd, forecast.deployment_usd) == (25, usd)
    assert [found.total_usd for found in asyncio.run(ask())] == [None, None]
    assert service.look()["jobs"] == []


HOOK = """
import json, os, pathlib, sys
log = pathlib.Path(sys.argv[1])
log.write_text((log.read_text() if log.exists() else "") + " ".join(sys.argv[2:]) + "\\n")
print("deploying ...")
print(json.dumps({"base_url": "http://127.0.0.1:9/v1", "model": "deployed-" + os.environ["SPARTA_ITERATION"]}))
"""


def test_a_deploy_command_brings_the_model_up_once_and_takes_the_old_one_down(
    service: EmulatorProcess, tmp_path: Path
) -> None:
    hook, log = tmp_path / "hook.py", tmp_path / "log"
    hook.write_text(HOOK)
    down = f"import sys; open({str(log)!r}, 'a').write('down ' + sys.argv[1] + '\\n')"
    command = {
        "command": [sys.executable, "hook.py", str(log), "up", "{model}", "{member}"],
        "undeploy": [sys.executable, "-c", down, "{model}"],
    }
    up = build_deployer("remote", section(service, deploy=command), "run-1", tmp_path, tmp_path)
    assert up is not None

    async def story() -> list[Any]:
        first = [await up.deploy(TrainedModel("openai", "ft:1", "ft:1"), "m", "plain", 0) for _ in range(2)]
        second = await up.deploy(TrainedModel("openai", "ft:2", "ft:2"), "m", "plain", 1)
        return [*first, second, await up.cleanup(), await up.cleanup()]

    first, again, second, cleaned, nothing = asyncio.run(story())
    assert first == again == ServedModel("deployed-0", "http://127.0.0.1:9/v1", KEY_ENV)
    assert second.model == "deployed-1" and cleaned == ["member 'plain': deployed-1 is down"] and nothing == []
    assert log.read_text().splitlines() == ["up ft:1 plain", "up ft:2 plain", "down deployed-0", "down deployed-1"]


def test_without_a_deploy_command_the_models_id_is_used(service: EmulatorProcess, tmp_path: Path) -> None:
    up = build_deployer("remote", section(service), "run-1", tmp_path)
    assert up is not None
    served = asyncio.run(up.deploy(TrainedModel("openai", "ft:1", "ft:1"), "m", "plain", 0))
    assert served == ServedModel("ft:1", service.base_url, KEY_ENV)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("print('no json')", "must be a JSON object, but is: no json"),
        ("raise SystemExit('az: not logged in')", "ended with code 1: az: not logged in"),
        ("print('{}')", "must print"),
        ("import time; time.sleep(60)", "took longer than 1 s"),
    ],
)
def test_a_deploy_command_that_fails_is_one_sentence(
    service: EmulatorProcess, tmp_path: Path, code: str, words: str
) -> None:
    deploy = {"command": [sys.executable, "-c", code], "timeout_s": 1}
    up = build_deployer("remote", section(service, deploy=deploy), "run-1", tmp_path)
    assert up is not None
    with pytest.raises(TrainingError, match=f"member 'plain'.*{words}"):
        asyncio.run(up.deploy(TrainedModel("openai", "ft:1", "ft:1"), "m", "plain", 0))
