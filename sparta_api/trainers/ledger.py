"""The memory of a training job: `job.json` in the job's own directory, replaced atomically and synced."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from sparta_api.data.journal import write_atomic
from sparta_api.errors import TrainingError

JOB_FILE = "job.json"
OVER = ("failed", "cancelled")
COSTS = ("cost_usd", "deployment_usd", "cost_partial")


def now() -> str:
    """The time, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class Ledger:
    """What is known of one job.

    Keys: backend, trainer, endpoint, key, status, job, base, parent, url, result; `cost_usd`, `deployment_usd` and
    `cost_partial` (see `Estimate.facts`); `intent` while a create may be on its way; `file` and `file_sha256` of the
    upload, `pairs` in it and those `dropped`, by reason; `creates`, `duplicates` and `previous` (ended jobs that a
    later try replaced).
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / JOB_FILE
        self.data: dict[str, Any] = {}
        if self.path.exists():
            try:
                self.data = orjson.loads(self.path.read_bytes())
            except orjson.JSONDecodeError as error:
                raise TrainingError(
                    f"{self.path}: not JSON ({error}); restore it, or remove it once no job of it is running"
                ) from error

    def update(self, **changes: Any) -> None:
        """Changes keys and writes the file; None removes a key. Does nothing when nothing changes."""
        data = {key: value for key, value in {**self.data, **changes}.items() if value is not None}
        if data != self.data:
            self.data = data
            write_atomic(self.path, orjson.dumps(data, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))

    @property
    def job(self) -> str | None:
        """The id of the job, once it is known to exist."""
        job: str | None = self.data.get("job")
        return job

    @property
    def status(self) -> str:
        """The last recorded state, "" before the first."""
        return str(self.data.get("status", ""))

    def claim(self, backend: str, trainer: str, endpoint: str, **facts: Any) -> None:
        """Makes the ledger this trainer's; refuses one whose job belongs to another trainer or place.

        Raises TrainingError: a job that was started elsewhere must end, or be cancelled, there.
        """
        open_elsewhere = self.job or self.data.get("intent")
        before = (self.data.get("backend"), self.data.get("endpoint"))
        if open_elsewhere and self.status not in OVER and before != (backend, endpoint):
            raise TrainingError(
                f"{self.path}: trainer '{self.data.get('trainer')}' ({before[0]}) already started "
                f"{self.job or 'a job'} at {before[1]}; resume with that trainer"
            )
        self.update(backend=backend, trainer=trainer, endpoint=endpoint, **facts)

    def set_aside(self) -> None:
        """Moves a failed or cancelled job to `previous`, so that another may be started."""
        kept = ("job", "status", "raw", "message", "backend", "endpoint", *COSTS)
        entry = {key: self.data[key] for key in kept if key in self.data}
        gone = ("job", "status", "raw", "message", "intent", "creates", "url", "result", "checkpoints", *COSTS)
        cleared = dict.fromkeys(gone)
        self.update(previous=[*self.data.get("previous", []), entry], **cleared)

    @property
    def abandoned(self) -> set[str]:
        """Ids that must never be taken for the job: replaced ones and duplicates."""
        return {entry["job"] for entry in self.data.get("previous", [])} | set(self.data.get("duplicates", {}))
