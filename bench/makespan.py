"""Scheduling: how long an iteration takes when members differ 50-fold in latency, beside a lower bound.

Every member is an account of its own (a key of its own) with its own limit. The bound is

    max over accounts of ceil(n_i / c_i) * l_i  +  max over duels of (max l_fighter + max l_judge)

with n_i requests at c_i in flight and latency l_i each: the busiest account's work in whole waves, plus the longest
chain of one duel, an answer and a judgment of it. The makespan goes from the receipt of the first request to the
last answer by the server's own log, so that start-up does not count.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.stage import Effort, Row, loopback, measured, say, sparta
from tests.front_door import rows, tribe
from tests.loopback import LoopbackProcess

TARGET = 1.05
WAVES = 50
SMALLEST_SCALE = 0.2


@dataclass(frozen=True)
class Place:
    """A member: seconds per answer, requests in flight, roles."""

    latency_s: float
    limit: int
    roles: tuple[str, ...] = ("fight", "judge")


SHAPES = {
    "all in all roles": [Place(0.01, 8), Place(0.02, 8), Place(0.1, 8), Place(0.5, 8)],
    "one slow judge": [Place(0.01, 8), Place(0.02, 4), Place(0.05, 8), Place(0.5, 8, ("judge",))],
    "one slow fighter": [Place(0.5, 6, ("fight",)), Place(0.01, 8), Place(0.02, 8), Place(0.05, 16)],
}
DUELS = {"all in all roles": 300, "one slow judge": 220, "one slow fighter": 680}
"""Enough for 50 waves of the slowest account."""


def _key(number: int) -> str:
    return f"BENCH_KEY_{number}"


def _tribe(directory: Path, server: LoopbackProcess, places: list[Place], duels: int) -> Path:
    members = [
        {
            "name": f"m{number}",
            "model": f"model-{number}",
            "api_key_env": _key(number),
            "concurrency": place.limit,
            "roles": list(place.roles),
        }
        for number, place in enumerate(places)
    ]
    path = tribe(directory, server.base_url, len(members), duels)
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    path.write_text(yaml.safe_dump({**config, "members": members}, sort_keys=False), encoding="utf-8")
    return path


def _bound(places: list[Place], asked: Counter[str], matchups: list[dict[str, Any]]) -> tuple[float, int]:
    """The lower bound in seconds, and the waves of the account that sets it."""
    latency = {f"m{number}": place.latency_s for number, place in enumerate(places)}
    work = {}
    for number, place in enumerate(places):
        waves = math.ceil(asked[f"model-{number}"] / place.limit)
        work[waves * place.latency_s] = waves
    path = max(max(latency[f] for f in m["fighters"]) + max(latency[j] for j in m["judges"]) for m in matchups)
    busiest = max(work)
    return busiest + path, work[busiest]


def _ratio(directory: Path, shape: str, scale: float) -> Row:
    slowed = max(SMALLEST_SCALE, min(1.0, scale))
    places = [Place(place.latency_s * slowed, place.limit, place.roles) for place in SHAPES[shape]]
    models = {f"model-{number}": {"latency_s": place.latency_s} for number, place in enumerate(places)}
    with loopback({"models": models}, directory, fast=False) as server:
        path = _tribe(directory, server, places, DUELS[shape])
        keys = {_key(number): f"key-{number}" for number in range(len(places))}
        measured(sparta("run", "--tribe", path, "--run-dir", directory / "run"), directory, env=keys)
        requests = server.requests("/chat/completions")
    asked = Counter(request["model"] for request in requests)
    bound, waves = _bound(places, asked, rows(directory / "run" / "iteration_000" / "matchups.jsonl"))
    makespan = max(request["ended"] for request in requests) - min(request["t"] for request in requests)
    say(f"makespan, {shape}: {makespan:.2f} s, bound {bound:.2f} s, {waves} waves, {len(requests)} requests")
    if waves < WAVES:
        raise RuntimeError(f"{shape}: {waves} waves, {WAVES} are wanted; raise its duels")
    return Row("makespan", shape, makespan / bound, TARGET, "less", f"{makespan:.1f} s, {waves} waves")


def makespan(directory: Path, effort: Effort) -> list[Row]:
    """The rows of the table; a scale below 1 makes all members faster, down to a fifth of their latencies."""
    return [_ratio(directory / shape.replace(" ", "-"), shape, effort.scale) for shape in SHAPES]
