"""Limits per account: what may be in flight, and how fast requests may leave.

An account is a base URL origin plus key; members that share it share its limits. Work waits in the account's
own queues; a fixed number of workers takes it from there, so that a hundred thousand waiting requests are a
hundred thousand small tuples and not as many coroutines.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from enum import IntEnum
from typing import Any, Literal

from sparta_api.endpoints.rates import AutoLimit, Pace
from sparta_api.endpoints.waits import exhausted_buckets, retry_after

Job = Callable[..., Awaitable[None]]


class Turn(IntEnum):
    """In which order an account takes its waiting work: answers first, since judges wait for them."""

    ANSWER = 0
    JUDGMENT = 1


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
        self.on_error: Callable[[BaseException], object] = lambda error: None
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

    def refused(self, wait: float | None, longest: float) -> None:
        """The server said that the account is over a limit, and perhaps for how long.

        A wait longer than `longest` is for the caller to judge: nothing is held up for it.
        """
        self._auto.refused()
        if wait and wait <= longest:
            self.pause(wait)

    def pause(self, wait: float) -> None:
        """Sends nothing for `wait` seconds."""
        self._paused_until = max(self._paused_until, asyncio.get_running_loop().time() + wait)

    def observe(self, headers: Mapping[str, str], longest: float) -> None:
        """Pauses when the server's headers say that nothing is left, whoever used it up, for at most `longest` s."""
        if exhausted_buckets(headers) and (wait := retry_after(headers)):
            self.pause(min(wait, longest))

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
