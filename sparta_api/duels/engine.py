"""The duel engine: what is asked when, what is journaled, what is owed.

One event loop. A duel's two answers are asked for as soon as it is opened, its judges as soon as both answers
are there; nothing waits for a phase to end. Duels are opened in order, as many as keep every account busy, and
folded in order, so that verdicts do not depend on who answers first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sparta_api.config.tribe import TribeConfig
from sparta_api.duels.matchmaking import Matchup
from sparta_api.duels.panel import Ask, Panel, ask_judge
from sparta_api.duels.preferences import with_system
from sparta_api.duels.rows import OpenDuel, Outcome, judgment_row, response_row, usage_json
from sparta_api.duels.standing import Standing
from sparta_api.endpoints.accounts import Turn
from sparta_api.endpoints.client import Client
from sparta_api.endpoints.questions import MemberDown, Owed, Question, Reply, Spent, Unanswered
from sparta_api.endpoints.seats import Seat
from sparta_api.errors import DiskError, EndpointError, SpartaError
from sparta_api.judging.bench import Bench, Message
from sparta_api.judging.verifiers import Verifier
from sparta_api.show.progress import Progress

OPEN_AT_LEAST = 256
OPEN_PER_SLOT = 8
DRAIN_S = 20.0
SYNC_EVERY_S = 2.0


@dataclass(slots=True)
class Owing:
    """A duel that is owed: the members whose requests failed, and how the first of them did."""

    matchup: Matchup
    reason: str
    members: set[str] = field(default_factory=set)


class Engine:
    """Plays the duels of one iteration.

    `seats` are the members by name, `instructions` gives the row of an id, `verifiers` are opened already. `play`
    returns the number of duels that are still owed; `stop` makes it raise after what is in flight had a moment to
    arrive.
    """

    def __init__(
        self,
        config: TribeConfig,
        iteration: int,
        standing: Standing,
        seats: Mapping[str, Seat],
        client: Client,
        instructions: Callable[[str], Mapping[str, Any]],
        progress: Progress,
        verifiers: Mapping[str, Verifier] | None = None,
    ) -> None:
        self._config = config
        self._standing = standing
        self._seats = seats
        self._client = client
        self._instructions = instructions
        self._progress = progress
        self._verifiers = dict(verifiers or {})
        self._bench = Bench(config, iteration)
        names = [*(member.name for member in config.members), *self._verifiers]
        weights = dict(zip(names, standing.reputation.weights(names), strict=True))
        self._panel = Panel(config, self._bench, weights)
        askable: list[Seat | Verifier] = [*seats.values(), *self._verifiers.values()]
        self._accounts = {id(one.account): one.account for one in askable}.values()
        self._max_attempts = config.judging.max_attempts
        self._reference = config.judging.reference is not False
        self._systems = {m.name: m.system_prompt for m in config.members}
        self._sampling = {m.name: m.sampling.model_dump() for m in config.members}
        self._outcomes: dict[int, Outcome | None] = {}
        self._in_play = 0
        self._filling = False
        self._ended = asyncio.Event()
        self._failure: BaseException | None = None
        self._grace = DRAIN_S
        self._owing: dict[int, Owing] = {}

    async def play(self, matchups: Iterator[Matchup]) -> int:
        """Asks everything that the journals do not hold yet and folds what is complete.

        Raises EndpointError when a member fails for good and the tribe says stop, LimitReached, DiskError.
        """
        self._matchups = matchups
        for account in self._accounts:
            account.on_error = self.stop
        self._fill()
        syncing = asyncio.create_task(self._sync())
        try:
            await self._ended.wait()
            while self._failure is None and self._reopen():
                await self._ended.wait()
            if self._failure is not None:
                await asyncio.gather(*(account.drain(self._grace) for account in self._accounts))
                await asyncio.gather(*(account.close() for account in self._accounts))
                raise self._failure
        finally:
            syncing.cancel()
            self._standing.close()
        return sum(outcome is None for outcome in self._outcomes.values())

    @property
    def owed(self) -> list[str]:
        """Why duels are owed, one sentence for each."""
        return [owing.reason for owing in self._owing.values()]

    def stop(self, reason: BaseException, grace: float = DRAIN_S) -> bool:
        """Ends the play: nothing new is sent, what is in flight may arrive within `grace` seconds.

        Returns False when it was ending already.
        """
        if self._failure is not None:
            return False
        self._failure, self._grace = reason, grace
        self._ended.set()
        return True

    async def _sync(self) -> None:
        while True:
            await asyncio.sleep(SYNC_EVERY_S)
            try:
                await asyncio.to_thread(self._standing.sync)
            except DiskError as error:
                self.stop(error)

    # Opening duels

    def _fill(self) -> None:
        """Opens duels while there are fewer than it takes to keep all accounts busy."""
        if self._filling:
            return
        self._filling = True
        limit = max(OPEN_AT_LEAST, OPEN_PER_SLOT * sum(account.limit for account in self._accounts))
        while self._in_play < limit and self._failure is None:
            matchup = next(self._matchups, None)
            if matchup is None:
                if self._in_play == 0:
                    self._ended.set()
                break
            if matchup.duel >= self._standing.folded:
                self._in_play += 1
                self._open(matchup)
        self._filling = False

    def _open(self, matchup: Matchup) -> None:
        duel = self._standing.opened(matchup.duel)
        unknown = [fighter for fighter in matchup.fighters if not duel.knows(fighter)]
        if not unknown:
            self._summon(matchup, duel)
            return
        duel.missing = len(unknown)
        for fighter in unknown:
            self._seats[fighter].account.submit(Turn.ANSWER, self._answer, matchup, duel, fighter)

    # Answers

    async def _answer(self, matchup: Matchup, duel: OpenDuel, fighter: str) -> None:
        seat = self._seats[fighter]
        row: dict[str, Any] = {"duel": matchup.duel, "fighter": fighter}
        if fighter in self._standing.benched:
            duel.errors[fighter] = "benched"
            self._settled(matchup, duel)
            return
        messages = with_system(self._instructions(matchup.instruction)["prompt"], self._systems[fighter])
        try:
            reply = await self._ask(seat, Question(messages, dict(self._sampling[fighter])))
        except Unanswered as error:
            duel.errors[fighter] = error.reason
            spent = {"usage": usage_json(error.spent), "attempts": error.spent.attempts}
            self._standing.response(row | {"error": error.reason, "detail": error.detail} | spent)
        except Owed as error:
            self._owe(matchup, duel, fighter, error)
            spent = {"usage": usage_json(error.spent), "attempts": error.spent.attempts}
            self._standing.response(row | {"error": str(error), "owed": True} | spent)
        except MemberDown as error:
            if not self._down(error):
                return
            duel.errors[fighter] = "benched"
        else:
            duel.texts[fighter] = reply.answer.content
            self._standing.response(row | response_row(seat.model, reply))
        self._settled(matchup, duel)

    async def _ask(self, seat: Seat, question: Question) -> Reply:
        in_flight = self._progress.in_flight
        in_flight[seat.name] = in_flight.get(seat.name, 0) + 1
        try:
            return await self._client.ask(seat, question)
        finally:
            in_flight[seat.name] -= 1

    def _owe(self, matchup: Matchup, duel: OpenDuel, member: str, error: Owed) -> None:
        duel.owed = True
        owing = self._owing.setdefault(matchup.duel, Owing(matchup, f"duel {matchup.duel}: {error}"))
        owing.members.add(member)

    def _reopen(self) -> bool:
        """Takes up duels again that only members owe which were benched since. Returns whether there are any."""
        benched = self._standing.benched.keys()
        settled = [owing for owing in self._owing.values() if owing.members <= benched]
        if settled:
            self._ended.clear()
        for owing in settled:
            del self._owing[owing.matchup.duel], self._outcomes[owing.matchup.duel]
            self._progress.owed -= 1
            self._standing.opened(owing.matchup.duel).owed = False
        self._in_play += len(settled)
        for owing in settled:
            self._open(owing.matchup)
        return bool(settled)

    def _down(self, error: MemberDown) -> bool:
        """A member failed for good: benches it, or ends the play. Returns whether the play goes on."""
        if self._config.on_member_failure == "stop":
            self.stop(EndpointError(f"{error}; repair it and resume the run (another model needs a new run)"))
            return False
        if error.member not in self._standing.benched:
            self._standing.bench(error.member, str(error))
            self._progress.notices.append(f"{error}: benched until the next iteration")
        return True

    def _settled(self, matchup: Matchup, duel: OpenDuel) -> None:
        """A request of the duel came to its end; goes on with what that makes possible."""
        duel.missing -= 1
        if duel.missing > 0:
            return
        if duel.owed:
            self._finish(matchup, None)
        else:
            self._summon(matchup, duel)

    # Judgments

    def _summon(self, matchup: Matchup, duel: OpenDuel) -> None:
        """Asks the judges for what they have not said yet. Questions that share a prompt go out together."""
        if any(fighter in duel.errors for fighter in matchup.fighters):
            self._finish(matchup, self._panel.outcome(matchup, duel))
            return
        asks = self._panel.missing(matchup, duel, self._standing.benched)
        if not asks:
            duel.texts.clear()
            self._finish(matchup, self._panel.outcome(matchup, duel))
            return
        duel.missing = len(asks)
        texts = {fighter: self._standing.text(duel, fighter) for ask in asks for fighter in ask.shown}
        row = self._instructions(matchup.instruction)
        prompts: dict[tuple[str, ...], list[Message]] = {}
        for ask in asks:
            verifier = self._verifiers.get(ask.judge)
            if verifier is not None:
                text = texts[ask.shown[0]]
                verifier.account.submit(Turn.JUDGMENT, self._verify, matchup, duel, ask, verifier, text, row)
                continue
            messages = prompts.get(ask.shown)
            if messages is None:
                shown = [texts[fighter] for fighter in ask.shown]
                reference = row.get("answer") if self._reference else None
                messages = self._bench.messages(row["prompt"], shown, matchup.duel, ask.shown, reference)
                prompts[ask.shown] = messages
            self._seats[ask.judge].account.submit(Turn.JUDGMENT, self._judge, matchup, duel, ask, messages)
        if not self._panel.staged:
            duel.texts.clear()

    async def _judge(self, matchup: Matchup, duel: OpenDuel, ask: Ask, messages: list[Message]) -> None:
        seat = self._seats[ask.judge]
        if ask.judge not in self._standing.benched:
            result: dict[str, Any] | None = None
            spent = Spent()
            try:
                result = await ask_judge(self._ask, self._bench, self._max_attempts, seat, messages, spent)
                duel.scores[ask.judge, ask.shown, ask.round] = result["values"]
            except Owed as error:
                self._owe(matchup, duel, ask.judge, error)
                result = {"values": None, "error": str(error), "owed": True}
            except MemberDown as error:
                if not self._down(error):
                    return
            if result is not None:
                cost = {"model": seat.model, "usage": usage_json(spent), "attempts": spent.attempts}
                self._standing.judgment(judgment_row(matchup.duel, *ask, result) | cost)
        self._answered(matchup, duel)

    async def _verify(
        self, matchup: Matchup, duel: OpenDuel, ask: Ask, verifier: Verifier, text: str, row: Mapping[str, Any]
    ) -> None:
        finding = await verifier.verify(text, row)
        values = None if finding.score is None else (finding.score,)
        duel.scores[ask.judge, ask.shown, ask.round] = values
        result: dict[str, Any] = {"values": values, "raw": None}
        if finding.reason is not None:
            result |= {"reason": finding.reason, "detail": finding.detail}
        cost = {"model": None, "usage": usage_json(Spent()), "attempts": 0}
        self._standing.judgment(judgment_row(matchup.duel, *ask, result) | cost)
        self._answered(matchup, duel)

    def _answered(self, matchup: Matchup, duel: OpenDuel) -> None:
        """A judgment came to its end; goes on once it was the last that was asked for."""
        duel.missing -= 1
        if duel.missing > 0:
            return
        if duel.owed:
            self._finish(matchup, None)
        elif self._panel.staged:
            self._summon(matchup, duel)
        else:
            self._finish(matchup, self._panel.outcome(matchup, duel))

    # Folding

    def _finish(self, matchup: Matchup, outcome: Outcome | None) -> None:
        """A duel has come to an end, or is owed (None). Folds whatever is next in order."""
        self._outcomes[matchup.duel] = outcome
        standing, progress = self._standing, self._progress
        if outcome is None:
            progress.owed += 1
        while (following := self._outcomes.get(standing.folded)) is not None:
            del self._outcomes[standing.folded]
            standing.fold(following)
            progress.duels_void += following.void is not None
        progress.duels_done = standing.folded
        self._in_play -= 1
        self._fill()


def owed_sentence(engine: Engine, owed: int) -> SpartaError:
    """The error of a play that ends with owed duels."""
    duels = "1 duel is" if owed == 1 else f"{owed} duels are"
    return EndpointError(f"{duels} owed ({engine.owed[0]}); resume the run to ask again")
