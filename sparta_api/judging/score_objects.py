"""Objects in a judge's reply that look like JSON: strict, single-quoted, unquoted, cut short.

One pass over the text; every character is looked at a bounded number of times.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_OPENS = re.compile(r"\{\s*(?=[\"'}]|[^\W\d]\w*[ \t]*:)")
_GAP = re.compile(r"[\s,]*")
_KEY = re.compile(r"\"((?:[^\"\\\n]|\\.){0,100})\"\s*:|'((?:[^'\\\n]|\\.){0,100})'\s*:|([^\W\d][\w -]{0,60})\s*:")
_STRING_ENDS = {quote: re.compile(rf"\\.|{quote}(?=\s*(?:[,}}\]]|\Z)|[ \t]*\n\s*[\"'])", re.S) for quote in "\"'"}
_BARE = re.compile(r"[-+]?[0-9]+(?:\.[0-9]+)?[ \t]*/[ \t]*[0-9]+|[^\s,{}\[\]\"':]{1,100}")
_AFTER_VALUE = re.compile(r"\s*(?:(?=[,}\]])|\Z)|[ \t]*\n\s*(?=[\"'])")
_DEEPEST = 12


@dataclass(frozen=True, slots=True)
class Token:
    """A string, number or word as it stands; `complete` is false where the end of the reply cut it."""

    text: str
    quoted: bool
    complete: bool


@dataclass(slots=True)
class Object:
    """An object: its fields in order (repeated keys stay), and `broken` where its text cannot be followed."""

    fields: list[tuple[str, Value]] = field(default_factory=list)
    broken: bool = False


Value = Token | Object | list["Value"] | None


class _Broken(Exception):
    """The text is not even nearly JSON from here on."""


@dataclass(frozen=True, slots=True)
class Span:
    """An object of the outermost level and where it stands."""

    start: int
    end: int
    object: Object


def find_objects(text: str) -> list[Span]:
    """The outermost objects of a text. A broken or unclosed one reaches to the end of the text."""
    spans: list[Span] = []
    position = 0
    while (opening := _OPENS.search(text, position)) is not None:
        reader = _Reader(text, opening.start())
        found = Object()
        try:
            reader.read_object(found, 0)
        except _Broken:
            found.broken = True
            reader.position = len(text)
        spans.append(Span(opening.start(), reader.position, found))
        position = reader.position
    return spans


class _Reader:
    def __init__(self, text: str, position: int) -> None:
        self.text = text
        self.position = position

    def read_object(self, into: Object, depth: int) -> None:
        """From the opening brace to behind the closing one, or to the end of the text."""
        self.position += 1
        while True:
            self._skip()
            if self._ended():
                return
            if self.text[self.position] == "}":
                self.position += 1
                return
            key = _KEY.match(self.text, self.position)
            if key is None:
                if self._cut_key():
                    return
                raise _Broken
            self.position = key.end()
            into.fields.append((key[key.lastindex or 1], self._value(depth)))
            self._expect_end_of_value()

    def _cut_key(self) -> bool:
        """Whether the rest of the text is the beginning of a key."""
        rest = self.text[self.position : self.position + 120]
        if self.position + len(rest) < len(self.text) or not re.fullmatch(r"[\"']?[\w -]*[\"']?\s*", rest):
            return False
        self.position = len(self.text)
        return True

    def _value(self, depth: int) -> Value:
        while not self._ended() and self.text[self.position].isspace():
            self.position += 1
        if self._ended():
            return None
        first = self.text[self.position]
        if depth >= _DEEPEST:
            raise _Broken
        if first in "\"'":
            return self._string(first)
        if first == "{":
            inner = Object()
            self.read_object(inner, depth + 1)
            return inner
        if first == "[":
            return self._list(depth + 1)
        return self._bare()

    def _list(self, depth: int) -> list[Value]:
        self.position += 1
        items: list[Value] = []
        while True:
            self._skip()
            if self._ended():
                return items
            if self.text[self.position] == "]":
                self.position += 1
                return items
            items.append(self._value(depth))
            self._expect_end_of_value()

    def _string(self, quote: str) -> Token:
        """A quote inside that is not escaped ends the string only where a value can end."""
        start = self.position + 1
        for mark in _STRING_ENDS[quote].finditer(self.text, start):
            if mark[0] == quote:
                self.position = mark.end()
                return Token(self.text[start : mark.start()], True, True)
        self.position = len(self.text)
        return Token(self.text[start:], True, False)

    def _bare(self) -> Token:
        word = _BARE.match(self.text, self.position)
        if word is None:
            raise _Broken
        self.position = word.end()
        return Token(word[0], False, not self._ended())

    def _skip(self) -> None:
        gap = _GAP.match(self.text, self.position)
        self.position = gap.end() if gap else self.position

    def _expect_end_of_value(self) -> None:
        end = _AFTER_VALUE.match(self.text, self.position)
        if end is None:
            raise _Broken
        self.position = end.end()

    def _ended(self) -> bool:
        return self.position >= len(self.text)
