"""The judges of a duel: what they are still to be asked, when they need not be, and what they say together.

Members judge, and so do verifiers. Both are named; a question is a judge, the fighters whose responses it is
shown, and a round. docs/judging.md gives the formulas.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from math import fsum
from typing import Any, NamedTuple

from sparta_api.config.tribe import TribeConfig
from sparta_api.duels.matchmaking import Matchup
from sparta_api.duels.rows import OpenDuel, Outcome
from sparta_api.endpoints.faults import Kind
from sparta_api.endpoints.questions import MemberDown, Owed, Question, Reply, Spent, Unanswered
from sparta_api.endpoints.seats import Seat
from sparta_api.judging.bench import Bench, Message, Orders, Shown
from sparta_api.ratings.reputation import TIE, panel_scores

ROUNDING = 1e-9
"""Points that a decision before the last judge keeps away from a tie, more than sums can be off."""

Rounds = list[float | None]


class Ask(NamedTuple):
    """One question to one judge."""

    judge: str
    shown: Shown
    round: int


class Panel:
    """The rules of one iteration's panels. `weights` are those of judges and verifiers, used where they are fixed."""

    def __init__(self, config: TribeConfig, orders: Orders, weights: Mapping[str, float]) -> None:
        judging = config.judging
        self._shows = orders.shows
        self._rounds = range(judging.rounds)
        self._verifiers = tuple(judging.verifiers)
        self._pairwise = judging.mode == "pairwise"
        self._ties_flips = judging.on_flip == "tie"
        self._range = judging.scale[1] - judging.scale[0]
        self._tie = max(config.preferences.min_margin, TIE)
        self._weights = weights
        self.staged = judging.stop_when_decided
        """Whether judges are asked one after another, so that a duel's questions come in several turns."""

    # Questions

    def missing(self, matchup: Matchup, duel: OpenDuel, benched: Collection[str]) -> list[Ask]:
        """What is to be asked now; nothing when the duel has all it needs. Questions with one prompt stand together."""
        asks = [
            Ask(name, (fighter,), 0)
            for name in self._verifiers
            for fighter in matchup.fighters
            if (name, (fighter,), 0) not in duel.scores
        ]
        if not self.staged:
            judges = [judge for judge in matchup.judges if judge not in benched]
            return asks + self._of_judges(matchup, duel, judges)
        if asks:
            return asks
        for judge in matchup.judges[: self._consulted(matchup, duel)]:
            if judge not in benched and (asks := self._of_judges(matchup, duel, (judge,))):
                return asks
        return []

    def _of_judges(self, matchup: Matchup, duel: OpenDuel, judges: Iterable[str]) -> list[Ask]:
        return [
            Ask(judge, shown, number)
            for shown in self._shows(matchup.fighters)
            for judge in judges
            for number in self._rounds
            if (judge, shown, number) not in duel.scores
        ]

    def _consulted(self, matchup: Matchup, duel: OpenDuel) -> int:
        """How many of the planned judges are needed as far as their answers go: all, or up to the deciding one."""
        total = len(matchup.judges)
        if not self.staged:
            return total
        scores = self._scores(matchup, duel, (*self._verifiers, *matchup.judges))
        weight = fsum(self._weights[name] for name in self._verifiers if name in scores)
        lead = fsum(self._lead(name, scores[name]) for name in self._verifiers if name in scores)
        for position, judge in enumerate(matchup.judges):
            rest = fsum(self._weights[other] for other in matchup.judges[position:])
            if self._decided(lead, weight, rest):
                return position
            if judge in scores:
                weight += self._weights[judge]
                lead += self._lead(judge, scores[judge])
            elif not self._answered(matchup, duel, judge):
                return total
        return total

    def _lead(self, name: str, scores: tuple[float, float]) -> float:
        return self._weights[name] * (scores[0] - scores[1])

    def _answered(self, matchup: Matchup, duel: OpenDuel, judge: str) -> bool:
        return not self._of_judges(matchup, duel, (judge,))

    def _decided(self, lead: float, weight: float, rest: float) -> bool:
        """Whether judges of weight `rest` cannot change the winner, however far apart they score and whoever abstains.

        The panel's margin is lead / weight; the furthest that it can still get is (lead -+ range * rest) /
        (weight + rest), since every judge that scores at the end of the scale pulls it that way.
        """
        if weight <= 0:
            return False
        lowest = (lead - self._range * rest) / (weight + rest)
        highest = (lead + self._range * rest) / (weight + rest)
        won = lowest > self._tie + ROUNDING or highest < -self._tie - ROUNDING
        return won or (lowest > ROUNDING - self._tie and highest < self._tie - ROUNDING)

    # Answers

    def outcome(self, matchup: Matchup, duel: OpenDuel) -> Outcome:
        """What a duel with all its answers came to."""
        for fighter in matchup.fighters:
            if fighter in duel.errors:
                return self._outcome(matchup, {}, [], f"{duel.errors[fighter]}: {fighter}", [], [])
        consulted = self._consulted(matchup, duel)
        asked = (*matchup.judges[:consulted], *self._verifiers)
        scores = self._scores(matchup, duel, asked)
        abstained = [judge for judge in asked if judge not in scores]
        flipped = [judge for judge in scores if self._flips(matchup, duel, judge)] if self._pairwise else []
        void = None if scores else "no judge left"
        return self._outcome(matchup, scores, abstained, void, flipped, list(matchup.judges[consulted:]))

    def _outcome(
        self,
        matchup: Matchup,
        scores: dict[str, tuple[float, float]],
        abstained: list[str],
        void: str | None,
        flipped: list[str],
        skipped: list[str],
    ) -> Outcome:
        outcome = Outcome(matchup, scores, abstained, void)
        if self._pairwise:
            outcome.flipped = flipped
        if self.staged:
            outcome.skipped = skipped
        return outcome

    def _scores(self, matchup: Matchup, duel: OpenDuel, judges: Iterable[str]) -> dict[str, tuple[float, float]]:
        """Each judge's scores of the two fighters; judges that abstained or were not asked are absent."""
        scores = panel_scores({judge: self._both(matchup, duel, judge) for judge in judges})
        if self._pairwise and self._ties_flips:
            for judge, (a, b) in scores.items():
                if self._flips(matchup, duel, judge):
                    scores[judge] = ((a + b) / 2, (a + b) / 2)
        return scores

    def _both(self, matchup: Matchup, duel: OpenDuel, judge: str) -> tuple[Rounds, Rounds]:
        """All that a judge said about either fighter; nothing where it said nothing in one of the orders."""
        a, b = matchup.fighters
        if judge in self._verifiers:
            return [_first(duel.scores.get((judge, (a,), 0)))], [_first(duel.scores.get((judge, (b,), 0)))]
        one, other = self._shows(matchup.fighters)
        first = [duel.scores.get((judge, one, number)) for number in self._rounds]
        second = [duel.scores.get((judge, other, number)) for number in self._rounds]
        if not self._pairwise:
            return [_first(values) for values in first], [_first(values) for values in second]
        ordered = [values for values in first if values is not None]
        swapped = [values for values in second if values is not None]
        if not ordered or not swapped:
            return [], []
        of_a: Rounds = [*(values[0] for values in ordered), *(values[1] for values in swapped)]
        of_b: Rounds = [*(values[1] for values in ordered), *(values[0] for values in swapped)]
        return of_a, of_b

    def _flips(self, matchup: Matchup, duel: OpenDuel, judge: str) -> bool:
        """Whether a judge's two orders name different winners."""
        if judge in self._verifiers:
            return False
        one, other = self._shows(matchup.fighters)
        leads = [
            fsum(
                values[0] - values[1] for number in self._rounds if (values := duel.scores.get((judge, shown, number)))
            )
            for shown in (one, other)
        ]
        return leads[0] * leads[1] > 0


def _first(values: tuple[float, ...] | None) -> float | None:
    return None if values is None else values[0]


async def ask_judge(
    ask: Callable[[Seat, Question], Awaitable[Reply]],
    bench: Bench,
    max_attempts: int,
    seat: Seat,
    messages: list[Message],
    spent: Spent,
) -> dict[str, Any]:
    """Asks one judge until its reply holds scores, at most `max_attempts` times; the last reply stands as it is.

    Returns the result's part of a row of judgments.jsonl, with `values` for the scores, and adds to `spent`. Raises
    Owed and MemberDown.
    """
    raw: str | None = None
    reason = "no_score"
    for attempt in range(1, max_attempts + 1):
        try:
            reply = await ask(seat, Question(messages, bench.fields(attempt), retry_empty=False))
        except Unanswered as error:
            spent.add(error.spent)
            reason = error.reason
            if error.reason != Kind.EMPTY:
                return {"values": None, "raw": raw, "reason": reason, "detail": error.detail}
            continue
        except (Owed, MemberDown) as error:
            spent.add(error.spent)
            raise
        spent.add(reply.spent)
        raw = reply.answer.content
        score = bench.score(reply.answer)
        if score.values is not None:
            row: dict[str, Any] = {"values": score.values, "raw": raw}
            if score.criteria is not None:
                row["criteria"] = score.criteria
            return row | {"mass": score.mass} if score.mass is not None else row
        reason = "no_score"
    return {"values": None, "raw": raw, "reason": reason}
