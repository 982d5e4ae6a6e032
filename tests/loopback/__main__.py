"""Runs the server as a process: `python -m tests.loopback --scenario FILE.json`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import importlib.util
import os
import signal
import sys
import threading
from pathlib import Path

import orjson
from pydantic import ValidationError

from tests.loopback.record import RequestLog
from tests.loopback.scenario import Scenario
from tests.loopback.server import Server, listen


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.loopback", description=__doc__)
    parser.add_argument("--scenario", type=Path, help="a JSON file; see tests/loopback/scenario.py")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--log", type=Path, help="append one JSON line per request and per outcome")
    parser.add_argument("--fast", action="store_true", help="for benches: no log, and any model without a scenario")
    parser.add_argument("--ignore-stdin", action="store_true", help="go on when stdin is closed")
    return parser.parse_args()


def _watch_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    def wait() -> None:
        while os.read(0, 4096):
            pass
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=wait, daemon=True).start()


async def _serve(scenario: Scenario, arguments: argparse.Namespace) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    server = Server(scenario, RequestLog(None if arguments.fast else arguments.log))
    sockets = await listen(server, arguments.port)
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    if not arguments.ignore_stdin:
        _watch_stdin(loop, stop)
    print(orjson.dumps({"port": sockets.sockets[0].getsockname()[1]}).decode(), flush=True)
    await stop.wait()
    sockets.close()
    for connection in list(server.connections):
        connection.close()


def main() -> int:
    """Runs until SIGTERM, SIGINT or the end of stdin; 2 when the scenario is wrong."""
    arguments = _arguments()
    data = {"any_model": True} if arguments.scenario is None else orjson.loads(arguments.scenario.read_bytes())
    try:
        scenario = Scenario.model_validate(data)
    except ValidationError as error:
        print(error, file=sys.stderr)
        return 2
    run = importlib.import_module("uvloop").run if importlib.util.find_spec("uvloop") else asyncio.run
    run(_serve(scenario, arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
