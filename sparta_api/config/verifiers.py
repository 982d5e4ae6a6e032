"""The keys of `judging.verifiers` in `tribe.yaml`: programs that score a response on the judging scale.

What each kind does stands in docs/judging.md. `sparta_api.config.tribe` joins the sections to one union, told apart by
`kind`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from sparta_api.config.section import Flag, NonNegativeInt, PositiveFloat, PositiveInt, Section, Text
from sparta_api.trainers.config import Command

RESERVED_FIELDS = ("id", "prompt", "answer")
"""Fields of an instruction that hold what their names say and no limit."""


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"this is no regular expression ({error})") from None
    return text


def _one_group(text: str) -> str:
    if re.compile(text).groups != 1:
        raise ValueError("the expression needs one group, around the number: at most (\\d+) words")
    return text


def _field_name(text: str) -> str:
    if text in RESERVED_FIELDS:
        raise ValueError(f"the field '{text}' of an instruction holds no limit; name another")
    return text


def _function_name(text: str) -> str:
    module, _, function = text.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), function]):
        raise ValueError("a function is written module:function")
    return text


Pattern = Annotated[Text, AfterValidator(_pattern)]


class VerifierSection(Section):
    """What all verifiers have."""

    weight: PositiveFloat | None = None
    """In points of reputation, as that of a judge; `reputation.initial` where it is absent. It never changes."""


class Exact(VerifierSection):
    """Best score where the response is the instruction's `answer`, else the worst; spaces at the ends don't count."""

    kind: Literal["exact"]
    ignore_case: Flag = False


class Number(VerifierSection):
    """Best score where the last number of the response is the one of the instruction's `answer`."""

    kind: Literal["number"]
    tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)] = 1e-9
    """The allowed distance from the answer's number."""


class Choice(VerifierSection):
    """Best score where the response chooses the letter of the instruction's `answer`.

    The answer is a letter, or the position of the right option, counted from 0.
    """

    kind: Literal["choice"]
    letters: Annotated[Text, Field(pattern="^[A-Z]{2,26}$")] = "ABCD"


class WordLimit(VerifierSection):
    """Best score within the limit, falling to the worst at twice as many words; the worst for saying nothing."""

    kind: Literal["word_limit"]
    field: Annotated[Text, AfterValidator(_field_name)] | None = None
    """The field of the instruction's row that holds the limit; `pattern` is used where a row has none."""
    pattern: Annotated[Pattern, AfterValidator(_one_group)] = (
        r"(?i)(?:at most|no more than|up to|within|under) (\d+) words"
    )
    """Finds the limit in the instruction's last message; its group is the number."""
    min_words: PositiveInt = 5
    """Different words that a response needs to be one at all (fewer where the limit is lower)."""
    min_new_words: NonNegativeInt = 0
    """So many of them have four letters or more and do not stand in the instruction: what a bare copy of it lacks."""
    on_topic: Flag = False
    """Whether it has to take up a word of four letters or more from the instruction, the limit left out."""
    sentence: Flag = False
    """Whether it has to end as a sentence does."""


class OutsideSection(VerifierSection):
    """Verifiers that run in processes of their own, which a hostile response cannot hold up."""

    timeout_s: PositiveFloat = 10
    """Of one response; after it the verifier abstains."""
    concurrency: PositiveInt = 1
    """Responses that are verified at the same time."""


class Regex(OutsideSection):
    """Best score where the pattern is found in the response, else the worst."""

    kind: Literal["regex"]
    pattern: Pattern
    whole: Flag = False
    """Whether the pattern has to match the whole response."""
    forbidden: Flag = False
    """Whether finding it earns the worst score instead."""


class JsonSchema(OutsideSection):
    """Best score where the response is JSON (a fence around it is taken off) that fits the schema, else the worst."""

    kind: Literal["json_schema"]
    json_schema: dict[str, Any]


class PythonFunction(OutsideSection):
    """A function of the user, called with the response and the instruction's row.

    It returns a number on the judging scale, true or false (best or worst), or None to abstain.
    """

    kind: Literal["python"]
    function: Annotated[Text, AfterValidator(_function_name)]
    """module:function; modules beside tribe.yaml are found."""


class CommandVerifier(OutsideSection):
    """A command of the user, started once a response, in the directory of tribe.yaml.

    Its standard input is {"response", "instruction": {"id", "prompt", "answer", ...}, "scale": [worst, best]}; its
    standard output is a number, true, false, null, or {"score": one of these}.
    """

    kind: Literal["command"]
    command: Command


Verifier = Annotated[
    Exact | Number | Choice | WordLimit | Regex | JsonSchema | PythonFunction | CommandVerifier,
    Field(discriminator="kind"),
]
