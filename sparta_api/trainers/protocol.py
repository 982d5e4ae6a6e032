"""What every training back end offers: find, submit, poll, result, cancel.

A job is identified by a deterministic key, so that whoever restarts can find what was already started.
The handle to train on and the handle to serve are two things: a remote service continues from a job id
but serves a model object; the local back end uses the adapter's directory for both.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol


class JobState(StrEnum):
    """Where a training job stands; unknown provider states count as running."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether no further change can come."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


@dataclass(frozen=True)
class TrainedModel:
    """What a job leaves behind.

    `train` is what the next iteration continues from, `serve` what an endpoint is asked to serve; `kind`
    says what the two strings mean ("adapter": a PEFT directory; remote back ends have kinds of their own).
    """

    kind: str
    train: str
    serve: str


@dataclass(frozen=True)
class TrainingSpec:
    """One member's training in one iteration.

    `preferences` is the iteration's preferences.jsonl (TRL's conversational form, prompts without a system
    message); the back end puts `system_prompt` in front of every prompt. `parent` is the model to continue
    and the DPO reference; None means the base model. `directory` belongs to this job alone.
    """

    run_id: str
    iteration: int
    member: str
    preferences: Path
    pairs: int
    system_prompt: str | None
    fold_system: bool
    base_model: str
    parent: TrainedModel | None
    directory: Path
    seed: int

    @property
    def key(self) -> str:
        """32 characters that name this job for ever: run, iteration, member and content of the pairs."""
        digest = hashlib.sha256()
        for part in (self.run_id, str(self.iteration), self.member):
            digest.update(part.encode() + b"\0")
        digest.update(hashlib.sha256(self.preferences.read_bytes()).digest())
        return f"sparta-{digest.hexdigest()[:25]}"


@dataclass(frozen=True)
class JobStatus:
    """A job at one moment. `progress` is 0..1 or None; `metrics` are the back end's latest figures
    (loss, rewards/margins, rewards/accuracies, ...); `message` is the provider's own sentence."""

    state: JobState
    raw: str = ""
    message: str = ""
    progress: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class Trainer(Protocol):
    """A training back end. Methods raise `TrainingError` for expected faults and retry nothing twice
    that could be paid twice; every method may be called again after a restart."""

    name: str
    """The key under `trainers`."""

    slots: int
    """How many jobs may run side by side (1 for a CPU, one per GPU, many for a remote service)."""

    async def preflight(self, spec_base: str, parent: TrainedModel | None, member: str) -> list[str]:
        """Checks that the back end could train the member on that base model; returns warnings."""

    async def find(self, spec: TrainingSpec) -> str | None:
        """The id of a job that was already submitted for `spec.key`, else None."""

    async def submit(self, spec: TrainingSpec) -> str:
        """Starts the job and returns its id. Call `find` first."""

    async def poll(self, job: str) -> JobStatus:
        """Where the job stands."""

    async def result(self, job: str) -> TrainedModel:
        """The model of a succeeded job."""

    async def cancel(self, job: str) -> None:
        """Stops the job; ended jobs are left alone."""

    def describe(self, job: str) -> dict[str, Any]:
        """What job.json should record beside id and status (paths, urls, counts of dropped pairs)."""
