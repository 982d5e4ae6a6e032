"""`check`: one small question to every endpoint in each of its roles, and to every trainer whether it could train."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sparta_api.config.file import LoadedTribe
from sparta_api.config.tribe import Member
from sparta_api.data.instructions import Instruction, InstructionSet
from sparta_api.data.rundir import RunDirectory
from sparta_api.duels.preferences import with_system
from sparta_api.endpoints.budget import Budget
from sparta_api.endpoints.client import Client
from sparta_api.endpoints.decisions import decision_route
from sparta_api.endpoints.questions import MemberDown, Owed, Question, Unanswered
from sparta_api.endpoints.seats import Seat
from sparta_api.errors import ConfigError, SpartaError
from sparta_api.judging.bench import Bench, Message
from sparta_api.judging.verifiers import Verifiers
from sparta_api.runs.models import Models
from sparta_api.runs.session import Session, read_source
from sparta_api.runs.training_plan import plan_jobs
from sparta_api.serving.seating import Seating
from sparta_api.show.progress import Progress
from sparta_api.show.terminal import clean, safe
from sparta_api.trainers.factory import make_trainers
from sparta_api.trainers.protocol import Trainer

PATIENCE = {"max_attempts": 2, "max_wait_s": 10.0}
ANSWER_TOKENS = 16
SAMPLE_ANSWER = "The answer is forty-two."


@dataclass(slots=True)
class Row:
    """What `check` found about one member; a role that it does not have is "-"."""

    member: str
    model: str
    endpoint: str
    fight: str = "-"
    judge: str = "-"
    trainer: str = "-"
    notes: list[str] = field(default_factory=list)
    problem: bool = False

    def fails(self, sentence: str) -> str:
        """Takes a problem down for below the table; returns what the cell says."""
        self.problem = True
        self.notes.append(sentence)
        return "failed"


def trainer_overrides(loaded: LoadedTribe, trainer: str) -> list[str]:
    """The `--set` values that `--trainer NAME` stands for: all that learn now learn with that one.

    Raises ConfigError for a trainer that the file does not have.
    """
    config = loaded.config
    if trainer != "none" and trainer not in config.trainers:
        known = ", ".join(sorted(config.trainers)) or "none are configured"
        raise ConfigError(f"{loaded.path}: --trainer {trainer}: there is no such trainer ({known})")
    overrides = [f"training.trainer={trainer}"]
    for member in config.members:
        if member.trainer is not None and config.trainer_of(member):
            overrides.append(f'members[{config.members.index(member)}].trainer="{trainer}"')
        elif member.trainer is None and not config.trainer_of(member):
            overrides.append(f"members[{config.members.index(member)}].trainer=none")
    return overrides


async def check(loaded: LoadedTribe) -> list[Row]:
    """One row per member, in the order of the file. Raises SpartaError where no server or data can be had."""
    source = read_source(loaded)
    instruction = source.items[0]
    with tempfile.TemporaryDirectory(prefix="sparta-check-") as directory:
        run = RunDirectory(Path(directory))
        session = Session(run, loaded, {"id": "check"})
        models = Models(run, session.config)
        progress = Progress(run="check", iterations=0)
        client = Client(Budget(session.config.limits), progress.notices.append)
        seating = Seating(session, models, progress.notices.append, lambda error: progress.notices.append(str(error)))
        trainers = make_trainers(loaded)
        verifiers = Verifiers(session.config, loaded.base_dir)
        try:
            await verifiers.open()
            await seating.open(trainers)
            rows = await asyncio.gather(
                *(_member(session, models, member, seating.seats[member.name], client, instruction)
                  for member in session.config.members)
            )  # fmt: skip
            await _trainers(session, models, trainers, rows, source)
        finally:
            for trainer in trainers.values():
                await trainer.close()
            await verifiers.close()
            await seating.close()
            await client.close()
        if progress.notices:
            rows[0].notes += progress.notices
        return list(rows)


async def _trainers(
    session: Session, models: Models, trainers: Mapping[str, Trainer], rows: Sequence[Row], source: InstructionSet
) -> None:
    """Asks every trainer whether it could train its members, and says what that would cost."""
    config = session.config
    for row, member in zip(rows, config.members, strict=True):
        name = config.trainer_of(member)
        if not name:
            continue
        base = config.base_model_of(member, config.trainers[name])
        try:
            warnings = await trainers[name].preflight(base, models.trained(member.name), member.name)
            said = {note for other in rows for note in other.notes}
            row.notes += [text for text in warnings if text not in said]
            row.trainer = f"{name}: ok"
        except SpartaError as error:
            row.trainer = f"{name}: {row.fails(str(error))}"
    texts = [message["content"] for item in source.items for message in item.prompt]
    plans = {plan.member: plan for plan in await plan_jobs(config, trainers, texts)}
    for row in rows:
        if (plan := plans.get(row.member)) and plan.estimate is not None:
            row.notes.append(f"training: {plan.sentence}")


async def _member(
    session: Session, models: Models, member: Member, seat: Seat, client: Client, instruction: Instruction
) -> Row:
    row = Row(member.name, models.members[member.name].model, ", ".join(r.base_url for r in seat.replicas))
    seat.member = member.model_copy(update=PATIENCE)
    messages = [dict(message) for message in instruction.prompt]
    if member.fights:
        fields = {**member.sampling.model_dump(), "max_tokens": ANSWER_TOKENS}
        row.fight = await _ask(row, client, seat, Question(with_system(messages, member.system_prompt), fields))
    if member.judges:
        bench = Bench(session.config, 0)
        question = Question(_sample_question(bench, messages), bench.fields(1), retry_empty=False)
        row.judge = await _ask(row, client, seat, question, bench)
        if session.config.judging.scoring == "expected":
            replica = seat.replicas[0]
            route = await decision_route(replica.base_url, seat.model, seat.headers, replica.proxy is not None)
            if route is not None:
                row.notes.append(f"{route} offers decisions; a run reads chat log-probabilities, which tell the same")
    return row


def _sample_question(bench: Bench, instruction: list[Message]) -> list[Message]:
    """What a judge is asked about a sample answer, or two, in the first of its orders."""
    shown = bench.shows(("one", "other"))[0]
    return bench.messages(instruction, [SAMPLE_ANSWER] * len(shown), 0, shown)


async def _ask(row: Row, client: Client, seat: Seat, question: Question, bench: Bench | None = None) -> str:
    started = time.monotonic()
    try:
        reply = await client.ask(seat, question)
    except (Unanswered, Owed, MemberDown) as error:
        return row.fails(str(error))
    took = f"ok, {time.monotonic() - started:.1f} s"
    if bench is None:
        return took
    score = bench.score(reply.answer)
    if score.values is None:
        row.notes.append(f"as a judge its first reply holds no score: {reply.answer.content[:80]!r}")
    doubt = bench.doubt(reply.answer)
    if doubt is not None:
        row.notes.append(f"as a judge: {doubt}")
    mass = "" if score.mass is None else f", {score.mass:.0%} on score labels"
    return f"{took}{mass}"


def show(rows: list[Row], console: Console) -> None:
    """Prints the rows as a table, and under it the notes and problems in full."""
    table = Table(box=None, pad_edge=False)
    for title in ("member", "model", "endpoint", "fight", "judge", "trainer"):
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*(safe(t) for t in (row.member, row.model, row.endpoint, row.fight, row.judge, row.trainer)))
    console.print(table)
    for row in rows:
        own = f"member '{row.member}': "
        for note in dict.fromkeys(row.notes):
            sentence = note if note.startswith("trainer '") else own + note.removeprefix(own)
            console.print(Text(clean(sentence)), soft_wrap=True)
