"""Limits per account: what may be in flight, how fast requests may leave, and what the run may spend.

An account is a base URL origin plus key; members that share it share its limits. Work waits in the account's
own queues; a fixed number of workers takes it from there, so that a hundred thousand waiting requests are a
hundred thousand small tuples and not as many coroutines.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

from sparta_api.config import Limits
from sparta_api.errors import LimitReached
from sparta_api.progress import Usage
from sparta_api.wire import retry_after

Job = Callable[..., Awaitable[None]]


class Turn(IntEnum):
    """In which order an account takes its waiting work: answers first, since judges wait for them."""

    ANSWER = 0
    JUDGMENT = 1


class Pace:
    """A token bucket: at most `per_minute` units in any 60 seconds, at most a second's worth at once."""

    def __init__(self, per_minute: int) -> None:
        self._burst = max(1.0, per_minute / 60)
        self._rate = per_minute / 60 * (1 - min(0.5, self._burst / per_minute))
        self._level = 1.0
        self._filled = 0.0

    def delay(self, now: float, units: float) -> float:
        """Seconds until `units` may be taken; more than a burst is allowed once the bucket is full."""
        if not self._filled:
            self._filled = now
        self._level = min(self._burst, self._level + (now - self._filled) * self._rate)
        self._filled = now
        return max(0.0, (min(units, self._burst) - self._level) / self._rate)

    def take(self, units: float) -> None:
        """Takes units; the level may fall below zero for a large request, which delays the next."""
        self._level -= units


class AutoLimit:
    """Finds how many requests in flight an endpoint can use.

    It doubles while throughput grows by it, then probes upwards in small steps, keeps a step that paid, takes
    back one that only made answers slower, and backs off by a factor when the server says 429 or 503.
    """

    START = 8
    CEILING = 1024
    GAIN = 1.08
    """A doubling pays when it brings this much throughput."""
    BACKOFF = 0.75
    SETTLED_EPOCHS = 4

    def __init__(self) -> None:
        self.limit = self.START
        self._good = (0, 0.0)
        """The limit that paid last, and its throughput."""
        self._doubling = True
        self._rest = 0
        self._done = 0
        self._started: float | None = None
        self._starved = False

    def finished(self, now: float, waiting: bool) -> None:
        """A request ended; `waiting` tells whether more work was queued, so that the limit was what held."""
        if self._started is None:
            self._started = now
            return
        self._done += 1
        self._starved = self._starved or not waiting
        if self._done < max(16, 3 * self.limit):
            return
        throughput = self._done / max(now - self._started, 1e-9)
        if not self._starved:
            self._judge(throughput)
        self._done, self._started, self._starved = 0, now, False

    def _judge(self, throughput: float) -> None:
        limit, best = self._good
        if limit == 0 or (self._doubling and throughput > best * self.GAIN):
            self._good = (self.limit, throughput)
            self.limit = min(self.CEILING, self.limit * 2)
        elif self._doubling:
            self._doubling = False
            self.limit = max(limit, round(self.limit * self.BACKOFF))
            self._good = (self.limit, max(best, throughput))
            self._rest = self.SETTLED_EPOCHS
        elif self._rest > 0:
            self._rest -= 1
            if self._rest == 0:
                self._good = (self.limit, throughput)
                self.limit = min(self.CEILING, self.limit + max(1, self.limit // 8))
        else:
            paid = throughput > best * (1 + (self.limit / limit - 1) / 2)
            self.limit = self.limit if paid else limit
            self._rest = 1 if paid else self.SETTLED_EPOCHS

    def refused(self) -> None:
        """The server said that it has too much: at most one step back per round of answers."""
        if self._started is not None and self._done == 0 and self._rest:
            return
        self.limit = max(1, int(self.limit * self.BACKOFF))
        self._good = (self.limit, 0.0)
        self._doubling, self._rest = False, self.SETTLED_EPOCHS
        self._done, self._started, self._starved = 0, None, False


class Account:
    """The queues and limits of one account. Everything runs on one event loop."""

    def __init__(
        self,
        name: str,
        concurrency: int | Literal["auto"],
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        replicas: int = 1,
    ) -> None:
        self.name = name
        self.on_error: Callable[[BaseException], None] = lambda error: None
        """Called with whatever a job raises."""
        self.in_flight = 0
        self._fixed = None if concurrency == "auto" else concurrency * replicas
        self._auto = AutoLimit()
        self._requests = Pace(requests_per_minute) if requests_per_minute else None
        self._tokens = Pace(tokens_per_minute) if tokens_per_minute else None
        self._queues: tuple[deque[tuple[Job, tuple[Any, ...]]], ...] = (deque(), deque())
        self._returning: deque[asyncio.Future[None]] = deque()
        self._workers: set[asyncio.Task[None]] = set()
        self._gate = asyncio.Lock()
        self._paused_until = 0.0
        self._closing = asyncio.Event()

    @property
    def limit(self) -> int:
        """Requests that may be in flight now."""
        return self._auto.limit if self._fixed is None else self._fixed

    @property
    def closed(self) -> bool:
        """Whether nothing new is sent any more."""
        return self._closing.is_set()

    @property
    def waiting(self) -> int:
        """Requests that are queued and not yet sent."""
        return len(self._queues[0]) + len(self._queues[1])

    def submit(self, turn: Turn, job: Job, *arguments: Any) -> None:
        """Queues `job(*arguments)`; it starts when a slot is free."""
        self._queues[turn].append((job, arguments))
        if self.in_flight < self.limit and not self.closed:
            self._start_worker()

    def _start_worker(self) -> None:
        self.in_flight += 1
        worker = asyncio.get_running_loop().create_task(self._work())
        self._workers.add(worker)
        worker.add_done_callback(self._ended)

    def _ended(self, worker: asyncio.Task[None]) -> None:
        self._workers.discard(worker)
        if not worker.cancelled() and (error := worker.exception()) is not None:
            self.on_error(error)

    async def _work(self) -> None:
        """A worker: holds one slot and does queued work until there is none, or the slot is wanted elsewhere."""
        try:
            while not self.closed and self.in_flight <= self.limit and not self._returning:
                for queue in self._queues:
                    if queue:
                        job, arguments = queue.popleft()
                        break
                else:
                    break
                await job(*arguments)
                if self._fixed is None:
                    self._adapt()
        finally:
            self._release()

    def _adapt(self) -> None:
        self._auto.finished(asyncio.get_running_loop().time(), self.waiting > 0)
        while self.waiting and self.in_flight < self.limit:
            self._start_worker()

    def _release(self) -> None:
        """Frees a slot: requests that come back from a rest have it first, then queued work."""
        self.in_flight -= 1
        while self._returning and self.in_flight < self.limit:
            future = self._returning.popleft()
            if not future.done():
                self.in_flight += 1
                future.set_result(None)
        if self.waiting and self.in_flight < self.limit and not self.closed:
            self._start_worker()

    async def rest(self, delay: float) -> None:
        """Frees the caller's slot for `delay` seconds, then waits for one again. Closing the account cancels it."""
        self._release()
        try:
            async with asyncio.timeout(delay):
                await self._closing.wait()
        except TimeoutError:
            if self.in_flight < self.limit and not self.closed:
                self.in_flight += 1
                return
        except asyncio.CancelledError:
            self.in_flight += 1
            raise
        await self._slot()

    async def _slot(self) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._returning.append(future)
        if self.closed:
            future.cancel()
        try:
            await future
        except asyncio.CancelledError:
            self.in_flight += future.cancelled()
            raise

    @property
    def paced(self) -> bool:
        """Whether a request may have to wait before it is sent."""
        return self._requests is not None or self._tokens is not None or self._paused_until > 0

    async def admit(self, tokens: int) -> None:
        """Waits until rates and pauses let a request of about `tokens` tokens leave."""
        loop = asyncio.get_running_loop()
        async with self._gate:
            while True:
                now = loop.time()
                delay = self._paused_until - now
                if self._requests:
                    delay = max(delay, self._requests.delay(now, 1))
                if self._tokens:
                    delay = max(delay, self._tokens.delay(now, tokens))
                if self.closed:
                    raise asyncio.CancelledError
                if delay <= 0:
                    break
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay):
                        await self._closing.wait()
            self._paused_until = 0.0
        if self._requests:
            self._requests.take(1)
        if self._tokens:
            self._tokens.take(tokens)

    def settle(self, reserved: int, used: int) -> None:
        """Corrects the token pace once the server has counted."""
        if self._tokens:
            self._tokens.take(used - reserved)

    def refused(self, wait: float | None) -> None:
        """The server said that the account is over a limit, and perhaps for how long."""
        self._auto.refused()
        if wait:
            self.pause(wait)

    def pause(self, wait: float) -> None:
        """Sends nothing for `wait` seconds."""
        self._paused_until = max(self._paused_until, asyncio.get_running_loop().time() + wait)

    def observe(self, headers: Mapping[str, str]) -> None:
        """Slows down when the server's headers say that nothing is left, whoever used it up."""
        for bucket in ("-requests", "-tokens"):
            if headers.get(f"x-ratelimit-remaining{bucket}") == "0":
                wait = retry_after(headers)
                if wait:
                    self.pause(wait)
                return

    async def drain(self, grace: float) -> None:
        """Sends nothing new and lets what is in flight arrive for up to `grace` seconds."""
        self._closing.set()
        for queue in self._queues:
            queue.clear()
        for future in self._returning:
            future.cancel()
        if self._workers:
            await asyncio.wait(self._workers, timeout=grace)

    async def close(self) -> None:
        """Drops what is queued, cancels what is in flight and waits for it."""
        await self.drain(0)
        for worker in list(self._workers):
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)


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
        self._open = 0
        self._held_tokens = 0
        self._held_cost = 0.0
        self._settled = asyncio.Event()

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

    def settle(self, held: Reservation, usage: Usage, cost: float) -> None:
        """Replaces an attempt's upper bound by what it used."""
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
