"""The Tinker loop against a double of its client that really learns (the service itself was never tried)."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from sparta_api.config.tribe import TinkerTrainer as Settings
from sparta_api.errors import ConfigError, TrainingError
from sparta_api.trainers.protocol import TrainedModel
from sparta_api.trainers.tinker import TinkerTrainer
from tests.training_jobs import KEY_ENV, job_file, make_spec, pair, whole_job

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
DOUBLES = Path(__file__).parent / "doubles"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "service"
    place.mkdir()
    monkeypatch.setenv("TINKER_DOUBLE", str(place))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(DOUBLES), str(DOUBLES.parents[1])]))
    monkeypatch.syspath_prepend(str(DOUBLES))
    return place


def trainer(**settings: Any) -> TinkerTrainer:
    known = {"backend": "tinker", "api_key_env": KEY_ENV, "learning_rate": 5.0, "batch_size": 4, "epochs": 2}
    return TinkerTrainer("loop", Settings.model_validate(known | settings))


def figures(spec: Any) -> list[dict[str, float]]:
    lines = (spec.directory / "output" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_loop_learns_and_the_next_one_continues_from_its_state(store: Path, tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    first = asyncio.run(whole_job(trainer(), spec))
    assert first.kind == "tinker" and "/weights/final" in first.train and "/sampler_weights/final" in first.serve
    steps = figures(spec)
    assert len(steps) == 6
    assert steps[0]["loss"] == pytest.approx(0.693147, abs=1e-5) and steps[0]["rewards/margins"] == 0
    assert steps[-1]["loss"] < 0.5 and steps[-1]["rewards/accuracies"] == 1
    second = make_spec(tmp_path, [pair(n, "other") for n in range(4)], iteration=1, parent=first)
    asyncio.run(whole_job(trainer(), second))
    assert f"continue {first.train}" in (store / "log").read_text()
    assert figures(second)[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert job_file(spec)["pairs"] == 12 and job_file(spec)["status"] == "succeeded"


def test_a_killed_loop_goes_on_from_its_last_state_with_the_first_reference(store: Path, tmp_path: Path) -> None:
    undisturbed = make_spec(tmp_path / "a", run_id="r")
    asyncio.run(whole_job(trainer(checkpoint_every=2), undisturbed))
    spec = make_spec(tmp_path / "b", run_id="r")
    (store / "die-at-step").write_text("4")
    with pytest.raises(TrainingError, match=r"member 'plain'.*code 9.*resume"):
        asyncio.run(whole_job(trainer(checkpoint_every=2), spec))
    asyncio.run(whole_job(trainer(checkpoint_every=2), spec))
    log = (store / "log").read_text()
    assert log.count("continue tinker://") == 1 and log.count("forward 24") == 2
    assert figures(spec)[-1]["loss"] == pytest.approx(figures(undisturbed)[-1]["loss"], abs=1e-6)


def test_no_key_reaches_the_job_directory(store: Path, tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    asyncio.run(whole_job(trainer(epochs=1), spec))
    key = os.environ[KEY_ENV]
    assert not [path for path in spec.directory.rglob("*") if path.is_file() and key in path.read_text()]


def test_preflight_says_what_is_missing(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "experimental" in asyncio.run(trainer().preflight("m", None, "plain"))[0]
    with pytest.raises(TrainingError, match="cannot continue ft-1"):
        asyncio.run(trainer().preflight("m", TrainedModel("together", "ft-1", "ml_1"), "plain"))
    monkeypatch.delenv(KEY_ENV)
    with pytest.raises(ConfigError, match=f"{KEY_ENV} is not set"):
        asyncio.run(trainer().preflight("m", None, "plain"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"install sparta-api\[tinker\]"):
        asyncio.run(trainer().preflight("m", None, "plain"))
