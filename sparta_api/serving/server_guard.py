"""The process between a run and a server of its own: the server ends with the run, however the run ends.

    python -I -S server_guard.py RECORD GRACE_S COMMAND...

Standard input is a pipe that only the run holds open. When it closes (the run stopped, or was killed), the
server's whole process group gets SIGTERM, and SIGKILL after GRACE_S seconds. The guard ends with the server's
exit code (128 + signal for a killed one). RECORD names the server's process while it lives, so that a later
run can end a server whose guard was killed too. The file runs as it stands, without this package.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

TICK_S = 0.1
NOT_STARTED = 127


def main(arguments: list[str]) -> int:
    """Runs the command until it ends or the run does; returns the exit code."""
    record, grace, command = Path(arguments[0]), float(arguments[1]), arguments[2:]
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: told.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return NOT_STARTED
    try:
        write_record(record, server.pid)
        while server.poll() is None and not told and not run_is_gone(TICK_S):
            pass
    finally:
        end_group(server, grace)
        remove_record(record, server.pid)
    return server.returncode if server.returncode >= 0 else 128 - server.returncode


def run_is_gone(seconds: float) -> bool:
    """Waits that long at most for the pipe to close."""
    ready, _, _ = select.select([sys.stdin.fileno()], [], [], seconds)
    return bool(ready) and not os.read(sys.stdin.fileno(), 1)


def end_group(server: subprocess.Popen[bytes], grace: float) -> None:
    """Ends what is left of the server's process group: kindly while the server itself lives, else at once."""
    if server.poll() is None:
        signal_group(server.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline and (server.poll() is None or signal_group(server.pid, 0)):
            time.sleep(0.02)
    signal_group(server.pid, signal.SIGKILL)
    server.wait()


def signal_group(group: int, number: int) -> bool:
    """Sends a signal to a process group; whether there was one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
        return True
    return False


def identity(pid: int) -> dict[str, object] | None:
    """What tells a process from a later one with the same number; None where it is gone or nothing tells."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] in "ZX":
        return None
    return {"pid": pid, "boot": boot, "session": int(fields[3]), "started": int(fields[19])}


def write_record(record: Path, pid: int) -> None:
    """Names the server's process in the record."""
    temporary = record.with_name(record.name + ".new")
    temporary.write_text(json.dumps(identity(pid) or {"pid": pid}) + "\n")
    temporary.replace(record)


def read_record(record: Path) -> dict[str, object] | None:
    """The record's content; None where there is no readable one."""
    try:
        found = json.loads(record.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def remove_record(record: Path, pid: int) -> None:
    """Removes the record of this very server; a later server's stays."""
    if (read_record(record) or {}).get("pid") == pid:
        record.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
