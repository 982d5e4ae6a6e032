"""How long a server asks to wait, in all the forms in which servers say it. Pure functions, no I/O."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

BUCKETS = ("-requests", "-tokens", "")
"""The limits that x-ratelimit-* headers tell apart."""
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_EPOCH_FROM = 1e9
"""Larger numbers are points in time: seconds since 1970, or milliseconds when a thousand times larger."""


def seconds(text: str, now: datetime | None = None) -> float | None:
    """A wait in seconds out of a number, a duration like 6m0s or 500ms, an ISO or HTTP date, or an epoch.

    Points in time are measured from `now`; None for anything else.
    """
    text = text.strip()
    now = now or datetime.now(UTC)
    try:
        value = float(text)
    except ValueError:
        told = _duration(text)
        return _date(text, now) if told is None else told
    if not math.isfinite(value):
        return None
    if value > _EPOCH_FROM:
        value = (value / 1000 if value > _EPOCH_FROM * 100 else value) - now.timestamp()
    return max(0.0, value)


def _duration(text: str) -> float | None:
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def _date(text: str, now: datetime) -> float | None:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        try:
            moment = parsedate_to_datetime(text)
        except ValueError:
            return None
    return max(0.0, (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() - now.timestamp())


def server_now(headers: Mapping[str, str]) -> datetime:
    """The server's own clock where it tells it, so that a wrong local clock changes no wait."""
    try:
        return parsedate_to_datetime(headers["date"])
    except (KeyError, ValueError):
        return datetime.now(UTC)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """How many seconds the server asks to wait: Retry-After(-Ms), else the reset of the bucket that is exhausted.

    Where the server does not tell which bucket that is, the one that is full again first.
    """
    now = server_now(headers)
    if headers.get("retry-after-ms") and (value := seconds(headers["retry-after-ms"], now)) is not None:
        return value / 1000
    if headers.get("retry-after") and (value := seconds(headers["retry-after"], now)) is not None:
        return value
    resets = {bucket: seconds(headers.get(f"x-ratelimit-reset{bucket}", ""), now) for bucket in BUCKETS}
    told = {bucket: value for bucket, value in resets.items() if value is not None}
    exhausted = [value for bucket, value in told.items() if bucket in exhausted_buckets(headers)]
    return max(exhausted) if exhausted else min(told.values(), default=None)


def exhausted_buckets(headers: Mapping[str, str]) -> list[str]:
    """The buckets of x-ratelimit-remaining* that hold nothing any more."""
    return [b for b in BUCKETS if headers.get(f"x-ratelimit-remaining{b}", "").strip() in ("0", "0.0")]
