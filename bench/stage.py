"""What all benches share: loopback servers, measured processes, the facts of the machine, the table."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tests.loopback import LoopbackProcess, start_loopback

REPOSITORY = Path(__file__).resolve().parent.parent
CORES = sorted(os.sched_getaffinity(0))
CLIENT_CORE, SERVER_CORE = CORES[0], CORES[-1]
PACKAGES = ("aiohttp", "uvloop", "orjson", "openai")
BUSY = 1.5
"""A load average above which wall-clock figures say little."""


@dataclass(frozen=True)
class Effort:
    """How much to measure: `scale` below 1 is a first look, `whole` plays the largest run in full."""

    scale: float = 1.0
    whole: bool = False


@dataclass(frozen=True)
class Row:
    """One line of the table: `value` is compared with `target` in the direction of `better`."""

    bench: str
    figure: str
    value: float
    target: float | None
    better: str = "more"
    note: str = ""

    @property
    def verdict(self) -> str:
        """met, missed, or nothing where there is no target."""
        if self.target is None:
            return ""
        met = self.value >= self.target if self.better == "more" else self.value <= self.target
        return "met" if met else "missed"


@dataclass(frozen=True)
class Ended:
    """A process that has ended: seconds of wall clock and of CPU, peak memory in MB (1e6 bytes)."""

    code: int
    wall_s: float
    cpu_s: float
    peak_mb: float
    out: str
    err: str


@dataclass
class Process:
    """A process under measurement."""

    popen: subprocess.Popen[bytes]
    files: tuple[Path, Path]
    started: float = field(default_factory=time.perf_counter)

    def wait(self) -> Ended:
        """Waits for its end."""
        _, status, usage = os.wait4(self.popen.pid, 0)
        wall = time.perf_counter() - self.started
        self.popen.returncode = os.waitstatus_to_exitcode(status)
        out, err = (path.read_text(encoding="utf-8", errors="replace") for path in self.files)
        peak = usage.ru_maxrss * 1024 / 1e6
        return Ended(self.popen.returncode, wall, usage.ru_utime + usage.ru_stime, peak, out, err)


def start(
    command: Sequence[str | Path],
    directory: Path,
    core: int | None = CLIENT_CORE,
    env: Mapping[str, str] | None = None,
) -> Process:
    """Starts a command from the repository's root, on one core unless that is None."""
    files = (directory / "stdout.txt", directory / "stderr.txt")
    with files[0].open("wb") as out, files[1].open("wb") as err:
        began = time.perf_counter()
        popen = subprocess.Popen(
            [*_pinned(core), *map(str, command)],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**os.environ, **(env or {})},
        )
    return Process(popen, files, began)


def _pinned(core: int | None) -> list[str]:
    return [] if core is None or len(CORES) == 1 else ["taskset", "--cpu-list", str(core)]


def measured(
    command: Sequence[str | Path],
    directory: Path,
    core: int | None = CLIENT_CORE,
    env: Mapping[str, str] | None = None,
) -> Ended:
    """Runs a command to its end; raises RuntimeError with its words when it fails."""
    ended = start(command, directory, core, env).wait()
    if ended.code != 0:
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {ended.code}: {ended.err[-2000:]}")
    return ended


def sparta(*arguments: str | Path) -> list[str]:
    """The command line of sparta-api."""
    return [sys.executable, "-m", "sparta_api.cli", *map(str, arguments)]


@contextmanager
def loopback(scenario: Mapping[str, Any], directory: Path, fast: bool = True) -> Iterator[LoopbackProcess]:
    """A loopback server on the core that the client does not use."""
    with start_loopback(scenario, directory, log=not fast, fast=fast) as server:
        os.sched_setaffinity(server.pid, {SERVER_CORE})
        yield server


def facts() -> str:
    """What the figures depend on, in two lines."""
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    busy = " (busy: wall-clock figures are preliminary)" if os.getloadavg()[0] > BUSY else ""
    return (
        f"{_processor()}, {len(CORES)} cores, {platform.system()} {platform.release()}, load {load}{busy}\n"
        f"Python {platform.python_version()}, {versions}, {time.strftime('%Y-%m-%d %H:%M')}"
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def say(text: str) -> None:
    """A line about what is being done, on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def show(rows: Sequence[Row], console: Console) -> None:
    """The table of ratios."""
    table = Table("bench", "figure", "value", "target", "", "note", box=box.SIMPLE, title=facts())
    for row in rows:
        sign = "≥" if row.better == "more" else "≤"
        target = "" if row.target is None else f"{sign} {row.target:g}"
        table.add_row(row.bench, row.figure, f"{row.value:,.3g}", target, row.verdict, row.note)
    console.print(table)
