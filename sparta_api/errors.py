"""The error vocabulary: every expected fault is one of these, and each knows its exit code.

    SpartaError
    ├── ConfigError        2   tribe.yaml, the command line or a data file is wrong; nothing was sent
    ├── DirectoryBusy      2   another live process owns the run directory
    ├── EndpointError      3   an endpoint fails, refuses or lacks what the run needs; resumable
    ├── TrainingError      3   a training job cannot start, failed or produced an unusable model; resumable
    ├── DiskError          3   the run directory cannot be written; resumable
    ├── LimitReached       4   a limit that the user set; resumable
    └── Interrupted  130/143   SIGINT or SIGTERM; resumable

The command line prints the message of a `SpartaError` as one sentence and ends with `exit_code`.
Anything else is a bug and keeps its traceback (exit code 1).
"""

from __future__ import annotations

import signal


class SpartaError(Exception):
    """An expected fault. The message is one sentence: the place, what is wrong, the next step."""

    exit_code = 1


class ConfigError(SpartaError):
    """The configuration, the command line or an input file is wrong. Nothing was sent."""

    exit_code = 2


class DirectoryBusy(SpartaError):
    """Another live process works in the run directory."""

    exit_code = 2


class EndpointError(SpartaError):
    """An endpoint or a server fails, refuses, or lacks what the run needs."""

    exit_code = 3


class TrainingError(SpartaError):
    """A training job could not start, failed, or left a model that cannot be used."""

    exit_code = 3


class DiskError(SpartaError):
    """The run directory cannot be written (full disk, read-only, permissions)."""

    exit_code = 3


class LimitReached(SpartaError):
    """The next request would pass a limit that the user set under `limits`."""

    exit_code = 4


class Interrupted(SpartaError):
    """The run was told to stop by a signal; the exit code is 128 plus its number."""

    def __init__(self, message: str, signum: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum
