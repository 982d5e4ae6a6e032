"""`sparta-api` in a child of this process: a command of its own that can be killed, without loading Python again."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path

from sparta_api import cli
from tests.front_door import Ended

WAIT_S = 120.0


class Forked:
    """A command that runs; `end()` waits for it, `kill()` does not let it finish."""

    def __init__(self, *arguments: str | Path, env: Mapping[str, str] | None = None) -> None:
        self._files = tempfile.TemporaryDirectory()
        self._printed = [Path(self._files.name, name) for name in ("out", "err")]
        self._pid = os.fork()
        if self._pid == 0:
            self._become([str(argument) for argument in arguments], env or {})

    def _become(self, arguments: list[str], env: Mapping[str, str]) -> None:
        """The child: the command's own streams, environment and arguments, then `main`."""
        code = 1
        try:
            nothing = os.open(os.devnull, os.O_RDONLY)
            printed = [os.open(path, os.O_CREAT | os.O_WRONLY) for path in self._printed]
            for number, source in enumerate((nothing, *printed)):
                os.dup2(source, number)
            sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
            os.environ.update(env)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            warnings.resetwarnings()
            sys.argv = ["sparta-api", *arguments]
            cli.main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):
                    stream.flush()
            os._exit(code)

    def signal(self, signum: int) -> None:
        """Sends a signal."""
        os.kill(self._pid, signum)

    def kill(self) -> None:
        """kill -9."""
        self.signal(signal.SIGKILL)
        self.end()

    def end(self) -> Ended:
        """How it ended and what it printed."""
        deadline = time.monotonic() + WAIT_S
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        while pid == 0:
            if time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)
            time.sleep(0.02)
            pid, status = os.waitpid(self._pid, os.WNOHANG)
        out, err = (path.read_text(encoding="utf-8") for path in self._printed)
        self._files.cleanup()
        return Ended(os.waitstatus_to_exitcode(status), out, err)


def forked(*arguments: str | Path, env: Mapping[str, str] | None = None) -> Ended:
    """Runs `sparta-api` to its end."""
    return Forked(*arguments, env=env).end()
