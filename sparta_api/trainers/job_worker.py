"""Runs one training command to its end, whatever becomes of the process that started it.

    python -m sparta_api.trainers.job_worker DIRECTORY

`DIRECTORY/command.json` holds {"command": [...], "env": {...}, "cwd": ..., "timeout_s": ...}; the environment
variables in it are added to this process's own. Output goes to `command.log`; `end.json`, written last, holds
{"code": ..., "result": ..., "message": ...}. A kernel lock on `worker.lock`, which holds the worker's process id,
says that the job lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import orjson

from sparta_api.data.journal import write_atomic
from sparta_api.trainers.commands import TAIL_BYTES, last_json, last_line

COMMAND, LOG, END, LOCK = "command.json", "command.log", "end.json", "worker.lock"
TRIES, TRY_S = 20, 0.05
STOP_S = 10.0


def alive(directory: Path) -> bool:
    """Whether a worker holds the job's lock."""
    try:
        with (directory / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def ended(directory: Path) -> bool:
    """Whether nothing more will come of the job."""
    return read_end(directory) is not None or not alive(directory)


def read_end(directory: Path) -> dict[str, Any] | None:
    """How the command ended, or None while it has not."""
    try:
        end: dict[str, Any] = orjson.loads((directory / END).read_bytes())
    except (FileNotFoundError, orjson.JSONDecodeError):
        return None
    return end


def read_pid(directory: Path) -> int | None:
    """The process of the worker that holds or held the lock; it leads its own group."""
    try:
        return int((directory / LOCK).read_text())
    except (FileNotFoundError, ValueError):
        return None


def main(directory: Path) -> None:
    """Leaves a worker behind, in a session of its own, and returns when that holds the lock or has ended."""
    locked, ready = os.pipe()
    if os.fork():
        os.close(ready)
        os.read(locked, 1)
        return
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    os._exit(work(directory, ready))


def work(directory: Path, ready: int) -> int:
    """Takes the lock, runs the command, writes how it ended; returns its code, or 1 where another worker runs."""
    with (directory / LOCK).open("a+b") as lock:
        if not _locked(lock.fileno()):
            return 1
        if read_end(directory) is not None:
            return 0
        lock.truncate(0)
        lock.write(str(os.getpid()).encode())
        lock.flush()
        os.close(ready)
        job = orjson.loads((directory / COMMAND).read_bytes())
        end = _run(job, directory / LOG, lock.fileno())
        write_atomic(directory / END, orjson.dumps(end, option=orjson.OPT_APPEND_NEWLINE))
        return int(end["code"])


def _locked(descriptor: int) -> bool:
    """Takes the lock; whoever only asks whether the job lives holds it for a moment too."""
    for _ in range(TRIES):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(TRY_S)
    return False


def _run(job: dict[str, Any], log: Path, lock: int) -> dict[str, Any]:
    """Runs the command, which holds the lock too: a command whose worker was killed still counts as alive."""
    with log.open("ab") as output:
        try:
            process = subprocess.Popen(
                job["command"],
                cwd=job["cwd"],
                env={**os.environ, **job["env"]},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(lock,),
            )
        except OSError as error:
            return {"code": 127, "message": f"cannot start {job['command'][0]} ({error.strerror})"}
        _stop_with_us(process)
        try:
            code = process.wait(job["timeout_s"])
        except subprocess.TimeoutExpired:
            _end(process)
            return {"code": 124, "message": f"it took longer than {job['timeout_s'] / 3600:g} hours and was stopped"}
    return _ended(code, _tail(log))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stops the command and what it started, which share the worker's group; the worker only hands SIGTERM on."""
    os.killpg(0, signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _ended(code: int, printed: bytes) -> dict[str, Any]:
    if code:
        return {"code": code, "message": f"it ended with code {code}: {last_line(printed)}"}
    result = last_json(printed)
    if result is None:
        return {"code": 1, "message": f"its last line must be a JSON object, but is: {last_line(printed)}"}
    return {"code": 0, "result": result}


def _stop_with_us(process: subprocess.Popen[bytes]) -> None:
    """Hands SIGTERM on to the command."""

    def stop(signum: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()

    signal.signal(signal.SIGTERM, stop)


def _tail(log: Path) -> bytes:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return file.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
