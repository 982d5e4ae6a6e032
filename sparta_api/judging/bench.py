"""What a judge is asked about responses, and what its reply is worth (rule 2 of docs/algorithm.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any

from sparta_api.config.tribe import Judging, TribeConfig
from sparta_api.endpoints.wire import Answer
from sparta_api.judging.expected import expected_score, label_scale, parse_label
from sparta_api.judging.prompts import (
    PAIR_VERDICT,
    VERDICT,
    Template,
    boundary,
    judge_messages,
    pair_messages,
    template_for,
)
from sparta_api.judging.score_fields import PAIR, parse_fields, parse_pair
from sparta_api.judging.scores import parse_score

REASK_TEMPERATURE = 0.5
TOP_LOGPROBS = 20

Message = dict[str, Any]
Shown = tuple[str, ...]
"""The fighters whose responses one question shows, in their order."""


@dataclass(slots=True)
class Score:
    """What a reply says.

    `values` are the scores of the responses in the order in which they were shown, None when the reply holds none;
    `mass` is the probability on score labels; `criteria` are the scores of a rubric, per response.
    """

    values: tuple[float, ...] | None
    mass: float | None = None
    criteria: list[dict[str, float]] | None = None


class Orders:
    """Which responses a judge's questions show."""

    def __init__(self, judging: Judging) -> None:
        self._pairwise = judging.mode == "pairwise"

    def shows(self, fighters: tuple[str, str]) -> tuple[Shown, Shown]:
        """What a judge is shown in a duel: each response by itself, or both in both orders."""
        a, b = fighters
        return ((a, b), (b, a)) if self._pairwise else ((a,), (b,))


class Bench(Orders):
    """The judges' side of a run: the prompt, the request fields, and reading scores."""

    def __init__(self, config: TribeConfig, iteration: int) -> None:
        judging = config.judging
        super().__init__(judging)
        self._judging = judging
        self._seed = config.seed
        self._iteration = iteration
        self._template: Template = template_for(judging)
        self._expected = judging.scoring == "expected"
        self._sheet = _Sheet(judging) if judging.rubric else None
        self._rubric = "\n".join(f"- {c.name}: {c.description}" for c in judging.rubric) or None
        keys = self._sheet.keys if self._sheet else PAIR if self._pairwise else ("score",)
        self._verdict = self._sheet.verdict if self._sheet else PAIR_VERDICT if self._pairwise else VERDICT
        first: dict[str, Any] = {"temperature": judging.temperature, "max_tokens": judging.max_tokens}
        if self._expected:
            first |= {"logprobs": True, "top_logprobs": TOP_LOGPROBS}
        if judging.enforces_json:
            scale = label_scale(judging.scale) if self._expected else judging.scale
            first["response_format"] = score_format(scale, keys)
        self._fields = first
        self._reask = {**first, "temperature": max(judging.temperature, REASK_TEMPERATURE)}

    def messages(
        self,
        instruction: list[Message],
        responses: Sequence[str],
        duel: int,
        shown: Shown,
        reference: str | None = None,
    ) -> list[Message]:
        """The question about the responses of `shown`; the same for all judges, so that prefix caches hit."""
        line = boundary(self._seed, self._iteration, duel, "/".join(shown), "".join(responses))
        if self._pairwise:
            return pair_messages(
                self._template,
                instruction=instruction,
                responses=(responses[0], responses[1]),
                scale=self._judging.scale,
                boundary=line,
                rubric=self._rubric,
                reference=reference,
                verdict=self._verdict,
            )
        return judge_messages(
            self._template,
            instruction=instruction,
            response=responses[0],
            scale=self._judging.scale,
            boundary=line,
            expected=self._expected,
            rubric=self._rubric,
            reference=reference,
            verdict=self._verdict,
        )

    def fields(self, attempt: int) -> dict[str, Any]:
        """The request fields of the n-th time of asking, counted from 1."""
        return dict(self._fields if attempt == 1 else self._reask)

    def score(self, answer: Answer) -> Score:
        """The scores in a judge's answer."""
        scale = self._judging.scale
        if self._sheet is not None:
            return self._sheet.score(answer)
        if self._pairwise:
            return Score(parse_pair(answer.content, scale, answer.finish_reason))
        if not self._expected:
            return Score(_one(parse_score(answer.content, scale, answer.finish_reason)))
        expected = expected_score(answer.logprobs, scale)
        if expected is not None and expected.mass >= self._judging.min_label_mass:
            return Score((expected.score,), expected.mass)
        text = parse_label(answer.content, scale, answer.finish_reason)
        return Score(_one(text), expected.mass if expected else None)

    def doubt(self, answer: Answer) -> str | None:
        """Why an answer's score is read from its text and not from its probabilities; None where it is not."""
        if not self._expected:
            return None
        expected = expected_score(answer.logprobs, self._judging.scale)
        if not answer.logprobs:
            why = "the endpoint returns no log-probabilities"
        elif expected is None or expected.mass < self._judging.min_label_mass:
            share = expected.mass if expected else 0.0
            least = self._judging.min_label_mass
            why = f"{share:.1%} of the probability lies on score labels, min_label_mass is {least:.0%}"
        else:
            return None
        return f"judging.scoring: expected has no effect: {why}, so scores are whole numbers from the replies' text"


def _one(value: float | None) -> tuple[float] | None:
    return None if value is None else (value,)


class _Sheet:
    """The scores of a rubric: one per criterion, and for a pair one per criterion and response."""

    def __init__(self, judging: Judging) -> None:
        sides = ("_a", "_b") if judging.mode == "pairwise" else ("",)
        self._scale = judging.scale
        self._criteria = judging.rubric
        self._sides = [[f"{criterion.name}{side}" for criterion in judging.rubric] for side in sides]
        self.keys = tuple(key for side in self._sides for key in side)
        self.verdict = "{" + ", ".join(f'"{key}": n' for key in self.keys) + "}"

    def score(self, answer: Answer) -> Score:
        """The weighted mean over the criteria, per response; none where a criterion has no score."""
        found = parse_fields(answer.content, self.keys, self._scale, answer.finish_reason)
        if found is None:
            return Score(None)
        criteria = [
            {criterion.name: found[key] for criterion, key in zip(self._criteria, side, strict=True)}
            for side in self._sides
        ]
        total = fsum(criterion.weight for criterion in self._criteria)
        means = tuple(fsum(c.weight * scores[c.name] for c in self._criteria) / total for scores in criteria)
        return Score(means, criteria=criteria)


def score_format(scale: tuple[int, int], keys: Sequence[str] = ("score",)) -> dict[str, Any]:
    """The response_format that makes a server answer with a score under each key."""
    level = {"type": "integer", "enum": list(range(scale[0], scale[1] + 1))}
    return {
        "type": "json_schema",
        "json_schema": {
            "name": "score",
            "strict": True,
            "schema": {
                "type": "object",
                "properties": dict.fromkeys(keys, level),
                "required": list(keys),
                "additionalProperties": False,
            },
        },
    }
