"""What the run may spend, and what it has spent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from sparta_api.config.tribe import Limits
from sparta_api.errors import LimitReached
from sparta_api.show.progress import Usage


@dataclass(slots=True)
class Reservation:
    """What an attempt may use at most, until it is known what it did use."""

    tokens: int
    cost: float


class Budget:
    """What the run has used of the user's limits, with what is in flight counted at its upper bound."""

    def __init__(self, limits: Limits, requests: int = 0, tokens: int = 0, cost: float = 0.0) -> None:
        self._limits = limits
        self.requests = requests
        self.tokens = tokens
        self.cost = cost
        self.lost = {"requests": 0, "tokens": 0, "cost_usd": 0.0}
        """What was spent on questions that were given up when the run stopped; no journal holds it."""
        self._open = 0
        self._held_tokens = 0
        self._held_cost = 0.0
        self._settled = asyncio.Event()

    def restore(self, lost: Mapping[str, float]) -> None:
        """Adds what earlier processes of the run have lost; once, before anything is spent."""
        for name, value in lost.items():
            self.lost[name] += value
        self.requests += int(self.lost["requests"])
        self.tokens += int(self.lost["tokens"])
        self.cost += self.lost["cost_usd"]

    def lose(self, attempts: int, usage: Usage, cost: float) -> None:
        """Notes what a question has cost that is given up without a trace in the journals."""
        self.lost["requests"] += attempts
        self.lost["tokens"] += usage.prompt + usage.completion
        self.lost["cost_usd"] += cost

    async def reserve(self, tokens: int, cost: float) -> Reservation:
        """Counts an attempt before it is sent. Waits for attempts in flight where only their upper bounds are
        in the way; raises LimitReached when the attempt would pass a limit."""
        while reason := self._in_the_way(tokens, cost):
            if not self._open:
                raise LimitReached(f"stopped before passing limits.{reason}; raise it with --set and resume the run")
            self._settled.clear()
            await self._settled.wait()
        self.requests += 1
        self._open += 1
        self._held_tokens += tokens
        self._held_cost += cost
        return Reservation(tokens, cost)

    def _in_the_way(self, tokens: int, cost: float) -> str | None:
        limits = self._limits
        if limits.max_requests is not None and self.requests + 1 > limits.max_requests:
            return f"max_requests ({limits.max_requests})"
        if limits.max_tokens is not None and self.tokens + self._held_tokens + tokens > limits.max_tokens:
            return f"max_tokens ({limits.max_tokens})"
        if limits.max_cost_usd is not None and self.cost + self._held_cost + cost > limits.max_cost_usd:
            return f"max_cost_usd ({limits.max_cost_usd})"
        return None

    def settle(self, held: Reservation, usage: Usage, cost: float, sent: bool = True) -> None:
        """Replaces an attempt's upper bound by what it used; one that was never sent does not count."""
        self.requests -= not sent
        self._open -= 1
        self._held_tokens -= held.tokens
        self._held_cost -= held.cost
        self.tokens += usage.prompt + usage.completion
        self.cost += cost
        self._settled.set()

    def spend(self, cost: float) -> None:
        """Adds a cost that no request made (a training job, a deployment). Raises LimitReached beyond the limit."""
        limit = self._limits.max_cost_usd
        if limit is not None and self.cost + self._held_cost + cost > limit:
            raise LimitReached(f"stopped before passing limits.max_cost_usd ({limit}); raise it and resume the run")
        self.cost += cost
