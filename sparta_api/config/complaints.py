"""Turns pydantic's complaints about a configuration into sentences with the place and the nearest right key."""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sparta_api.config.keys import keys_at, nearest
from sparta_api.config.variables import secret_shown
from sparta_api.config.yaml_source import KeyPath, Place, Problem, Source, key_text, kind_of

_WORDS = (
    (re.compile(r"^Input should be (an instance of|a valid dictionary or instance of) .*"), "a map"),
    (re.compile(r"^Input should be a valid dictionary.*"), "a map"),
    (re.compile(r"^Input should be a valid (string|boolean)$"), r"a \1"),
    (re.compile(r"^Input should be a valid list$"), "a list"),
    (re.compile(r"^Input should be a valid tuple$"), "a list"),
    (re.compile(r"^Input should be a valid integer.*"), "a whole number"),
    (re.compile(r"^Input should be a valid number.*"), "a number"),
    (re.compile(r"^Input should be "), ""),
    (re.compile(r"^String should match pattern .*"), "the name of an environment variable"),
    (re.compile(r"^String should have at least 1 character$"), "not empty"),
)
_LONGEST = 60


def problems_of(error: ValidationError, source: Source) -> list[Problem]:
    """One problem for every value that is wrong, whatever the number of pydantic's errors about it."""
    groups: dict[KeyPath, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        groups.setdefault(_path(detail, source.data), []).append(detail)
    return [_problem(path, details, source) for path, details in groups.items()]


def unknown_keys(error: ValidationError, data: Any) -> list[KeyPath]:
    """The paths of the keys that no section knows."""
    return [_path(detail, data) for detail in error.errors() if detail["type"] == "extra_forbidden"]


def _path(detail: ErrorDetails, data: Any) -> KeyPath:
    """The error's location without the steps that pydantic adds for unions and validators."""
    path: KeyPath = ()
    last = len(detail["loc"]) - 1
    for position, part in enumerate(detail["loc"]):
        if _has(data, part):
            data = data[part]
        elif detail["type"] != "missing" or position != last:
            continue
        path = (*path, part)
    return path


def _has(data: Any, part: str | int) -> bool:
    if isinstance(data, list):
        return isinstance(part, int) and part < len(data)
    return isinstance(data, dict) and part in data


def _problem(path: KeyPath, details: list[ErrorDetails], source: Source) -> Problem:
    place = source.place(path)
    first = details[0]
    if first["type"] == "missing":
        lacking = f"entry [{path[-1]}]" if isinstance(path[-1], int) else f"'{path[-1]}'"
        return Problem(place, f"{_section(path[:-1], source)} lacks {lacking}")
    if first["type"] == "extra_forbidden":
        known = nearest(str(path[-1]), keys_at(path[:-1]))
        return Problem(place, f"unknown key {place.key}{known}")
    if first["type"].startswith("union_tag"):
        return Problem(place, _wrong_backend(place, first))
    if own := [detail["msg"] for detail in details if detail["type"] == "value_error"]:
        return Problem(place, f"{place.key or 'the file'}: {own[0].removeprefix('Value error, ')}")
    if first["type"] == "too_short":
        context = first["ctx"]
        return Problem(
            place, f"{place.key} needs at least {context['min_length']} entries, it has {context['actual_length']}"
        )
    return Problem(place, _wrong_value(path, place, details))


def _section(path: KeyPath, source: Source) -> str:
    """The name of a section, with the member's own where it has one."""
    value = source.data
    for part in path:
        value = value[part]
    name = value.get("name") if isinstance(value, dict) and path[:1] == ("members",) else None
    text = key_text(path) or "the file"
    return f"{text} ('{name}')" if isinstance(name, str) else text


def _wrong_backend(place: Place, detail: ErrorDetails) -> str:
    context = detail["ctx"]
    key = str(context["discriminator"]).strip("'")
    expected = str(context.get("expected_tags", "")).replace("'", "").split(", ")
    if detail["type"] == "union_tag_not_found":
        return f"{place.key} lacks '{key}'"
    tag = str(context["tag"])
    return f"{place.key}.{key} is `{tag}`; it should be one of {', '.join(expected)}{_meant(tag, expected)}"


def _meant(word: str, known: list[str]) -> str:
    clause = nearest(word, known)
    return clause if "did you mean" in clause else ""


def _wrong_value(path: KeyPath, place: Place, details: list[ErrorDetails]) -> str:
    value = details[0]["input"]
    types = {detail["type"] for detail in details}
    if "string_type" in types and isinstance(value, bool | int | float) and place.raw is not None:
        return f'{place.key} is `{place.raw}`, which YAML reads as {kind_of(value)}; quote it: "{place.raw}"'
    wanted = " or ".join(dict.fromkeys(_words(detail["msg"]) for detail in details))
    if isinstance(value, str):
        expected = [word for detail in details for word in re.findall(r"'([^']*)'", _literals(detail))]
        hint = "; ${VAR} stands in texts only" if "${" in value and "string_type" not in types else ""
        shown = "a text" if secret_shown(path) or len(value) > _LONGEST else f"`{value}`"
        return f"{place.key} is {shown}; it should be {wanted}{_meant(value, expected) if expected else hint}"
    shown = f"`{place.raw}`" if place.raw else kind_of(value).replace("nothing", "empty")
    return f"{place.key} is {shown}; it should be {wanted}"


def _literals(detail: ErrorDetails) -> str:
    return str(detail["ctx"]["expected"]) if detail["type"] == "literal_error" else ""


def _words(message: str) -> str:
    for pattern, replacement in _WORDS:
        if pattern.match(message):
            return pattern.sub(replacement, message)
    return message[:1].lower() + message[1:]
