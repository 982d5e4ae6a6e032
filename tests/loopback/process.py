"""Starting, steering and reading a loopback server from a test."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_ROOT = Path(__file__).resolve().parents[2]
_PATIENCE_S = 20


class LoopbackProcess:
    """A loopback server in a process of its own; it keeps its port, log and scenario over restarts."""

    def __init__(
        self, scenario: Mapping[str, Any], directory: Path, *, port: int = 0, log: bool = True, fast: bool = False
    ) -> None:
        """`directory` gets the scenario, the log (unless `log` is False) and the server's stderr; several servers
        may share it. Nothing runs before `start` or the `with` block."""
        directory.mkdir(parents=True, exist_ok=True)
        number = 0
        while (directory / f"loopback-{number}.json").exists():
            number += 1
        self._scenario = directory / f"loopback-{number}.json"
        self._scenario.write_text(json.dumps(scenario), encoding="utf-8")
        self.log_path = directory / f"loopback-{number}.jsonl"
        self._stderr = directory / f"loopback-{number}.stderr"
        self._log = log and not fast
        self._fast = fast
        self._process: subprocess.Popen[str] | None = None
        self.port = port

    @property
    def origin(self) -> str:
        """http://127.0.0.1:PORT."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def base_url(self) -> str:
        """What goes into `base_url` of a member."""
        return f"{self.origin}/v1"

    @property
    def pid(self) -> int:
        """The server's process."""
        if self._process is None:
            raise RuntimeError("the loopback server is not running")
        return self._process.pid

    def start(self) -> Self:
        """Starts the server, on the same port as before if there was one."""
        command = [sys.executable, "-m", "tests.loopback", "--port", str(self.port), "--scenario", str(self._scenario)]
        command += ["--log", str(self.log_path)] if self._log else []
        command += ["--fast"] if self._fast else []
        with self._stderr.open("a") as stderr:
            self._process = subprocess.Popen(
                command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._ended()
            raise RuntimeError(f"the loopback server did not start: {self._stderr.read_text()}")
        self.port = json.loads(line)["port"]
        return self

    def stop(self) -> None:
        """Ends the server in good order; nothing where it does not run."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._ended()

    def kill(self) -> None:
        """Kills the server with SIGKILL; connections break."""
        if self._process is not None:
            self._process.kill()
            self._ended()

    def restart(self) -> Self:
        """The server ends and comes back on the same port: loaded adapters and counts are gone."""
        self.stop()
        return self.start()

    def wait(self) -> int:
        """Waits until the server has ended by itself (fault `exit`) and returns its exit code."""
        assert self._process is not None
        process = self._process
        process.wait(_PATIENCE_S)
        self._ended()
        return process.returncode

    def _ended(self) -> None:
        assert self._process is not None
        process, self._process = self._process, None
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def control(self, path: str = "/control", json: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """POSTs changes (scenario keys, `forget_adapters`, `reset_stats`), or without any GETs; returns the figures."""
        body = None if json is None else _dumps(json)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_PATIENCE_S)
        try:
            connection.request("GET" if body is None else "POST", path, body=body, headers={"connection": "close"})
            answer = connection.getresponse()
            data: dict[str, Any] = _loads(answer.read())
        finally:
            connection.close()
        if answer.status != 200:
            raise ValueError(data)
        return data

    def stats(self) -> dict[str, Any]:
        """Counts: requests, in_flight, max_in_flight, connections, models (statuses, faults, ...), adapters."""
        return self.control()

    def requests(self, path: str | None = None) -> list[dict[str, Any]]:
        """Every request in the log in the order of receipt, with `outcome`, `fault` and `ended` (None: never).

        `path` keeps those whose path ends with it ("/chat/completions")."""
        found: dict[tuple[int, int], dict[str, Any]] = {}
        for line in self.log_path.read_text(encoding="utf-8").splitlines() if self.log_path.exists() else []:
            event = _loads(line)
            name = (event["pid"], event["id"])
            if event["event"] == "request":
                found[name] = {**event, "outcome": None, "fault": None, "ended": None}
            elif name in found:
                found[name] |= {"outcome": event["outcome"], "fault": event["fault"], "ended": event["t"]}
        return [request for request in found.values() if path is None or request["path"].endswith(path)]

    def __enter__(self) -> Self:
        return self if self._process is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _dumps(value: Any) -> bytes:
    return json.dumps(value).encode()


def _loads(text: str | bytes) -> Any:
    return json.loads(text)


def start_loopback(
    scenario: Mapping[str, Any], directory: Path, *, port: int = 0, log: bool = True, fast: bool = False
) -> LoopbackProcess:
    """A started server; use it as a context manager, or call `stop`."""
    return LoopbackProcess(scenario, directory, port=port, log=log, fast=fast).start()
