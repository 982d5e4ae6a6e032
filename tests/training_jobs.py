"""Training jobs for tests: preferences on disk, specs, a whole job in one call, and one that is killed on its way."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from sparta_api.trainers.faults import Pace
from sparta_api.trainers.protocol import TrainedModel, Trainer, TrainingSpec
from tests.emulators.process import EmulatorProcess

FAST = Pace(
    poll=(0.005, 0.01), file_poll=0.005, retry=0.005, look=0.01, looks=3, max_wait=2, unreachable=0.3, missing=0.3
)
KEY_ENV = "SPARTA_TEST_KEY"
KEY = "test-key-4711-not-a-secret"
os.environ[KEY_ENV] = KEY


def pair(number: int, chosen: str = "", rejected: str = "worse") -> dict[str, Any]:
    """A row of preferences.jsonl."""
    return {
        "prompt": [{"role": "user", "content": f"Question {number}?"}],
        "chosen": [{"role": "assistant", "content": chosen or f"better {number}"}],
        "rejected": [{"role": "assistant", "content": rejected}],
        "duel": number,
        "chosen_member": "a",
        "rejected_member": "b",
        "margin": 2.0,
    }


def make_spec(root: Path, rows: list[dict[str, Any]] | None = None, **changes: Any) -> TrainingSpec:
    """A job of member "plain" in iteration 0 on twelve pairs."""
    rows = [pair(number) for number in range(12)] if rows is None else rows
    iteration = changes.get("iteration", 0)
    directory = root / f"iteration_{iteration:03d}"
    directory.mkdir(parents=True, exist_ok=True)
    preferences = directory / "preferences.jsonl"
    preferences.write_text("".join(json.dumps(row) + "\n" for row in rows))
    known: dict[str, Any] = {
        "run_id": "run-1",
        "iteration": iteration,
        "member": "plain",
        "preferences": preferences,
        "pairs": len(rows),
        "system_prompt": "Be brief.",
        "fold_system": False,
        "base_model": "org/base-model",
        "parent": None,
        "directory": directory / "training" / changes.get("member", "plain"),
        "seed": 7,
    }
    return TrainingSpec(**(known | changes))


async def whole_job(trainer: Trainer, spec: TrainingSpec) -> TrainedModel:
    """Find, submit, wait, result: what a run does with a job."""
    try:
        job = await trainer.find(spec)
        if job is None:
            job = await trainer.submit(spec)
        status = await trainer.poll(job)
        while not status.state.ended:
            await asyncio.sleep(0.003)
            status = await trainer.poll(job)
        return await trainer.result(job)
    finally:
        await trainer.close()


def job_file(spec: TrainingSpec) -> dict[str, Any]:
    """The job's job.json."""
    data: dict[str, Any] = json.loads((spec.directory / "job.json").read_text())
    return data


def killed_at(
    service: EmulatorProcess, operation: str, fault: str, work: Callable[[], Coroutine[Any, Any, object]], skip: int = 0
) -> bool:
    """Does the work in a process that is killed where the service holds the operation; False if it ends before."""
    service.change(faults={operation: ["ok"] * skip + [fault]})
    process = multiprocessing.get_context("fork").Process(target=lambda: asyncio.run(work()))
    process.start()
    snapshot = service.wait(lambda seen: seen["hanging"] == operation or not process.is_alive())
    process.kill()
    process.join()
    service.change(faults={})
    return bool(snapshot["hanging"] == operation)
