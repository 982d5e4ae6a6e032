"""A run as it is opened: a new directory, or an old one that is continued with the same configuration.

Whatever would change results is refused with the names of the changed keys; whatever only says where and how
fast to ask is allowed and recorded in run.json.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson

from sparta_api.config.diff import Change, changed_keys
from sparta_api.config.file import LoadedTribe, dump_tribe, read_tribe
from sparta_api.config.tribe import TribeConfig
from sparta_api.data.instructions import Instruction, InstructionSet, read_instructions
from sparta_api.data.journal import write_atomic, write_lines
from sparta_api.data.rundir import RunDirectory
from sparta_api.errors import ConfigError
from sparta_api.judging.prompts import template_for
from sparta_api.judging.verifiers import unverifiable
from sparta_api.runs.bill import read_job, under_way

Message = dict[str, Any]


class InstructionStore:
    """The run's instructions.jsonl, looked up by id without holding the texts in memory.

    `ids` are in the order of the source.
    """

    def __init__(self, path: Path) -> None:
        self._places: dict[str, tuple[int, int]] = {}
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        offset = 0
        for line in iter(self._data.readline, b""):
            self._places[orjson.loads(line)["id"]] = (offset, len(line))
            offset += len(line)

    @property
    def ids(self) -> list[str]:
        """All ids in the order of the source."""
        return list(self._places)

    def row(self, instruction: str) -> dict[str, Any]:
        """The whole row of an instruction."""
        offset, length = self._places[instruction]
        row: dict[str, Any] = orjson.loads(self._data[offset : offset + length])
        return row

    def messages(self, instruction: str) -> list[Message]:
        """The chat messages of an instruction."""
        messages: list[Message] = self.row(instruction)["prompt"]
        return messages


@dataclass(slots=True)
class Session:
    """An opened run: its directory, its configuration, and run.json."""

    run: RunDirectory
    loaded: LoadedTribe
    record: dict[str, Any]
    """run.json as it stands."""
    changes: list[Change] = field(default_factory=list)
    """How the configuration differs from the one that the directory keeps; see `adopt`."""

    @property
    def config(self) -> TribeConfig:
        """The configuration with variables expanded and paths absolute."""
        return self.loaded.resolved

    @property
    def id(self) -> str:
        """The run's id, unique for ever."""
        return str(self.record["id"])

    def adopt(self) -> None:
        """Makes the changed configuration the run's own, once it is known to work."""
        if self.changes:
            at = datetime.now(UTC).isoformat(timespec="seconds")
            self.record["changes"] += [{"at": at, "key": c.path, "old": c.old, "new": c.new} for c in self.changes]
            write_atomic(self.run.tribe, dump_tribe(self.loaded.config).encode())
            self.changes = []
            self.save()

    def save(self, **changes: Any) -> None:
        """Updates run.json."""
        self.record.update(changes)
        self.run.write_json(self.run.state, self.record)


def instruction_rows(instructions: InstructionSet) -> Iterator[dict[str, Any]]:
    """Rows of instructions.jsonl."""
    for item in instructions.items:
        yield instruction_row(item)


def instruction_row(item: Instruction) -> dict[str, Any]:
    """An instruction as a row."""
    answer = {"answer": item.answer} if item.answer is not None else {}
    return {"id": item.id, "prompt": item.prompt} | answer | item.fields


def instructions_hash(items: Sequence[Instruction]) -> str:
    """SHA-256 over ids, messages, answers, and the fields that verifiers read."""
    digest = hashlib.sha256()
    for item in items:
        fields = [item.fields] if item.fields else []
        digest.update(orjson.dumps([item.id, item.prompt, item.answer, *fields]) + b"\n")
    return digest.hexdigest()


def read_source(loaded: LoadedTribe) -> InstructionSet:
    """The instructions that the configuration names, checked against what an iteration needs."""
    source = loaded.resolved.instructions
    config = loaded.resolved
    instructions = read_instructions(source.path, source.field, loaded.base_dir, config.verifier_fields)
    if problem := unverifiable(config, instruction_rows(instructions)):
        raise ConfigError(f"{source.path}: {problem}; add it, or leave the instruction out")
    wanted = source.per_iteration
    if wanted is not None and wanted > len(instructions.items):
        raise ConfigError(
            f"{loaded.path}: instructions.per_iteration is {wanted}, but {source.path} holds "
            f"{len(instructions.items)} different instructions; lower it or add instructions"
        )
    return instructions


def create(root: Path, loaded: LoadedTribe) -> Session:
    """Starts a run in an empty or absent directory. run.json is written last: a run exists when it does."""
    run = RunDirectory(root)
    instructions = read_source(loaded)
    write_lines(run.instructions, instruction_rows(instructions))
    write_atomic(run.tribe, dump_tribe(loaded.config).encode())
    created = datetime.now(UTC).isoformat(timespec="seconds")
    record = {
        "id": f"{root.name}-{hashlib.sha256(f'{root}{created}'.encode()).hexdigest()[:8]}",
        "version": version("sparta-api"),
        "created": created,
        "state": "running",
        "base_dir": str(loaded.base_dir),
        "hashes": {
            "instructions": instructions_hash(instructions.items),
            "judging_prompt": template_for(loaded.resolved.judging).sha256,
        },
        "instructions": {"count": len(instructions.items), "duplicates": instructions.duplicates},
        "changes": [],
    }
    if loaded.config.preferences.control != "none":
        record["control"] = loaded.config.preferences.control
    run.write_json(run.state, record)
    return Session(run, loaded, record)


def continued(root: Path, loaded: LoadedTribe) -> Session:
    """Goes on with the run in `root` under a configuration that gives the same results.

    Raises ConfigError with the names of the changed keys otherwise.
    """
    run = RunDirectory(root)
    record = run.read_json(run.state)
    old = read_tribe(run.tribe)
    changes = changed_keys(old, loaded.config)
    refused = [_named(change) for change in changes if not _allowed(run, change, old, loaded.config)]
    hashes = record["hashes"]
    if template_for(loaded.resolved.judging).sha256 != hashes["judging_prompt"]:
        refused.append("judging.prompt (its text)")
    if loaded.path != run.tribe and instructions_hash(read_source(loaded).items) != hashes["instructions"]:
        refused.append("instructions (their contents)")
    if refused:
        raise ConfigError(
            f"{root}: this run was started with other values of {', '.join(refused)}; "
            "undo the change, or start a new run in another directory"
        )
    return Session(run, loaded, record, changes)


def _allowed(run: RunDirectory, change: Change, old: TribeConfig, new: TribeConfig) -> bool:
    """Whether a change leaves results alone: where and how fast to ask, more iterations, trainers not yet in use."""
    if change.allowed:
        return True
    if not change.of_trainers:
        return False
    if change.keys[0] == "trainers" and len(change.keys) > 1:
        return not any(_started(run, name) for name in _learners(old, change.keys[1]) + _learners(new, change.keys[1]))
    moved = [member.name for member in old.members if old.trainer_of(member) != new.trainer_of(new.member(member.name))]
    return not any(_started(run, name) for name in moved)


def _named(change: Change) -> str:
    """The changed key; of a trainer with the reason, for between its jobs it may change."""
    return f"{change.path} (while a job of that trainer is under way)" if change.of_trainers else change.path


def _learners(config: TribeConfig, trainer: str) -> list[str]:
    return [member.name for member in config.members if config.trainer_of(member) == trainer]


def _started(run: RunDirectory, member: str) -> bool:
    """Whether a job of the member is under way in the newest iteration."""
    return under_way(read_job(run.iteration(run.newest_iteration()).job(member)))
