"""Throughput: a whole run against a server that answers at once, beside clients that only send.

The run is timed from the start of its process to its end: imports, configuration, planning, prompts, HTTP, parsing,
journals, reputation, preferences and the report. The bare loop sends the same bodies and is timed without its start.
Both take turns on the same core, the server has the other one; medians are compared.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import orjson

from bench.clients import IN_FLIGHT
from bench.peer import installed
from bench.stage import Effort, Row, loopback, measured, say, sparta
from tests.front_door import tribe

MEMBERS = 6
REQUESTS_PER_DUEL = 2 + 2 * (MEMBERS - 2)
REQUESTS = 60_000
ROUNDS = 3
SLOW_REQUESTS = 5_000
"""For the clients that are several times slower than the run."""
SAMPLE_DUELS = 60
TARGET = 0.33
BETTER = 0.5


@dataclass(frozen=True)
class Rate:
    """Requests per second of wall clock and per second of CPU."""

    wall: float
    cpu: float


def bodies(directory: Path) -> Path:
    """The request bodies of a small run, one JSON object a line, in the order in which the server got them."""
    with loopback({"any_model": True, "log_bodies": True}, directory, fast=False) as server:
        path = tribe(directory, server.base_url, members=MEMBERS, instructions=SAMPLE_DUELS)
        measured(sparta("run", "--tribe", path, "--run-dir", directory / "run"), directory)
        requests = server.requests("/chat/completions")
    target = directory / "bodies.jsonl"
    target.write_bytes(b"".join(orjson.dumps(request["body"]) + b"\n" for request in requests))
    return target


def whole_run(directory: Path, base_url: str, duels: int) -> Rate:
    """A run of so many duels, from the start of its process to its end."""
    shutil.rmtree(directory, ignore_errors=True)
    path = tribe(directory, base_url, MEMBERS, duels, defaults={"concurrency": IN_FLIGHT, "timeout_s": 120})
    ended = measured(sparta("run", "--tribe", path, "--run-dir", directory / "run"), directory)
    requests = duels * REQUESTS_PER_DUEL
    return Rate(requests / ended.wall_s, requests / ended.cpu_s)


def client(command: list[str], directory: Path, base_url: str, lines: Path, requests: int) -> Rate:
    """A client of bench.clients, or a peer that takes the same arguments."""
    ended = measured([*command, base_url, str(lines), str(requests)], directory)
    took = json.loads(ended.out.splitlines()[-1])
    return Rate(requests / took["wall_s"], requests / took["cpu_s"])


def throughput(directory: Path, effort: Effort) -> list[Row]:
    """The rows of the table; a scale below 1 sends fewer requests."""
    lines = bodies(directory / "bodies")
    duels = max(SAMPLE_DUELS, int(REQUESTS * effort.scale) // REQUESTS_PER_DUEL)
    own = [sys.executable, "-m", "bench.clients"]
    runs: list[Rate] = []
    bares: list[Rate] = []
    with loopback({"any_model": True}, directory / "server") as server:
        for number in range(ROUNDS):
            bares.append(client([*own, "bare"], directory, server.base_url, lines, duels * REQUESTS_PER_DUEL))
            runs.append(whole_run(directory / "run", server.base_url, duels))
            say(
                f"throughput {number + 1}/{ROUNDS}: bare {bares[-1].wall:,.0f}/s "
                f"({bares[-1].cpu:,.0f} per CPU second), "
                f"run {runs[-1].wall:,.0f}/s ({runs[-1].cpu:,.0f})"
            )
        slow = max(500, int(SLOW_REQUESTS * effort.scale))
        others = {"openai SDK": client([*own, "openai"], directory, server.base_url, lines, slow)}
        peer = installed()
        if peer is not None:
            others[peer.name] = client(peer.command, directory, server.base_url, lines, slow)
        else:
            say("throughput: no peer tool; python -m bench.peer installs one")
    return _rows(bares, runs, others)


def _rows(bares: list[Rate], runs: list[Rate], others: dict[str, Rate]) -> list[Row]:
    bare, run = median(rate.wall for rate in bares), median(rate.wall for rate in runs)
    cpu = median(rate.cpu for rate in runs) / median(rate.cpu for rate in bares)
    rows = [
        Row("throughput", "run / bare aiohttp loop", run / bare, TARGET, note=f"{run:,.0f} and {bare:,.0f} requests/s"),
        Row("throughput", "the same per CPU second", cpu, BETTER, note=f"medians of {len(runs)}"),
    ]
    for name, rate in others.items():
        rows.append(Row("throughput", f"run / {name}", run / rate.wall, None, note=f"{rate.wall:,.0f} requests/s"))
    return rows
