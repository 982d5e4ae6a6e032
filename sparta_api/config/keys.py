"""Which keys may stand where in `tribe.yaml`, told by the models: the nearest valid one, a schema for editors.

`python -m sparta_api.config.keys > docs/tribe.schema.json` writes the schema anew after a change of the models.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from sparta_api.config.section import Section
from sparta_api.config.tribe import Member, TribeConfig
from sparta_api.config.yaml_source import KeyPath


def keys_at(path: KeyPath) -> list[str]:
    """The keys of the section at that path; none where any key may stand or no section is."""
    types: list[Any] = [TribeConfig]
    for part in path:
        types = [inner for outer in types for inner in _inner(outer, part)]
    found: dict[str, None] = {}
    for section in types:
        if _is_section(section):
            found |= dict.fromkeys(section.model_fields)
    return list(found)


def nearest(word: str, known: Sequence[str]) -> str:
    """A clause for the end of a message: what was probably meant, or else what there is."""
    lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{lower[close[0]]}'?"
    return f"; there is {', '.join(known)}" if known else ""


def _inner(outer: Any, part: str | int) -> Iterator[Any]:
    """The types of the value that stands at one step below a type, unions taken apart."""
    if _is_section(outer):
        if outer is TribeConfig and part == "defaults":
            yield Member
        elif part in outer.model_fields:
            yield from _members(outer.model_fields[part].annotation)
    elif get_origin(outer) in (list, tuple) and isinstance(part, int):
        yield from _members(get_args(outer)[0])
    elif get_origin(outer) is dict:
        yield from _members(get_args(outer)[1])


def _members(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _members(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for option in get_args(annotation):
            yield from _members(option)
    else:
        yield annotation


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def schema() -> dict[str, Any]:
    """A JSON Schema (2020-12) of `tribe.yaml` for editors.

    Members need only a name there, for `defaults` may hold the rest.
    """
    result = TribeConfig.model_json_schema()
    definitions = result["$defs"]
    definitions["Member"]["required"] = ["name"]
    known = {name: value for name, value in definitions["Member"]["properties"].items() if name != "name"}
    description = result["properties"]["defaults"]["description"]
    definitions["Defaults"] = {
        "additionalProperties": False,
        "description": description,
        "properties": known,
        "title": "Defaults",
        "type": "object",
    }
    result["properties"]["defaults"] = {"$ref": "#/$defs/Defaults"}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **result, "title": "tribe.yaml"}


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2, ensure_ascii=False))
