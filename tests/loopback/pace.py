"""How fast and how much: latency, capacity, and rate limits per API key."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from email.utils import formatdate

from tests.loopback.answers import Ask
from tests.loopback.scenario import Capacity, RateLimit

_DRAWS = 2**32


def latency_s(ask: Ask, in_flight: int, capacity: Capacity | None) -> float:
    """Seconds that the answer takes with so many requests in flight, this one included."""
    seconds = ask.settings.latency_s
    if seconds and ask.settings.latency == "exponential":
        drawn = int.from_bytes(ask.draw(8)[4:], "little")
        seconds *= -math.log((drawn + 1) / (_DRAWS + 1))
    if capacity is not None and capacity.saturation is None and in_flight > capacity.concurrent:
        seconds *= in_flight / capacity.concurrent
    return seconds


def duration(seconds: float) -> str:
    """A duration as OpenAI's rate limit headers have it: 500ms, 12s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def retry_after(kind: str, seconds: float) -> dict[str, str]:
    """The header that tells when to come again, in one of the forms in which servers say it."""
    if kind == "seconds":
        return {"retry-after": str(math.ceil(seconds))}
    if kind == "ms":
        return {"retry-after-ms": str(math.ceil(seconds * 1000))}
    if kind == "date":
        return {"retry-after": formatdate(time.time() + seconds, usegmt=True)}
    return {}


@dataclass(slots=True)
class Bucket:
    """A token bucket: `limit` at most, refilled within `window_s`."""

    limit: int
    window_s: float
    level: float
    filled_at: float

    def refill(self, now: float) -> None:
        self.level = min(self.limit, self.level + (now - self.filled_at) * self.limit / self.window_s)
        self.filled_at = now

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` is there; 0 when it is."""
        return max(0.0, (min(amount, self.limit) - self.level) * self.window_s / self.limit)

    def reset_s(self) -> float:
        """Seconds until the bucket is full."""
        return (self.limit - self.level) * self.window_s / self.limit


class Account:
    """The limits of one key."""

    def __init__(self, limit: RateLimit, now: float) -> None:
        self.limit = limit
        sizes = {"requests": limit.requests, "tokens": limit.tokens}
        self.buckets = {k: Bucket(size, limit.window_s, size, now) for k, size in sizes.items() if size is not None}

    def admit(self, tokens: int, now: float) -> tuple[bool, dict[str, str]]:
        """Takes one request of so many tokens out of the buckets, unless one lacks it; and the headers to send."""
        wait = 0.0
        amounts = {"requests": 1, "tokens": tokens}
        for kind, bucket in self.buckets.items():
            bucket.refill(now)
            wait = max(wait, bucket.wait_s(amounts[kind]))
        if wait == 0.0:
            for kind, bucket in self.buckets.items():
                bucket.level -= amounts[kind]
        headers = self._headers() if self.limit.headers else {}
        return wait == 0.0, headers if wait == 0.0 else headers | retry_after(self.limit.retry_after, wait)

    def _headers(self) -> dict[str, str]:
        headers = {}
        for kind, bucket in self.buckets.items():
            headers[f"x-ratelimit-limit-{kind}"] = str(bucket.limit)
            headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(bucket.level)))
            headers[f"x-ratelimit-reset-{kind}"] = duration(bucket.reset_s())
        return headers
