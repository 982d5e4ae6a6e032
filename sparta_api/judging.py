"""What a judge is asked about a response, and what its reply is worth (rule 2 of docs/algorithm.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparta_api.config import TribeConfig
from sparta_api.expected import expected_score, parse_label
from sparta_api.prompts import Template, boundary, judge_messages, template_for
from sparta_api.scores import parse_score
from sparta_api.wire import Answer

REASK_TEMPERATURE = 0.5
TOP_LOGPROBS = 20

Message = dict[str, Any]


@dataclass(slots=True)
class Score:
    """What a reply says: `value` is None when it holds no score; `mass` is the probability on score labels."""

    value: float | None
    mass: float | None = None


class Bench:
    """The judges' side of a run: the prompt, the request fields, and reading scores."""

    def __init__(self, config: TribeConfig, iteration: int) -> None:
        judging = config.judging
        self._judging = judging
        self._seed = config.seed
        self._iteration = iteration
        self._template: Template = template_for(judging)
        self._expected = judging.scoring == "expected"
        first: dict[str, Any] = {"temperature": judging.temperature, "max_tokens": judging.max_tokens}
        if self._expected:
            first |= {"logprobs": True, "top_logprobs": TOP_LOGPROBS}
        elif judging.enforces_json:
            first["response_format"] = score_format(judging.scale)
        self._fields = first
        self._reask = {**first, "temperature": max(judging.temperature, REASK_TEMPERATURE)}

    def messages(self, instruction: list[Message], response: str, duel: int, fighter: str) -> list[Message]:
        """The question about one response; the same for all judges, so that prefix caches hit."""
        return judge_messages(
            self._template,
            instruction=instruction,
            response=response,
            scale=self._judging.scale,
            boundary=boundary(self._seed, self._iteration, duel, fighter),
            expected=self._expected,
        )

    def fields(self, attempt: int) -> dict[str, Any]:
        """The request fields of the n-th time of asking, counted from 1."""
        return dict(self._fields if attempt == 1 else self._reask)

    def score(self, answer: Answer) -> Score:
        """The score in a judge's answer."""
        if not self._expected:
            return Score(parse_score(answer.content, self._judging.scale, answer.finish_reason))
        expected = expected_score(answer.logprobs, self._judging.scale)
        if expected is not None and expected.mass >= self._judging.min_label_mass:
            return Score(expected.score, expected.mass)
        text = parse_label(answer.content, self._judging.scale, answer.finish_reason)
        return Score(text, expected.mass if expected else None)


def score_format(scale: tuple[int, int]) -> dict[str, Any]:
    """The response_format that makes a server answer with {"score": n}."""
    return {
        "type": "json_schema",
        "json_schema": {
            "name": "score",
            "strict": True,
            "schema": {
                "type": "object",
                "properties": {"score": {"type": "integer", "enum": list(range(scale[0], scale[1] + 1))}},
                "required": ["score"],
                "additionalProperties": False,
            },
        },
    }
