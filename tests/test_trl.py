"""Local DPO with the real TRL on a tiny random model, through `LocalTrl` and its worker process."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from sparta_api.config.tribe import TrlTrainer
from sparta_api.errors import TrainingError
from sparta_api.trainers.adapters_check import read_adapter
from sparta_api.trainers.protocol import JobState, JobStatus, TrainedModel, TrainingSpec
from sparta_api.trainers.trl import LocalTrl, last_line, usable_gpus
from tests.front_door import REPOSITORY
from tests.tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.trl,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs the local extra"),
]
PAIRS = 12
SETTINGS: dict[str, Any] = {"learning_rate": 1e-3, "epochs": 4, "lora": {"r": 4, "alpha": 8}}
WAIT_S = 120.0


@dataclass
class Trained:
    """A job that ended: its trainer, specification, last status and, where it succeeded, its model."""

    trainer: LocalTrl
    spec: TrainingSpec
    status: JobStatus
    model: TrainedModel | None

    @property
    def adapter(self) -> Path:
        return self.spec.directory / "adapter"

    def metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.spec.directory / "metrics.jsonl").read_text().splitlines()]

    def facts(self) -> dict[str, Any]:
        return self.trainer.describe(self.spec.key)


def trainer(**settings: Any) -> LocalTrl:
    return LocalTrl("local", TrlTrainer(**{**SETTINGS, "gpus": [], **settings}))


def write_pairs(path: Path, long: tuple[int, ...] = ()) -> Path:
    rows = [
        {
            "prompt": [
                {"role": "user", "content": f"Explain number {i} in one sentence." + " again" * 200 * (i in long)}
            ],
            "chosen": [{"role": "assistant", "content": f"It is the number {i}, and good."}],
            "rejected": [{"role": "assistant", "content": f"Nobody knows what {i * 7} would say, no."}],
            "duel": i,
        }
        for i in range(PAIRS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


async def ended(local: LocalTrl, spec: TrainingSpec) -> Trained:
    job = await local.submit(spec)
    status = await finished(local, job)
    await local.close()
    return Trained(local, spec, status, await local.result(job) if status.state is JobState.SUCCEEDED else None)


async def finished(local: LocalTrl, job: str) -> JobStatus:
    status = await local.poll(job)
    while not status.state.ended:
        await asyncio.sleep(0.05)
        status = await local.poll(job)
    return status


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        await asyncio.sleep(0.005)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", pad_is_eos=True)


@pytest.fixture
def spec(base: Path, tmp_path: Path) -> TrainingSpec:
    return make_spec(base, tmp_path)


def make_spec(base: Path, directory: Path) -> TrainingSpec:
    return TrainingSpec(
        run_id="run",
        iteration=0,
        member="terse",
        preferences=write_pairs(directory / "preferences.jsonl"),
        pairs=PAIRS,
        system_prompt="Be brief.",
        fold_system=False,
        base_model=str(base),
        parent=None,
        directory=directory / "job",
        seed=3,
    )


@pytest.fixture(scope="module")
def first(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return asyncio.run(ended(trainer(), make_spec(base, tmp_path_factory.mktemp("first"))))


def weights(adapter: Path) -> bytes:
    return (adapter / "adapter_model.safetensors").read_bytes()


def test_first_training_starts_at_the_base_model_and_learns(first: Trained, base: Path) -> None:
    assert first.status.state is JobState.SUCCEEDED, first.status.message
    rows = first.metrics()
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-3)
    assert rows[0]["rewards/margins"] == pytest.approx(0, abs=1e-3)
    assert rows[-1]["rewards/margins"] > rows[0]["rewards/margins"]
    assert [row["step"] for row in rows] == list(range(1, 4 * PAIRS + 1))
    assert first.status.progress == 1.0
    assert first.status.metrics["rewards/accuracies"] == 1.0
    facts = first.facts()
    assert (facts["pairs"], facts["dropped"], facts["steps"]) == (PAIRS, {}, 4 * PAIRS)
    assert facts["seconds"] > 0
    assert facts["margin"] > 0
    assert facts["warnings"] == []


def test_the_adapter_is_complete_and_names_the_served_base(first: Trained, base: Path) -> None:
    assert first.model == TrainedModel("adapter", str(first.adapter.resolve()), str(first.adapter.resolve()))
    assert sorted(file.name for file in first.adapter.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((first.adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    left = {file.name for file in first.spec.directory.iterdir()}
    assert left == {"adapter", "metrics.jsonl", "result.json", "spec.json", "worker.lock", "worker.log"}


def test_a_finished_training_is_adopted_unless_its_adapter_is_damaged(first: Trained, tmp_path: Path) -> None:
    copied = replace(first.spec, directory=tmp_path / "job")
    shutil.copytree(first.spec.directory, copied.directory)
    fresh = trainer()
    job = asyncio.run(fresh.find(copied))
    assert job == copied.key
    assert asyncio.run(fresh.poll(job)).state is JobState.SUCCEEDED
    assert asyncio.run(fresh.result(job)).serve == str((copied.directory / "adapter").resolve())
    assert asyncio.run(trainer().find(replace(copied, iteration=1))) is None
    torn = copied.directory / "adapter" / "adapter_model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    assert asyncio.run(trainer().find(copied)) is None


def test_an_interrupted_training_goes_on_to_the_same_bytes(first: Trained, spec: TrainingSpec) -> None:
    async def story() -> Trained:
        local = trainer(checkpoint_s=1e-6)
        job = await local.submit(spec)
        await until(lambda: any(spec.directory.glob("checkpoints/*/complete")))
        os.kill(int((spec.directory / "worker.lock").read_text()), signal.SIGKILL)
        status = await finished(local, job)
        assert status.state is JobState.FAILED
        assert "SIGKILL" in status.message
        assert await local.find(spec) is None
        return await ended(trainer(), spec)

    again = asyncio.run(story())
    assert again.status.state is JobState.SUCCEEDED, again.status.message
    assert json.loads((spec.directory / "spec.json").read_text())["resume_from"]
    assert weights(again.adapter) == weights(first.adapter)
    assert (again.adapter / "adapter_config.json").read_bytes() == (first.adapter / "adapter_config.json").read_bytes()
    assert [(r["step"], r["loss"]) for r in again.metrics()] == [(r["step"], r["loss"]) for r in first.metrics()]


def test_the_second_training_continues_the_adapter_with_itself_as_reference(first: Trained, spec: TrainingSpec) -> None:
    before = weights(first.adapter)
    write_pairs(spec.preferences, long=(1, 5, 6))
    local = trainer(epochs=1, sft_weight=0.5, beta=4.0, learning_rate=0.02, max_length=300)
    second = asyncio.run(ended(local, replace(spec, iteration=1, parent=first.model, fold_system=True)))
    assert second.status.state is JobState.SUCCEEDED, second.status.message
    start = second.metrics()[0]
    assert start["rewards/margins"] == pytest.approx(0, abs=1e-4)
    assert start["rewards/chosen"] == pytest.approx(0, abs=1e-4)
    assert start["loss"] > math.log(2) + 0.1
    assert weights(first.adapter) == before
    assert weights(second.adapter) != before
    assert not (second.adapter / "ref").exists()
    assert (second.facts()["dropped"], second.facts()["pairs"]) == ({"prompt_too_long": 3}, PAIRS - 3)
    assert any("loss collapsed" in text and "0.02" in text for text in second.facts()["warnings"])


CHECKS = """
import sys
from pathlib import Path
import torch
from sparta_api.errors import TrainingError
from sparta_api.trainers import trl_model
from sparta_api.trainers.trl_job import Job, JobFiles
from sparta_api.trainers.trl_pairs import load_tokenizer
from sparta_api.trainers.trl_worker import usable_pairs

job = Job.model_validate_json(Path(sys.argv[1]).read_bytes()).model_copy(update={"parent": sys.argv[2]})
files = JobFiles(Path(sys.argv[3]))
files.directory.mkdir()
tokenizer = load_tokenizer(job.base_model)
pairs = usable_pairs(job, tokenizer).pairs
trainer = trl_model.make_trainer(job, files, tokenizer, pairs, trl_model.Figures(files, 1e9))
row = trainer.train_dataset[0]
batch = trainer.data_collator([row])
end = tokenizer.eos_token_id
assert tokenizer.pad_token_id == end
assert all((batch["completion_mask"][i] * (batch["input_ids"][i] == end)).sum() == 1 for i in (0, 1))
trl_model.check_reference(trainer, job)
weights = dict(trainer.model.named_parameters())
refused = []
references = [weight for name, weight in weights.items() if ".ref." in name]
for damage in (lambda weight: weight.flatten()[0].add_(1e-6), lambda weight: weight.zero_()):
    for weight in references:
        damage(weight.data)
    try:
        trl_model.check_reference(trainer, job)
    except TrainingError as error:
        refused.append(str(error))
before = trl_model.trainable_weights(trainer.model)
try:
    trl_model.check_changed(trainer.model, before, job)
except TrainingError as error:
    refused.append(str(error))
print("\\n".join(refused))
"""


def test_a_wrong_reference_and_an_idle_training_are_refused(first: Trained, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            CHECKS,
            str(first.spec.directory / "spec.json"),
            str(first.adapter),
            str(tmp_path / "x"),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        cwd=REPOSITORY,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    nudged, base_instead, idle = done.stdout.strip().splitlines()[-3:]
    assert "the DPO reference is not the member's previous model: it is no frozen copy" in nudged
    assert "the DPO reference is not the member's previous model: before any update the DPO loss is" in base_instead
    assert "training changed nothing" in idle


def test_nothing_left_to_train_on_and_no_chat_template_are_told(base: Path, spec: TrainingSpec, tmp_path: Path) -> None:
    plain = make_tiny_model(tmp_path / "plain", chat_template=None)
    other = replace(spec, base_model=str(plain), directory=tmp_path / "other")

    async def both() -> list[Trained]:
        return list(await asyncio.gather(ended(trainer(max_length=8), spec), ended(trainer(), other)))

    short, mute = asyncio.run(both())
    assert short.status.state is mute.status.state is JobState.FAILED
    assert "none of the 12 pairs" in short.status.message
    assert "12 prompt_too_long" in short.status.message
    assert "trainers.local.max_length" in short.status.message
    assert f"the tokenizer of {plain} has no chat template" in mute.status.message
    with pytest.raises(TrainingError, match="no chat template"):
        asyncio.run(mute.trainer.result(mute.spec.key))


def test_a_crash_shows_the_last_useful_line_and_the_log(base: Path, spec: TrainingSpec, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(base, broken)
    (broken / "model.safetensors").write_bytes(b"\xff" * 64)
    crashed = asyncio.run(ended(trainer(), replace(spec, base_model=str(broken))))
    assert crashed.status.state is JobState.FAILED
    assert "training of 'terse' (trainers.local)" in crashed.status.message
    assert "SafetensorError" in crashed.status.message
    assert str(spec.directory / "worker.log") in crashed.status.message


def test_cancelling_stops_the_worker(spec: TrainingSpec) -> None:
    async def story() -> tuple[JobStatus, str | None, int]:
        local = trainer(epochs=1000)
        job = await local.submit(spec)
        assert await local.find(spec) == job
        await until(lambda: (spec.directory / "worker.lock").exists())
        await until(lambda: bool((spec.directory / "worker.lock").read_text()))
        await local.close()
        return await local.poll(job), await local.find(spec), int((spec.directory / "worker.lock").read_text())

    status, found, worker = asyncio.run(story())
    assert status.state is JobState.CANCELLED
    assert found is None
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


OWNER = """
import asyncio, sys
from pathlib import Path
from sparta_api.config.tribe import TrlTrainer
from sparta_api.trainers.protocol import TrainingSpec
from sparta_api.trainers.trl import LocalTrl

async def main():
    base, preferences, directory = sys.argv[1:]
    spec = TrainingSpec("run", 0, "m", Path(preferences), 12, None, False, base, None, Path(directory), 0)
    await LocalTrl("local", TrlTrainer(epochs=1000, gpus=[])).submit(spec)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_the_worker_dies_with_its_owner(base: Path, spec: TrainingSpec) -> None:
    arguments = [str(base), str(spec.preferences), str(spec.directory)]
    owner = subprocess.Popen([sys.executable, "-c", OWNER, *arguments], cwd=REPOSITORY)
    lock = spec.directory / "worker.lock"
    asyncio.run(until(lambda: lock.exists() and bool(lock.read_text())))
    worker = int(lock.read_text())
    owner.kill()
    owner.wait()
    asyncio.run(until(lambda: not alive(worker)))


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def write_adapter(directory: Path, **config: Any) -> Path:
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps({"r": 16, "lora_alpha": 32, **config}))
    return directory


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, ("rank 16", "lora.r is 4", "parent")),
        ({"r": 4, "lora_alpha": 16}, ("lora_alpha 16", "alpha is 8", "parent")),
        ({"r": 4, "lora_alpha": 8, "modules_to_save": ["embed_tokens", "lm_head"]}, ("modules_to_save", "lm_head")),
    ],
)
def test_an_adapter_that_cannot_be_continued_is_refused_at_once(
    spec: TrainingSpec, tmp_path: Path, config: dict[str, Any], words: tuple[str, ...]
) -> None:
    parent = TrainedModel("adapter", str(write_adapter(tmp_path / "parent", **config)), "x")
    with pytest.raises(TrainingError) as caught:
        asyncio.run(trainer().submit(replace(spec, parent=parent)))
    assert all(word in str(caught.value) for word in ("terse", *words))
    assert not spec.directory.exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base_model": "/nowhere/model"}, "there is no model directory /nowhere/model"),
        ({"base_model": "some-model"}, "set base_model of the trainer"),
        ({"parent": TrainedModel("together", "ft-1", "ml-1")}, "cannot continue a model of kind 'together'"),
        ({"parent": TrainedModel("adapter", "/nowhere/adapter", "x")}, "/nowhere/adapter is not a LoRA adapter"),
        ({"pairs": 0}, "no preference pairs"),
    ],
)
def test_impossible_jobs_start_no_worker(spec: TrainingSpec, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        asyncio.run(trainer().submit(replace(spec, **changes)))
    assert not spec.directory.exists()


def test_preflight_tells_what_is_missing(base: Path, tmp_path: Path) -> None:
    assert asyncio.run(trainer().preflight(str(base), None, "terse")) == []
    assert "fetches it from the hub" in asyncio.run(trainer().preflight("org/model", None, "terse"))[0]
    with pytest.raises(TrainingError, match=r"holds no config\.json"):
        asyncio.run(trainer().preflight(str(tmp_path), None, "terse"))
    relative = LocalTrl("local", TrlTrainer(gpus=[]), root=base.parent)
    assert asyncio.run(relative.preflight(base.name, None, "terse")) == []


def test_the_largest_rank_counts_patterns(tmp_path: Path) -> None:
    shape = read_adapter(write_adapter(tmp_path / "a", r=8, rank_pattern={"q_proj": 32}))
    assert (shape.rank, shape.largest_rank) == (8, 32)


def test_every_gpu_is_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, GPU-abc")
    assert usable_gpus(None) == ["2", "GPU-abc"]
    assert usable_gpus([5]) == ["5"]
    assert LocalTrl("local", TrlTrainer(gpus=[4, 5, 6])).slots == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert usable_gpus(None) == []
    assert LocalTrl("local", TrlTrainer()).slots == 1


def test_the_last_line_of_a_log_is_the_error_without_keys(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_text("start\nValueError: no sk-abcdefghijklmnop here\n\nresource_tracker: leaked\n")
    assert last_line(log) == "ValueError: no *** here"
    assert last_line(tmp_path / "none.log") == ""


def test_the_tiny_model_is_the_same_every_time(base: Path, tmp_path: Path) -> None:
    twin = make_tiny_model(tmp_path / "twin", pad_is_eos=True)
    for file in base.iterdir():
        assert (twin / file.name).read_bytes() == file.read_bytes()
    assert (base / "model.safetensors").stat().st_size < 500_000
