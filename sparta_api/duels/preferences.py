"""Preference pairs: from duels to rows, their checks, and the bytes that trainers and other tools read.

Rows are TRL's conversational form with an explicit prompt. The prompt is the instruction alone; whoever trains
a member puts its own system prompt in front.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, cast

import orjson

from sparta_api.config.tribe import TribeConfig
from sparta_api.errors import ConfigError
from sparta_api.ratings.reputation import TIE

Message = dict[str, Any]
"""A chat message: `role`, `content`, and whatever else the instruction's source gave."""

_INPUT_ROLES = ("system", "user", "assistant", "tool")
_LAST_ROLES = ("user", "tool")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class Preference(TypedDict):
    """A row of preferences.jsonl. `margin` is the distance of the two weighted scores, in points."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    duel: int
    chosen_member: str
    rejected_member: str
    margin: float


@dataclass(slots=True)
class PairCounts:
    """What became of an iteration's duels."""

    pairs: int = 0
    ties: int = 0
    void: int = 0
    identical: int = 0
    """Duels with a winner whose two texts are the same but for surrounding white space."""


def build(
    duels: Iterable[Mapping[str, Any]],
    responses: Iterable[Mapping[str, Any]],
    prompts: Callable[[str], list[Message]],
    min_margin: float = 0.0,
    counts: PairCounts | None = None,
) -> Iterator[Preference]:
    """One row for every duel that has a winner, in duel order; `counts` is filled on the way.

    `duels` are rows of duels.jsonl in duel order, `responses` rows of responses.jsonl in nearly that order: only
    those of duels ahead are kept in memory. `prompts` gives the messages of an instruction id. A margin of at
    most max(`min_margin`, 1e-9) is a tie. Raises ConfigError when a fighter's response was not recorded.
    """
    counts = PairCounts() if counts is None else counts
    answers = Answers(responses)
    for duel in duels:
        if duel["void"] is not None:
            counts.void += 1
            continue
        winner = duel["winner"]
        if winner is None or duel["margin"] <= max(min_margin, TIE):
            counts.ties += 1
            continue
        a, b = duel["fighters"]
        loser = b if winner == a else a
        texts = answers.of(duel["duel"], (winner, loser))
        if texts[0].strip() == texts[1].strip():
            counts.identical += 1
            continue
        counts.pairs += 1
        yield {
            "prompt": prompts(duel["instruction"]),
            "chosen": [{"role": "assistant", "content": texts[0]}],
            "rejected": [{"role": "assistant", "content": texts[1]}],
            "duel": duel["duel"],
            "chosen_member": winner,
            "rejected_member": loser,
            "margin": duel["margin"],
        }


def configured(
    config: TribeConfig,
    iteration: int,
    duels: Iterable[Mapping[str, Any]],
    responses: Iterable[Mapping[str, Any]],
    prompts: Callable[[str], list[Message]],
    counts: PairCounts,
) -> Iterator[Preference]:
    """The rows of `build` under `preferences`, turned into a control where that is wanted."""
    pairs = build(duels, responses, prompts, config.preferences.min_margin, counts)
    return shuffled(pairs, config.seed, iteration) if config.preferences.control == "shuffled" else pairs


def shuffled(pairs: Iterable[Preference], seed: int, iteration: int) -> Iterator[Preference]:
    """The same pairs with chosen and rejected as a fair coin falls: a control without any verdict in it."""
    for pair in pairs:
        coin = hashlib.sha256(f"{seed}/{iteration}/{pair['duel']}/control".encode()).digest()[0] & 1
        if not coin:
            yield pair
            continue
        chosen, rejected = pair["rejected"], pair["chosen"]
        names = (pair["rejected_member"], pair["chosen_member"])
        yield {**pair, "chosen": chosen, "rejected": rejected, "chosen_member": names[0], "rejected_member": names[1]}


class Answers:
    """Looks up responses while reading them once, for duels in ascending order."""

    def __init__(self, responses: Iterable[Mapping[str, Any]]) -> None:
        self._responses = iter(responses)
        self._ahead: dict[int, dict[str, str]] = {}
        self._current = 0

    def of(self, duel: int, members: tuple[str, str]) -> tuple[str, str]:
        """The two members' texts in a duel; ConfigError when one was not recorded."""
        for passed in range(self._current, duel):
            self._ahead.pop(passed, None)
        self._current = duel
        known = self._ahead.setdefault(duel, {})
        while not all(member in known for member in members):
            row = next(self._responses, None)
            if row is None:
                missing = next(member for member in members if member not in known)
                raise ConfigError(
                    f"duel {duel} has a winner, but responses.jsonl of its iteration holds no response of "
                    f"'{missing}' to it: restore that file, or start a new run"
                )
            self._keep(row)
        return known[members[0]], known[members[1]]

    def _keep(self, row: Mapping[str, Any]) -> None:
        if row["duel"] >= self._current and isinstance(row.get("content"), str):
            self._ahead.setdefault(row["duel"], {}).setdefault(row["fighter"], row["content"])


def pair_problem(row: Mapping[str, Any]) -> str | None:
    """What a trainer or a provider would stumble over in a row, or None.

    The rules are the union of what TRL, Together, OpenAI and Azure ask for: text messages with known roles, the
    system message first, the prompt ending with the user's (or a tool's) message, and exactly one assistant
    message that is not empty on either side, with different texts.
    """
    problem = _prompt_problem(row.get("prompt"))
    if problem:
        return problem
    for side in ("chosen", "rejected"):
        problem = _output_problem(side, row.get(side))
        if problem:
            return problem
    if row["chosen"][0]["content"].strip() == row["rejected"][0]["content"].strip():
        return "chosen and rejected are identical"
    return None


def validate_pairs(rows: Iterable[Mapping[str, Any]], source: str = "preferences.jsonl") -> Iterator[Preference]:
    """Hands the rows on as long as they are sound; rows count from 1.

    Raises ConfigError with `source`, the row and what is wrong with it (see `pair_problem`).
    """
    for number, row in enumerate(rows, 1):
        problem = pair_problem(row)
        if problem:
            raise ConfigError(f"{source}, row {number}: {problem}; correct or remove the row")
        yield cast(Preference, row)


def _prompt_problem(prompt: object) -> str | None:
    if not isinstance(prompt, list) or not prompt:
        return "prompt must be a list of messages that is not empty"
    for place, message in enumerate(prompt):
        problem = _message_problem(f"prompt[{place}]", message, _INPUT_ROLES)
        if problem:
            return problem
        if message["role"] == "system" and place:
            return f"prompt[{place}].role is 'system', which only the first message may be"
    last = prompt[-1]["role"]
    if last not in _LAST_ROLES:
        return f"prompt[{len(prompt) - 1}].role is '{last}', but the prompt must end with a user or tool message"
    return None


def _output_problem(side: str, output: object) -> str | None:
    if not isinstance(output, list) or len(output) != 1:
        return f"{side} must be a list of exactly one message"
    return _message_problem(f"{side}[0]", output[0], ("assistant",)) or (
        None if output[0]["content"].strip() else f"{side}[0].content is empty"
    )


def _message_problem(place: str, message: object, roles: tuple[str, ...]) -> str | None:
    if not isinstance(message, dict):
        return f"{place} must be a message with role and content"
    role = message.get("role")
    if role not in roles:
        shown = "missing" if role is None else repr(role)
        return f"{place}.role is {shown}, but must be {' or '.join(roles)}"
    if not isinstance(message.get("content"), str):
        return f"{place}.content must be a string"
    return None


def export_trl(rows: Iterable[Preference]) -> Iterator[bytes]:
    """The lines of preferences.jsonl, as TRL's DPOTrainer reads them: always the same bytes for the same rows."""
    for row in rows:
        yield _line({key: row[key] for key in Preference.__annotations__})  # type: ignore[literal-required]


def export_openai(rows: Iterable[Preference], system_prompt: str | None = None) -> Iterator[bytes]:
    """The lines of a preference file for OpenAI, Azure and Together: always the same bytes for the same rows.

    `system_prompt` goes in front of each prompt; one that the instruction brings along follows it in the same
    message. Together finds a file that it already has by its hash, which is why no byte may vary.
    """
    for row in rows:
        yield _line(
            {
                "input": {"messages": with_system(row["prompt"], system_prompt)},
                "preferred_output": row["chosen"],
                "non_preferred_output": row["rejected"],
            }
        )


def with_system(prompt: list[Message], system_prompt: str | None) -> list[Message]:
    """The prompt under a system prompt; a system message of its own follows in the same message."""
    if not system_prompt:
        return prompt
    if prompt[0]["role"] == "system":
        joined = f"{system_prompt}\n\n{prompt[0]['content']}"
        return [{**prompt[0], "content": joined}, *prompt[1:]]
    return [{"role": "system", "content": system_prompt}, *prompt]


def _line(row: object) -> bytes:
    try:
        return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
    except orjson.JSONEncodeError:
        return orjson.dumps(_encodable(row), option=orjson.OPT_APPEND_NEWLINE)


def _encodable(value: Any) -> Any:
    """The value with lone surrogates, which UTF-8 cannot hold, replaced by U+FFFD."""
    if isinstance(value, str):
        return _LONE_SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return value
