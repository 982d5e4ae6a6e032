"""Instructions: what the fighters are asked, read from data files, checked, with ids and without duplicates."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from sparta_api.config.file import resolve_path
from sparta_api.config.keys import nearest
from sparta_api.data.rows import TEXT_COLUMN, Rows, open_rows
from sparta_api.errors import ConfigError

Message = dict[str, str]

DEFAULT_FIELD = "prompt"
USUAL_FIELDS = ("instruction", "question", "text", "messages")
"""Where the default field is lacking, the only one of these that the rows have is taken."""

_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: chat messages that end with the user's, and the right answer where the data has one."""

    id: str
    prompt: list[Message]
    answer: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    """What else the row holds that somebody asked for."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """The instructions in the order of the source; `duplicates` counts the exact ones that were left out."""

    items: list[Instruction]
    duplicates: int


def read_instructions(path: str, field: str, base_dir: Path, keep: Sequence[str] = ()) -> InstructionSet:
    """Reads .jsonl .json .csv .tsv .parquet .txt (relative to `base_dir`) or hf:ORG/NAME[:SPLIT].

    `field` holds a string or a list of chat messages. An instruction's id is its row's `id`, else a hash of the
    messages; `keep` names further fields to keep, where rows have them. Raises ConfigError with file:line for
    everything that is wrong with the data.
    """
    local = None if path.startswith("hf:") else resolve_path(path, base_dir)
    source = open_rows(path, local)
    one_column = local is not None and local.suffix.lower() == ".txt"
    reader = _Reader(TEXT_COLUMN if one_column else field, source, keep)
    for position, row in source.rows:
        reader.add(position, row)
    if not reader.items:
        raise ConfigError(f"{local or path}: there is no instruction in it")
    return InstructionSet(reader.items, reader.duplicates)


class _Reader:
    """Collects instructions from rows."""

    def __init__(self, field: str, source: Rows, keep: Sequence[str]) -> None:
        self.field = field
        self.keep = keep
        self.place = source.place
        self.items: list[Instruction] = []
        self.duplicates = 0
        self.seen: set[bytes] = set()
        self.ids: dict[str, int] = {}

    def add(self, position: int, row: dict[str, Any]) -> None:
        """Takes one row, or counts it as a duplicate."""
        if not self.ids and self.field == DEFAULT_FIELD and self.field not in row:
            self.field = _usual_field(row)
        if self.field not in row:
            have = ", ".join(map(str, row)) or "none"
            meant = nearest(self.field, [str(key) for key in row])
            clause = meant if "did you mean" in meant else "; set instructions.field"
            raise ConfigError(f"{self.place(position)}: no field '{self.field}'; the fields are: {have}{clause}")
        prompt = self._messages(row[self.field], position)
        digest = hashlib.sha256(orjson.dumps(prompt)).digest()
        if digest in self.seen:
            self.duplicates += 1
            return
        self.seen.add(digest)
        name = row.get("id")
        name = digest.hex()[:16] if name is None or name == "" else name if isinstance(name, str) else _plain(name)
        if name in self.ids:
            earlier = self.place(self.ids[name])
            raise ConfigError(f"{self.place(position)}: the id '{name}' belongs to another instruction ({earlier})")
        self.ids[name] = position
        answer = None if self.field == "answer" else row.get("answer")
        fields = {name: row[name] for name in self.keep if row.get(name) is not None}
        self.items.append(Instruction(name, prompt, None if answer in (None, "") else _plain(answer), fields))

    def _messages(self, value: Any, position: int) -> list[Message]:
        if isinstance(value, str):
            if not value.strip():
                raise self._wrong(position, "is empty")
            return [{"role": "user", "content": value}]
        if not isinstance(value, list) or not value:
            raise self._wrong(position, "is neither a text nor a list of chat messages")
        messages = [self._message(message, index, position) for index, message in enumerate(value)]
        if messages[-1]["role"] != "user":
            raise self._wrong(position, f"ends with the {messages[-1]['role']}; the last message has to be the user's")
        return messages

    def _message(self, message: Any, index: int, position: int) -> Message:
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if role not in _ROLES:
            raise self._wrong(position, f"has a message [{index}] without a role out of {', '.join(_ROLES)}")
        if not isinstance(content, str) or not content.strip():
            raise self._wrong(position, f"has a message [{index}] without a text as its content")
        if role == "system" and index > 0:
            raise self._wrong(position, f"has a system message at [{index}]; only the first may be one")
        return {"role": role, "content": content}

    def _wrong(self, position: int, text: str) -> ConfigError:
        return ConfigError(f"{self.place(position)}: '{self.field}' {text}")


def _usual_field(row: dict[str, Any]) -> str:
    found = [name for name in USUAL_FIELDS if name in row]
    return found[0] if len(found) == 1 else DEFAULT_FIELD


def _plain(value: Any) -> str:
    """A value of a row as text."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
