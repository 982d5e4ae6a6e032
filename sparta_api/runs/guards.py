"""What tells a model that got better from one that collapsed: figures of its held-out answers, before and after.

A preference can be met by saying nothing, and DPO finds that out. So a share of answers that meet the verifiers is
read together with how long answers are, how much they repeat themselves, how many different words they know, and how
likely they are to the model that the run began with.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sparta_api.config.section import NonNegativeFloat, PositiveFloat, Probability, Section

Z_95 = 1.959964
"""The 97.5 % point of the normal distribution."""
_WORD = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*")


class Guards(Section):
    """When a member's held-out answers count as collapsed, compared with those before the run."""

    min_words: NonNegativeFloat = 4.0
    """The least mean length in words."""
    max_repetition: Probability = 0.25
    """The largest share of trigrams that an answer has held before."""
    min_distinct: Probability = 0.5
    """The least share of the variety (different words or word pairs, of all) before that has to be left."""
    max_surprise: PositiveFloat = 0.7
    """How much less likely a token may be to the initial model on average than before, in nats (0.7: half)."""


@dataclass(frozen=True, slots=True)
class Figures:
    """A set of answers in figures. Shares are 0..1."""

    answers: int
    words: float
    """Mean length."""
    repetition: float
    """Share of the trigrams of words that the same answer has held before."""
    distinct_1: float
    """Different words as a share of all words of all answers (Li et al. 2016, section 5.2)."""
    distinct_2: float
    """The same for pairs of neighbours."""
    logprob: float | None = None
    """Mean natural logarithm of a token's probability under the initial model; None where nobody tells it."""

    def to_json(self) -> dict[str, Any]:
        """A plain mapping with stable keys."""
        return asdict(self)


def figures(answers: Sequence[str], logprobs: Iterable[tuple[float, int]] = ()) -> Figures:
    """The figures of answers; `logprobs` are sums over an answer's tokens with their number."""
    texts = [[word.casefold() for word in _WORD.findall(answer)] for answer in answers]
    trigrams = [list(_runs(words, 3)) for words in texts]
    known = list(logprobs)
    return Figures(
        answers=len(answers),
        words=_share(sum(map(len, texts)), len(texts)),
        repetition=_share(sum(len(t) - len(set(t)) for t in trigrams), sum(map(len, trigrams))),
        distinct_1=_variety(texts, 1),
        distinct_2=_variety(texts, 2),
        logprob=math.fsum(total for total, _ in known) / sum(n for _, n in known) if known else None,
    )


def _runs(words: Sequence[str], length: int) -> Iterator[tuple[str, ...]]:
    return zip(*(words[start:] for start in range(length)), strict=False)


def _variety(texts: Iterable[Sequence[str]], length: int) -> float:
    runs = [run for words in texts for run in _runs(words, length)]
    return _share(len(set(runs)), len(runs))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def broken(before: Figures, now: Figures, guards: Guards) -> list[str]:
    """The guards that a member's answers break, one clause each; none is a model that still answers."""
    found = []
    if now.words < min(guards.min_words, before.words):
        found.append(f"answers have {now.words:.1f} words on average, {before.words:.1f} before")
    if now.repetition > max(guards.max_repetition, before.repetition):
        found.append(f"{now.repetition:.0%} of their trigrams are repetitions, {before.repetition:.0%} before")
    variety = ((now.distinct_1, before.distinct_1, "words"), (now.distinct_2, before.distinct_2, "word pairs"))
    for left, first, what in variety:
        if left < guards.min_distinct * first:
            found.append(f"{left:.0%} of their {what} are different ones, {first:.0%} before")
    if now.logprob is not None and before.logprob is not None and before.logprob - now.logprob > guards.max_surprise:
        told = f"{now.logprob:.2f} on average, {before.logprob:.2f} before"
        found.append(f"a token's log-likelihood under the initial model is {told}")
    return found


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """The 95 % interval of a share by Wilson (1927): (low, high), (0, 1) without trials."""
    if not trials:
        return 0.0, 1.0
    z2 = Z_95 * Z_95
    share = successes / trials
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z_95 * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials * trials)) / (1 + z2 / trials)
    return max(0.0, centre - half), min(1.0, centre + half)
