"""The run directory. This is the only module that knows file names; docs/run-directory.md explains them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from sparta_api.data.journal import disk_error, write_atomic
from sparta_api.errors import ConfigError, DirectoryBusy

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def file_name(name: str) -> str:
    """A file name for a member or server name: unsafe characters replaced and, then, a short hash appended."""
    safe = _UNSAFE.sub("-", name).strip(".-")[:60]
    if safe == name:
        return name
    return f"{safe or 'x'}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def new_run_directory(parent: Path, name: str, now: datetime | None = None) -> Path:
    """runs/<name>-<time stamp>; a counter is added where that already exists."""
    stamp = (now or datetime.now(UTC)).strftime("%Y%m%d-%H%M%S")
    base = parent / f"{file_name(name)}-{stamp}"
    path, count = base, 2
    while path.exists():
        path, count = base.with_name(f"{base.name}-{count}"), count + 1
    return path


class IterationFiles:
    """The files of one iteration."""

    def __init__(self, root: Path, number: int) -> None:
        self.number = number
        self.root = root / f"iteration_{number:03d}"
        self.matchups = self.root / "matchups.jsonl"
        self.responses = self.root / "responses.jsonl"
        self.judgments = self.root / "judgments.jsonl"
        self.duels = self.root / "duels.jsonl"
        self.benched = self.root / "benched.jsonl"
        self.preferences = self.root / "preferences.jsonl"
        self.index = self.root / "index.json"
        """Where the open work begins in the journals, and the figures up to there; can be rebuilt."""

    def training(self, member: str) -> Path:
        """The directory of a member's training job."""
        return self.root / "training" / file_name(member)

    def job(self, member: str) -> Path:
        """job.json of a member's training."""
        return self.training(member) / "job.json"


class RunDirectory:
    """One run's directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tribe = root / "tribe.yaml"
        self.state = root / "run.json"
        self.ratings = root / "ratings.json"
        self.models = root / "models.json"
        self.instructions = root / "instructions.jsonl"
        self.heldout = root / "heldout.jsonl"
        self.heldout_scores = root / "heldout_scores.jsonl"
        self.logs = root / "logs"

    def iteration(self, number: int) -> IterationFiles:
        """The files of iteration `number`, counted from 0."""
        return IterationFiles(self.root, number)

    def newest_iteration(self) -> int:
        """The number of the last iteration that was begun; 0 before the first."""
        numbers = [int(path.name.removeprefix("iteration_")) for path in self.root.glob("iteration_[0-9]*")]
        return max(numbers, default=0)

    @property
    def exists(self) -> bool:
        """Whether a run was started here."""
        return self.state.exists()

    @cached_property
    def _lock_path(self) -> Path:
        return self.root / ".lock"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the directory for this process; DirectoryBusy when another live one has it.

        The lock is the kernel's, so it ends with the process that holds it, however that dies.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise disk_error(self.root, error) from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                owner = os.read(descriptor, 32).decode("ascii", "replace").strip() or "unknown"
                raise DirectoryBusy(
                    f"{self.root}: process {owner} is working in this run directory; wait for it or stop it first"
                ) from error
            self._sweep()
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
            try:
                yield
            finally:
                os.ftruncate(descriptor, 0)
        finally:
            os.close(descriptor)

    def _sweep(self) -> None:
        """Removes what a process left that was killed while it replaced a file."""
        for pattern in (".*.tmp", "iteration_*/.*.tmp"):
            for leftover in self.root.glob(pattern):
                leftover.unlink()

    def read_json(self, path: Path) -> dict[str, Any]:
        """A whole JSON file; ConfigError when it is missing or damaged."""
        try:
            data: dict[str, Any] = orjson.loads(path.read_bytes())
        except FileNotFoundError:
            raise ConfigError(f"{path}: missing; {self.root} is not a run directory, or is damaged") from None
        except orjson.JSONDecodeError as error:
            raise ConfigError(f"{path}: not JSON ({error}); restore it from a copy of the run directory") from error
        return data

    def write_json(self, path: Path, data: Any) -> None:
        """Replaces a whole JSON file atomically."""
        write_atomic(path, orjson.dumps(data, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
