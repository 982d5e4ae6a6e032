"""YAML together with the place of every value, which error messages need and PyYAML drops.

The values are those of YAML 1.1 as people know it, without its surprises that no configuration wants: dates and
base-60 numbers stay text, 1e-6 is a number, tags and duplicate keys are errors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from sparta_api.errors import ConfigError

KeyPath = tuple[str | int, ...]
"""Where a value stands: ("members", 0, "model")."""

MAX_NODES = 200_000
"""More values than this (aliases of aliases, say) are no configuration."""

_CORE = "tag:yaml.org,2002:"
_MERGE = _CORE + "merge"
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$|0x[0-9a-fA-F_]+$")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)$"
    r"|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value was written. `rank` says who wins: 0 `defaults`, 1 the file, 2 `--set`."""

    label: str
    line: int
    key: str
    raw: str | None = None
    rank: int = 1


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, at its place."""

    place: Place
    text: str

    def __str__(self) -> str:
        return f"{self.place.label}: {self.text}"


@dataclass(slots=True)
class Source:
    """Parsed YAML: the data, the place of every value by its path, and what was wrong already."""

    data: Any
    places: dict[KeyPath, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def place(self, path: KeyPath) -> Place:
        """The place of the value, or of the nearest thing around it that was written."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places[path]


def key_text(path: KeyPath) -> str:
    """The path as people write it: members[0].sampling.temperature."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


class _Loader(yaml.SafeLoader):
    """The safe loader with the scalar types described above."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own class attribute
        first: [(tag, pattern) for tag, pattern in resolvers if tag.removeprefix(_CORE) in ("bool", "null", "merge")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(_CORE + "int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver(_CORE + "float", _FLOAT, list("-+.0123456789"))


class _Dumper(yaml.SafeDumper):
    """The safe dumper that also quotes text which `_Loader` would take for a number."""


_Dumper.add_implicit_resolver(_CORE + "float", _FLOAT, list("-+.0123456789"))


def dump(data: Any) -> str:
    """YAML text of plain data, in the order of its keys; `parse` reads the same data from it."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 20))


def read(path: Path) -> Source:
    """Reads a YAML file. Raises ConfigError with file:line when it cannot be read or is no YAML."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {(error.strerror or str(error)).lower()}; give the path of a tribe.yaml") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: this is not UTF-8 text; save the file as UTF-8") from error
    return parse(text, lambda line, key, raw: Place(f"{path}:{line}", line, key, raw))


def parse(text: str, place_at: Callable[[int, str, str | None], Place]) -> Source:
    """Parses YAML text; `place_at` makes a place from a line, a key and the scalar as it was written.

    Raises ConfigError when the text is no YAML at all; duplicate keys and tags are collected as problems.
    """
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        reader = _Reader(loader, place_at)
        source = Source(None, {(): place_at(1, "", None)}, reader.problems)
        if node is not None:
            source.data = reader.read(node, ())
            source.places |= reader.places
        return source
    except RecursionError as error:
        raise ConfigError(f"{place_at(1, '', None).label}: this is nested too deeply for a configuration") from error
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_syntax(error, place_at)) from error
    except yaml.reader.ReaderError as error:
        where = place_at(text.count("\n", 0, error.position) + 1, "", None).label
        raise ConfigError(f"{where}: the control character {error.character!r} cannot stand in YAML") from error
    finally:
        if loader is not None:
            loader.dispose()


def _syntax(error: yaml.MarkedYAMLError, place_at: Callable[[int, str, str | None], Place]) -> str:
    mark = error.problem_mark or error.context_mark
    where = place_at(mark.line + 1 if mark else 1, "", None).label
    problem = str(error.problem or error.context)
    if "'\\t'" in problem:
        return f"{where}: a tab stands where YAML wants spaces; indent with spaces"
    hint = "; quote a text that contains ': '" if "mapping values" in problem else ""
    context = f" {error.context}" if error.context and error.problem else ""
    return f"{where}: this is not YAML ({problem}{context}){hint}"


class _Reader:
    """Turns nodes into data, remembering where each value was written."""

    def __init__(self, loader: yaml.SafeLoader, place_at: Callable[[int, str, str | None], Place]) -> None:
        self.loader = loader
        self.place_at = place_at
        self.places: dict[KeyPath, Place] = {}
        self.problems: list[Problem] = []
        self.nodes = 0

    def read(self, node: yaml.Node, path: KeyPath, line: int | None = None) -> Any:
        """The value of a node; `line` is that of its key where it has one."""
        self.nodes += 1
        line = line or node.start_mark.line + 1
        raw = node.value if isinstance(node, yaml.ScalarNode) else None
        here = self.places[path] = self.place_at(line, key_text(path), raw)
        if self.nodes > MAX_NODES:
            raise ConfigError(f"{here.label}: more than {MAX_NODES} values are no configuration")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._scalar(node, here)

    def _scalar(self, node: yaml.Node, here: Place) -> Any:
        if node.tag.removeprefix(_CORE) not in ("str", "int", "float", "bool", "null"):
            self.problems.append(Problem(here, f"{here.key}: the YAML tag {node.tag} is not used here; remove it"))
            return node.value
        try:
            return self.loader.construct_object(node, deep=True)
        except (ValueError, KeyError, yaml.YAMLError):
            self.problems.append(Problem(here, f"{here.key}: the value does not fit the YAML tag {node.tag}"))
            return node.value

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        first: dict[str, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == _MERGE or not isinstance(key_node, yaml.ScalarNode):
                continue
            line = key_node.start_mark.line + 1
            key = key_node.value
            if key in first:
                where = self.place_at(line, key_text((*path, key)), None)
                text = f"duplicate key {where.key}; it stands in line {first[key]} already"
                self.problems.append(Problem(where, text))
            first.setdefault(key, line)
        result: dict[str, Any] = {}
        for key_node, value_node in self._entries(node):
            name = self._key(key_node, path)
            result[name] = self.read(value_node, (*path, name), key_node.start_mark.line + 1)
        return result

    def _key(self, node: yaml.Node, path: KeyPath) -> str:
        line = node.start_mark.line + 1
        if not isinstance(node, yaml.ScalarNode):
            self.problems.append(Problem(self.place_at(line, key_text(path), None), "a key has to be text"))
            return "?"
        if node.tag != _CORE + "str":
            where = self.place_at(line, key_text((*path, node.value)), None)
            kind = kind_of(self._scalar(node, where))
            text = f"the key `{node.value}` of {key_text(path) or 'the file'} is read as {kind}; quote it"
            self.problems.append(Problem(where, text))
        return str(node.value)

    def _entries(self, node: yaml.MappingNode) -> Iterator[tuple[yaml.Node, yaml.Node]]:
        """The entries, those of merged mappings (<<) first so that the mapping's own win."""
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                sources = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                for source in reversed(sources):
                    if isinstance(source, yaml.MappingNode):
                        yield from self._entries(source)
        for key_node, value_node in node.value:
            if key_node.tag != _MERGE:
                yield key_node, value_node


def kind_of(value: Any) -> str:
    """What a value is, in words for a message."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number" if math.isfinite(value) else "an infinite number"
    return "a text" if isinstance(value, str) else "a list" if isinstance(value, list) else "a map"
