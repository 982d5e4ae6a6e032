"""Scores of the held-out answers: what the verifiers say of each, and how likely it is to the initial model.

They are journaled as they come, so that a run that goes on scores only what is missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from sparta_api.data.journal import Journal, read_lines
from sparta_api.endpoints.accounts import Account, Turn
from sparta_api.endpoints.client import Client
from sparta_api.endpoints.seats import Seat
from sparta_api.judging.verifier_rules import Row, make_rule
from sparta_api.judging.verifiers import Verifier
from sparta_api.runs.heldout import heldout_instructions
from sparta_api.runs.likelihood import InitialModel
from sparta_api.runs.session import Session, instruction_row

T = TypeVar("T")


class HeldoutScores:
    """Scores the answers of one stage and appends the scores to heldout_scores.jsonl."""

    def __init__(
        self,
        session: Session,
        seats: Mapping[str, Seat],
        client: Client,
        verifiers: Mapping[str, Verifier],
        notice: Callable[[str], None],
    ) -> None:
        self._session = session
        self._seats = seats
        self._client = client
        self._verifiers = verifiers
        self._notice = notice
        sections = session.config.judging.verifiers
        self._rules = {name: rule for name, section in sections.items() if (rule := make_rule(section))}
        self._rows = {item.id: instruction_row(item) for item in heldout_instructions(session)}

    async def score(self, trained: int) -> None:
        """Scores all answers of that stage which are not scored yet."""
        path = self._session.run.heldout_scores
        done = {(row["trained"], row["instruction"], row["member"]) for row, _, _ in read_lines(path)}
        first: dict[str, str] = {}
        owed: dict[str, list[dict[str, Any]]] = {}
        for row, _, _ in read_lines(self._session.run.heldout):
            if row["trained"] == 0:
                first[row["member"]] = row["model"]
            if row["trained"] == trained and (trained, row["instruction"], row["member"]) not in done:
                owed.setdefault(row["member"], []).append(row)
        with Journal(path) as journal:
            await asyncio.gather(*(self._member(journal, name, first[name], rows) for name, rows in owed.items()))

    async def _member(self, journal: Journal, name: str, model: str, rows: Sequence[dict[str, Any]]) -> None:
        """One member's answers: the first alone, since it tells whether the endpoint knows likelihoods."""
        initial = InitialModel(self._seats[name], model, self._client)
        await self._answer(journal, initial, rows[0])
        await asyncio.gather(*(self._answer(journal, initial, row) for row in rows[1:]))
        if initial.lack:
            self._notice(f"no likelihood of the held-out answers under the initial model: {initial.lack}")

    async def _answer(self, journal: Journal, initial: InitialModel, row: dict[str, Any]) -> None:
        instruction = self._rows[row["instruction"]]
        scores = {name: await self._score(name, row["content"], instruction) for name in self._verifiers}
        found = await _queued(initial.seat.account, partial(initial.likelihood, row, instruction["prompt"]))
        key = {name: row[name] for name in ("trained", "instruction", "member")}
        journal.append(key | {"scores": scores, "logprob": found and found.logprob, "tokens": found and found.tokens})

    async def _score(self, name: str, response: str, instruction: Row) -> float | None:
        """A verifier's score; None where it has none, or where the instruction lacks what it needs."""
        rule, verifier = self._rules.get(name), self._verifiers[name]
        if rule is not None and rule.lacks(instruction):
            return None
        return (await _queued(verifier.account, partial(verifier.verify, response, instruction))).score


async def _queued(account: Account, question: Callable[[], Awaitable[T]]) -> T:
    """The answer to a question that waits for its turn in an account's queue."""
    answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    async def ask() -> None:
        try:
            found = await question()
        except BaseException as error:
            if not answer.done():
                answer.set_exception(error)
            raise
        if not answer.done():
            answer.set_result(found)

    account.submit(Turn.ANSWER, ask)
    return await answer
