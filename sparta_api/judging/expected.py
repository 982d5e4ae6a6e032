"""Expected scores: the mean over the score labels' probabilities instead of the sampled number.

A judge answers with one digit, so that every level of the scale is one token, and its score is
`sum(p(label) * value(label)) / sum(p(label))` over the labels (G-Eval, section 2.3: Liu et al. 2023,
arXiv 2303.16634). It is finer than a sampled whole number and removes most ties.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

from sparta_api.judging.scores import parse_score

_LONGEST_PREFIX = 64
_SKIPPED = re.compile(
    r"[\s{\[(<\"'`*_#:=>|]*(?:(?:json|score|rating|grade|answer|final|overall)[\s\"'`*_:=>|{\[]*)*", re.I
)
_NUMBER_GOES_ON = re.compile(r"\s*/|[.,]?\d")
_MARKS = " \t\n\r\u0120\u2581\u010a"
"""Whitespace, and the signs that stand for it in vocabularies (Ġ, ▁, Ċ)."""


@dataclass(frozen=True, slots=True)
class Expected:
    """An expected score on the judging scale, and the probability that lay on labels (0..1)."""

    score: float
    mass: float


@lru_cache(maxsize=64)
def labels(scale: tuple[int, int]) -> tuple[str, ...]:
    """The one-token answers of a scale, worst first; the i-th stands for `scale[0] + i`.

    A scale within 0..9 uses its own digits; any other of at most ten levels uses 0, 1, 2, ...
    Raises ValueError for more than ten levels or fewer than two.
    """
    low, high = scale
    levels = high - low + 1
    if not 2 <= levels <= 10:
        raise ValueError(f"an expected score needs 2 to 10 levels, and {low} to {high} has {levels}")
    first = low if low >= 0 and high <= 9 else 0
    return tuple(str(first + i) for i in range(levels))


def label_scale(scale: tuple[int, int]) -> tuple[int, int]:
    """The worst and the best label of a scale, as the judge is told."""
    names = labels(scale)
    return int(names[0]), int(names[-1])


def parse_label(reply: str, scale: tuple[int, int], finish_reason: str = "stop") -> float | None:
    """The score behind a label in the text of a reply: the way out where log-probabilities are unusable."""
    shown = label_scale(scale)
    value = parse_score(reply, shown, finish_reason)
    return None if value is None else value - shown[0] + scale[0]


@lru_cache(maxsize=64)
def _values(scale: tuple[int, int]) -> dict[str, int]:
    """Every common spelling of a label token, with the value it stands for."""
    spellings: dict[str, int] = {}
    for i, label in enumerate(labels(scale)):
        for token in (label, chr(ord(label) + 0xFEE0)):
            for mark in ("", " ", "\u0120", "\u2581", "\n"):
                spellings[mark + token] = scale[0] + i
    return spellings


def expected_score(logprobs: Any, scale: tuple[int, int] = (1, 10)) -> Expected | None:
    """The mean score over the label tokens' probabilities, or None where there is nothing to read.

    `logprobs` is what the server sent, as decoded JSON: a choice, its `logprobs` object in the chat shape
    (`content[].top_logprobs`) or in the older one (`tokens`, `token_logprobs`, `top_logprobs`), or the list
    of content entries. The first token that is neither whitespace nor the opening of a JSON object or a
    "Score:" label decides; spellings of a label (leading space, Ġ7, ▁7, fullwidth) are added up. A label that
    is not listed is at most as probable as the least listed token and counts nothing; what is missing
    shows in `mass`. None too when the label is only the beginning of a longer number or a fraction. Never raises for
    malformed input.
    """
    values = _values(scale)
    best: dict[int, float] = {}
    prefix = ""
    steps = islice(_steps(logprobs), _LONGEST_PREFIX)
    for token, candidates in steps:
        prefix += token.strip(_MARKS) if token[:1] in _MARKS else token
        found = _on_labels(candidates, values)
        if sum(found.values()) > sum(best.values()):
            best = found
        if not _SKIPPED.fullmatch(prefix):
            if _value(token, values) is not None and _goes_on(next(steps, ("", {}))[0]):
                return None
            best = found
            break
    return _mean(best, scale)


def _mean(found: Mapping[int, float], scale: tuple[int, int]) -> Expected | None:
    mass = math.fsum(found.values())
    if mass <= 0.0:
        return None
    mean = math.fsum(value * p for value, p in found.items()) / mass
    return Expected(min(max(mean, float(scale[0])), float(scale[1])), min(mass, 1.0))


def _goes_on(token: str) -> bool:
    return _NUMBER_GOES_ON.match(token) is not None


def _value(token: str, values: Mapping[str, int]) -> int | None:
    value = values.get(token)
    if value is None and len(token) < 8:
        value = values.get(unicodedata.normalize("NFKC", token).strip(_MARKS))
    return value


def _on_labels(candidates: Mapping[str, float], values: Mapping[str, int]) -> dict[int, float]:
    """Probability per score value at one position."""
    found: dict[int, float] = {}
    for token, probability in candidates.items():
        value = _value(token, values)
        if value is not None:
            found[value] = found.get(value, 0.0) + probability
    return found


def _probability(logprob: Any) -> float | None:
    """exp(logprob) of a hostile number; None for what is no log-probability."""
    if isinstance(logprob, bool) or not isinstance(logprob, int | float):
        return None
    if logprob != logprob or logprob == math.inf:
        return None
    return 1.0 if logprob >= 0 else math.exp(max(logprob, -1e4))


def _steps(logprobs: Any) -> Iterator[tuple[str, dict[str, float]]]:
    """(emitted token, probability of each listed token) per position, from either shape."""
    if isinstance(logprobs, Mapping) and isinstance(logprobs.get("logprobs"), Mapping | list):
        logprobs = logprobs["logprobs"]
    if isinstance(logprobs, Mapping) and isinstance(logprobs.get("content"), list):
        logprobs = logprobs["content"]
    if isinstance(logprobs, list):
        return (_chat_step(entry) for entry in logprobs)
    if isinstance(logprobs, Mapping) and isinstance(logprobs.get("tokens"), list):
        return _legacy_steps(logprobs)
    return iter(())


def _chat_step(entry: Any) -> tuple[str, dict[str, float]]:
    if not isinstance(entry, Mapping):
        return "", {}
    listed = entry.get("top_logprobs")
    candidates: dict[str, float] = {}
    for item in [*(listed if isinstance(listed, list) else ()), entry]:
        if isinstance(item, Mapping):
            _add(candidates, item.get("token"), item.get("logprob"))
    token = entry.get("token")
    return token if isinstance(token, str) else "", candidates


def _legacy_steps(logprobs: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    def at(key: str, i: int) -> Any:
        column = logprobs.get(key)
        return column[i] if isinstance(column, list) and i < len(column) else None

    for i, token in enumerate(logprobs["tokens"]):
        listed = at("top_logprobs", i)
        candidates: dict[str, float] = {}
        for name, logprob in listed.items() if isinstance(listed, Mapping) else ():
            _add(candidates, name, logprob)
        _add(candidates, token, at("token_logprobs", i))
        yield token if isinstance(token, str) else "", candidates


def _add(candidates: dict[str, float], token: Any, logprob: Any) -> None:
    """The emitted token stands in the list as well at most servers; it counts once."""
    probability = _probability(logprob)
    if isinstance(token, str) and probability is not None and token not in candidates:
        candidates[token] = probability
