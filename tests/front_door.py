"""The command line as users start it, and tribes for the loopback server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).parent.parent
RESULTS = ("matchups.jsonl", "duels.jsonl", "preferences.jsonl")
"""The files of an iteration that are the same to the byte however a run went."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


def sparta(*arguments: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> Ended:
    """Runs `sparta-api` to its end."""
    done = subprocess.run(
        [sys.executable, "-m", "sparta_api.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
        cwd=cwd,
        timeout=240,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def started(*arguments: str | Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Starts `sparta-api` and returns while it works."""
    return subprocess.Popen(
        [sys.executable, "-m", "sparta_api.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
    )


def kill(process: subprocess.Popen[str]) -> None:
    """kill -9, and everything that it still printed is read."""
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)


def tribe(
    directory: Path, base_url: str, members: int | list[dict[str, Any]] = 4, instructions: int = 12, **changes: Any
) -> Path:
    """Writes a tribe.yaml with `members` (or so many fighters) at one endpoint, and its data; returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = [{"id": f"q{n}", "prompt": f"Explain thing number {n} in one sentence."} for n in range(instructions)]
    (directory / "instructions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config: dict[str, Any] = {
        "name": "loop",
        "seed": 7,
        "iterations": 1,
        "instructions": {"path": "instructions.jsonl"},
        "defaults": {"base_url": base_url, "concurrency": 8, "timeout_s": 20, "sampling": {"max_tokens": 64}},
        "members": members if isinstance(members, list) else _fighters(members),
    }
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            config[key] = {**config[key], **value}
        else:
            config[key] = value
    path = directory / "tribe.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return path


def _fighters(count: int) -> list[dict[str, Any]]:
    return [{"name": f"m{n}", "model": f"model-{n}"} for n in range(count)]


def results(run: Path) -> dict[str, bytes]:
    """The files that must be the same to the byte, by their path in the run directory."""
    found = {path.relative_to(run).as_posix(): path.read_bytes() for name in RESULTS for path in run.rglob(name)}
    found["ratings.json"] = (run / "ratings.json").read_bytes()
    return found


def rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
