"""Held-out instructions: the same questions before the first and after every training, never trained on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from sparta_api.data.instructions import Instruction, read_instructions
from sparta_api.data.journal import Journal, read_lines
from sparta_api.duels.preferences import with_system
from sparta_api.duels.rows import usage_json
from sparta_api.endpoints.accounts import Turn
from sparta_api.endpoints.client import Client
from sparta_api.endpoints.questions import MemberDown, Owed, Question, Unanswered
from sparta_api.endpoints.seats import Seat
from sparta_api.errors import EndpointError
from sparta_api.runs.session import Session


def heldout_instructions(session: Session) -> list[Instruction]:
    """The held-out instructions, with the fields that verifiers read; none where the run has no such section."""
    source = session.config.heldout
    if source is None:
        return []
    return read_instructions(source.path, source.field, session.loaded.base_dir, session.config.verifier_fields).items


async def ask_heldout(session: Session, seats: Mapping[str, Seat], client: Client, trained: int) -> None:
    """Asks every fighter every held-out instruction at temperature 0 and appends the answers to heldout.jsonl.

    `trained` is how many iterations the models have been trained for. Answers that are there already are not
    asked again. A question without an answer is recorded as empty; a member that is down raises EndpointError.
    """
    instructions = heldout_instructions(session)
    path = session.run.heldout
    known = {(row["trained"], row["instruction"], row["member"]) for row, _, _ in read_lines(path)}
    with Journal(path) as journal:
        questions = [
            _Question(session, journal, seats[member.name], client, instruction, trained)
            for instruction in instructions
            for member in session.config.fighters
            if (trained, instruction.id, member.name) not in known
        ]
        for question in questions:
            question.seat.account.submit(Turn.ANSWER, question.ask)
        await asyncio.gather(*(question.answered for question in questions))


class _Question:
    """One held-out question to one member."""

    def __init__(
        self,
        session: Session,
        journal: Journal,
        seat: Seat,
        client: Client,
        instruction: Instruction,
        trained: int,
    ) -> None:
        self.seat = seat
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._member = session.config.member(seat.name)
        self._journal = journal
        self._client = client
        self._instruction = instruction
        self._trained = trained

    async def ask(self) -> None:
        """Asks and journals; the future `answered` tells how it went."""
        prompt: list[dict[str, Any]] = [dict(message) for message in self._instruction.prompt]
        fields = {"temperature": 0.0, "max_tokens": self._member.sampling.max_tokens}
        row: dict[str, Any] = {
            "trained": self._trained,
            "instruction": self._instruction.id,
            "member": self.seat.name,
            "model": self.seat.model,
            "prompt": prompt[-1]["content"],
        }
        try:
            reply = await self._client.ask(self.seat, Question(with_system(prompt, self._member.system_prompt), fields))
            spent = reply.spent
            found = {"content": reply.answer.content, "usage": usage_json(spent), "attempts": spent.attempts}
            self._journal.append(row | found)
        except Unanswered as error:
            self._journal.append(row | {"content": "", "error": error.reason, "usage": usage_json(error.spent)})
        except (Owed, MemberDown) as error:
            self._fail(EndpointError(f"held-out question to {error}; repair it and resume the run"))
        except BaseException as error:
            self._fail(error)
            raise
        if not self.answered.done():
            self.answered.set_result(None)

    def _fail(self, error: BaseException) -> None:
        if not self.answered.done():
            self.answered.set_exception(error)
