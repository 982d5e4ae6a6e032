"""One question to one member: attempts, retries, adaptations to the endpoint's quirks.

This module owns the only retry policy for chat completions. A first attempt costs no retry machinery; what
fails goes through tenacity, which waits as long as the server asked, or with exponential backoff and jitter.
The hot path speaks HTTP through aiohttp: docs/architecture.md gives the measurements behind that choice.
"""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, wait_exponential_jitter
from yarl import URL

from sparta_api.accounts import Account, Budget
from sparta_api.config import Member, Price
from sparta_api.journal import encode
from sparta_api.progress import Usage
from sparta_api.wire import Answer, Fault, Kind, estimate_tokens, one_line, read

BACKOFF_START_S = 0.5
BACKOFF_LIMIT_S = 30.0
DEAD_AFTER = 3
"""Requests in a row that exhaust their attempts before an endpoint counts as down."""
REPLICA_REST_S = 10.0
OUTPUT_GUESS = 1024

Message = dict[str, Any]


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


class Replica:
    """One base URL of a member."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url.rstrip("/")
        self.url = URL(self.base_url + "/chat/completions")
        self.in_flight = 0
        self.rests_until = 0.0
        self.proxy = _proxy(self.base_url)


def _proxy(url: str) -> str | None:
    parts = urlsplit(url)
    if urllib.request.proxy_bypass(parts.hostname or ""):
        return None
    return urllib.request.getproxies().get(parts.scheme)


class Seat:
    """A member as the client sees it at this moment: where it is, which model it is, what its endpoint takes."""

    def __init__(self, member: Member, base_urls: list[str], model: str, key: str | None, account: Account) -> None:
        self.member = member
        self.name = member.name
        self.model = model
        self.account = account
        self.replicas = [Replica(url) for url in base_urls]
        self.headers = {"Content-Type": "application/json", **member.headers}
        if key:
            self.headers["Authorization"] = f"Bearer {key}"
        self.key = key
        self.fold = member.system_role == "fold"
        self.refused_fields: set[str] = set()
        self.reload: Callable[[], Awaitable[None]] | None = None
        """Makes the endpoint serve the member's model again, where the run can."""
        self.failures = 0
        """Questions in a row that exhausted their attempts."""
        self.answered_at = float("-inf")
        """When the endpoint last gave an answer, in seconds of the event loop's clock."""

    def pick(self, now: float) -> Replica:
        """The least busy replica that is not resting after a failure."""
        if len(self.replicas) == 1:
            return self.replicas[0]
        return min(self.replicas, key=lambda r: (r.rests_until > now, r.in_flight))

    def others(self, replica: Replica, now: float) -> bool:
        """Whether another replica is healthy."""
        return any(r is not replica and r.rests_until <= now for r in self.replicas)

    def body(self, question: Question) -> bytes:
        """The request body."""
        messages = fold_system(question.messages) if self.fold else question.messages
        data = {"model": self.model, "messages": messages, **question.fields}
        if self.member.extra_body:
            data.update(self.member.extra_body)
        for name in self.refused_fields:
            data.pop(name, None)
        return encode(data)

    def cost(self, usage: Usage) -> float:
        """USD of a usage; 0 where the member has no price."""
        price = self.member.price
        return usage_cost(usage, price) if price else 0.0


def usage_cost(usage: Usage, price: Price) -> float:
    """USD for a usage: cached input at its own price, reasoning as output."""
    cached = price.input if price.cached_input is None else price.cached_input
    fresh = max(0, usage.prompt - usage.cached)
    return (fresh * price.input + usage.cached * cached + usage.completion * price.output) / 1e6


def fold_system(messages: list[Message]) -> list[Message]:
    """The messages with the system text on top of the first user message."""
    system = [m["content"] for m in messages if m["role"] == "system"]
    rest = [m for m in messages if m["role"] != "system"]
    if not system or not rest:
        return messages
    return [{**rest[0], "content": "\n\n".join([*system, rest[0]["content"]])}, *rest[1:]]


def _worth_another(error: BaseException) -> bool:
    return isinstance(error, Fault) and error.kind in (Kind.RETRY, Kind.THROTTLED, Kind.LOADING, Kind.EMPTY)


class Client:
    """Asks questions over HTTP. One per run; `notice` receives warnings that are worth showing once."""

    def __init__(self, budget: Budget, notice: Callable[[str], None]) -> None:
        self._budget = budget
        self._notice = notice
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=60),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=True,
        )
        self._timeouts: dict[float, aiohttp.ClientTimeout] = {}
        self._backoff = wait_exponential_jitter(initial=BACKOFF_START_S, max=BACKOFF_LIMIT_S, jitter=BACKOFF_START_S)

    async def close(self) -> None:
        """Closes all connections."""
        await self._session.close()

    async def ask(self, seat: Seat, question: Question) -> Reply:
        """The member's answer.

        Raises Unanswered, Owed or MemberDown, and LimitReached before an attempt that a limit forbids.
        """
        spent = Spent()
        started = asyncio.get_running_loop().time()
        try:
            try:
                reply = await self._adapted(seat, question, spent)
            except Fault as fault:
                if not _worth_another(fault) or (fault.kind is Kind.EMPTY and not question.retry_empty):
                    raise
                reply = await self._again(seat, question, spent, fault)
        except Fault as fault:
            raise self._verdict(seat, fault, spent, started) from None
        seat.failures = 0
        seat.answered_at = asyncio.get_running_loop().time()
        return reply

    async def _again(self, seat: Seat, question: Question, spent: Spent, first: Fault) -> Reply:
        """The attempts after a failed first one."""
        faults = iter([first])
        loading_since = asyncio.get_running_loop().time()

        def out_of_time(state: RetryCallState) -> bool:
            fault = state.outcome.exception() if state.outcome else None
            if isinstance(fault, Fault) and fault.kind is Kind.LOADING:
                return asyncio.get_running_loop().time() - loading_since > seat.member.startup_timeout_s
            return bool(stop_after_attempt(seat.member.max_attempts)(state))

        retrying = AsyncRetrying(
            retry=retry_if_exception(_worth_another),
            stop=out_of_time,
            wait=lambda state: self._wait(seat, state),
            sleep=seat.account.rest,
            reraise=True,
        )
        async for attempt in retrying:
            with attempt:
                for fault in faults:
                    raise fault
                return await self._adapted(seat, question, spent)
        raise first

    def _wait(self, seat: Seat, state: RetryCallState) -> float:
        fault = state.outcome.exception() if state.outcome else None
        asked = fault.wait if isinstance(fault, Fault) else None
        if asked is None:
            return self._backoff(state)
        if asked > seat.member.max_wait_s:
            raise Fault(
                Kind.FATAL,
                f"the server asks to wait {asked:.0f} s, longer than max_wait_s ({seat.member.max_wait_s:.0f} s)",
            )
        return asked

    async def _adapted(self, seat: Seat, question: Question, spent: Spent) -> Reply:
        """One attempt, repeated at once in another form where the endpoint says which form it takes."""
        reloaded = shortened = False
        for _ in count():
            try:
                return await self._attempt(seat, question, spent)
            except Fault as fault:
                if fault.kind is Kind.UNSUPPORTED and fault.parameter not in seat.refused_fields:
                    seat.refused_fields.add(str(fault.parameter))
                    self._notice(
                        f"{seat.replicas[0].base_url}: '{seat.model}' does not take {fault.parameter}; left out"
                    )
                elif fault.kind is Kind.NO_SYSTEM_ROLE and not seat.fold:
                    seat.fold = True
                    self._notice(f"{seat.replicas[0].base_url}: '{seat.model}' has no system role; its text is folded")
                elif fault.kind is Kind.OVERFLOW and not shortened and (room := _room(fault, question)):
                    question.fields["max_tokens"] = room
                    shortened = True
                elif fault.kind is Kind.NO_MODEL and seat.reload and not reloaded:
                    await seat.reload()
                    reloaded = True
                else:
                    raise
        raise AssertionError("unreachable")

    async def _attempt(self, seat: Seat, question: Question, spent: Spent) -> Reply:
        body = seat.body(question)
        most = question.fields.get("max_tokens") or OUTPUT_GUESS
        window = seat.member.context_window
        if window and estimate_tokens(len(body)) + most > window:
            self._fit(question, len(body), window)
            body = seat.body(question)
        price = seat.member.price
        held = await self._budget.reserve(
            len(body) + most, usage_cost(Usage(len(body), 0, most), price) if price else 0.0
        )
        usage, cost = Usage(), 0.0
        try:
            spent.attempts += 1
            if seat.account.paced:
                await seat.account.admit(estimate_tokens(len(body)) + most)
            started = asyncio.get_running_loop().time()
            answer = await self._exchange(seat, body)
            usage = answer.usage
            if not usage.prompt and not usage.completion:
                usage.prompt, usage.completion = estimate_tokens(len(body)), estimate_tokens(len(answer.content))
                spent.estimated = True
            return Reply(answer, spent, asyncio.get_running_loop().time() - started)
        except Fault as fault:
            usage = fault.usage
            raise
        finally:
            cost = seat.cost(usage)
            self._budget.settle(held, usage, cost)
            spent.usage.add(usage)
            spent.cost_usd += cost
            seat.account.settle(estimate_tokens(len(body)) + most, usage.prompt + usage.completion)

    def _fit(self, question: Question, length: int, window: int) -> None:
        """Lowers max_tokens to what the member's context window leaves, by estimate."""
        prompt = estimate_tokens(length)
        if prompt >= window:
            raise Fault(Kind.OVERFLOW, f"the prompt has about {prompt} tokens, the context window {window}")
        question.fields["max_tokens"] = window - prompt

    async def _exchange(self, seat: Seat, body: bytes) -> Answer:
        """One HTTP exchange. With several replicas a broken one is left alone for a while, at no cost."""
        while True:
            loop = asyncio.get_running_loop()
            replica = seat.pick(loop.time())
            replica.in_flight += 1
            try:
                async with self._session.post(
                    replica.url,
                    data=body,
                    headers=seat.headers,
                    timeout=self._timeout(seat.member.timeout_s),
                    allow_redirects=False,
                    proxy=replica.proxy,
                ) as response:
                    content = await response.read()
                if "x-ratelimit-limit-requests" in response.headers:
                    seat.account.observe(response.headers)
                return read(response.status, response.headers, content)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                replica.rests_until = loop.time() + REPLICA_REST_S
                if not seat.others(replica, loop.time()):
                    raise Fault(Kind.RETRY, _transport(error, replica, seat)) from None
            except Fault as fault:
                if fault.kind is Kind.THROTTLED:
                    seat.account.refused(fault.wait)
                raise
            finally:
                replica.in_flight -= 1

    def _timeout(self, seconds: float) -> aiohttp.ClientTimeout:
        timeout = self._timeouts.get(seconds)
        if timeout is None:
            timeout = self._timeouts[seconds] = aiohttp.ClientTimeout(total=seconds)
        return timeout

    def _verdict(self, seat: Seat, fault: Fault, spent: Spent, started: float) -> Exception:
        """What a fault that no attempt got around means for the question."""
        where = f"{seat.replicas[0].base_url} (model '{seat.model}'): {fault}"
        if fault.kind in (Kind.FILTERED, Kind.OVERFLOW, Kind.EMPTY):
            return Unanswered(fault.kind.value, str(fault), spent)
        if fault.kind in (Kind.RETRY, Kind.THROTTLED, Kind.LOADING):
            seat.failures += 1
            if fault.status == 500:
                where += "; if its chat template knows no system role, set system_role: fold"
            unreachable = fault.status is None and seat.answered_at == float("-inf")
            silent = seat.failures >= DEAD_AFTER and seat.answered_at < started
            if unreachable or silent or fault.kind is Kind.LOADING:
                return MemberDown(seat.name, where, spent)
            return Owed(f"member '{seat.name}': {where}, after {spent.attempts} attempts", spent)
        hint = "; check model and base_url" if fault.status == 404 else ""
        return MemberDown(seat.name, f"{where}{hint}", spent)


def _room(fault: Fault, question: Question) -> int | None:
    """The max_tokens that fits the window the server told; None when the prompt alone does not."""
    if not fault.context:
        return None
    window, prompt = fault.context
    room = window - prompt
    return room if 0 < room < question.fields.get("max_tokens", room + 1) else None


def _transport(error: Exception, replica: Replica, seat: Seat) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within timeout_s ({seat.member.timeout_s:g} s)"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect to {replica.base_url} ({one_line(str(error.os_error or error))})"
    return f"the connection broke ({one_line(str(error) or type(error).__name__)})"
