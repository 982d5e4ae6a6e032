"""Merging `defaults` into the members, so that every value keeps the place where it was written."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from sparta_api.config.yaml_source import KeyPath, Problem, Source

_DISPLACES = {"base_url": "server", "server": "base_url"}
"""A member that names one of them does not want the other from `defaults`."""


def merge_defaults(source: Source) -> None:
    """Gives every member what `defaults` has and it lacks, maps key by key, and removes `defaults`.

    Data of other shapes is left for the model to complain about.
    """
    defaults, members = source.data.get("defaults"), source.data.get("members")
    if not isinstance(defaults, dict) or not isinstance(members, list):
        return
    if "name" in defaults:
        source.problems.append(Problem(source.place(("defaults", "name")), "defaults.name: every member has its own"))
        del defaults["name"]
    for index, member in enumerate(members):
        if isinstance(member, dict):
            wanted = {key: value for key, value in defaults.items() if member.get(_DISPLACES.get(key, "")) is None}
            members[index] = _merged(wanted, member, ("defaults",), ("members", index), source)
    _report_idle_overrides(source)
    del source.data["defaults"]


def _merged(
    defaults: dict[str, Any], own: dict[str, Any], there: KeyPath, here: KeyPath, source: Source
) -> dict[str, Any]:
    result = dict(own)
    for key, value in defaults.items():
        if key not in own:
            result[key] = copy.deepcopy(value)
            _inherit(source, (*there, key), (*here, key))
        elif isinstance(value, dict) and isinstance(own[key], dict):
            result[key] = _merged(value, own[key], (*there, key), (*here, key), source)
    return result


def _inherit(source: Source, there: KeyPath, here: KeyPath) -> None:
    """The places of a default value become those of the member's."""
    inherited = {
        (*here, *path[len(there) :]): replace(place, rank=0)
        for path, place in source.places.items()
        if path[: len(there)] == there
    }
    source.places.update(inherited)


def _report_idle_overrides(source: Source) -> None:
    """`--set defaults.KEY=...` that no member takes would change nothing without a word."""
    taken = {place.label for path, place in source.places.items() if path[0:1] == ("members",)}
    for path, place in source.places.items():
        if path[0:1] == ("defaults",) and place.rank == 2 and place.label not in taken:
            text = "this changes no member, for each has a value of its own; set members.NAME.KEY"
            source.problems.append(Problem(place, text))
