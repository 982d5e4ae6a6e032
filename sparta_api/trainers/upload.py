"""The file that a provider trains on: an iteration's pairs, checked, in the providers' form, always the same bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from sparta_api.data.journal import read_lines, write_atomic
from sparta_api.duels.preferences import (
    Message,
    Preference,
    export_openai,
    export_trl,
    pair_problem,
    with_system,
)
from sparta_api.errors import ConfigError, TrainingError
from sparta_api.trainers.protocol import TrainingSpec

CHARACTERS_PER_TOKEN = 4
EMPTY, IDENTICAL, TOO_LONG = "empty", "identical", "too long"


@dataclass(frozen=True)
class Upload:
    """A preference file as it is sent. `tokens` is an estimate: prompt and answer of both sides, one epoch."""

    path: Path
    sha256: str
    pairs: int
    tokens: int
    dropped: dict[str, int] = field(default_factory=dict)

    def explain(self) -> str:
        """Such as '3 pairs, 2 dropped (identical)'."""
        gone = ", ".join(f"{number} dropped ({reason})" for reason, number in self.dropped.items())
        return f"{self.pairs} pairs" + (f", {gone}" if gone else "")


def write_upload(spec: TrainingSpec, form: str, max_length: int | None, minimum: int) -> Upload:
    """Writes the job's file next to its job.json: `form` is "openai" or "trl".

    Pairs with an empty side, two identical sides, or more than `max_length` tokens (by four characters a token)
    are dropped and counted. Raises ConfigError for rows that are broken otherwise, and TrainingError when fewer
    than `minimum` pairs are left.
    """
    dropped: dict[str, int] = {}
    tokens: list[int] = []
    data = b"".join((export_openai if form == "openai" else export_trl)(_sound(spec, max_length, dropped, tokens)))
    digest = hashlib.sha256(data).hexdigest()
    path = spec.directory / f"{spec.key}-{digest[:8]}.jsonl"
    upload = Upload(path, digest, len(tokens), sum(tokens), dropped)
    if upload.pairs < minimum:
        raise TrainingError(
            f"member '{spec.member}': {spec.preferences} leaves {upload.explain()}, but the trainer needs at least "
            f"{minimum}; play more instructions an iteration, or train this member elsewhere"
        )
    if not path.exists() or path.read_bytes() != data:
        write_atomic(path, data)
    return upload


def _sound(
    spec: TrainingSpec, max_length: int | None, dropped: dict[str, int], tokens: list[int]
) -> Iterator[Preference]:
    for number, (row, _, _) in enumerate(read_lines(spec.preferences), 1):
        problem = pair_problem(row)
        if problem is None:
            pair = cast(Preference, row)
            pair["prompt"] = member_prompt(pair["prompt"], spec.system_prompt, spec.fold_system)
            sides = _tokens(pair)
            if max_length is None or max(sides) <= max_length:
                tokens.append(sum(sides))
                yield pair
                continue
        reason = TOO_LONG if problem is None else _droppable(problem)
        if reason is None:
            raise ConfigError(f"{spec.preferences}:{number}: {problem}; correct or remove the line")
        dropped[reason] = dropped.get(reason, 0) + 1


def _droppable(problem: str) -> str | None:
    if problem.endswith("identical"):
        return IDENTICAL
    return EMPTY if problem.endswith(".content is empty") else None


def _tokens(pair: Preference) -> tuple[int, int]:
    """Estimated tokens of prompt and answer together, for either side."""
    prompt = sum(len(str(message["content"])) for message in pair["prompt"])
    chosen, rejected = (len(str(side[0]["content"])) for side in (pair["chosen"], pair["rejected"]))
    return (prompt + chosen) // CHARACTERS_PER_TOKEN + 1, (prompt + rejected) // CHARACTERS_PER_TOKEN + 1


def member_prompt(prompt: list[Message], system_prompt: str | None, fold: bool) -> list[Message]:
    """The prompt as the member sees it in a duel: its system prompt in front, or folded into the user's message."""
    messages = with_system(prompt, system_prompt)
    if not fold or messages[0]["role"] != "system" or len(messages) < 2:
        return messages
    first: dict[str, Any] = messages[1]
    return [{**first, "content": f"{messages[0]['content']}\n\n{first['content']}"}, *messages[2:]]
