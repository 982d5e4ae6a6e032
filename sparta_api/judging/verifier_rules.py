"""The rules of the verifiers that come with the package: what share of the scale a response earns, 0 to 1.

Every rule is a pure function of the response and the instruction's row. Its `lacks` says what a row has to have and
does not, so that a run whose data cannot be verified never starts.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from sparta_api.config.verifiers import Choice, Exact, Number, WordLimit

Row = Mapping[str, Any]
"""An instruction: `id`, `prompt` (messages), `answer` where it has one, and the fields that verifiers read."""

_NUMBER = re.compile(r"[-\u2212]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,40})(?:\.\d{1,40})?(?:[eE][-+]?\d{1,3})?")
_BOXED = re.compile(r"\\boxed\s{0,4}\{([^{}]{1,80})\}")
_WORD = re.compile(r"[^\W_]+(?:['\u2019.,-][^\W_]+)*")
_FENCE = re.compile(r"\A```\w*[ \t]*\n(.*?)\n?```\Z", re.DOTALL)
_SENTENCE_END = re.compile(r"[.!?\u2026\u3002\uff01\uff1f\u061f\u0964][\"'\u2019\u201d\u00bb)\]*_]{0,4}\s*\Z")
_LONG_WORD = 4
_DEEPEST = 64


class Rule(Protocol):
    """What a verifier kind does."""

    def share(self, response: str, row: Row) -> float:
        """How much of the scale the response earns: 0 the worst score, 1 the best."""
        ...

    def lacks(self, row: Row) -> str | None:
        """Why an instruction cannot be verified, or None."""
        ...


class ExactRule:
    """The response is the answer."""

    def __init__(self, section: Exact) -> None:
        self._fold = section.ignore_case

    def share(self, response: str, row: Row) -> float:
        """1 for the same text, else 0."""
        return float(self._plain(response) == self._plain(row["answer"]))

    def lacks(self, row: Row) -> str | None:
        """An answer."""
        return None if row.get("answer") else "has no `answer`"

    def _plain(self, text: str) -> str:
        text = text.strip()
        return text.casefold() if self._fold else text


class NumberRule:
    """The last number of the response is the answer's; what stands in \\boxed{} or behind #### goes before."""

    def __init__(self, section: Number) -> None:
        self._tolerance = section.tolerance

    def share(self, response: str, row: Row) -> float:
        """1 within the tolerance, else 0, also for a response without a number."""
        found, wanted = last_number(response), last_number(row["answer"])
        return float(found is not None and wanted is not None and abs(found - wanted) <= self._tolerance)

    def lacks(self, row: Row) -> str | None:
        """An answer with a number."""
        return None if last_number(row.get("answer") or "") is not None else "has no `answer` with a number"


def last_number(text: str) -> float | None:
    """The number that a text comes to: in its last \\boxed{}, behind its last ####, or the last one at all."""
    boxed = _BOXED.findall(text)
    part = boxed[-1] if boxed else text.rpartition("####")[2] if "####" in text else text
    numbers = _NUMBER.findall(part)
    if not numbers:
        return None
    value = float(numbers[-1].replace(",", "").replace("\u2212", "-"))
    return value if math.isfinite(value) else None


class ChoiceRule:
    """The response chooses the right letter."""

    def __init__(self, section: Choice) -> None:
        self._letters = section.letters
        among = f"[{section.letters}]"
        self._stated = re.compile(rf"(?i:answer|choice|option)(?i:\s+is)?[\s:*(\[\"']{{1,8}}({among})(?![\w'])")
        self._leading = re.compile(rf"\A[\s*(\[\"'`]{{0,8}}({among})(?:[).:\]*\"'`]|\s*\Z|\s*\n)")
        self._marked = re.compile(rf"\(({among})\)|\*\*({among})\*\*")

    def share(self, response: str, row: Row) -> float:
        """1 for the right letter, else 0, also where no single one is chosen."""
        return float(self._chosen(response) == self._right(row["answer"]))

    def lacks(self, row: Row) -> str | None:
        """An answer that names an option."""
        return None if self._right(row.get("answer") or "") else f"has no `answer` that is one of {self._letters}"

    def _chosen(self, response: str) -> str | None:
        boxed = [text.strip(" ()") for text in _BOXED.findall(response)]
        if boxed:
            return str(boxed[-1])
        if stated := self._stated.findall(response):
            return str(stated[-1])
        whole = response.strip(" \t\n()[].*\"'`").upper()
        if len(whole) == 1:
            return whole
        if leading := self._leading.match(response):
            return leading[1]
        marked = {one or other for one, other in self._marked.findall(response)}
        return marked.pop() if len(marked) == 1 else None

    def _right(self, answer: str) -> str | None:
        text = answer.strip()
        if text.isdecimal() and int(text) < len(self._letters):
            return self._letters[int(text)]
        match = re.match(r"\(?([A-Z])(?:[).:\s]|\Z)", text)
        return match[1] if match and match[1] in self._letters else None


class WordLimitRule:
    """The response keeps to a number of words and says something."""

    def __init__(self, section: WordLimit) -> None:
        self._field = section.field
        self._pattern = re.compile(section.pattern)
        self._min_words = section.min_words
        self._min_new = section.min_new_words
        self._on_topic = section.on_topic
        self._sentence = section.sentence

    def share(self, response: str, row: Row) -> float:
        """1 within the limit, 0 from twice the limit on, in proportion between; 0 for what says too little."""
        limit = self._limit(row)
        words = _WORD.findall(response)
        if limit is None or not self._says_something(response, words, limit, row):
            return 0.0
        return max(0.0, 1.0 - max(0, len(words) - limit) / limit)

    def _says_something(self, response: str, words: list[str], limit: int, row: Row) -> bool:
        different = {word.casefold() for word in words}
        if len(different) < min(self._min_words, limit) or (self._sentence and not _SENTENCE_END.search(response)):
            return False
        asked = {word.casefold() for word in _WORD.findall(self._pattern.sub(" ", str(row["prompt"][-1]["content"])))}
        new = long_words(different - asked)
        topic = {word[:_LONG_WORD] for word in long_words(asked)}
        on_topic = not self._on_topic or any(word[:_LONG_WORD] in topic for word in different)
        return on_topic and len(new) >= min(self._min_new, limit)

    def lacks(self, row: Row) -> str | None:
        """A limit, in its field or in the text of its last message."""
        if self._limit(row) is not None:
            return None
        return "names no word limit" + (f" and has no `{self._field}`" if self._field else "")

    def _limit(self, row: Row) -> int | None:
        given = row.get(self._field) if self._field else None
        if given is None:
            found = self._pattern.search(str(row["prompt"][-1]["content"]))
            given = found[1] if found else None
        text = str(given)
        return int(text) if text.isascii() and text.isdigit() and 0 < int(text) < 100_000 else None


def long_words(words: Iterable[str]) -> list[str]:
    """The words with four letters or more."""
    return [word for word in words if sum(map(str.isalpha, word)) >= _LONG_WORD]


def make_rule(section: object) -> Rule | None:
    """The rule of a verifier that needs no process of its own, else None."""
    match section:
        case Exact():
            return ExactRule(section)
        case Number():
            return NumberRule(section)
        case Choice():
            return ChoiceRule(section)
        case WordLimit():
            return WordLimitRule(section)
    return None


# What runs in a process of its own: a scoring function (response, row) -> number, bool or None


Scoring = Callable[[str, Row], Any]


def make_scoring(settings: Mapping[str, Any]) -> Scoring:
    """The scoring function of a regex, json_schema or python section, given as plain values.

    Raises whatever importing the function or reading the schema raises.
    """
    kind = settings["kind"]
    if kind == "regex":
        return _regex(settings)
    return _json_schema(settings["json_schema"]) if kind == "json_schema" else _function(settings["function"])


def _regex(settings: Mapping[str, Any]) -> Scoring:
    pattern = re.compile(settings["pattern"])
    find = pattern.fullmatch if settings["whole"] else pattern.search
    return lambda response, row: (find(response) is None) == settings["forbidden"]


def _json_schema(schema: dict[str, Any]) -> Scoring:
    import jsonschema
    import referencing

    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    kind.check_schema(schema)
    registry: referencing.Registry[Any] = referencing.Registry()
    validator = kind(schema, registry=registry, format_checker=kind.FORMAT_CHECKER)

    def fits(response: str, row: Row) -> bool:
        fenced = _FENCE.match(response.strip())
        try:
            value = json.loads(fenced[1] if fenced else response)
        except (ValueError, RecursionError):
            return False
        return _depth(value) <= _DEEPEST and bool(validator.is_valid(value))

    return fits


def _depth(value: Any) -> int:
    """How deep a JSON value is nested, counted up to a little above the deepest that is looked at."""
    level, depth = [value], 0
    while level and depth <= _DEEPEST:
        level = [
            item
            for outer in level
            if isinstance(outer, dict | list)
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
        depth += 1
    return depth


def _function(name: str) -> Scoring:
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    if not callable(function):
        raise TypeError(f"{name} is no function")
    scoring: Scoring = function
    return scoring
