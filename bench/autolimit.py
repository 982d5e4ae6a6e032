"""`concurrency: auto` beside every fixed setting, on servers that behave as inference servers and gateways do.

`line` runs 32 requests at once and lets the others wait; `batch` slows down smoothly as its batch fills, up to 64
requests at once (tests/loopback/batch.py gives the formula); `gateway` is `line` with a 429 above 40 in flight. The
rate is that of the server's own log, from the first request received to the last answer. Auto starts from nothing
and has 100 times the server's capacity in requests; a fixed setting gets about four seconds' worth, since its rate does
not change. The best one and auto then take turns, and medians are compared.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from bench.stage import Effort, Row, loopback, measured, say, sparta
from tests.front_door import tribe

LATENCY_S = 0.1
UNLIMITED = 1e9
SERVERS: dict[str, dict[str, Any]] = {
    "line": {"concurrent": 32, "saturation": UNLIMITED},
    "batch": {"concurrent": 64, "saturation": 24},
    "gateway": {"concurrent": 32, "saturation": UNLIMITED, "queue": 40, "status": 429},
}
FIXED = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 96, 128)
TIMES_CAPACITY = 100
SECONDS_PER_SETTING = 4.0
ROUNDS = 3
MEMBERS = 4
REQUESTS_PER_DUEL = 2 + 2 * (MEMBERS - 2)
TARGET = 0.9


def _rate(directory: Path, capacity: dict[str, Any], concurrency: int | str, requests: int) -> float:
    """Answers per second over a run of about so many requests."""
    scenario = {"any_model": True, "default_model": {"latency_s": LATENCY_S}, "capacity": capacity}
    with loopback(scenario, directory, fast=False) as server:
        defaults = {"concurrency": concurrency, "timeout_s": 120, "max_attempts": 50}
        path = tribe(directory, server.base_url, MEMBERS, max(4, requests // REQUESTS_PER_DUEL), defaults=defaults)
        measured(sparta("run", "--tribe", path, "--run-dir", directory / "run"), directory)
        log = server.requests("/chat/completions")
    answered = [request for request in log if request["outcome"] == "200"]
    took: float = max(request["ended"] for request in log) - min(request["t"] for request in log)
    return len(answered) / took


def _compared(directory: Path, name: str, scale: float) -> Row:
    capacity = SERVERS[name]
    total = int(TIMES_CAPACITY * capacity["concurrent"] * max(scale, 0.2))

    attempts = count()

    def fixed_rate(fixed: int) -> float:
        enough = int(min(fixed, capacity["concurrent"]) * SECONDS_PER_SETTING / LATENCY_S)
        return _rate(directory / f"fixed-{fixed}-{next(attempts)}", capacity, fixed, min(total, enough))

    def auto_rate() -> float:
        return _rate(directory / f"auto-{next(attempts)}", capacity, "auto", total)

    rates = {fixed: fixed_rate(fixed) for fixed in FIXED}
    best = max(rates, key=rates.__getitem__)
    say(f"auto, {name}, fixed: " + ", ".join(f"{n} {rate:.0f}/s" for n, rate in rates.items()))
    pairs = [(auto_rate(), fixed_rate(best)) for _ in range(ROUNDS)]
    say(f"auto, {name}, in turns: " + ", ".join(f"auto {auto:.0f}/s, {best} {rate:.0f}/s" for auto, rate in pairs))
    auto, rate = (median(figures) for figures in zip(*pairs, strict=True))
    return Row("auto", f"{name}: auto / best fixed", auto / rate, TARGET, note=f"{auto:.0f}/s, {rate:.0f}/s at {best}")


def autolimit(directory: Path, effort: Effort) -> list[Row]:
    """The rows of the table; a scale below 1 sends fewer requests, down to 20 times the capacity."""
    return [_compared(directory / name, name, effort.scale) for name in SERVERS]
