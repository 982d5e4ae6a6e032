"""`${VAR}` in configuration values, API keys, and what must not be written literally.

`${VAR:-default}` takes the default where the variable is unset or empty; `$${` is a literal `${`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from sparta_api import secrets
from sparta_api.config.yaml_source import KeyPath, Problem, Source

_VARIABLE = re.compile(r"\$\$\{|\$\{(?:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\})?")
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:api_?key|authorization|secret|password|passwd|credentials?)$"
    r"|^token$|(?:^|_)(?:access|api|auth|bearer|hf|hub|session|secret)_token$"
)
_SCHEME = re.compile(r"(?i)^\s*(?:bearer|basic|token)\b")


def strings(data: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Every text value with its path, depth first, in the order of the data."""
    if isinstance(data, str):
        yield path, data
    elif isinstance(data, dict):
        for key, value in data.items():
            yield from strings(value, (*path, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from strings(value, (*path, index))


def names_in(text: str) -> list[str]:
    """The variables that a text refers to."""
    return [match["name"] for match in _VARIABLE.finditer(text) if match["name"]]


def expand(text: str, environ: Mapping[str, str]) -> str:
    """The text with its variables replaced.

    Raises ValueError with a sentence when a variable without default is unset or `${` starts no variable.
    """

    def value_of(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        if match[0] == "$${":
            return "${"
        if name is None:
            raise ValueError("'${' starts no variable here; write ${NAME} or ${NAME:-default}, and $${ for a literal")
        if default is not None:
            return environ.get(name) or default
        if name not in environ:
            raise ValueError(f"the variable {name} is not set; export it, or write ${{{name}:-default}}")
        return environ[name]

    return _VARIABLE.sub(value_of, text)


def expand_all(data: Any, source: Source, environ: Mapping[str, str]) -> tuple[Any, list[Problem]]:
    """A copy of the data with all variables of its texts replaced, and the problems by place.

    The values of variables in `headers` are registered as secrets; they are stripped and must be one line.
    """
    problems: list[Problem] = []

    def walk(value: Any, path: KeyPath) -> Any:
        if isinstance(value, dict):
            return {key: walk(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [walk(item, (*path, index)) for index, item in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value
        try:
            if "headers" in path:
                return expand(value, {**environ, **_header_values(value, environ)})
            return expand(value, environ)
        except ValueError as error:
            place = source.place(path)
            problems.append(Problem(place, f"{place.key}: {error}"))
            return value

    return walk(data, ()), problems


def _header_values(text: str, environ: Mapping[str, str]) -> dict[str, str]:
    return {name: read_key(name, environ) for name in names_in(text) if environ.get(name)}


def read_key(name: str, environ: Mapping[str, str]) -> str:
    """The key in that variable, stripped, and from now on masked by `secrets.scrub`.

    Raises ValueError with a sentence, and no part of the key, when it is unset, blank or no header value.
    """
    value = environ.get(name, "").strip()
    if not value:
        raise ValueError(f"the variable {name} is {'empty' if name in environ else 'not set'}; export the key in it")
    secrets.register(value)
    if not value.isascii() or not value.isprintable():
        raise ValueError(f"the key in {name} holds control or non-ASCII characters; export it again without them")
    return value


def literal_keys(source: Source) -> list[Problem]:
    """A problem for every secret that stands in the file itself; no message shows any of it."""
    problems = []
    for path, text in strings(source.data):
        place = source.place(path)
        written = _VARIABLE.sub(lambda match: match["default"] or "", text)
        if _is_secret_place(path) and _SCHEME.sub("", written).strip():
            advice = "name its environment variable as api_key_env, or write ${NAME}"
            problems.append(Problem(place, f"a key is never written into the file ({place.key}); {advice}"))
        elif _looks_secret(path, written):
            problems.append(Problem(place, f"{place.key}: this looks like an API key; put it into a variable"))
    return problems


def secret_shown(path: KeyPath) -> bool:
    """Whether the value at that path must not be repeated in a message."""
    return _is_secret_place(path) or "headers" in path


def _is_secret_place(path: KeyPath) -> bool:
    names = [part.lower().replace("-", "_") for part in path if isinstance(part, str)]
    return bool(names) and bool(_SECRET_NAME.search(names[-1]))


def _looks_secret(path: KeyPath, text: str) -> bool:
    """Prose is looked at word by word, for "the bearer arrived" is no key."""
    parts = text.split() if "system_prompt" in path else [text]
    return any(secrets.looks_like_key(part) for part in parts)
