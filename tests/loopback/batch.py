"""A continuous batch as inference servers run it: requests share the machine, and wait in line when it is full."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from itertools import count

_EPSILON_S = 1e-6

Action = Callable[[], None]


class Batch:
    """`slots` requests run at once, the others wait in order of arrival.

    n requests that run together each advance 1 / (1 + (n - 1) / saturation) seconds of work per second, so the
    server as a whole is n times that as fast as with one request, and never more than `saturation` times as fast.
    """

    def __init__(self, slots: int, saturation: float) -> None:
        self._slots = slots
        self._saturation = saturation
        self._running: list[tuple[float, int, Action]] = []
        self._waiting: deque[tuple[float, Action]] = deque()
        self._order = count()
        self._clock = 0.0
        """Seconds of work that a request would have done that had run from the beginning."""
        self._read_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, work_s: float, action: Action) -> None:
        """Does `action` once the request has had `work_s` seconds of work."""
        self._advance()
        self._waiting.append((work_s, action))
        self._admit()
        self._schedule()

    def _speed(self) -> float:
        return 1 / (1 + (len(self._running) - 1) / self._saturation) if self._running else 0.0

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        self._clock += (now - self._read_at) * self._speed()
        self._read_at = now

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            work, action = self._waiting.popleft()
            heapq.heappush(self._running, (self._clock + work, next(self._order), action))

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._running:
            left = max(0.0, self._running[0][0] - self._clock) / self._speed()
            self._timer = asyncio.get_running_loop().call_later(left, self._due)

    def _due(self) -> None:
        self._advance()
        done: list[Action] = []
        while self._running and self._running[0][0] <= self._clock + _EPSILON_S:
            done.append(heapq.heappop(self._running)[2])
        self._admit()
        self._schedule()
        for action in done:
            action()
