"""One tribe.yaml trained here, at Together and by OpenAI's protocol in turn: `--trainer` is the whole change."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.emulators.process import EmulatorProcess
from tests.forked import forked
from tests.front_door import results, rows, tribe
from tests.loopback import start_loopback
from tests.tiny_model import make_tiny_model
from tests.training_jobs import KEY_ENV

pytestmark = [
    pytest.mark.trl,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs the local extra"),
]
MEMBERS: list[dict[str, Any]] = [
    {"name": "learner", "model": "model-0", "system_prompt": "You are quick."},
    {"name": "fixed", "model": "model-1", "trainer": "none"},
    {"name": "judge", "model": "model-2", "roles": ["judge"]},
]
KINDS = {"local": "adapter", "together": "together", "openai": "openai"}


def test_only_the_trainers_name_changes(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "tiny")
    served: dict[str, Any] = {"models": {str(member["model"]): {} for member in MEMBERS}}
    with (
        start_loopback(served, tmp_path) as members,
        EmulatorProcess("together") as together,
        EmulatorProcess("openai_tuning") as openai,
    ):
        together.change(job_statuses=["running", "completed"])
        openai.change(job_statuses=["running", "succeeded"])
        remote = {"base_model": "org/base", "api_key_env": KEY_ENV}
        local = {"base_model": "tiny", "learning_rate": 1e-3, "max_length": 256, "lora": {"r": 4, "alpha": 8}}
        path = tribe(
            tmp_path,
            members.base_url,
            members=MEMBERS,
            instructions=6,
            iterations=2,
            trainers={
                "local": {"backend": "trl", **local},
                "together": {"backend": "together", "base_url": together.base_url, **remote},
                "openai": {"backend": "openai", "base_url": openai.base_url, "minimum_pairs": 1, **remote},
            },
            training={"trainer": "local"},
        )
        for trainer in KINDS:
            run = tmp_path / trainer
            told = ("--tribe", path, "--trainer", trainer, "--run-dir", run, "--yes")
            ended = forked("run", *told, env={"SPARTA_TRAINING_PACE": "0.002"})
            assert ended.code == 0, ended.err
        assert (len(together.look()["jobs"]), len(openai.look()["jobs"])) == (2, 2)
    firsts = []
    for trainer, kind in KINDS.items():
        models = json.loads((tmp_path / trainer / "models.json").read_text())["members"]
        assert {name: [step["kind"] for step in model["history"]] for name, model in models.items()} == {
            "learner": [kind, kind],
            "fixed": [],
            "judge": [],
        }
        answers = rows(tmp_path / trainer / "iteration_001" / "responses.jsonl")
        names = {(row["fighter"], row["model"]) for row in answers}
        assert names == {("learner", models["learner"]["history"][0]["model"]), ("fixed", "model-1")}
        found = results(tmp_path / trainer)
        firsts.append({name: data for name, data in found.items() if name.startswith("iteration_000")})
    assert firsts[0] == firsts[1] == firsts[2]
