"""What is asked of a member, and what can come of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sparta_api.endpoints.faults import Fault, Kind
from sparta_api.endpoints.seats import Message, Seat
from sparta_api.endpoints.wire import Answer
from sparta_api.show.progress import Usage

DEAD_AFTER = 3
"""Questions in a row that exhaust their attempts before an endpoint counts as down."""


class Unanswered(Exception):
    """A question that has no answer for good: filtered, too long, or empty. `reason` is a Kind's value."""

    def __init__(self, reason: str, detail: str, spent: Spent) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.spent = spent


class Owed(Exception):
    """A question whose attempts all failed in transport or at the server; it is asked again on resume."""

    def __init__(self, detail: str, spent: Spent) -> None:
        super().__init__(detail)
        self.spent = spent


class MemberDown(Exception):
    """The member's endpoint cannot answer this or any later question until somebody repairs something."""

    def __init__(self, member: str, detail: str, spent: Spent) -> None:
        super().__init__(f"member '{member}': {detail}")
        self.member = member
        self.spent = spent


@dataclass(slots=True)
class Spent:
    """What a question has cost so far, over all its attempts."""

    attempts: int = 0
    usage: Usage = field(default_factory=Usage)
    cost_usd: float = 0.0
    estimated: bool = False
    """Whether some of the usage was estimated because the server told none."""

    def add(self, other: Spent) -> None:
        """Adds what another question has cost."""
        self.attempts += other.attempts
        self.usage.add(other.usage)
        self.cost_usd += other.cost_usd
        self.estimated = self.estimated or other.estimated


@dataclass(slots=True)
class Reply:
    """An answer with what it took to get it. `latency_s` is that of the successful attempt."""

    answer: Answer
    spent: Spent
    latency_s: float


@dataclass(slots=True)
class Question:
    """What is asked: chat messages and the request fields beside model and messages."""

    messages: list[Message]
    fields: dict[str, Any]
    retry_empty: bool = True
    """Whether an answer without text is asked again here (fighters) or returned as a fault (judges)."""

    def asks_again(self, error: BaseException) -> bool:
        """Whether an attempt that ended so is followed by another."""
        return isinstance(error, Fault) and (error.kind.passes or (error.kind is Kind.EMPTY and self.retry_empty))


def verdict(seat: Seat, fault: Fault, spent: Spent, started: float) -> Exception:
    """What a fault that no attempt got around means for the question."""
    if fault.kind in (Kind.FILTERED, Kind.OVERFLOW, Kind.EMPTY):
        return Unanswered(fault.kind.value, str(fault), spent)
    where = f"{seat.place}: {fault}"
    if fault.kind.passes:
        seat.failures += 1
        if fault.status == 500:
            where += "; if its chat template knows no system role, set system_role: fold"
        down = _is_down(seat, fault, started)
    else:
        down = not (seat.answered and fault.status in (400, 422))
        where += "; check model and base_url" if fault.status == 404 else ""
    if down:
        return MemberDown(seat.name, where, spent)
    return Owed(f"member '{seat.name}': {where}, after {spent.attempts} attempt{'s' * (spent.attempts != 1)}", spent)


def _is_down(seat: Seat, fault: Fault, started: float) -> bool:
    """Whether the endpoint is down, rather than unable to answer a few of many questions.

    It is when it was never there, or when several questions in a row had no luck while nobody else had any; the last
    questions of a run tell nothing about a member that has answered before.
    """
    if fault.kind is Kind.LOADING or (fault.kind is Kind.UNREACHABLE and not seat.answered):
        return True
    silent = seat.failures >= DEAD_AFTER and seat.answered_at < started
    return silent and (not seat.answered or seat.account.waiting > 0)
