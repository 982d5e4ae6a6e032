"""Scores in running text: labels, fractions, verdict sentences, plain numbers.

Three kinds, by how plainly they are meant as the verdict: strong (`Score: 8`, `[[8]]`, `<score>8</score>`), weak
(`8/10`, `I give it an 8`, `the score is 8`) and bare (a number that opens the reply or has a line of its own).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice

from sparta_api.judging.score_text import MASK, belongs_to_response

_NUMBER = r"(?P<num>[-+]?[0-9]{1,40}(?:[.,][0-9]{1,40}){0,4}(?:[eE][+-]?[0-9]{1,6})?)"
_READABLE = re.compile(r"([0-9]{1,4})(?:[.,]([0-9]{1,2})|\.([0-9]{3,8}))?")
_WORDS = {
    "zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5,
    "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
}  # fmt: skip
_WORD = rf"(?P<word>{'|'.join(_WORDS)})"

_FIRM = (
    r"score|rating|grade|punktzahl|bewertung|wertung|gesamtbewertung|gesamtpunktzahl|gesamtnote|puntuaci[oó]n|"
    r"calificaci[oó]n|puntaje|pontuaç[aã]o|avaliaç[aã]o|punteggio|valutazione|voto|оценка|балл|рейтинг|оцінка|бал|ocena|"
    r"wynik|hodnocení|skóre|cijfer|beoordeling|betyg|poäng|puan|skor|điểm|pontszám|punctaj|scor|arvosana|vurdering|"
    r"βαθμολογία|βαθμός|ציון|الدرجة|التقييم|النتيجة|अंक|स्कोर|रेटिंग|मूल्यांकन|คะแนน|évaluation|notation"
)
_FIRM_CJK = (
    r"(?:最终|总体|综合|整体|最后|我的|最終|総合|總體|總|最终的|최종|종합|전체)?\s?"
    r"(?:评分|得分|分数|打分|評分|得點|分數|スコア|評価|点数|得点|採点|評点|점수|평점|평가)"
)
_VAGUE = r"overall|verdict|evaluation|assessment|mark|note|nota|note finale|nilai|karakter|gesamt|итог|итого"
_LABEL = (
    rf"(?:(?<!\w)(?P<firm>{_FIRM})(?!\w)|(?<![^\W的の为為は])(?P<cjk>{_FIRM_CJK})(?:为|為|は|은|는)?"
    rf"|(?<!\w)(?P<vague>{_VAGUE})(?!\w))"
)
_QUALIFIER = r"(?:\s(?:final|global|general|generale|finale|globale|complessivo|value))?"
_ASIDE = r"(?:\s{0,3}[(\[](?P<aside>[^()\[\]\n]{0,40})[)\]])?"
_LABELLED = re.compile(
    rf"{_LABEL}{_QUALIFIER}{_ASIDE}"
    r"(?P<link>[ \t_]{0,4}(?:[:=]|\||-(?=\s)|[–—])[\s_\[(]{0,6}|(?<=[为為は은는])\s?|[ \t_]{1,4})"
    rf"(?:{_NUMBER}|{_WORD}(?!\w))",
    re.IGNORECASE,
)
_BRACKETED = re.compile(rf"\[\[\s{{0,4}}(?:(?:rating|score)\s{{0,4}}:\s{{0,4}})?{_NUMBER}", re.IGNORECASE)
_TAGGED = re.compile(
    rf"<(?:final_|overall_)?(?:score|rating|grade)>\s{{0,8}}{_NUMBER}"
    rf"|\\boxed{{\s{{0,4}}{_NUMBER.replace('<num>', '<boxed>')}",
    re.IGNORECASE,
)
_STATED = re.compile(
    rf"{_LABEL}(?:\sfor\s(?:this|the)\s\w{{1,12}})?{_ASIDE}\s{{1,3}}"
    rf"(?:is|would be|will be|should be|ist|est|es|è|é|равна)\s{{0,2}}:?\s{{1,3}}(?:an?\s)?{_NUMBER}",
    re.IGNORECASE,
)
_GIVEN = re.compile(
    rf"\b(?:(?:i|we)(?:'d|'ll|\s(?:would|will|must|shall|have to))?(?:\s\w{{2,12}}ly)?"
    rf"\s(?:give|rate|assign|award|score|grade)|"
    rf"(?:deserves|merits|warrants|earns|receives|gets)\s(?:an?|my))(?:\s[\w']{{1,16}}){{0,7}}?[\s:]{{1,3}}{_NUMBER}",
    re.IGNORECASE,
)
_ON_SCALE = re.compile(
    rf"(?:\A|\n|[.!?] )\s{{0,3}}on a scale (?:of|from) {MASK}{{3,30}}[\s,:]{{1,3}}{_NUMBER}", re.IGNORECASE
)
_OUT_OF = (
    r"\s{0,3}(?:points?|pts|stars?|punkte|puntos|баллов|балла)?\s{0,3}"
    r"(?:/|\b(?:out of(?: a possible)?|of|von|sur|de|из|з|su|z|van|av|dari|trên)\b)\s{0,3}"
)
_DENOMINATOR = re.compile(rf"{_OUT_OF}(?:(?P<den>[0-9]{{1,6}}(?:[.,][0-9]+)?)|(?P<ten>ten\b))", re.IGNORECASE)
_FRACTION = re.compile(
    rf"(?<![\w.,/-])(?:{_NUMBER}|{_WORD})(?!\s{{0,3}}of\b)(?={_OUT_OF}(?:[0-9]|ten\b))", re.IGNORECASE
)
_RANGE = re.compile(
    r"\s{0,3}(?:-|–|—|~|\b(?:to|or|and|bis|oder|und|à|ou|et|o|y|e|до|или|и)\b)\s{0,3}"
    rf"(?:[0-9]|(?:{'|'.join(_WORDS)})\b)",
    re.IGNORECASE,
)
_SPOILED = re.compile(
    r"\s?[%+°^\u00b2\u00b3\u00b9\u00bc-\u00be\u2070-\u2079\u2150-\u215e\ufe0f\u20e3]|\s?(?:점\s?(?:만점|중)|点(?:満点|中)|分(?:满分|制))"
    r"|[A-Za-z_]|[.,:][0-9]|[ \t]?[*x×][ \t]?[0-9]"
)
_FOLLOWS = re.compile(
    r"[\s_]{0,3}(?:\Z|[.,;:!?)\]}|<\n。，；！、–—\ufffc-]|[分점点](?!\w)|"
    r"(?:because|since|for|as|due|given|overall|on|in|here|points?|stars?|pts|punkten?|puntos)\b)",
    re.IGNORECASE,
)
_ALTERNATIVE = re.compile(r"\s{1,3}(?:or|and|but|rather|maybe|perhaps|although|minus|plus)\b", re.IGNORECASE)
_ENDS = re.compile(r"[ \t_]{0,3}(?:\Z|[.!。]?[ \t]{0,3}(?:\n|\Z))")
_LINE_START = re.compile(r"(?:\A|\n)[\s#_>|-]*\Z")
_ITS_NAME = re.compile(r"([\w'][\w'-]{0,30})[ \t_-]{1,3}\Z")
_OWN_NAMES = re.compile(
    r"the|an?|my|your|final|overall|numeric(?:al)?|single|suggested|proposed|assigned|given|recommended|resulting|judge(?:'s)?|"
    r"response|answer|quality|and|so|is|total|итоговая|общая|моя|финальная|ma|mi|la|le|il|el|die|der|das|meine|sua|minha|"
    r"końcowa|finalna|celková|slutlig",
    re.IGNORECASE,
)
_CRITERION = re.compile(r"(?:\A|\n)(?!\s*On a scale)[^\n:|.]{1,60}[:|][\s_]{0,4}\Z", re.IGNORECASE)
_HEDGED = re.compile(
    r"\b(?:not|never|cannot|if|unless|than|least|most|maximum|minimum|without|instead|could|might|between|\w+n't)\b",
    re.IGNORECASE,
)
_REFUSED = re.compile(
    r"\b(?:can(?:no|')t|cannot|unable to|not able to|won't|will not|decline to|refuse to)(?:\s\w{1,14}){0,4}?\s"
    r"(?:rate|rating|score|scoring|grade|grading|assess|evaluate|judge|assist|help)\b",
    re.IGNORECASE,
)
_OPENING = re.compile(
    rf"[\s_#(\[]*{_NUMBER}(?=[\s_)\]}}]*(?:\Z|\n|[,;:!)}}(\ufffc]|\.[ \t]*(?:\n|\Z)|[ \t]+[-–—][ \t]|[分점点](?!\w)))"
)
_ALONE = re.compile(rf"^[ \t_#(\[]*{_NUMBER}[ \t_)\]]*[.!。]?[ \t]*$", re.MULTILINE)
_ONE_WORD = re.compile(rf"[\s_]*{_WORD}[\s_]*[.!]?\s*", re.IGNORECASE)
_SCALE = re.compile(
    r"(?:\b(?:scale|skala|escala|échelle|scala|schaal)|шкал\w{0,3})[^0-9\n.]{1,24}[0-9]{1,4}\s?(?:-|–|—|to|bis|a|à|al?|до|through|tot|,|and)\s?([0-9]{1,6})"
    r"|满分(?:为|是|:)?\s?([0-9]{1,6})|([0-9]{1,6})\s?(?:分制|分满分|点満点|점\s?만점)",
    re.IGNORECASE,
)
_MOST_MATCHES = 50
_LAST_NUMBER = re.compile(r"([0-9]{1,6})\D*\Z")


def number_in(text: str, scale: tuple[int, int]) -> float:
    """The number that a whole text is, alone or as a fraction of the scale's best score; NaN otherwise."""
    text = text.strip()
    head = re.match(_NUMBER, text)
    if head is None:
        return float(_WORDS.get(text.casefold(), math.nan))
    rest = text[head.end() :]
    denominator = _DENOMINATOR.fullmatch(rest)
    if rest and not (denominator and _is_best(denominator, scale[1])):
        return math.nan
    return _readable(head["num"])


def states_other_scale(text: str, best: int) -> bool:
    """Whether the judge says that it grades on a scale with another best score."""
    return any(int(m[m.lastindex or 1]) != best for m in _SCALE.finditer(text))


@lru_cache(maxsize=64)
def _bounds(scale: tuple[int, int]) -> re.Pattern[str]:
    """The scale itself in running text ("between 1 and 10"), but not as the value of a label."""
    low, best = scale
    return re.compile(
        rf"(?:\bbetween\s)?(?<![\d.,:/=-])(?<![:=]\s)(?:{low}|0)\s?(?:-|–|—|to|and|bis|und|a|à|et|y|до|и|~)\s?{best}(?![\d/%])",
        re.IGNORECASE,
    )


def _readable(number: str) -> float:
    plain = _READABLE.fullmatch(number)
    return float(number.replace(",", ".")) if plain else math.nan


def _is_best(denominator: re.Match[str], best: int) -> bool:
    return best == 10 if denominator["ten"] else denominator["den"] == str(best)


class Prose:
    """The candidates in a text whose quotations and objects are masked; NaN forbids a verdict."""

    def __init__(self, masked: str, scale: tuple[int, int], cut: bool) -> None:
        self.text = _bounds(scale).sub(lambda m: MASK * len(m[0]), masked.replace("*", " ").replace("`", " "))
        self.scale = scale
        self.cut = cut
        self.flooded = False

    def with_structured(self, structured: list[float]) -> list[float]:
        """What an object says, and the strong candidates that could contradict it."""
        return structured + list(self._strong()) + ([math.nan] if self.flooded else [])

    def candidates(self) -> list[float]:
        """All that may be the verdict where no object states one."""
        if _REFUSED.search(self.text):
            return []
        strong = list(self._strong())
        other = [*self._weak(), *self._bare()]
        if self.flooded:
            return []
        return strong + [value for value in other if not math.isnan(value)] if strong else other

    def _found(self, pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
        """The first matches of a pattern; a reply with more is `flooded` with numbers and holds no verdict."""
        matches = pattern.finditer(self.text)
        yield from islice(matches, _MOST_MATCHES)
        self.flooded = self.flooded or next(matches, None) is not None

    def _strong(self) -> Iterator[float]:
        for found in self._found(_LABELLED):
            if self._names_the_score(found) and not belongs_to_response(self.text, found.start(), found.end()):
                yield self._at(found)
        for pattern in (_BRACKETED, _TAGGED):
            for found in self._found(pattern):
                if not belongs_to_response(self.text, found.start(), found.end()):
                    yield self._at(found)

    def _names_the_score(self, found: re.Match[str]) -> bool:
        """Whether the label means the verdict, not a criterion ("Accuracy score"), a remark or a heading."""
        before = self.text[max(0, found.start() - 40) : found.start()]
        if not self._own_name(found):
            return False
        end = self._end_of_score(found)
        if not found["link"].strip() and not found["cjk"]:
            firm = found["firm"] and found["firm"].casefold() != "grade"
            return bool(firm and _LINE_START.search(before) and _ENDS.match(self.text, end))
        return not found["vague"] or _FOLLOWS.match(self.text, end) is not None

    def _own_name(self, found: re.Match[str]) -> bool:
        """Whether the word before a label leaves it the verdict's ("final score", not "clarity score")."""
        before = self.text[max(0, found.start() - 40) : found.start()]
        name = _ITS_NAME.search(before.rpartition("\n")[2])
        return name is None or _OWN_NAMES.fullmatch(name[1]) is not None

    def _weak(self) -> Iterator[float]:
        for pattern in (_FRACTION, _GIVEN, _STATED, _ON_SCALE):
            for found in self._found(pattern):
                end = self._end_of_score(found)
                spoiled = self._spoiled(found.end())
                if pattern is _FRACTION and not spoiled and _ALTERNATIVE.match(self.text, end):
                    yield math.nan
                if not (spoiled or _FOLLOWS.match(self.text, end)) or (spoiled and pattern is _FRACTION):
                    continue
                if self._criterion(found) or (pattern is _STATED and not self._own_name(found)):
                    continue
                if belongs_to_response(self.text, found.start(), end):
                    continue
                yield math.nan if self._hedged(found.start(), end) else self._at(found)

    def _criterion(self, found: re.Match[str]) -> bool:
        line = self.text[max(0, found.start() - 80) : found.start()]
        return _CRITERION.search(line) is not None

    def _hedged(self, start: int, end: int) -> bool:
        lead = re.split(r"[.!?;\n]", self.text[max(0, start - 120) : start])[-1]
        trail = re.split(r"[.!?;\n]", self.text[end : end + 80])[0]
        return bool(_HEDGED.search(lead) or re.search(r"\b(?:if|unless|but)\b", trail))

    def _bare(self) -> Iterator[float]:
        word = _ONE_WORD.fullmatch(self.text)
        if word:
            yield self._scaled(float(_WORDS[word["word"].casefold()]))
        opening = _OPENING.match(self.text)
        if opening:
            yield self._at(opening)
        for found in self._found(_ALONE):
            if not belongs_to_response(self.text, found.start(), found.end()):
                yield self._at(found)

    def _at(self, found: re.Match[str]) -> float:
        """The value of a candidate with what stands around its number; NaN when that makes it another thing."""
        groups = found.groupdict()
        number = groups.get("num") or groups.get("boxed")
        aside = groups.get("aside")
        if aside and (last := _LAST_NUMBER.search(aside)) and int(last[1]) != self.scale[1]:
            return math.nan
        if self._spoiled(found.end()) or self._may_be_cut(self._end_of_score(found)):
            return math.nan
        if number is None:
            return self._scaled(float(_WORDS[groups["word"].casefold()]))
        return self._scaled(_readable(number))

    def _spoiled(self, end: int) -> bool:
        denominator = _DENOMINATOR.match(self.text, end)
        if denominator is not None:
            return not _is_best(denominator, self.scale[1]) or _RANGE.match(self.text, denominator.end()) is not None
        return _RANGE.match(self.text, end) is not None or _SPOILED.match(self.text, end) is not None

    def _end_of_score(self, found: re.Match[str]) -> int:
        denominator = _DENOMINATOR.match(self.text, found.end())
        return denominator.end() if denominator else found.end()

    def _may_be_cut(self, end: int) -> bool:
        return self.cut and "\n" not in self.text[end:] and len(self.text) - end < 16

    def _scaled(self, value: float) -> float:
        return value if self.scale[0] <= value <= self.scale[1] else math.nan
