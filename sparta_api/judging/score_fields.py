"""Reading several scores out of a judge's reply: both responses' of a pair, or one per criterion of a rubric.

As strict as `scores.parse_score`: a reply that leaves one of the scores open, or names two different ones, holds
none at all and the judge is asked again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from sparta_api.judging.score_objects import Object, Token, Value, find_objects
from sparta_api.judging.score_prose import number_in, states_other_scale
from sparta_api.judging.score_text import (
    MASK,
    belongs_to_response,
    code_starts,
    is_attributed,
    mask_quotations,
    mask_quotes,
    plain_signs,
    without_reasoning,
)
from sparta_api.judging.scores import CUT, LONGEST_REPLY, LONGEST_VERDICT

PAIR = ("score_a", "score_b")
"""The keys of a judge's verdict on two responses, in the order in which they were shown."""

_PAIR_NAMES = {
    "score_a": ("score a", "response a", "answer a", "a"),
    "score_b": ("score b", "response b", "answer b", "b"),
}
_WRAPPERS = re.compile("results?|scores?|ratings?|evaluation|verdict|judge?ment|assessment|output|answer|final|review")
_INNER = frozenset(("value", "score", "rating", "overall", "final"))
_OWN_PLACE = re.compile(
    r"(?:\A|\n|[.!?。！？:=>])[\s*_#`\-(\[,]*(?:```\w*\s*)?\Z|\b(?:give|is|json|be|scores?|verdict)\s+\Z", re.IGNORECASE
)
_NUMBER = r"([0-9]{1,4}(?:\.[0-9]{1,8})?)"
_COMMON = re.compile(rf'\s*\{{\s*"score_a"\s*:\s*{_NUMBER}\s*,\s*"score_b"\s*:\s*{_NUMBER}\s*\}}\s*')
_DRESSING = " \t*_`.[])"


def parse_pair(reply: str, scale: tuple[int, int] = (1, 10), finish_reason: str = "stop") -> tuple[float, float] | None:
    """Both scores of a pairwise verdict in the order in which the responses were shown, or None: ask again.

    Reads {"score_a": x, "score_b": y}, what nearly is that, and labelled lines ("Response A: 7/10").
    """
    common = _COMMON.fullmatch(reply) if reply else None
    if common is not None:
        a, b = float(common[1]), float(common[2])
        return (a, b) if scale[0] <= min(a, b) and max(a, b) <= scale[1] else None
    found = parse_fields(reply, PAIR, scale, finish_reason)
    return None if found is None else (found["score_a"], found["score_b"])


def parse_fields(
    reply: str, keys: Sequence[str], scale: tuple[int, int] = (1, 10), finish_reason: str = "stop"
) -> dict[str, float] | None:
    """The score under every one of the keys, all within `scale`, or None when one is missing or in doubt.

    Reasoning blocks, quotations and what the judge says the response contains are ignored. Linear time; never
    raises.
    """
    if not reply or len(reply) > LONGEST_REPLY:
        return None
    text = without_reasoning(plain_signs(reply)).strip()
    if not text or len(text) > LONGEST_VERDICT:
        return None
    return _Sheet(text, tuple(keys), scale, finish_reason in CUT).read()


class _Sheet:
    """One reply. What is found for a key is a number; NaN is one that forbids a verdict."""

    def __init__(self, text: str, keys: tuple[str, ...], scale: tuple[int, int], cut: bool) -> None:
        self.text = text
        self.keys = keys
        self.scale = scale
        self.cut = cut
        self.names = _names(keys)
        self.found: dict[str, list[float]] = {key: [] for key in keys}

    def read(self) -> dict[str, float] | None:
        spans = find_objects(self.text)
        alone = len(spans) == 1 and spans[0].start == 0 and spans[0].end == len(self.text)
        if alone:
            self._take(spans[0].object, 0)
            return self._agreed()
        blanked = self._blank([(span.start, span.end) for span in spans])
        masked = mask_quotations(blanked)
        if states_other_scale(masked, self.scale[1]):
            return None
        quotes, code_start = mask_quotes(blanked), code_starts(blanked)
        for span in spans:
            if self._is_quoted(blanked, quotes, code_start, span.start, span.end):
                continue
            if self._take(span.object, 0) and not _OWN_PLACE.search(blanked[max(0, span.start - 80) : span.start]):
                return None
        self._lines(masked)
        return self._agreed()

    def _blank(self, spans: list[tuple[int, int]]) -> str:
        parts: list[str] = []
        position = 0
        for start, end in spans:
            parts += [self.text[position:start], MASK * (end - start)]
            position = end
        return "".join(parts) + self.text[position:]

    def _agreed(self) -> dict[str, float] | None:
        scores: dict[str, float] = {}
        for key, values in self.found.items():
            if not values or any(value != values[0] for value in values):
                return None
            scores[key] = values[0]
        return scores

    def _is_quoted(
        self, blanked: str, quotes: str, code_start: Callable[[int], int | None], start: int, end: int
    ) -> bool:
        line = blanked[max(0, start - 80) : start].rpartition("\n")[2]
        if line.lstrip().startswith(">") or (start and quotes[start - 1] == MASK != blanked[start - 1]):
            return True
        block = code_start(start)
        return belongs_to_response(blanked, start, end) or (block is not None and is_attributed(blanked, block))

    def _take(self, found: Object, depth: int) -> bool:
        """Notes the scores that an object states; returns whether it states any."""
        named = [(self.names.get(_plain(key)), value) for key, value in found.fields]
        ours = [(key, value) for key, value in named if key is not None]
        for key, value in ours:
            self.found[key].append(math.nan if found.broken else self._number(value))
        inner = [
            value for name, value in found.fields if isinstance(value, Object) and _WRAPPERS.fullmatch(_plain(name))
        ]
        if not ours and len(inner) == 1 and depth < 2:
            return self._take(inner[0], depth + 1)
        return bool(ours)

    def _number(self, value: Value) -> float:
        if isinstance(value, Object):
            inner = [v for key, v in value.fields if _plain(key) in _INNER]
            return self._number(inner[0]) if len(inner) == 1 and not value.broken else math.nan
        if not isinstance(value, Token) or not (value.complete or (not self.cut and not value.quoted)):
            return math.nan
        return self._scaled(number_in(value.text, self.scale))

    def _lines(self, masked: str) -> None:
        """Labelled numbers outside objects; they have to say the same as the objects do."""
        for match in _label(self.keys).finditer(masked):
            key = self.names[_plain(match["label"])]
            text = match["value"].strip(_DRESSING)
            if not text[:1].isdigit():
                continue
            number = self._scaled(number_in(text, self.scale))
            if (self.cut and match.end() == len(masked)) or belongs_to_response(masked, match.start(), match.end()):
                number = math.nan
            self.found[key].append(number)

    def _scaled(self, value: float) -> float:
        return value if self.scale[0] <= value <= self.scale[1] else math.nan


def _plain(key: str) -> str:
    return "".join(c for c in key.casefold() if c not in " _-")


@lru_cache(maxsize=64)
def _names(keys: tuple[str, ...]) -> Mapping[str, str]:
    """The key that every accepted spelling means."""
    names = {_plain(key): key for key in keys}
    if keys == PAIR:
        names |= {_plain(name): key for key, others in _PAIR_NAMES.items() for name in others}
    return names


@lru_cache(maxsize=64)
def _label(keys: tuple[str, ...]) -> re.Pattern[str]:
    """A label, its sign, and what stands behind it up to the end of the line or clause."""
    spellings = [*keys, *(other for key in keys if keys == PAIR for other in _PAIR_NAMES[key])]
    words = "|".join(r"[ _-]?".join(map(re.escape, re.split(r"[ _-]", s))) for s in sorted(spellings, key=len)[::-1])
    return re.compile(rf"(?<![^\W_])(?P<label>{words})[ \t*_`)]{{0,6}}[:=](?P<value>[^\n,;|(]{{1,40}})", re.IGNORECASE)
