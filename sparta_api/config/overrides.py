"""`--set KEY.PATH=VALUE`: changes to the values of a configuration file, before they are checked.

Members are addressed by name or position: `members.NAME.key`, `members[0].key`. Names may contain dots.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sparta_api.config.keys import nearest
from sparta_api.config.yaml_source import KeyPath, Place, Problem, Source, key_text, parse
from sparta_api.errors import ConfigError

_INDEX = re.compile(r"\[(\d+)\]")
_LATER = 1 << 30
"""Sorts problems of overrides behind those of the file."""


def apply(source: Source, overrides: Sequence[str]) -> None:
    """Changes the source in place; what is wrong with an override joins its problems."""
    for number, override in enumerate(overrides):
        key, found, value = override.partition("=")
        key = key.strip()
        label = f"--set {key}" if found and key else "--set"
        if not found or not key:
            here = Place(label, _LATER + number, key, None, 2)
            source.problems.append(Problem(here, "write it as KEY.PATH=VALUE"))
            continue
        _apply_one(source, key, value, label, _LATER + number)


def _apply_one(source: Source, key: str, value: str, label: str, order: int) -> None:
    here = Place(label, order, key, None, 2)
    try:
        path, parent = _locate(source.data, key)
    except ValueError as error:
        source.problems.append(Problem(here, str(error)))
        return
    try:
        parsed = parse(value, lambda line, inner, raw: Place(label, order, _joined(key_text(path), inner), raw, 2))
    except ConfigError as error:
        source.problems.append(Problem(here, f"{str(error).removeprefix(label + ': ')}; quote the value"))
        return
    source.problems.extend(parsed.problems)
    parent[path[-1]] = parsed.data
    for old in [known for known in source.places if known[: len(path)] == path]:
        del source.places[old]
    for length in range(1, len(path)):
        source.places.setdefault(path[:length], replace(here, key=key_text(path[:length])))
    for inner, place in parsed.places.items():
        source.places[(*path, *inner)] = place


def _joined(outer: str, inner: str) -> str:
    return f"{outer}{inner}" if inner.startswith("[") or not inner else f"{outer}.{inner}"


def _locate(data: Any, key: str) -> tuple[KeyPath, Any]:
    """The path that a key names and the container of its last step; missing maps on the way are made."""
    path: KeyPath = ()
    container = data
    rest = key
    while True:
        step, rest = _step(container, rest, path)
        path = (*path, step)
        if not rest:
            return path, container
        inner = container.get(step) if isinstance(container, dict) else container[step]
        if inner is None:
            inner = container[step] = {}
        if not isinstance(inner, dict | list):
            raise ValueError(f"{key_text(path)} is no map, so it has no '{rest}'")
        container = inner


def _step(container: Any, rest: str, path: KeyPath) -> tuple[str | int, str]:
    """The next step into the container, and what is left of the key."""
    if isinstance(container, list):
        index, rest = _item(container, rest, path)
        return index, rest.removeprefix(".")
    known = [name for name in container if rest == name or rest.startswith((f"{name}.", f"{name}["))]
    name = max(known, key=len) if known else re.split(r"[.\[]", rest, maxsplit=1)[0]
    if not name:
        raise ValueError("the key has an empty part; write it as KEY.PATH=VALUE")
    return name, rest[len(name) :].removeprefix(".")


def _item(items: list[Any], rest: str, path: KeyPath) -> tuple[int, str]:
    """An item of a list, by [position] or by its name."""
    if match := _INDEX.match(rest):
        index = int(match[1])
        if index >= len(items):
            raise ValueError(f"{key_text(path)} has {len(items)} entries, the last is [{len(items) - 1}]")
        return index, rest[match.end() :]
    names = {item["name"]: i for i, item in enumerate(items) if isinstance(item, dict) and _named(item)}
    known = [name for name in names if rest == name or rest.startswith(f"{name}.")]
    if not known:
        wanted = rest.split(".")[0]
        raise ValueError(f"{key_text(path)} has no '{wanted}'{nearest(wanted, list(names))}")
    name = max(known, key=len)
    return names[name], rest[len(name) :]


def _named(item: dict[str, Any]) -> bool:
    return isinstance(item.get("name"), str)
