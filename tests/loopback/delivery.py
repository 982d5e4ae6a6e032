"""How an answer leaves: whole, spoiled, in drips, or never."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import orjson

from tests.loopback.faults import body_of, edited, stream_of
from tests.loopback.record import ModelStats, RequestLog, Stats
from tests.loopback.scenario import Fault
from tests.loopback.wire import Connection, Head, response


class Exchange:
    """One request between its receipt and its outcome."""

    __slots__ = ("_timer", "connection", "fault", "headers", "id", "log", "model", "open", "stats")

    def __init__(
        self, connection: Connection, number: int, log: RequestLog, stats: Stats | None, model: ModelStats | None
    ) -> None:
        self.connection = connection
        self.id = number
        self.log = log
        self.stats = stats
        self.model = model
        self.headers: dict[str, str] = {}
        self.fault: str | None = None
        self.open = True
        self._timer: asyncio.TimerHandle | None = None
        if stats is not None and model is not None:
            stats.requests += 1
            stats.in_flight += 1
            if stats.in_flight > stats.max_in_flight:
                stats.max_in_flight = stats.in_flight
            model.enter()

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Does it then, unless the client has gone."""
        if seconds > 0:
            self._timer = asyncio.get_running_loop().call_later(seconds, action)
        else:
            action()

    def end(self, outcome: str) -> None:
        """Records the outcome: a status, or what happened on the wire. The first one counts."""
        if not self.open:
            return
        self.open = False
        if self._timer is not None:
            self._timer.cancel()
        self.connection.exchange = None
        if self.stats is not None and self.model is not None:
            self.stats.in_flight -= 1
            self.model.leave(outcome, self.fault)
        if self.log.on:
            self.log.write(event="outcome", id=self.id, outcome=outcome, fault=self.fault)

    def reply(self, status: int, payload: bytes, content_type: str = "application/json") -> None:
        """Sends a whole answer. The outcome is recorded first: whoever has read the answer finds it."""
        self.end(str(status))
        self.connection.send(response(status, payload, content_type, self.headers))


def before_answer(exchange: Exchange, fault: Fault, head: Head) -> bool:
    """Applies a fault that needs no answer; False when the fault waits for one."""
    connection = exchange.connection
    if fault.kind in ("reply", "echo_authorization"):
        payload = body_of(fault, head.headers.get("authorization", ""))
        exchange.reply(fault.status, payload, fault.content_type)
    elif fault.kind == "reset":
        exchange.end("reset")
        connection.reset()
    elif fault.kind == "close":
        exchange.end("closed")
        connection.close()
    elif fault.kind == "hang":
        if fault.seconds:
            exchange.later(fault.seconds, connection.close)
    elif fault.kind == "exit":
        exchange.end("exit")
        os._exit(fault.code)
    else:
        return False
    return True


def with_fault(exchange: Exchange, fault: Fault, answer: dict[str, Any]) -> None:
    """Sends a chat completion as the fault changes it."""
    if fault.kind in ("edit", "surrogate"):
        exchange.reply(fault.status, edited(fault, answer))
    elif fault.kind == "sse":
        exchange.reply(fault.status, edited(fault, answer), "text/event-stream")
    else:
        spoiled(exchange, fault, orjson.dumps(answer))


def streamed(exchange: Exchange, answer: dict[str, Any]) -> None:
    """Sends a chat completion as the event stream that was asked for."""
    exchange.reply(200, stream_of(answer), "text/event-stream")


def spoiled(exchange: Exchange, fault: Fault, payload: bytes) -> None:
    """Sends a body in a way that breaks or delays it; other faults leave it whole."""
    connection, half = exchange.connection, payload[: len(payload) // 2]
    if fault.kind == "reset_in_body":
        connection.write(response(200, half, length=len(payload)))
        exchange.end("reset_in_body")
        connection.reset_soon()
    elif fault.kind == "half_json" and fault.length == "sent":
        exchange.reply(200, half)
    elif fault.kind == "half_json" and fault.length == "whole":
        exchange.end("200")
        connection.send(response(200, half, length=len(payload)), close=True)
    elif fault.kind == "half_json":
        exchange.end("200")
        start = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        connection.send(start + b"%x\r\n%b\r\n" % (len(half), half), close=True)
    elif fault.kind == "drip":
        _drip(exchange, fault, response(200, payload))
    else:
        exchange.reply(200, payload)


def _drip(exchange: Exchange, fault: Fault, data: bytes) -> None:
    rest = data[fault.chunk :]
    if not rest:
        exchange.end("200")
        exchange.connection.send(data)
        return
    exchange.connection.write(data[: fault.chunk])
    exchange.later(fault.interval_s, lambda: _drip(exchange, fault, rest))
