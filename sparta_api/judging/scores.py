"""Reading the score out of a judge's reply.

The reply is hostile text: the judge may think aloud, quote a score that the response planted, answer on
another scale or be cut off. Whatever is ambiguous yields None and the judge is asked again (rule 2 of
docs/algorithm.md); a wrong number would go into the ratings unseen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import lru_cache

from sparta_api.judging.score_objects import Object, Token, Value, find_objects
from sparta_api.judging.score_prose import Prose, number_in, states_other_scale
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

LONGEST_VERDICT = 20_000
"""A reply that is longer than this many characters without its reasoning holds no readable verdict."""

LONGEST_REPLY = 4_000_000
_COMMON = re.compile(r'\s*(?:\{\s*"score"\s*:\s*([0-9]{1,4}(?:\.[0-9]{1,8})?)\s*\}|([0-9]{1,4}(?:\.[0-9]{1,8})?))\s*')
CUT = frozenset(("length", "max_tokens", "MAX_TOKENS", "content_filter"))
_SYNONYMS = re.compile(
    "rating|grade|mark|(?:overall|final)(?:score|rating|grade)|overall|scorevalue|оценка|балл|оцінка|puntuación|calificación|"
    "puntaje|pontuação|nota|bewertung|punktzahl|punteggio|voto|valutazione|ocena|skóre|skor|puan|评分|得分|分数|打分|評分|得點|"
    "スコア|評価|点数|得点|점수|평점|الدرجة|التقييم|अंक|स्कोर|ציון|điểm|คะแนน"
)
_WRAPPERS = re.compile("results?|evaluation|verdict|judge?ment|assessment|output|answer|final|review|data|json|grading")
_MAXIMA = re.compile("max(?:imum)?(?:score|rating)?|outof|scale(?:max)?")
_INNER = frozenset(("value", "score", "overall", "final"))
_OWN_LINE = re.compile(
    r"(?:\A|\n|[.!?。！？:=\ufffc>]|\b(?:give|is|json|be|score|rating|verdict|therefore))[\s*_#`\-(\[{,]*(?:```\w*\s*)?\Z",
    re.IGNORECASE,
)
_LAST_NUMBER = re.compile(r"([0-9]{1,6})\D*\Z")
_LOOSE_FIELD = re.compile(r"[\"']score[\"']\s{0,8}:", re.IGNORECASE)
_LOOSE_START = re.compile(r"\s*[\"']?score[\"']\s{0,8}:\s{0,8}([0-9.]{1,12})\s{0,8}(?:[,}]|\Z)", re.IGNORECASE)
_AFTER_OBJECT = re.compile(r"\s{0,8}(?:[\"']|,\s{0,8}[\"'])")


def parse_score(reply: str, scale: tuple[int, int] = (1, 10), finish_reason: str = "stop") -> float | None:
    """The score in a judge's reply, or None when it holds none beyond doubt: ask again.

    Reads JSON and what nearly is JSON, labelled numbers in many languages, [[n]], fractions of the scale's
    best score, plain numbers, decimal digits of every script. Reasoning blocks, quotations and what the
    judge says the response contains are ignored. None too for two different scores, a number outside the
    scale or on another scale, ranges, percentages, refusals, and a number that may be cut (`finish_reason`
    "length"). Linear time; never raises; the result lies within `scale`.
    """
    cut = finish_reason in CUT
    common = _COMMON.fullmatch(reply) if reply else None
    if common is not None:
        if common[2] and cut and not reply[-1].isspace():
            return None
        value = float(common[1] or common[2])
        return value if scale[0] <= value <= scale[1] else None
    if not reply or len(reply) > LONGEST_REPLY:
        return None
    text = without_reasoning(plain_signs(reply)).lstrip()
    if not text or len(text) > LONGEST_VERDICT:
        return None
    return _verdict(text, (scale[0], scale[1]), cut)


@lru_cache(maxsize=1024)
def _verdict(text: str, scale: tuple[int, int], cut: bool) -> float | None:
    """Judges repeat themselves, so that the last replies are kept (at most 20 MB of them)."""
    return _Reading(text, scale, cut).verdict()


class _Reading:
    """One reply. Candidates are numbers; NaN is one that forbids a verdict (out of scale, unreadable)."""

    def __init__(self, text: str, scale: tuple[int, int], cut: bool) -> None:
        self.text = text
        self.scale = scale
        self.cut = cut

    def verdict(self) -> float | None:
        """The one value that all candidates of the strongest kind agree on."""
        spans = find_objects(self.text)
        if len(spans) == 1 and spans[0].start == 0 and not self.text[spans[0].end :].strip():
            return _agreed(self._of_object(spans[0].object))
        blanked = self._blank([(span.start, span.end) for span in spans])
        quotes, code_start = mask_quotes(blanked), code_starts(blanked)
        masked = mask_quotations(blanked)
        if states_other_scale(masked, self.scale[1]):
            return None
        structured = self._loose_fields(blanked)
        unclear: list[float] = []
        for span in spans:
            values = self._of_object(span.object)
            if not values or self._is_quoted(blanked, quotes, code_start, span.start, span.end):
                continue
            if _AFTER_OBJECT.match(self.text, span.end):
                structured.append(math.nan)
            elif _OWN_LINE.search(blanked[max(0, span.start - 80) : span.start]):
                structured += values
            else:
                unclear += values
        if unclear:
            structured = structured + unclear if structured else [math.nan]
        prose = Prose(masked, self.scale, self.cut)
        return _agreed(prose.with_structured(structured) if structured else prose.candidates())

    def _blank(self, spans: list[tuple[int, int]]) -> str:
        parts: list[str] = []
        position = 0
        for start, end in spans:
            parts += [self.text[position:start], MASK * (end - start)]
            position = end
        return "".join(parts) + self.text[position:]

    def _is_quoted(
        self, blanked: str, quotes: str, code_start: Callable[[int], int | None], start: int, end: int
    ) -> bool:
        """Whether an object is the response's and not the judge's: in quotation marks or attributed to it."""
        line = blanked[max(0, start - 80) : start].rpartition("\n")[2]
        if line.lstrip().startswith(">") or (start and quotes[start - 1] == MASK != blanked[start - 1]):
            return True
        block = code_start(start)
        return belongs_to_response(blanked, start, end) or (block is not None and is_attributed(blanked, block))

    def _loose_fields(self, blanked: str) -> list[float]:
        """`"score": 7}` without an opening brace counts at the start of a reply and forbids a verdict elsewhere."""
        start = _LOOSE_START.match(blanked)
        if start is not None:
            complete = not (self.cut and start.end() == len(blanked) and blanked[-1].isdigit())
            return [self._scaled(number_in(start[1], self.scale)) if complete else math.nan]
        return [math.nan] if _LOOSE_FIELD.search(blanked) and MASK in blanked else []

    def _of_object(self, found: Object, depth: int = 0) -> list[float]:
        """The scores that an object states; nested objects count only as its one result or its score's value."""
        named = [(_plain_key(key), value) for key, value in found.fields]
        if found.broken or any(_MAXIMA.fullmatch(key) and self._other_maximum(value) for key, value in named):
            return [math.nan]
        exact = [self._of_value(value, depth) for key, value in named if key == "score" and not _is_placeholder(value)]
        synonyms = [self._of_value(value, depth) for key, value in named if _SYNONYMS.fullmatch(key)]
        values = exact + [v for v in synonyms if not math.isnan(v)] if exact else synonyms
        if values or depth > 1:
            return values
        inner = [value for key, value in named if _WRAPPERS.fullmatch(key) and isinstance(value, Object)]
        return self._of_object(inner[0], depth + 1) if len(inner) == 1 else []

    def _other_maximum(self, value: Value) -> bool:
        last = _LAST_NUMBER.search(value.text) if isinstance(value, Token) else None
        return last is not None and int(last[1]) != self.scale[1]

    def _of_value(self, value: Value, depth: int) -> float:
        if isinstance(value, Object):
            inner = [v for key, v in value.fields if _plain_key(key) in _INNER]
            if len(inner) == 1 and depth < 2 and not value.broken:
                return self._of_value(inner[0], depth + 1)
            return math.nan
        if not isinstance(value, Token) or not (value.complete or (not self.cut and not value.quoted)):
            return math.nan
        return self._scaled(number_in(value.text, self.scale))

    def _scaled(self, value: float) -> float:
        return value if self.scale[0] <= value <= self.scale[1] else math.nan


def _is_placeholder(value: Value) -> bool:
    """Whether a judge only repeats the form that it was asked for."""
    return isinstance(value, Token) and value.text.casefold() in ("n", "<n>", "number")


def _plain_key(key: str) -> str:
    return "".join(c for c in key.casefold() if c not in " _-")


def _agreed(candidates: list[float]) -> float | None:
    """The value of all candidates, or None where there is none, a forbidden one or two different ones."""
    if not candidates or any(math.isnan(value) for value in candidates):
        return None
    return candidates[0] if min(candidates) == max(candidates) else None
