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
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable


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


@dataclass(frozen=True)
class Capabilities:
    """What a back end can do; what it cannot express is refused when the configuration is read."""

    parents: frozenset[str]
    """Kinds of `TrainedModel` that it can continue."""
    serves: Literal["adapter", "at once", "deployment", "command"]
    """How its models come to answer: loaded into a server, by their id, by a deployment, by the user's command."""
    learning_rate: Literal["absolute", "multiplier", "own"] = "absolute"
    """own: written into the user's own command."""
    lora_shape: Literal["full", "rank", "none"] = "full"
    loss_extras: tuple[str, ...] = ()
    minimum_pairs: int = 1
    estimates: bool = False
    """Whether the service itself tells what a job will cost."""
    found_by: Literal["directory", "suffix", "metadata"] = "directory"
    """What a job that was already started is recognised by."""


@dataclass(frozen=True)
class Estimate:
    """What a job will cost. None means unknown, never free."""

    usd: float | None
    tokens: int | None = None
    deployment_usd: float | None = 0.0
    """USD for serving its model for one iteration."""
    detail: str = ""
    deployment: str = ""
    """How `deployment_usd` comes about; "" where nothing has to be deployed."""

    @property
    def total_usd(self) -> float | None:
        """Job and deployment together; None where either is unknown."""
        return None if self.usd is None or self.deployment_usd is None else self.usd + self.deployment_usd

    @property
    def known_usd(self) -> float:
        """What is known of both: the least that it will cost."""
        return (self.usd or 0.0) + (self.deployment_usd or 0.0)

    @property
    def facts(self) -> dict[str, Any]:
        """What job.json records: `cost_usd` is all that is known, `deployment_usd` the part of it for serving, and
        `cost_partial` says that more is not known."""
        partial = True if self.total_usd is None else None
        return {"cost_usd": self.known_usd, "deployment_usd": self.deployment_usd or None, "cost_partial": partial}


@dataclass(frozen=True)
class ServedModel:
    """Where a trained model answers. None for `base_url` or `api_key_env` means: as the member has it."""

    model: str
    base_url: str | None = None
    api_key_env: str | None = None


class Trainer(Protocol):
    """A training back end. Methods raise `TrainingError` for expected faults and retry nothing twice
    that could be paid twice; every method may be called again after a restart."""

    name: str
    """The key under `trainers`."""

    capabilities: ClassVar[Capabilities]

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

    async def close(self) -> None:
        """Lets go of connections and of processes that end with the run. Remote jobs go on."""


@runtime_checkable
class Priced(Protocol):
    """A trainer whose jobs cost money. `forecast` asks nobody to train; `estimate` may upload the file."""

    async def forecast(self, base_model: str, pairs: int, tokens: int) -> Estimate:
        """Before there are pairs: the cost of a job with that many pairs and trained tokens (one epoch)."""

    async def estimate(self, spec: TrainingSpec) -> Estimate:
        """The cost of this very job. Raises `TrainingError` when the service would not allow it."""


@runtime_checkable
class Deployer(Protocol):
    """Makes trained models answer, and takes them down. Every method may be repeated after a restart."""

    keep: bool
    """Whether what is up stays up when the run ends; else the run calls `cleanup` then, and after a failure."""

    def up(self) -> list[str]:
        """What the run's ledger says is up and has to be taken down some day; one name for each."""

    async def deploy(self, model: TrainedModel, base_model: str, member: str, iteration: int) -> ServedModel:
        """Waits until the member's model answers; what is already up is only checked."""

    async def cleanup(self) -> list[str]:
        """Takes down everything that the run's ledger says is up; one sentence for each."""

    async def close(self) -> None:
        """Lets go of connections; what is up stays up."""
