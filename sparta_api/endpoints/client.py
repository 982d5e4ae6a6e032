"""One question to one member: attempts, retries, adaptations to the endpoint's quirks.

This module owns the only retry policy for chat completions. A first attempt costs no retry machinery; what
fails goes through tenacity, which waits as long as the server asked, or with exponential backoff and jitter.
The hot path speaks HTTP through aiohttp: docs/architecture.md gives the measurements behind that choice.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_exponential_jitter

from sparta_api.config.tribe import Member
from sparta_api.endpoints.budget import Budget
from sparta_api.endpoints.faults import Fault, Kind, one_line
from sparta_api.endpoints.questions import MemberDown, Question, Reply, Spent, verdict
from sparta_api.endpoints.seats import Replica, Seat
from sparta_api.endpoints.wire import Answer, estimate_tokens, read
from sparta_api.errors import EndpointError
from sparta_api.show.progress import Usage

BACKOFF_START_S = 0.5
BACKOFF_LIMIT_S = 30.0
LOADING_POLL_S = 3.0
CONNECT_S = 15.0
"""A connection that has not come about by then does not come."""
UNREACHABLE_S = 15.0
"""How long an endpoint that was never there is waited for, whatever max_attempts says."""
_REQUESTS_LEFT, _TOKENS_LEFT = "x-ratelimit-remaining-requests", "x-ratelimit-remaining-tokens"
_LEFT = "x-ratelimit-remaining"


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
                if not question.asks_again(fault):
                    raise
                reply = await self._again(seat, question, spent, fault)
        except Fault as fault:
            error = verdict(seat, fault, spent, started)
            if isinstance(error, MemberDown):
                self._budget.lose(spent.attempts, spent.usage, spent.cost_usd)
            raise error from None
        except BaseException:
            self._budget.lose(spent.attempts, spent.usage, spent.cost_usd)
            raise
        seat.failures = 0
        seat.answered_at = asyncio.get_running_loop().time()
        if "response_format" in question.fields and not seat.free_text:
            self._check_format(seat, reply.answer.content)
        return reply

    async def _again(self, seat: Seat, question: Question, spent: Spent, first: Fault) -> Reply:
        """The attempts after a failed first one."""
        faults = iter([first])
        patience = _Patience(seat)
        retrying = AsyncRetrying(
            retry=retry_if_exception(question.asks_again),
            stop=patience.is_over,
            wait=patience.wait,
            sleep=seat.account.rest,
            reraise=True,
        )
        async for attempt in retrying:
            with attempt:
                for fault in faults:
                    raise fault
                return await self._adapted(seat, question, spent)
        raise first

    async def _adapted(self, seat: Seat, question: Question, spent: Spent) -> Reply:
        """One attempt, repeated at once in another form, or at another replica, where that is known to help."""
        reloaded = shortened = False
        moves = len(seat.replicas) - 1
        while True:
            form = seat.form
            try:
                return await self._attempt(seat, question, spent)
            except Fault as fault:
                if fault.elsewhere and moves > 0:
                    moves -= 1
                elif fault.kind in (Kind.UNSUPPORTED, Kind.NO_SYSTEM_ROLE):
                    self._adapt(seat, fault, form)
                elif fault.kind is Kind.OVERFLOW and not shortened and (room := _room(fault, question)):
                    question.fields["max_tokens"] = room
                    shortened = True
                elif fault.kind is Kind.NO_MODEL and seat.reload and not reloaded:
                    await _reload(seat.reload)
                    reloaded = True
                else:
                    raise

    def _adapt(self, seat: Seat, fault: Fault, form: int) -> None:
        """Writes requests differently from now on, unless that has happened while this one was under way."""
        if seat.form != form:
            return
        sentence = seat.adapt(fault)
        if sentence is None:
            raise fault
        self._notice(sentence)

    async def _attempt(self, seat: Seat, question: Question, spent: Spent) -> Reply:
        if seat.member.context_window:
            _fit(question, seat.member.context_window)
        body, most = seat.body(question.messages, question.fields)
        price = seat.member.price
        held = await self._budget.reserve(len(body) + most, seat.cost(Usage(len(body), 0, most)) if price else 0.0)
        guess = estimate_tokens(len(body)) + most
        usage, cost, sent = Usage(), 0.0, False
        try:
            if seat.account.closed:
                raise asyncio.CancelledError
            if seat.account.paced:
                await seat.account.admit(guess)
            sent = True
            spent.attempts += 1
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
            if price:
                cost = seat.cost(usage)
                spent.cost_usd += cost
            self._budget.settle(held, usage, cost, sent)
            spent.usage.add(usage)
            if sent:
                seat.account.settle(guess, usage.prompt + usage.completion)

    async def _exchange(self, seat: Seat, body: bytes) -> Answer:
        """One HTTP exchange."""
        now = asyncio.get_running_loop().time
        replica = seat.pick(now())
        replica.in_flight += 1
        try:
            response = await self._session.post(
                replica.url,
                data=body,
                headers=seat.headers,
                timeout=self._timeout(seat.member.timeout_s),
                allow_redirects=False,
                proxy=replica.proxy,
            )
            content = await response.read()
            headers = response.headers
            if _REQUESTS_LEFT in headers or _TOKENS_LEFT in headers or _LEFT in headers:
                seat.account.observe(headers, seat.member.max_wait_s)
            answer = read(response.status, headers, content)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            fault = _transport(error, replica, seat)
            seat.blame(replica, fault, now())
            raise fault from None
        except Fault as fault:
            if fault.kind.passes:
                seat.blame(replica, fault, now())
                if fault.kind is Kind.THROTTLED and not fault.elsewhere:
                    seat.account.refused(fault.wait, seat.member.max_wait_s)
            raise
        finally:
            replica.in_flight -= 1
        replica.failures = 0
        return answer

    def _timeout(self, seconds: float) -> aiohttp.ClientTimeout:
        timeout = self._timeouts.get(seconds)
        if timeout is None:
            timeout = self._timeouts[seconds] = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_S)
        return timeout

    def _check_format(self, seat: Seat, content: str) -> None:
        if "response_format" not in seat.refused_fields and not content.lstrip().startswith("{"):
            seat.free_text = True
            self._notice(f"{seat.place} does not enforce JSON; scores are read from its text")


class _Patience:
    """How long one question is worth asking again, and how long to wait in between."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._began = asyncio.get_running_loop().time()
        self._attempts = 0
        self._backoff = wait_exponential_jitter(initial=BACKOFF_START_S, max=BACKOFF_LIMIT_S, jitter=BACKOFF_START_S)

    def is_over(self, state: RetryCallState) -> bool:
        """Whether the last attempt was the last one. A server that loads its model has its own time."""
        fault = _outcome(state)
        elapsed = asyncio.get_running_loop().time() - self._began
        if fault.kind is Kind.LOADING:
            return elapsed > self._seat.member.startup_timeout_s
        self._attempts += 1
        never_there = fault.kind is Kind.UNREACHABLE and not self._seat.answered
        if never_there and elapsed + state.upcoming_sleep > UNREACHABLE_S:
            return True
        return self._attempts >= self._seat.member.max_attempts

    def wait(self, state: RetryCallState) -> float:
        """Seconds until the next attempt; raises Fault when the server asks for more than the member allows."""
        fault = _outcome(state)
        if fault.wait is None:
            backoff = self._backoff(state)
            return min(backoff, LOADING_POLL_S) if fault.kind is Kind.LOADING else backoff
        member: Member = self._seat.member
        if fault.wait > member.max_wait_s:
            text = f"the server asks to wait {fault.wait:.0f} s, longer than max_wait_s ({member.max_wait_s:.0f} s)"
            raise Fault(Kind.FATAL, text, fault.status)
        return fault.wait


def _outcome(state: RetryCallState) -> Fault:
    fault = state.outcome.exception() if state.outcome else None
    assert isinstance(fault, Fault), "only faults are asked again"
    return fault


async def _reload(reload: Callable[[], Any]) -> None:
    try:
        await reload()
    except EndpointError as error:
        raise Fault(Kind.FATAL, str(error)) from error


def _fit(question: Question, window: int) -> None:
    """Lowers max_tokens to what the member's context window leaves, by estimate."""
    prompt = estimate_tokens(sum(len(str(message["content"])) for message in question.messages))
    if prompt >= window:
        raise Fault(Kind.OVERFLOW, f"the prompt has about {prompt} tokens, the context window {window}")
    most = question.fields.get("max_tokens")
    if most is None or prompt + most > window:
        question.fields["max_tokens"] = window - prompt


def _room(fault: Fault, question: Question) -> int | None:
    """The max_tokens that fits the window the server told; None when the prompt alone does not."""
    if not fault.context:
        return None
    window, prompt = fault.context
    room = window - prompt
    return room if 0 < room < question.fields.get("max_tokens", room + 1) else None


def _transport(error: Exception, replica: Replica, seat: Seat) -> Fault:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        reason = one_line(getattr(error.certificate_error, "verify_message", "") or str(error.certificate_error))
        text = (
            f"the TLS certificate of {replica.base_url} is not trusted ({reason}); point SSL_CERT_FILE to its authority"
        )
        return Fault(Kind.FATAL, text)
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        reason = (
            os.strerror(number) if number and number > 0 else one_line(error.os_error.strerror or str(error.os_error))
        )
        return Fault(Kind.UNREACHABLE, f"cannot connect to {replica.base_url} ({reason})")
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return Fault(Kind.UNREACHABLE, f"cannot connect to {replica.base_url} within {CONNECT_S:g} s")
    if isinstance(error, TimeoutError):
        return Fault(Kind.RETRY, f"no answer within timeout_s ({seat.member.timeout_s:g} s)")
    return Fault(Kind.RETRY, f"the connection broke ({one_line(str(error) or type(error).__name__)})")
