"""What a continued run may change in its configuration, and what it may not."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sparta_api.config.file import dump_tribe
from sparta_api.config.tribe import TribeConfig

_ALLOWED_OF_MEMBERS = (
    "server", "base_url", "api_key_env", "headers", "concurrency", "requests_per_minute", "tokens_per_minute",
    "timeout_s", "max_attempts", "max_wait_s", "startup_timeout_s", "price", "path_map",
)  # fmt: skip
"""Where, how fast and at what cost a member is asked. `server` is here because it stands instead of `base_url`."""

_ALLOWED_OF_TRAINERS = (
    "api_key_env", "price_per_million_tokens", "price_per_job", "price_per_hour", "hours", "keep", "max_hours",
    "timeout_s", "ready_timeout_s", "inactive_timeout_min", "deployments", "gpus", "slots", "checkpoint_s",
)  # fmt: skip
"""What a trainer costs, how long it is waited for, and how many of its jobs run at once."""

_ABSENT = object()


@dataclass(frozen=True)
class Change:
    """One value that differs. `path` is as `--set` takes it; `old` or `new` is None where there is none.

    `allowed` says whether a run that has begun may take it over. Trainers (`trainers.*`, `training.trainer`,
    `members.NAME.trainer`) are not allowed here: whoever knows which jobs have started decides.
    """

    path: str
    old: Any
    new: Any
    allowed: bool
    keys: tuple[str, ...]
    """The steps of the path, for names may hold dots."""

    @property
    def of_trainers(self) -> bool:
        """Whether it is about training back ends, which may change until their jobs have started."""
        first, last = self.keys[0], self.keys[-1]
        return first in ("trainers", "training") or (first == "members" and len(self.keys) == 3 and last == "trainer")


def changed_keys(old: TribeConfig, new: TribeConfig) -> list[Change]:
    """The differences of two configurations, members matched by name, in the order of the models.

    Another order of the members is a change of its own, for matchups depend on it.
    """
    before, after = _plain(old), _plain(new)
    changes = [
        Change(".".join(keys), _shown(a), _shown(b), _allowed(keys, a, b), keys)
        for keys, a, b in _differences((), before, after)
    ]
    names = [[member.name for member in config.members] for config in (old, new)]
    if names[0] != names[1] and sorted(names[0]) == sorted(names[1]):
        changes.append(Change("members", names[0], names[1], False, ("members",)))
    return changes


def fingerprint(config: TribeConfig) -> str:
    """64 hex digits that differ whenever the configuration does."""
    return hashlib.sha256(dump_tribe(config).encode()).hexdigest()


def _plain(config: TribeConfig) -> dict[str, Any]:
    data = config.model_dump(mode="json", exclude={"defaults"})
    data["members"] = {member["name"]: member for member in data["members"]}
    return data


def _differences(keys: tuple[str, ...], old: Any, new: Any) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """The steps to every difference, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _differences((*keys, key), old.get(key, _ABSENT), new.get(key, _ABSENT))
    elif old != new:
        yield keys, old, new


def _allowed(keys: tuple[str, ...], old: Any, new: Any) -> bool:
    if keys == ("iterations",):
        return bool(new > old)
    of_member = keys[0] == "members" and len(keys) > 2 and keys[2] in _ALLOWED_OF_MEMBERS
    of_trainer = keys[0] == "trainers" and len(keys) > 2 and keys[-1] in _ALLOWED_OF_TRAINERS
    return of_member or of_trainer or keys[0] in ("limits", "servers")


def _shown(value: Any) -> Any:
    return None if value is _ABSENT else value
