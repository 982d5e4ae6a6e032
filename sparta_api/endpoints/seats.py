"""A member as the client sees it: where it is, which model it is, what its endpoint takes, how it has been doing."""

from __future__ import annotations

import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from yarl import URL

from sparta_api.config.tribe import Member, Price
from sparta_api.data.journal import encode
from sparta_api.endpoints.accounts import Account
from sparta_api.endpoints.faults import Fault, Kind
from sparta_api.show.progress import Usage

REPLICA_REST_S = 10.0
REPLICA_PATIENCE = 3
"""Server errors in a row after which a replica is left alone for a while; a broken connection is enough."""
OUTPUT_GUESS = 1024
"""Tokens that an answer may have where no max_tokens bounds it."""

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

Message = dict[str, Any]


class Replica:
    """One base URL of a member."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url.rstrip("/")
        self.url = URL(self.base_url + "/chat/completions")
        self.in_flight = 0
        self.rests_until = 0.0
        self.failures = 0
        """Faults in a row."""
        self.proxy = _proxy(self.base_url)


def _proxy(url: str) -> str | None:
    """The proxy that the environment names for a URL; this machine itself is never asked through one."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if host in LOOPBACK or urllib.request.proxy_bypass(host):
        return None
    return urllib.request.getproxies().get(parts.scheme)


class Seat:
    """A member's place at this moment."""

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
        self.form = 0
        """Counts the changes to how requests are written for this endpoint."""
        self.free_text = False
        """Whether the endpoint has answered in free text where JSON was asked for."""
        self.reload: Callable[[], Awaitable[None]] | None = None
        """Makes the endpoint serve the member's model again, where the run can."""
        self.failures = 0
        """Questions in a row that exhausted their attempts."""
        self.answered_at = float("-inf")
        """When the endpoint last gave an answer, in seconds of the event loop's clock."""

    @property
    def answered(self) -> bool:
        """Whether the endpoint has answered this member in this process."""
        return self.answered_at > float("-inf")

    @property
    def place(self) -> str:
        """Where and what the member is, for messages."""
        return f"{', '.join(replica.base_url for replica in self.replicas)} (model '{self.model}')"

    def pick(self, now: float) -> Replica:
        """The least busy replica that is not resting after a failure."""
        if len(self.replicas) == 1:
            return self.replicas[0]
        return min(self.replicas, key=lambda r: (r.rests_until > now, r.in_flight))

    def blame(self, replica: Replica, fault: Fault, now: float) -> None:
        """Leaves a failing replica alone for a while where another one is healthy, and says so in the fault."""
        replica.failures += 1
        broken = fault.status is None or fault.kind in (Kind.THROTTLED, Kind.LOADING)
        if broken or replica.failures >= REPLICA_PATIENCE:
            replica.rests_until = now + max(REPLICA_REST_S, fault.wait or 0.0)
            fault.elsewhere = any(r is not replica and r.rests_until <= now for r in self.replicas)

    def adapt(self, fault: Fault) -> str | None:
        """Changes how requests are written so that the endpoint takes them; a sentence on it, or None."""
        if fault.kind is Kind.NO_SYSTEM_ROLE and not self.fold:
            self.fold = True
            self.form += 1
            return f"{self.place} has no system role; its text is put on top of the first user message"
        if fault.kind is Kind.UNSUPPORTED and fault.parameter and fault.parameter not in self.refused_fields:
            self.refused_fields.add(fault.parameter)
            self.form += 1
            renamed = fault.parameter == "max_tokens" and "max_completion_tokens" not in self.refused_fields
            return f"{self.place} does not take {fault.parameter}; " + (
                "sent as max_completion_tokens" if renamed else "left out"
            )
        return None

    def body(self, question: list[Message], fields: dict[str, Any]) -> tuple[bytes, int]:
        """The request body, and how many tokens its answer has at most."""
        messages = fold_system(question) if self.fold else question
        data = {"model": self.model, "messages": messages, **fields}
        if self.member.extra_body:
            data.update(self.member.extra_body)
        if self.refused_fields:
            self._leave_out(data)
        most = data.get("max_completion_tokens") or data.get("max_tokens")
        return encode(data), most if isinstance(most, int) else OUTPUT_GUESS

    def _leave_out(self, data: dict[str, Any]) -> None:
        if "max_tokens" in self.refused_fields and "max_tokens" in data:
            data.setdefault("max_completion_tokens", data["max_tokens"])
        for name in self.refused_fields:
            data.pop(name, None)

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
