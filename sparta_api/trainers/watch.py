"""One job under observation: when to look again, and how long a silence is bearable."""

from __future__ import annotations

import random
import time

from sparta_api.errors import TrainingError
from sparta_api.trainers.faults import Pace, ProviderFault
from sparta_api.trainers.ledger import Ledger
from sparta_api.trainers.protocol import JobState, JobStatus, TrainingSpec

NOT_FOUND = 404


class Watch:
    """Times are monotonic seconds of this process: a clock that jumps changes nothing."""

    def __init__(self, pace: Pace) -> None:
        self.spec: TrainingSpec | None = None
        self.ledger: Ledger | None = None
        self.status = JobStatus(JobState.QUEUED)
        self._pace = pace
        self._pause = pace.poll[0]
        self._started = time.monotonic()
        self._next = self._started
        self._answered = self._started

    @property
    def member(self) -> str:
        """Whose job it is."""
        return self.spec.member if self.spec else "?"

    @property
    def hours(self) -> float:
        """Since this process began to watch."""
        return (time.monotonic() - self._started) / 3600

    @property
    def due(self) -> bool:
        """Whether the provider should be asked again."""
        return not self.status.state.ended and time.monotonic() >= self._next

    def seen(self, status: JobStatus) -> None:
        """Notes an answer and plans the next look."""
        self.status = status
        self._answered = time.monotonic()
        self._later(0)

    def fault(self, fault: ProviderFault, job: str) -> JobStatus:
        """A look that failed never changes the job's state; TrainingError once it cannot be hoped for any more."""
        silence = time.monotonic() - self._answered
        new = fault.status == NOT_FOUND and silence < self._pace.missing
        if not (fault.transient or new) or silence > self._pace.unreachable:
            raise TrainingError(
                f"{job} cannot be watched ({fault}); it may go on there: resume the run to watch it again"
            )
        self._later(fault.wait or 0)
        return JobStatus(
            self.status.state, self.status.raw, f"no news ({fault})", self.status.progress, self.status.metrics
        )

    def _later(self, at_least: float) -> None:
        self._next = time.monotonic() + max(at_least, self._pause * random.uniform(0.8, 1.2))
        self._pause = min(self._pause * 1.5, self._pace.poll[1])
