"""Together's back end against a loopback emulator, through the real SDK."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from sparta_api.config.tribe import TogetherTrainer as Settings
from sparta_api.errors import ConfigError, TrainingError
from sparta_api.trainers.protocol import JobState, TrainedModel
from sparta_api.trainers.together import TogetherTrainer
from tests.emulators.process import EmulatorProcess
from tests.training_jobs import FAST, KEY, KEY_ENV, job_file, killed_at, make_spec, pair, whole_job

STEPS = ("upload", "put file", "preprocess", "file", "list jobs", "limits", "estimate", "create job", "job", "metrics")


@pytest.fixture(scope="module")
def emulator() -> Iterator[EmulatorProcess]:
    with EmulatorProcess("together") as process:
        yield process


@pytest.fixture
def service(emulator: EmulatorProcess) -> EmulatorProcess:
    emulator.change(clear=True)
    return emulator


def trainer(service: EmulatorProcess, **settings: Any) -> TogetherTrainer:
    known = {"backend": "together", "base_url": service.base_url, "api_key_env": KEY_ENV, "batch_size": 8}
    return TogetherTrainer("remote", Settings.model_validate(known | settings), FAST)


def live(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    return [job for job in snapshot["jobs"] if job["status"] != "cancelled"]


def test_a_job_is_sent_as_configured_and_its_model_has_two_handles(service: EmulatorProcess, tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    settings = {"learning_rate": 2e-5, "beta": 0.3, "epochs": 2, "rpo_alpha": 0.5, "lora": {"r": 32, "alpha": 64}}
    model = asyncio.run(whole_job(trainer(service, **settings), spec))
    seen = service.look()
    (job,) = seen["jobs"]
    assert model == TrainedModel("together", job["id"], f"ml_{job['id']}")
    body = job["body"]
    assert body["model"] == "org/base-model" and "from_checkpoint" not in body
    assert body["suffix"] == spec.key and len(spec.key) <= 40
    assert (body["learning_rate"], body["n_epochs"], body["batch_size"], body["random_seed"]) == (2e-5, 2, 8, 7)
    assert body["training_method"]["method"] == "dpo"
    assert (body["training_method"]["dpo_beta"], body["training_method"]["rpo_alpha"]) == (0.3, 0.5)
    assert (body["training_type"]["type"], body["training_type"]["lora_r"], body["training_type"]["lora_alpha"]) == (
        "Lora",
        32,
        64,
    )
    (content,) = seen["contents"].values()
    first = json.loads(content.splitlines()[0])
    assert list(first) == ["input", "preferred_output", "non_preferred_output"]
    assert first["input"]["messages"][0] == {"role": "system", "content": "Be brief."}
    record = job_file(spec)
    assert record["file_sha256"] == hashlib.sha256(content.encode()).hexdigest()
    assert record["status"] == "succeeded" and record["url"].endswith(f"/v1/fine-tunes/{job['id']}")
    assert record["result"]["serve"] == f"ml_{job['id']}" and record["cost_usd"] > 0


def test_the_next_iteration_continues_the_previous_job_and_keeps_its_shape(
    service: EmulatorProcess, tmp_path: Path
) -> None:
    first = asyncio.run(whole_job(trainer(service), make_spec(tmp_path)))
    spec = make_spec(tmp_path, [pair(n, "other") for n in range(3)], iteration=1, parent=first)
    asyncio.run(whole_job(trainer(service), spec))
    body = service.look()["jobs"][1]["body"]
    assert body["from_checkpoint"] == first.train
    assert "model" not in body and "training_type" not in body


def test_progress_and_figures_reach_the_poll(service: EmulatorProcess, tmp_path: Path) -> None:
    service.change(job_statuses=["pending", "running"])
    spec = make_spec(tmp_path)

    async def watch() -> Any:
        remote = trainer(service)
        job = await remote.submit(spec)
        status = await remote.poll(job)
        while not status.metrics:
            await asyncio.sleep(0.003)
            status = await remote.poll(job)
        await remote.close()
        return status

    status = asyncio.run(watch())
    assert (status.state, status.progress) == (JobState.RUNNING, 0.5)
    assert (status.metrics["loss"], status.metrics["rewards/margins"]) == (0.6, 0.1)


@pytest.mark.parametrize("fault", ["hang", "hang after"])
def test_killed_at_any_step_there_is_one_job(service: EmulatorProcess, tmp_path: Path, fault: str) -> None:
    for number, step in enumerate(STEPS):
        rows = [pair(question) for question in range(number, number + 3)]
        spec = make_spec(tmp_path / str(number), rows, run_id=f"run-{number}")
        assert killed_at(service, step, fault, partial(whole_job, trainer(service), spec))
        model = asyncio.run(whole_job(trainer(service), spec))
        ours = [job for job in service.look()["jobs"] if job["suffix"] == spec.key]
        assert [job["id"] for job in ours] == [model.train], f"killed at {step} ({fault})"


@pytest.mark.parametrize("faults", [["ghost"], ["drop"], ["503"], ["cut"], ["429:0"], ["503", "ghost"], ["409"]])
@pytest.mark.parametrize("lag", [0, 2])
def test_a_create_that_fails_leaves_one_job(
    service: EmulatorProcess, tmp_path: Path, faults: list[str], lag: int
) -> None:
    service.change(faults={"create job": faults}, list_lag=lag)
    model = asyncio.run(whole_job(trainer(service), make_spec(tmp_path)))
    assert [job["id"] for job in service.look()["jobs"]] == [model.train]


def test_killed_between_a_ghost_and_a_lagging_list_there_is_one_job(service: EmulatorProcess, tmp_path: Path) -> None:
    service.change(list_lag=2)
    spec = make_spec(tmp_path)
    assert killed_at(service, "create job", "hang after", lambda: whole_job(trainer(service), spec))
    model = asyncio.run(whole_job(trainer(service), spec))
    assert [job["id"] for job in service.look()["jobs"]] == [model.train]


def test_a_ghost_that_appears_too_late_is_cancelled_and_recorded(service: EmulatorProcess, tmp_path: Path) -> None:
    service.change(faults={"create job": ["ghost"]}, list_lag=5)
    spec = make_spec(tmp_path)
    model = asyncio.run(whole_job(trainer(service), spec))
    seen = service.look()
    assert [job["id"] for job in live(seen)] == [model.train]
    assert len(seen["jobs"]) == 2
    (cancelled,) = [job["id"] for job in seen["jobs"] if job["status"] == "cancelled"]
    assert job_file(spec)["duplicates"] == {cancelled: "cancelled"}


def test_of_jobs_with_the_same_key_the_oldest_stays(service: EmulatorProcess, tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    asyncio.run(whole_job(trainer(service), spec))
    body = service.look()["jobs"][0]["body"]
    request = Request(
        f"{service.base_url}/v1/fine-tunes", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    urlopen(request).close()
    (spec.directory / "job.json").unlink()
    model = asyncio.run(whole_job(trainer(service), spec))
    first, second = service.look()["jobs"]
    assert model.train == first["id"]
    assert second["status"] == "cancelled" and job_file(spec)["duplicates"] == {second["id"]: "cancelled"}


@pytest.mark.parametrize(
    ("statuses", "report", "words"),
    [
        (
            ["RUNNING", "INVALID_FORMAT"],
            {"valid": False, "error": "line 12: missing role"},
            ["line 12", "missing role"],
        ),
        (["FAILED"], {}, ["FAILED"]),
        (["COMPLETED"], {"valid": True, "nlines": 3}, ["counts 3 lines", "12"]),
    ],
)
def test_a_file_that_the_service_refuses_stops_before_the_job(
    service: EmulatorProcess, tmp_path: Path, statuses: list[str], report: dict[str, Any], words: list[str]
) -> None:
    service.change(file_statuses=statuses, file_report=report)
    with pytest.raises(TrainingError) as caught:
        asyncio.run(whole_job(trainer(service), make_spec(tmp_path)))
    seen = service.look()
    assert seen["jobs"] == []
    assert all(word in str(caught.value) for word in [*words, "plain", seen["files"][0]["id"], "no job was created"])


def test_a_price_that_is_not_allowed_stops_before_the_job(service: EmulatorProcess, tmp_path: Path) -> None:
    service.change(estimate={"allowed_to_proceed": False, "estimated_total_price": 812.5, "user_limit": 100})
    with pytest.raises(TrainingError, match=r"812\.5 USD.*100\.0 USD"):
        asyncio.run(whole_job(trainer(service), make_spec(tmp_path)))
    assert service.look()["jobs"] == []


def test_estimates_name_the_job_and_its_deployment(service: EmulatorProcess, tmp_path: Path) -> None:
    deployment = {"config": "projects/proj-public/configs/cr_1", "hours": 2}

    async def ask(**settings: Any) -> Any:
        remote = trainer(service, **settings)
        estimate = await remote.estimate(make_spec(tmp_path))
        await remote.close()
        return estimate

    estimate = asyncio.run(ask(deployment=deployment))
    assert estimate.usd > 0 and estimate.deployment_usd == 7.0 and estimate.total_usd == estimate.usd + 7.0
    service.change(estimate={"estimation_available": False, "unavailable_reason": "multimodal_dataset"})
    estimate = asyncio.run(ask(price_per_million_tokens=1000, epochs=2))
    assert estimate.usd == pytest.approx(estimate.tokens / 1000)
    assert "multimodal_dataset" in estimate.detail and estimate.total_usd is None
    assert service.look()["jobs"] == []


def test_pairs_that_teach_nothing_are_dropped_and_counted(service: EmulatorProcess, tmp_path: Path) -> None:
    rows = [pair(0), pair(1, "same", "same "), pair(2, rejected=" "), pair(3, "long " * 2000), pair(4)]
    spec = make_spec(tmp_path, rows)
    asyncio.run(whole_job(trainer(service, max_length=512), spec))
    (content,) = service.look()["contents"].values()
    assert content.count("\n") == 2
    assert job_file(spec)["pairs"] == 2
    assert job_file(spec)["dropped"] == {"identical": 1, "empty": 1, "too long": 1}


def test_a_broken_row_names_its_line_and_nothing_is_sent(service: EmulatorProcess, tmp_path: Path) -> None:
    broken = pair(1) | {"rejected": [{"role": "user", "content": "B"}]}
    with pytest.raises(ConfigError, match=r"preferences\.jsonl:2: rejected\[0\]\.role"):
        asyncio.run(whole_job(trainer(service), make_spec(tmp_path, [pair(0), broken])))
    assert "upload" not in service.look()["calls"]


@pytest.mark.parametrize("status", ["user_error", "error", "cancelled"])
def test_a_job_that_ends_badly_says_why_and_where(service: EmulatorProcess, tmp_path: Path, status: str) -> None:
    service.change(job_statuses=["running", status], job_message="the dataset offends the policy")
    spec = make_spec(tmp_path)
    with pytest.raises(TrainingError) as caught:
        asyncio.run(whole_job(trainer(service), spec))
    words = ["plain", status, f"{service.base_url}/v1/fine-tunes/ft-"]
    words += [] if status == "cancelled" else ["the dataset offends the policy"]
    assert all(word in str(caught.value) for word in words)
    service.change(job_statuses=[])
    model = asyncio.run(whole_job(trainer(service), spec))
    first, second = service.look()["jobs"]
    assert model.train == second["id"]
    assert [entry["job"] for entry in job_file(spec)["previous"]] == [first["id"]]


def test_unknown_and_odd_statuses_never_count_as_done(service: EmulatorProcess, tmp_path: Path) -> None:
    service.change(
        job_statuses=["running", "waiting_for_moonrise", "waiting_for_moonrise", "cancel_requested", "completed"]
    )
    messages = []

    async def watch() -> TrainedModel:
        remote = trainer(service)
        job = await remote.submit(make_spec(tmp_path))
        status = await remote.poll(job)
        while not status.state.ended:
            messages.append(status.message)
            await asyncio.sleep(0.003)
            status = await remote.poll(job)
        model = await remote.result(job)
        await remote.close()
        return model

    assert asyncio.run(watch()).kind == "together"
    assert "unknown status 'waiting_for_moonrise' counts as running" in messages


def test_a_job_without_a_model_is_an_error(service: EmulatorProcess, tmp_path: Path) -> None:
    service.change(unnamed=True)
    with pytest.raises(TrainingError, match="ended as completed but names no model"):
        asyncio.run(whole_job(trainer(service), make_spec(tmp_path)))


def test_a_refusal_carries_the_providers_sentence_and_keeps_the_file(service: EmulatorProcess, tmp_path: Path) -> None:
    sentence = "Preference fine-tuning is not available for model foo-mini"
    service.change(refuse={"status": 400, "message": sentence})
    spec = make_spec(tmp_path)
    with pytest.raises(TrainingError) as caught:
        asyncio.run(whole_job(trainer(service), spec))
    file = job_file(spec)["file"]
    assert all(word in str(caught.value) for word in (sentence, "plain", file))
    service.change(refuse={})
    asyncio.run(whole_job(trainer(service), spec))
    assert service.look()["calls"].count("upload") == 1


def test_a_silent_provider_does_not_change_a_jobs_state(service: EmulatorProcess, tmp_path: Path) -> None:
    service.change(faults={"job": ["503", "drop", "429:0"]})
    assert asyncio.run(whole_job(trainer(service), make_spec(tmp_path))).kind == "together"
    spec = make_spec(tmp_path / "second", run_id="second")
    service.change(faults={"job": ["503"] * 500}, job_statuses=["running"])
    with pytest.raises(TrainingError, match="resume the run to watch it again"):
        asyncio.run(whole_job(trainer(service), spec))
    assert job_file(spec)["status"] == "queued" and job_file(spec)["job"]
    service.change(faults={}, job_statuses=["completed"])


def test_preflight_names_what_the_service_cannot_do(
    service: EmulatorProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(parent: TrainedModel | None = None, **settings: Any) -> list[str]:
        async def ask() -> list[str]:
            remote = trainer(service, **settings)
            try:
                return await remote.preflight("org/base-model", parent, "plain")
            finally:
                await remote.close()

        return asyncio.run(ask())

    assert "billed while it is up" in check()[0]
    for settings, words in (
        ({"learning_rate": 0.5}, "learning_rate 0.5 is outside"),
        ({"lora": {"r": 128, "alpha": 128}}, "lora.r 128 is outside"),
        ({"batch_size": 64}, "batch_size 64 is outside"),
        ({"epochs": 50}, "epochs 50 is outside"),
    ):
        with pytest.raises(TrainingError, match=words):
            check(**settings)
    with pytest.raises(TrainingError, match="cannot continue /adapters/x"):
        check(TrainedModel("adapter", "/adapters/x", "/adapters/x"))
    model = asyncio.run(whole_job(trainer(service), make_spec(tmp_path)))
    with pytest.raises(TrainingError, match=r"rank 16, but lora\.r is 8"):
        check(model, lora={"r": 8, "alpha": 8})
    monkeypatch.delenv(KEY_ENV)
    with pytest.raises(ConfigError, match=f"{KEY_ENV} is not set"):
        check()


def test_nothing_that_is_written_holds_the_key(service: EmulatorProcess, tmp_path: Path) -> None:
    service.change(refuse={"status": 401, "message": f"Incorrect API key provided: {KEY}"})
    spec = make_spec(tmp_path)
    with pytest.raises(TrainingError) as caught:
        asyncio.run(whole_job(trainer(service), spec))
    assert KEY not in str(caught.value)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and KEY in path.read_text()]


def test_identical_pairs_make_identical_files(tmp_path: Path, service: EmulatorProcess) -> None:
    spec = make_spec(tmp_path)
    asyncio.run(whole_job(trainer(service), spec))
    again = replace(spec, run_id="another", directory=tmp_path / "again")
    asyncio.run(whole_job(trainer(service), again))
    assert len(service.look()["contents"]) == 1
    assert {job["training_file"] for job in service.look()["jobs"]} == set(service.look()["contents"])


def test_another_trainer_does_not_take_a_running_job_over(service: EmulatorProcess, tmp_path: Path) -> None:
    service.change(job_statuses=["running"])
    spec = make_spec(tmp_path)

    async def start(base_url: str) -> None:
        remote = trainer(service, base_url=base_url)
        try:
            await remote.submit(spec)
        finally:
            await remote.close()

    asyncio.run(start(service.base_url))
    with pytest.raises(TrainingError, match=r"already started ft-.* resume with that trainer"):
        asyncio.run(start(service.base_url.replace("127.0.0.1", "localhost")))


def test_hyper_parameters_of_other_back_ends_are_refused_by_name() -> None:
    for key, value, words in (
        ("sft_weight", 0.1, "rpo_alpha"),
        ("precision", "bfloat16", "cannot express precision"),
        ("learning_rate_multiplier", 2, "absolute learning_rate"),
        ("lora", {"alpha": 1.5}, "whole number"),
    ):
        with pytest.raises(ValueError, match=words):
            Settings.model_validate({"backend": "together", key: value})
