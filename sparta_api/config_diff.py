"""What a continued run may change in its configuration, and what it may not."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sparta_api.config import TribeConfig
from sparta_api.config_file import dump_tribe

_ALLOWED = re.compile(
    r"members\0[^\0]*\0(?:server|base_url|api_key_env|headers|concurrency|requests_per_minute"
    r"|tokens_per_minute|timeout_s|max_attempts|max_wait_s|startup_timeout_s|price|path_map)(?:\0|$)"
    r"|(?:limits|servers)(?:\0|$)",
    re.DOTALL,
)
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

    @property
    def of_trainers(self) -> bool:
        """Whether it is about training back ends, which may change until their jobs have started."""
        return self.path.split(".")[0] in ("trainers", "training") or (
            self.path.startswith("members.") and self.path.endswith(".trainer")
        )


def changed_keys(old: TribeConfig, new: TribeConfig) -> list[Change]:
    """The differences of two configurations, members matched by name, in the order of the models.

    Another order of the members is a change of its own, for matchups depend on it.
    """
    before, after = _plain(old), _plain(new)
    changes = [
        Change(path.replace("\0", "."), _shown(a), _shown(b), _allowed(path, a, b))
        for path, a, b in _differences("", before, after)
    ]
    names = [[member.name for member in config.members] for config in (old, new)]
    if names[0] != names[1] and sorted(names[0]) == sorted(names[1]):
        changes.append(Change("members", names[0], names[1], False))
    return changes


def fingerprint(config: TribeConfig) -> str:
    """64 hex digits that differ whenever the configuration does."""
    return hashlib.sha256(dump_tribe(config).encode()).hexdigest()


def _plain(config: TribeConfig) -> dict[str, Any]:
    data = config.model_dump(mode="json", exclude={"defaults"})
    data["members"] = {member["name"]: member for member in data["members"]}
    return data


def _differences(path: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """Paths with both values; a NUL parts the steps, for names may hold dots."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            inner = f"{path}\0{key}" if path else key
            yield from _differences(inner, old.get(key, _ABSENT), new.get(key, _ABSENT))
    elif old != new:
        yield path, old, new


def _allowed(path: str, old: Any, new: Any) -> bool:
    if path == "iterations":
        return bool(new > old)
    return bool(_ALLOWED.match(path))


def _shown(value: Any) -> Any:
    return None if value is _ABSENT else value
