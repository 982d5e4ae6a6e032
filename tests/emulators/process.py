"""An emulator as a process of its own, for tests: started, changed, looked at, stopped."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.request import Request, urlopen

from tests.emulators.base import CONTROL

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 20.0


class EmulatorProcess:
    """`with EmulatorProcess("together") as service: service.base_url ...`"""

    def __init__(self, kind: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"tests.emulators.{kind}", "--port", "0"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        started = json.loads(self._process.stdout.readline())
        self.base_url: str = started["base_url"]
        self._control = f"http://127.0.0.1:{started['port']}{CONTROL}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process."""
        self._process.terminate()
        self._process.wait(WAIT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def change(self, **state: Any) -> None:
        """Changes the state (see `tests.emulators.base.State`)."""
        body = json.dumps(state).encode()
        with urlopen(Request(self._control, body, {"content-type": "application/json"})):
            pass

    def look(self) -> dict[str, Any]:
        """The state and everything stored."""
        with urlopen(self._control) as answer:
            snapshot: dict[str, Any] = json.load(answer)
        return snapshot

    def wait(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first snapshot that fulfils the condition."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            snapshot = self.look()
            if condition(snapshot):
                return snapshot
            time.sleep(0.01)
        raise AssertionError(f"not reached within {WAIT_S} s")
