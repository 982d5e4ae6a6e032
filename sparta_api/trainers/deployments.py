"""What a run has brought up at a provider and pays for: `deployments.json`, written before each change.

An entry is recorded before its deployment is asked for and removed only after it is gone, so that whatever
dies in between, `cleanup` still knows of it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Iterable
from pathlib import Path
from typing import Any

import orjson

from sparta_api.data.journal import write_atomic
from sparta_api.errors import TrainingError
from sparta_api.trainers.ledger import now

DEPLOYMENTS_FILE = "deployments.json"
STARTING, UP, DOWN = "starting", "up", "down"


async def all_of(acts: Iterable[Awaitable[str]]) -> list[str]:
    """What all of them say, side by side; TrainingError with every reason, after all have ended, where some fail."""
    outcomes = await asyncio.gather(*acts, return_exceptions=True)
    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    for error in failed:
        if not isinstance(error, TrainingError):
            raise error
    if failed:
        raise TrainingError("\n".join(dict.fromkeys(str(error) for error in failed)))
    return [outcome for outcome in outcomes if isinstance(outcome, str)]


def short_name(run_id: str, member: str) -> str:
    """A name that a provider takes, the same for the same member of the same run: 27 characters."""
    return "sparta-" + hashlib.sha256(f"{run_id}\0{member}".encode()).hexdigest()[:20]


class DeploymentLedger:
    """The file, as a map from a name to what is known of it (backend, trainer, member, state, and its own keys)."""

    def __init__(self, run_directory: Path) -> None:
        self.path = run_directory / DEPLOYMENTS_FILE

    def read(self) -> dict[str, dict[str, Any]]:
        """Every entry."""
        try:
            entries: dict[str, dict[str, Any]] = orjson.loads(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except orjson.JSONDecodeError as error:
            raise TrainingError(
                f"{self.path}: not JSON ({error}); take down by hand what the provider has, then remove it"
            ) from error
        return entries

    def record(self, name: str, **facts: Any) -> None:
        """Adds to an entry, or makes it; synced before it returns."""
        entries = self.read()
        entries[name] = {**entries.get(name, {}), **facts}
        write_atomic(self.path, orjson.dumps(entries, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))

    def begin(self, name: str, **facts: Any) -> None:
        """Records that something is being brought up, and, the first time, since when it may be billed."""
        before = self.read().get(name, {})
        since = before.get("since") if before.get("state") != DOWN else None
        self.record(name, **facts, state=STARTING, since=since or now())

    def up(self, backend: str, trainer: str) -> dict[str, dict[str, Any]]:
        """The entries of a trainer that are not known to be down."""
        return {
            name: entry
            for name, entry in self.read().items()
            if entry.get("backend") == backend and entry.get("trainer") == trainer and entry.get("state") != DOWN
        }
