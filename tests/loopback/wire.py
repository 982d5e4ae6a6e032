"""HTTP/1.1 by hand: a keep-alive connection that can also misbehave on purpose."""

from __future__ import annotations

import asyncio
import http
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast

_HEADS_KEPT = 4096
_REASONS = {status.value: status.phrase for status in http.HTTPStatus}
_SETTLE_S = 0.02
"""Between the last bytes and a reset, so that the peer reads them before it learns of the reset."""


@dataclass(frozen=True, slots=True)
class Head:
    """A request without its body."""

    method: str
    path: str
    headers: dict[str, str]
    length: int
    close: bool

    @property
    def key(self) -> str:
        """The API key, "" where there is none."""
        return self.headers.get("authorization", "").removeprefix("Bearer ").strip() or self.headers.get("api-key", "")


class Handler(Protocol):
    """What a connection needs of the server."""

    def handle(self, connection: Connection, head: Head, body: bytes) -> None: ...
    def opened(self, connection: Connection) -> None: ...
    def closed(self, connection: Connection) -> None: ...


def parse_head(raw: bytes) -> Head:
    """A request head (without the blank line); ValueError when it is none."""
    lines = raw.decode("latin-1").split("\r\n")
    method, target, _ = lines[0].split(" ", 2)
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    if "transfer-encoding" in headers:
        raise ValueError("chunked requests are not understood")
    return Head(
        method=method,
        path=target.partition("?")[0],
        headers=headers,
        length=int(headers.get("content-length", 0)),
        close=headers.get("connection", "").lower() == "close",
    )


def response(
    status: int,
    body: bytes,
    content_type: str = "application/json",
    headers: Mapping[str, str] | None = None,
    length: int | None = None,
) -> bytes:
    """A whole response; `length` overrides what Content-Length says."""
    size = len(body) if length is None else length
    if status == 200 and not headers and content_type == "application/json":
        return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (size, body)
    lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Unknown')}", f"content-type: {content_type}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return ("\r\n".join([*lines, f"content-length: {size}"]) + "\r\n\r\n").encode() + body


class Connection(asyncio.Protocol):
    """One client connection; requests on it are answered one after another."""

    _heads: dict[bytes, Head] = {}  # noqa: RUF012 (shared on purpose: clients repeat the same few heads)

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._buffer = b""
        self._busy = False
        self._close_after = False
        self._transport: asyncio.Transport | None = None
        self.exchange: object | None = None
        """The request that waits for its answer."""
        self.counted = False
        """Whether it has carried a request (/control is none)."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._handler.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._handler.closed(self)

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        self._advance()

    def _advance(self) -> None:
        while not self._busy and self._buffer:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            raw = self._buffer[:end]
            head = self._heads.get(raw)
            if head is None:
                head = self._learn(raw)
                if head is None:
                    return
            total = end + 4 + head.length
            if len(self._buffer) < total:
                return
            body = self._buffer[end + 4 : total]
            self._buffer = self._buffer[total:]
            self._busy, self._close_after = True, head.close
            self._handler.handle(self, head, body)

    def _learn(self, raw: bytes) -> Head | None:
        try:
            head = parse_head(raw)
        except ValueError as error:
            self.send(response(400, f"bad request: {error}".encode(), "text/plain"), close=True)
            return None
        if len(self._heads) >= _HEADS_KEPT:
            self._heads.clear()
        self._heads[raw] = head
        return head

    @property
    def open(self) -> bool:
        """Whether the client is still there."""
        return self._transport is not None

    def write(self, data: bytes) -> None:
        """Sends part of an answer."""
        if self._transport is not None:
            self._transport.write(data)

    def send(self, data: bytes, close: bool = False) -> None:
        """Sends the (rest of the) answer and goes on with the next request."""
        if self._transport is None:
            return
        self._transport.write(data)
        if close or self._close_after:
            self._transport.close()
            return
        self._busy = False
        if self._buffer:
            asyncio.get_running_loop().call_soon(self._advance)

    def close(self) -> None:
        """Ends the connection in good order."""
        if self._transport is not None:
            self._transport.close()

    def reset(self) -> None:
        """Ends the connection with a TCP reset."""
        if self._transport is None:
            return
        twin = socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno()))
        twin.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        twin.close()
        self._transport.abort()

    def reset_soon(self) -> None:
        """A reset once the bytes written so far have left."""
        asyncio.get_running_loop().call_later(_SETTLE_S, self.reset)
