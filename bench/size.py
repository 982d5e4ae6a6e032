"""Size: memory and cost per request of a large run, and how long its directory takes to be opened.

The runs are real. The directory of 100,000 duels for `resume` and `status` is a run that was killed when its first
duels were done and whose journals are then filled up to 97 % with rows like those that it had written, folded by the
public `Reputation`; the engine goes on from there to 99 %, writes its index, and is killed. The large run has 10,000
duels; `python -m bench size --whole` plays all 100,000, which takes minutes.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import orjson

from bench.clients import IN_FLIGHT
from bench.stage import Effort, Ended, Process, Row, loopback, measured, say, sparta, start
from sparta_api import Rating, Reputation, ReputationConfig
from tests.front_door import rows, tribe
from tests.loopback import LoopbackProcess

MEMBERS = 6
REQUESTS_PER_DUEL = 2 + 2 * (MEMBERS - 2)
SMALL = 1_000
LARGE = 10_000
WHOLE = 100_000
FILLED = 0.97
KILLED = 0.99
SEED_DUELS = 300
PATIENCE_S = 600.0
MEMORY_MB = 300
OPEN_S = 5.0
STATUS_S = 1.0
COST_RATIO = 1.1


@dataclass(frozen=True)
class Cost:
    """A run's CPU seconds per request, start-up taken off, and its peak memory in MB."""

    per_request_s: float
    peak_mb: float


def _tribe(directory: Path, server: LoopbackProcess, duels: int) -> Path:
    defaults = {"concurrency": IN_FLIGHT, "timeout_s": 120}
    return tribe(directory, server.base_url, MEMBERS, duels, defaults=defaults)


def _played(directory: Path, server: LoopbackProcess, duels: int, startup_s: float) -> Cost:
    path = _tribe(directory, server, duels)
    ended = measured(sparta("run", "--tribe", path, "--run-dir", directory / "run"), directory)
    requests = duels * REQUESTS_PER_DUEL
    cost = Cost((ended.cpu_s - startup_s) / requests, ended.peak_mb)
    say(f"size: {duels:,} duels: {cost.per_request_s * 1e6:.0f} us of CPU per request, {cost.peak_mb:.0f} MB")
    return cost


def _folded(run: Path) -> int:
    """How many duels are settled, by the last row of duels.jsonl."""
    path = run / "iteration_000" / "duels.jsonl"
    if not path.exists() or path.stat().st_size == 0:
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 8192))
        lines = file.read().splitlines(keepends=True)
    whole = [line for line in lines[1:] if line.endswith(b"\n")]
    return int(orjson.loads(whole[-1])["duel"]) + 1 if whole else 0


def _killed_at(process: Process, run: Path, duels: int) -> None:
    """Kills a run with SIGKILL once so many duels are settled."""
    _until(process, lambda: _folded(run) >= duels)
    process.popen.send_signal(signal.SIGKILL)
    process.wait()


def _until(process: Process, reached: Callable[[], bool]) -> None:
    patience = time.monotonic() + PATIENCE_S
    while not reached():
        if process.popen.poll() is not None or time.monotonic() > patience:
            raise RuntimeError(f"the run ended early: {process.files[1].read_text()[-2000:]}")
        time.sleep(0.005)


def _fill(run: Path, duels: int) -> None:
    """Writes the journals of the first `duels` duels anew, with the texts, scores and usage of those that there are."""
    files = run / "iteration_000"
    responses = cycle(rows(files / "responses.jsonl"))
    judgments = cycle(rows(files / "judgments.jsonl"))
    verdict = rows(files / "duels.jsonl")[0]
    reputation = Reputation(ReputationConfig(), {f"m{n}": Rating(100.0, 0.5) for n in range(MEMBERS)})
    names = ("responses", "judgments", "duels")
    with (
        (files / "matchups.jsonl").open("rb") as matchups,
        (files / "responses.new").open("wb") as answers,
        (files / "judgments.new").open("wb") as marks,
        (files / "duels.new").open("wb") as verdicts,
    ):
        for line, _ in zip(matchups, range(duels), strict=False):
            matchup = orjson.loads(line)
            place = {"duel": matchup["duel"]}
            for fighter in matchup["fighters"]:
                answers.write(_line(next(responses) | place | {"fighter": fighter}))
            scores: dict[str, list[float]] = {}
            for judge, fighter in ((judge, fighter) for fighter in matchup["fighters"] for judge in matchup["judges"]):
                row = next(judgments) | place | {"judge": judge, "fighter": fighter}
                scores.setdefault(judge, []).append(row["score"])
                marks.write(_line(row))
            verdicts.write(_line(_verdict(verdict, matchup, scores, reputation)))
    for name in names:
        (files / f"{name}.new").replace(files / f"{name}.jsonl")
    (files / "index.json").unlink(missing_ok=True)


def _verdict(
    like: dict[str, Any], matchup: dict[str, Any], scores: dict[str, list[float]], reputation: Reputation
) -> dict[str, Any]:
    a, b = matchup["fighters"]
    change = reputation.update((a, b), {judge: (pair[0], pair[1]) for judge, pair in scores.items()})
    return like | {
        "duel": matchup["duel"],
        "instruction": matchup["instruction"],
        "fighters": [a, b],
        "judges": scores,
        "abstained": [],
        "scores": change.scores,
        "winner": change.winner,
        "margin": change.margin,
        "void": None,
        "k": change.k,
        "before": change.before,
        "after": change.after,
        "deviation": change.deviation,
    }


def _line(row: dict[str, Any]) -> bytes:
    return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)


def _nearly_done(directory: Path, server: LoopbackProcess) -> Path:
    """The directory of a run of 100,000 duels that was killed at 99 %."""
    path, run = _tribe(directory, server, WHOLE), directory / "run"
    _killed_at(start(sparta("run", "--tribe", path, "--run-dir", run), directory), run, SEED_DUELS)
    _fill(run, int(WHOLE * FILLED))
    _killed_at(start(sparta("resume", run), directory), run, int(WHOLE * KILLED))
    return run


def _opening(directory: Path, server: LoopbackProcess, run: Path, label: str, target: float | None) -> Row:
    """Seconds from the start of `resume` to its first request, and its memory until then; then it is killed."""
    server.control(json={"reset_stats": True})
    process = start(sparta("resume", run), directory)
    _until(process, lambda: server.stats()["requests"] > 0)
    took = time.perf_counter() - process.started
    process.popen.send_signal(signal.SIGKILL)
    ended = process.wait()
    return Row("size", f"resume at 99 %, {label}, s", took, target, "less", _note(ended))


def _status(directory: Path, run: Path, label: str, target: float | None) -> Row:
    ended = measured(sparta("status", run), directory)
    return Row("size", f"status, {label}, s", ended.wall_s, target, "less", _note(ended))


def _note(ended: Ended) -> str:
    return f"{ended.cpu_s:.2f} s of CPU, {ended.peak_mb:.0f} MB"


def _startup(directory: Path) -> float:
    """CPU seconds of a process that only starts."""
    return min(measured(sparta("--help"), directory).cpu_s for _ in range(3))


def size(directory: Path, effort: Effort) -> list[Row]:
    """The rows of the table; the large run has 100,000 duels where the effort is whole, else 10,000 times its scale."""
    with loopback({"any_model": True}, directory) as server:
        startup = _startup(directory)
        small = _played(directory / "small", server, SMALL, startup)
        duels = WHOLE if effort.whole else max(2 * SMALL, int(LARGE * effort.scale))
        large = _played(directory / "large", server, duels, startup)
        found = [
            Row(
                "size",
                "cost per request, large / small run",
                large.per_request_s / small.per_request_s,
                COST_RATIO,
                "less",
                f"{large.per_request_s * 1e6:.0f} and {small.per_request_s * 1e6:.0f} us of CPU",
            ),
            Row("size", "peak memory of the large run, MB", large.peak_mb, MEMORY_MB, "less"),
        ]
        run = _nearly_done(directory / "nearly", server)
        index = run / "iteration_000" / "index.json"
        found.append(_opening(directory, server, run, "with index", OPEN_S))
        found.append(_status(directory, run, "with index", STATUS_S))
        index.unlink()
        found.append(_status(directory, run, "index deleted", None))
        found.append(_opening(directory, server, run, "index deleted", None))
        idle = measured(sparta("--help"), directory)
        found.append(Row("size", "a command that does nothing, s", idle.wall_s, None, "less", _note(idle)))
    return found
