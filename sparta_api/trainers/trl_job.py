"""What passes between the local trainer and its worker: one directory with a job, its figures and its result."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from sparta_api.config.tribe import TrlTrainer
from sparta_api.data.journal import disk_error, read_lines, write_atomic, write_lines
from sparta_api.trainers.adapters_check import CONFIG_FILE, WEIGHTS_FILE

COMPLETE = "complete"
"""Marks a checkpoint whose files were all written."""

LAUNCH: dict[str, Any] = {
    "parent_pid": True,
    "resume_from": True,
    "preferences": True,
    "config": {"env", "gpus", "checkpoint_s", "serve"},
}
"""What may differ between two attempts of one training (the key stands for the content of the preferences)."""


@dataclass(frozen=True)
class JobFiles:
    """The names inside a job's directory."""

    directory: Path

    @property
    def job(self) -> Path:
        """What is to be trained; written before the worker starts."""
        return self.directory / "spec.json"

    @property
    def result(self) -> Path:
        """How it ended; the last file that is written."""
        return self.directory / "result.json"

    @property
    def metrics(self) -> Path:
        """One line of figures a step."""
        return self.directory / "metrics.jsonl"

    @property
    def log(self) -> Path:
        """What the worker and its libraries print."""
        return self.directory / "worker.log"

    @property
    def adapter(self) -> Path:
        """The trained adapter; it appears as a whole."""
        return self.directory / "adapter"

    @property
    def checkpoints(self) -> Path:
        """What an interrupted training continues from; removed at its end."""
        return self.directory / "checkpoints"

    @property
    def lock(self) -> Path:
        """Held by the live worker."""
        return self.directory / "worker.lock"

    def last_checkpoint(self) -> Path | None:
        """The newest checkpoint that was written to its end."""
        found = [mark.parent for mark in self.checkpoints.glob(f"checkpoint-*/{COMPLETE}")]
        return max(found, key=checkpoint_step, default=None)

    def rewind(self, step: int) -> None:
        """Takes back everything after that step: all of it for 0, else the figures of later steps."""
        self.result.unlink(missing_ok=True)
        shutil.rmtree(self.adapter, ignore_errors=True)
        if step == 0:
            shutil.rmtree(self.checkpoints, ignore_errors=True)
        write_lines(self.metrics, [row for row, _, _ in read_lines(self.metrics) if row["step"] <= step])


def checkpoint_step(checkpoint: Path) -> int:
    """The number of optimizer steps in a checkpoint's name."""
    return int(checkpoint.name.rpartition("-")[2])


class Job(BaseModel):
    """One training as the worker gets it. `resume_from` is a checkpoint of the very same job."""

    model_config = ConfigDict(frozen=True)

    key: str
    member: str
    place: str
    preferences: Path
    system_prompt: str | None
    fold_system: bool
    base_model: str
    """A directory or a hub id to load; `served_base` is what the adapter names as its base."""
    served_base: str
    parent: str | None
    seed: int
    config: TrlTrainer
    parent_pid: int
    resume_from: Path | None = None

    def same_training(self, other: Job) -> bool:
        """Whether a checkpoint of the other job can be continued by this one."""
        return self.model_dump(exclude=LAUNCH) == other.model_dump(exclude=LAUNCH)


class Result(BaseModel):
    """How a training ended. `error` is a sentence for the user; figures are those of the last steps."""

    key: str
    state: Literal["succeeded", "failed"]
    error: str = ""
    sha256: str = ""
    pairs: int = 0
    dropped: dict[str, int] = {}
    steps: int = 0
    seconds: float = 0.0
    loss: float | None = None
    margin: float | None = None
    accuracy: float | None = None
    memory_gib: float = 0.0
    warnings: list[str] = []
    versions: dict[str, str] = {}

    def write(self, path: Path) -> None:
        """Replaces the result file atomically."""
        write_atomic(path, self.model_dump_json(indent=1).encode() + b"\n")


def begin(job: Job, files: JobFiles) -> None:
    """Makes the directory ready for a worker: clean, or rewound to the last checkpoint of the same training.

    The job file is written last. Raises DiskError.
    """
    previous = read_job(files)
    checkpoint = files.last_checkpoint() if previous and previous.same_training(job) else None
    try:
        files.directory.mkdir(parents=True, exist_ok=True)
        files.rewind(checkpoint_step(checkpoint) if checkpoint else 0)
        files.log.unlink(missing_ok=True)
    except OSError as error:
        raise disk_error(files.directory, error) from error
    job = job.model_copy(update={"resume_from": checkpoint.absolute() if checkpoint else None})
    write_atomic(files.job, job.model_dump_json(indent=1).encode() + b"\n")


def read_job(files: JobFiles) -> Job | None:
    """The job that was last started in the directory, if its file is whole."""
    try:
        return Job.model_validate_json(files.job.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def read_result(files: JobFiles, key: str) -> Result | None:
    """The result for that key; one without the adapter that it promises does not count."""
    try:
        result = Result.model_validate_json(files.result.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
    if result.key != key:
        return None
    if result.state == "succeeded":
        weights = files.adapter / WEIGHTS_FILE
        if not weights.exists() or not (files.adapter / CONFIG_FILE).exists() or digest(weights) != result.sha256:
            return None
    return result


def digest(file: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
