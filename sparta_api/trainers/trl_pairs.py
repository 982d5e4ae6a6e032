"""Preference pairs as the local trainer needs them: with the member's system text, and none that cannot teach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparta_api.data.journal import read_lines
from sparta_api.errors import TrainingError
from sparta_api.trainers.upload import member_prompt

Message = dict[str, Any]


@dataclass(frozen=True)
class Pair:
    """One row for TRL: the conversation up to the answer, and the two answers as one message each."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]

    def row(self) -> dict[str, list[Message]]:
        """The row in TRL's conversational form."""
        return {"prompt": self.prompt, "chosen": self.chosen, "rejected": self.rejected}


@dataclass
class Selection:
    """What is left to train on, why pairs were dropped, and what looks wrong."""

    pairs: list[Pair] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)


def load_tokenizer(base_model: str) -> Any:
    """The base model's tokenizer. Raises TrainingError when it has no chat template."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(base_model)
    except (OSError, ValueError) as error:
        raise TrainingError(f"the tokenizer of {base_model} cannot be loaded: {first_line(error)}") from error
    if not tokenizer.chat_template:
        raise TrainingError(
            f"the tokenizer of {base_model} has no chat template, so training would not see what the server sees; "
            "use an instruction-tuned model, or put its chat_template.jinja beside the tokenizer"
        )
    return tokenizer


def read_pairs(path: Path, system: str | None, fold: bool) -> list[Pair]:
    """All pairs of a preference file. Raises TrainingError that names file and line of a damaged row."""
    pairs = []
    for number, (row, _, _) in enumerate(read_lines(path), start=1):
        try:
            prompt, chosen, rejected = (_messages(row[name]) for name in ("prompt", "chosen", "rejected"))
        except (KeyError, TypeError) as error:
            raise TrainingError(f"{path}:{number}: not a preference pair ({error!r})") from None
        pairs.append(Pair(member_prompt(prompt, system, fold), chosen, rejected))
    return pairs


def _messages(value: Iterable[Message]) -> list[Message]:
    return [{"role": message["role"], "content": message["content"]} for message in value]


def select(pairs: list[Pair], tokenizer: Any, max_length: int, end_tokens: set[int]) -> Selection:
    """Keeps the pairs that teach something within `max_length` tokens of prompt and answer together.

    Dropped are prompts that leave no room for an answer (`prompt_too_long`) and answers that do not differ
    in what is left of them (`identical`). `end_tokens` are the ids that end an answer when it is sampled.
    """
    selection = Selection()
    for pair in pairs:
        prompt = _tokens(tokenizer, pair.prompt, add_generation_prompt=True)
        chosen, rejected = (_tokens(tokenizer, pair.prompt + answer) for answer in (pair.chosen, pair.rejected))
        if len(prompt) >= max_length:
            selection.dropped["prompt_too_long"] += 1
        elif chosen[:max_length] == rejected[:max_length]:
            selection.dropped["identical"] += 1
        else:
            selection.pairs.append(pair)
            _notice(selection, prompt, chosen, end_tokens)
    return selection


def _notice(selection: Selection, prompt: list[int], chosen: list[int], end_tokens: set[int]) -> None:
    notes = []
    if chosen[: len(prompt)] != prompt:
        notes.append(
            "the chat template writes a prompt differently when an answer follows it, so the model is trained on "
            "another context than it is asked with"
        )
    if end_tokens and not end_tokens & set(chosen[len(prompt) :]):
        notes.append("the chat template does not end an answer with a stop token, so the model never learns to stop")
    selection.warnings.extend(note for note in notes if note not in selection.warnings)


def _tokens(tokenizer: Any, messages: list[Message], add_generation_prompt: bool = False) -> list[int]:
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=True
    )
    return list(encoded["input_ids"])


def first_line(error: Exception) -> str:
    """The first line of a library's message."""
    return str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
