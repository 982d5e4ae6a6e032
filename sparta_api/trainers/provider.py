"""What a hosted back end has to say about its provider; `remote` does the rest."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

from sparta_api.trainers.protocol import Capabilities, Estimate, JobState, TrainedModel, TrainingSpec
from sparta_api.trainers.upload import Upload


class Provider(abc.ABC):
    """One provider's protocol. Every request raises `ProviderFault` when it is not fulfilled."""

    backend: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    states: ClassVar[dict[str, JobState]]
    """The provider's statuses; any other counts as running."""

    @abc.abstractmethod
    async def _jobs(self, spec: TrainingSpec) -> list[dict[str, Any]]:
        """The provider's jobs that carry the spec's key."""

    @abc.abstractmethod
    async def _create(self, spec: TrainingSpec, file: str) -> dict[str, Any]:
        """Creates the job, sending one request that creates."""

    @abc.abstractmethod
    async def _retrieve(self, job: str) -> dict[str, Any]:
        """The job as the provider has it."""

    @abc.abstractmethod
    async def _cancel(self, job: str) -> None:
        """Asks the provider to stop the job."""

    @abc.abstractmethod
    async def _find_file(self, upload: Upload) -> str | None:
        """The id of the same file, where it was already uploaded and the provider cannot tell by itself."""

    @abc.abstractmethod
    async def _send_file(self, upload: Upload) -> str:
        """Uploads the file; returns its id."""

    @abc.abstractmethod
    async def _file_ready(self, file: str, upload: Upload) -> bool:
        """Whether the provider has checked the file and found it sound; TrainingError when it is not."""

    @abc.abstractmethod
    async def _priced(self, spec: TrainingSpec, upload: Upload, file: str) -> Estimate:
        """The job's cost; TrainingError when the provider does not allow it."""

    @abc.abstractmethod
    def _trained(self, job: dict[str, Any]) -> TrainedModel | None:
        """The model of a succeeded job, None when the provider names none."""

    @abc.abstractmethod
    def _explain(self, job: dict[str, Any]) -> str:
        """The provider's own words about how the job stands or ended."""

    @abc.abstractmethod
    def url(self, job: str) -> str:
        """The job's address."""

    def _figures(self, job: dict[str, Any]) -> tuple[float | None, dict[str, float]]:
        """Progress (0..1) and metrics that the job itself carries."""
        return None, {}

    async def _metrics(self, job: str) -> dict[str, float]:
        """The latest figures of a running or finished job, where the provider has them elsewhere than in the job."""
        return {}

    async def _kept(self, job: str) -> dict[str, Any]:
        """What else the provider has kept of a succeeded job, for job.json."""
        return {}

    def _state(self, job: dict[str, Any]) -> JobState:
        return self.states.get(str(job.get("status")), JobState.RUNNING)
