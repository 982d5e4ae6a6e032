"""One tribe.yaml trained here, at Together and by OpenAI's protocol in turn: `--trainer` is the whole change."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.emulators.process import EmulatorProcess
from tests.front_door import results, rows, sparta, tribe
from tests.loopback import start_loopback
from tests.tiny_model import make_tiny_model
from tests.training_jobs import KEY_ENV

pytestmark = [
    pytest.mark.trl,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs the local extra"),
]
MEMBERS = 3
KINDS = {"local": "adapter", "together": "together", "openai": "openai"}


def tell_apart(path: Path) -> None:
    """Gives every member a system prompt of its own, so that no two learn the same."""
    config = yaml.safe_load(path.read_text())
    for member in config["members"]:
        member["system_prompt"] = f"You are {member['name']}."
    path.write_text(yaml.safe_dump(config, sort_keys=False))


def test_only_the_trainers_name_changes(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "tiny")
    served: dict[str, Any] = {"models": {f"model-{number}": {} for number in range(MEMBERS)}}
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
        tell_apart(path)
        env = {"SPARTA_TRAINING_PACE": "0.01"}
        for trainer in KINDS:
            run = tmp_path / trainer
            ended = sparta("run", "--tribe", path, "--trainer", trainer, "--run-dir", run, "--yes", env=env)
            assert ended.code == 0, ended.err
        assert (len(together.look()["jobs"]), len(openai.look()["jobs"])) == (MEMBERS * 2, MEMBERS * 2)
    firsts = []
    for trainer, kind in KINDS.items():
        models = json.loads((tmp_path / trainer / "models.json").read_text())["members"]
        assert {step["kind"] for member in models.values() for step in member["history"]} == {kind}
        assert [len(member["history"]) for member in models.values()] == [2] * MEMBERS
        names = {row["model"] for row in rows(tmp_path / trainer / "iteration_001" / "responses.jsonl")}
        assert names == {member["history"][0]["model"] for member in models.values()}
        found = results(tmp_path / trainer)
        firsts.append({name: data for name, data in found.items() if name.startswith("iteration_000")})
    assert firsts[0] == firsts[1] == firsts[2]
