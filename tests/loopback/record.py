"""What a server saw: figures in memory, and a log that survives the death of its process."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson


class RequestLog:
    """One JSON line per event, handed to the system at once."""

    def __init__(self, path: Path | None) -> None:
        self._fd = None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.on = self._fd is not None

    def write(self, **event: Any) -> None:
        """Appends one event, with the time on the machine's monotonic clock."""
        if self._fd is not None:
            os.write(self._fd, orjson.dumps({**event, "t": time.monotonic(), "pid": os.getpid()}) + b"\n")


@dataclass(slots=True)
class ModelStats:
    """Counts of one model."""

    requests: int = 0
    in_flight: int = 0
    max_in_flight: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)

    def enter(self) -> None:
        self.requests += 1
        self.in_flight += 1
        if self.in_flight > self.max_in_flight:
            self.max_in_flight = self.in_flight

    def leave(self, outcome: str, fault: str | None) -> None:
        self.in_flight -= 1
        self.statuses[outcome] += 1
        if fault is not None:
            self.faults[fault] += 1

    def to_json(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "in_flight": self.in_flight,
            "max_in_flight": self.max_in_flight,
            "statuses": dict(self.statuses),
            "faults": dict(self.faults),
        }


@dataclass(slots=True)
class Stats:
    """Counts of the whole server. `requests` are chat completions."""

    requests: int = 0
    in_flight: int = 0
    max_in_flight: int = 0
    connections: int = 0
    max_connections: int = 0
    all_connections: int = 0
    models: dict[str, ModelStats] = field(default_factory=dict)

    def model(self, name: str) -> ModelStats:
        stats = self.models.get(name)
        if stats is None:
            stats = self.models[name] = ModelStats()
        return stats

    def connected(self) -> None:
        self.connections += 1
        self.all_connections += 1
        self.max_connections = max(self.max_connections, self.connections)

    def reset(self) -> None:
        """Forgets what is over; what is going on stays."""
        self.requests, self.max_in_flight = 0, self.in_flight
        self.max_connections = self.all_connections = self.connections
        for stats in self.models.values():
            stats.requests, stats.max_in_flight = 0, stats.in_flight
            stats.statuses.clear()
            stats.faults.clear()

    def to_json(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "in_flight": self.in_flight,
            "max_in_flight": self.max_in_flight,
            "connections": {"open": self.connections, "peak": self.max_connections, "total": self.all_connections},
            "models": {name: stats.to_json() for name, stats in self.models.items()},
        }
