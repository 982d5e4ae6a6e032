"""One server process behind its guard (`server_guard`): started, told to stop, or ended when an earlier run left it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from sparta_api.data.journal import disk_error
from sparta_api.serving import server_guard
from sparta_api.serving.server_log import useful_line

GRACE_S = 3.0
"""From SIGTERM to SIGKILL: what is left of the five seconds in which Ctrl-C ends a run."""
GUARD_S = 1.5
"""How much longer the guard itself may take."""
TICK_S = 0.05


class ServerProcess:
    """A started server. `log` grows by what it prints; `record` names its process while it lives."""

    def __init__(self, guard: asyncio.subprocess.Process, log: Path, log_start: int, record: Path) -> None:
        self._guard = guard
        self._log_start = log_start
        self._record = record
        self.log = log
        self.stopping = False

    @classmethod
    async def launch(
        cls, command: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path, record: Path
    ) -> ServerProcess:
        """Starts the command in a session of its own, its output appended to `log`. DiskError where that fails."""
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                start = output.tell()
                guard = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", server_guard.__file__, str(record.resolve()), str(GRACE_S)),
                    *command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    cwd=cwd,
                    env={**os.environ, **env},
                )
        except OSError as error:
            raise disk_error(log, error) from error
        return cls(guard, log, start, record)

    @property
    def pid(self) -> int:
        """The server's own process; the guard's until that has started it."""
        return int(str((server_guard.read_record(self._record) or {}).get("pid", self._guard.pid)))

    @property
    def code(self) -> int | None:
        """The exit code, 128 + signal for a killed server; None while it runs."""
        code = self._guard.returncode
        return code if code is None or code >= 0 else 128 - code

    def how_it_ended(self) -> str:
        """'ended with exit code 1' or 'was killed by SIGKILL'."""
        code = self.code or 0
        if code <= 128:
            return f"ended with exit code {code}"
        try:
            return f"was killed by {signal.Signals(code - 128).name}"
        except ValueError:
            return f"was killed by signal {code - 128}"

    def last_words(self) -> str:
        """The line of this start's log that most likely names the cause."""
        return useful_line(self.log, self._log_start)

    async def wait(self, seconds: float | None = None) -> bool:
        """Waits for the end, that long at most; whether it has ended."""
        try:
            await asyncio.wait_for(self._guard.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """Ends the server and everything in its process group, within a few seconds."""
        self.stopping = True
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        if not await self.wait(GRACE_S + GUARD_S):
            self._guard.kill()
            await self._guard.wait()
            await end_orphan(self._record)


async def end_orphan(record: Path) -> int | None:
    """Ends the server that a record names, if that very process still lives; returns its process id.

    A process counts as the same one by number, session, start time and boot of the machine.
    """
    known = server_guard.read_record(record)
    pid = (known or {}).get("pid")
    if known is None or not isinstance(pid, int):
        return None
    same = "started" in known and server_guard.identity(pid) == known
    if same:
        await asyncio.to_thread(_end, pid, known)
    record.unlink(missing_ok=True)
    return pid if same else None


def _end(pid: int, known: dict[str, object]) -> None:
    server_guard.signal_group(pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and server_guard.identity(pid) == known:
        time.sleep(TICK_S)
    server_guard.signal_group(pid, signal.SIGKILL)
