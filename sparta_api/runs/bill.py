"""What training and deployments cost, and what of it is still up or under way: read from a run's own ledgers.

Costs are those that the jobs were created at: the services' prices or the file's, with the deployments' hours as
the file expects them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from sparta_api.config.tribe import TribeConfig
from sparta_api.data.rundir import RunDirectory
from sparta_api.errors import ConfigError
from sparta_api.trainers.deployments import DOWN, DeploymentLedger
from sparta_api.trainers.protocol import JobState

ENDED = tuple(state.value for state in JobState if state.ended)
REMOTE = ("together", "openai", "tinker", "command")
"""Back ends whose jobs go on when the run stops."""


@dataclass(frozen=True, slots=True)
class Costs:
    """USD of some training jobs: `training` for the jobs, `deployments` for serving what they made.

    `partial` says that more was not known when they were started.
    """

    training: float = 0.0
    deployments: float = 0.0
    partial: bool = False

    @property
    def total(self) -> float:
        """Both together: the least that they cost."""
        return self.training + self.deployments

    def __add__(self, other: Costs) -> Costs:
        return Costs(
            math.fsum((self.training, other.training)),
            math.fsum((self.deployments, other.deployments)),
            self.partial or other.partial,
        )

    def to_json(self) -> dict[str, Any]:
        """A plain mapping with stable keys."""
        return {"training_usd": self.training, "deployments_usd": self.deployments, "partial": self.partial}


@dataclass(frozen=True, slots=True)
class Bill:
    """What a run's ledgers say about money, per member, and what has not ended."""

    costs: Mapping[str, Costs] = field(default_factory=dict)
    up: tuple[dict[str, Any], ...] = ()
    """Entries of deployments.json that are not known to be down."""
    going_on: tuple[str, ...] = ()
    """Jobs that were started elsewhere and whose end is not recorded, one clause each."""

    @property
    def total(self) -> Costs:
        """The sum over all members."""
        return sum(self.costs.values(), Costs())

    def of(self, member: str) -> Costs:
        """One member's part."""
        return self.costs.get(member, Costs())

    def sentences(self, directory: Path, finished: bool = False) -> list[str]:
        """What goes on, and may be billed, while no process works in the run directory."""
        found = []
        if self.up:
            names = ", ".join(str(entry.get("model") or entry["name"]) for entry in self.up)
            resume = "" if finished else f"`sparta-api resume {directory}` goes on with it, "
            found.append(
                f"still up, and billed where the provider bills for it: {names}; {resume}"
                f"`sparta-api cleanup {directory}` takes it down"
            )
        if self.going_on:
            found.append(f"training goes on without the run: {'; '.join(self.going_on)}; resuming finds it again")
        return found


def read_job(path: Path) -> dict[str, Any]:
    """job.json, or an empty mapping where there is none yet. ConfigError when it is damaged."""
    try:
        record: dict[str, Any] = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path}: not JSON ({error}); remove the directory to train this member again") from error
    return record


def job_costs(record: Mapping[str, Any]) -> Costs:
    """What a job.json stands for: its job, where it was created, and those that failed before it."""
    own = [record] if record.get("job") else []
    return sum((_costs(entry) for entry in [*own, *record.get("previous", [])]), Costs())


def _costs(entry: Mapping[str, Any]) -> Costs:
    serving = float(entry.get("deployment_usd") or 0.0)
    whole = float(entry.get("cost_usd") or 0.0)
    return Costs(max(0.0, whole - serving), serving, bool(entry.get("cost_partial")))


def read_bill(run: RunDirectory, config: TribeConfig) -> Bill:
    """The bill as it stands."""
    costs = {member.name: Costs() for member in config.members}
    going_on = []
    for name, record in _jobs(run, config):
        costs[name] += job_costs(record)
        if under_way(record) and record.get("backend") in REMOTE:
            place = record.get("url") or record.get("endpoint")
            going_on.append(f"member '{name}': job {record.get('job', 'not yet known')} ({place})")
    entries = DeploymentLedger(run.root).read().items()
    up = tuple({"name": name, **entry} for name, entry in entries if entry.get("state") != DOWN)
    return Bill(costs, up, tuple(going_on))


def under_way(record: Mapping[str, Any]) -> bool:
    """Whether a job was created, or may have been, whose end is not recorded."""
    created = record.get("job") or record.get("intent")
    return bool(created) and record.get("status") not in (*ENDED, "skipped")


def _jobs(run: RunDirectory, config: TribeConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    for number in range(run.newest_iteration() + 1):
        for member in config.members:
            record = read_job(run.iteration(number).job(member.name))
            if record:
                yield member.name, record
