"""Whether a response is right, where its instruction carries an answer: a letter, a number, or a text.

The comparison is that of the verifiers `choice`, `number` and `exact`; docs/judging.md describes them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sparta_api.config.verifiers import Choice, Exact, Number
from sparta_api.judging.verifier_rules import ChoiceRule, ExactRule, NumberRule, Rule

_LETTER = re.compile(r"\s*\(?[A-J](?:[).:].*)?\s*\Z", re.DOTALL)
_NUMBER = re.compile(r"\s*[-+\u2212]?\$?[\d,]*\.?\d+(?:[eE][-+]?\d+)?%?\s*\Z")

_CHOICE = ChoiceRule(Choice(kind="choice", letters="ABCDEFGHIJ"))
_NUMERIC = NumberRule(Number(kind="number"))
_TEXT = ExactRule(Exact(kind="exact", ignore_case=True))


def rule_for(answer: str) -> Rule:
    """The rule that an answer calls for.

    A letter A to J, alone or before its option, is a choice; a number, or a solution that ends in #### and one, is a
    number; anything else has to be the whole response but for case and space around it.
    """
    if _LETTER.match(answer):
        return _CHOICE
    if _NUMBER.match(answer) or "####" in answer:
        return _NUMERIC
    return _TEXT


def is_right(response: str, instruction: Mapping[str, Any]) -> bool:
    """Whether the response gives the instruction's `answer`."""
    return rule_for(instruction["answer"]).share(response, instruction) == 1.0
