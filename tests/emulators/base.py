"""What the emulators share: an HTTP server on 127.0.0.1, faults by operation, a control channel, chat.

Control, beside the emulated API:
  POST /_emulator {"faults": {"create job": ["ghost"]}, "list_lag": 2, ...}   changes the state (see `State`);
                  {"clear": true} forgets everything first
  GET  /_emulator                                                             the state and everything stored

Faults are taken from the operation's list one by one, then it works:
  "503" (or any status) answered without doing it   "ghost" done, then 503       "drop" done, then the connection is cut
  "cut" the connection is cut at once               "429:7" with Retry-After 7   "hang" held before it is done, for ever
  "hang after" done, then held for ever             "ok" works
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from aiohttp import web

from tests.loopback.answers import Ask, canonical, completion, role_of, text_of
from tests.loopback.scenario import Judge, ModelSettings

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
CONTROL = "/_emulator"


@dataclass
class State:
    """What a test may change; lists are used up from the front, then the last entry stays."""

    faults: dict[str, list[str]] = field(default_factory=dict)
    list_lag: int = 0
    """How many listings a new job is absent from."""
    job_statuses: list[str] = field(default_factory=list)
    """What a job says at each look."""
    job_message: str = ""
    file_statuses: list[str] = field(default_factory=list)
    file_report: dict[str, Any] = field(default_factory=dict)
    estimate: dict[str, Any] = field(default_factory=dict)
    deployment_statuses: list[str] = field(default_factory=list)
    refuse: dict[str, Any] = field(default_factory=dict)
    """{"status": 400, "message": ...} for every create."""
    unnamed: bool = False
    """Jobs complete without naming their model."""
    keep_metadata: bool = True
    filter_metadata: bool = True
    shutdown_date: str | None = None


class Emulator:
    """Base of both services. `calls` counts operations by name; `hanging` is the one being held."""

    name = "emulator"
    prefix = ""
    """What a base URL ends in."""

    def __init__(self) -> None:
        self.clear()
        self.app = web.Application(client_max_size=1 << 30)
        self.app.router.add_get(CONTROL, self._look)
        self.app.router.add_post(CONTROL, self._change)
        self.origin = ""

    def clear(self) -> None:
        """Forgets everything."""
        self.state = State()
        self.calls: list[str] = []
        self.hanging: str | None = None
        self.jobs: list[dict[str, Any]] = []
        self.files: dict[str, dict[str, Any]] = {}
        self.contents: dict[str, bytes] = {}
        self.chats: dict[str, int] = {}

    def route(self, method: str, path: str, operation: str, handler: Handler) -> None:
        """Adds an operation that faults can name."""

        async def run(request: web.Request) -> web.StreamResponse:
            self.calls.append(operation)
            queue = self.state.faults.get(operation, [])
            fault = queue.pop(0) if queue else "ok"
            if fault in ("ghost", "drop", "hang after", "ok"):
                try:
                    response = await handler(request)
                except ConnectionResetError:
                    return web.Response()
                return response if fault == "ok" else await self._spoil(request, operation, fault)
            return await self._spoil(request, operation, fault)

        self.app.router.add_route(method, path, run)

    async def _spoil(self, request: web.Request, operation: str, fault: str) -> web.StreamResponse:
        if fault in ("drop", "cut"):
            if request.transport:
                request.transport.abort()
            return web.Response()
        if fault.startswith("hang"):
            self.hanging = operation
            await asyncio.Event().wait()
        status, _, wait = ("503" if fault == "ghost" else fault).partition(":")
        headers = {"retry-after": wait} if wait else {}
        return self.error(int(status), "the emulator was told to fail", headers)

    def error(self, status: int, message: str, headers: dict[str, str] | None = None, **more: Any) -> web.Response:
        """An error as both services word it."""
        body = {"error": {"message": message, "type": "emulated", "param": None, "code": None, **more}}
        return web.json_response(body, status=status, headers={"x-request-id": "req-emulated", **(headers or {})})

    def step(self, script: list[str], default: str) -> str:
        """The next entry of a script; its last one stays."""
        if not script:
            return default
        return script.pop(0) if len(script) > 1 else script[0]

    def listed(self) -> list[dict[str, Any]]:
        """The jobs that a listing shows at this moment, newest first."""
        shown = [job for job in self.jobs if job["lag"] <= 0]
        for job in self.jobs:
            job["lag"] -= 1
        return [self.public(job) for job in reversed(shown)]

    def public(self, job: dict[str, Any]) -> dict[str, Any]:
        """A job as the API shows it."""
        return {key: value for key, value in job.items() if key not in ("lag", "script", "parent")}

    def add_job(self, job: dict[str, Any], script: list[str]) -> dict[str, Any]:
        """Stores a new job."""
        job |= {"lag": self.state.list_lag, "script": list(self.state.job_statuses or script)}
        job["status"] = self.step(job["script"], "running")
        self.jobs.append(job)
        return job

    def job_of(self, model: str) -> dict[str, Any] | None:
        """The job that made a tuned model, None for any other name."""
        return None

    def identity(self, job: dict[str, Any]) -> str:
        """What a tuned model's answers depend on: everything that it was trained on, and nothing else."""
        parent = next((other for other in self.jobs if other["id"] == job["parent"]), None)
        before = self.identity(parent) if parent else str(job["model"])
        return hashlib.sha256(before.encode() + self.contents[job["training_file"]]).hexdigest()

    def gone(self, model: str) -> bool:
        """Whether chat must not know the model."""
        return False

    async def chat(self, request: web.Request) -> web.Response:
        """POST /v1/chat/completions: a pure function of what the model is and of the messages."""
        body = await request.json()
        model = str(body.get("model"))
        if self.gone(model):
            return self.error(404, f"model {model} not found", code="model_not_found")
        settings, judge = ModelSettings(), Judge()
        text = text_of(body["messages"])
        role = role_of(text, settings, judge)
        self.chats[model] = self.chats.get(model, 0) + 1
        job = self.job_of(model)
        ask = Ask(self.identity(job) if job else model, model, settings, body, text, canonical(body["messages"]), role)
        return web.json_response(completion(ask, judge))

    async def _look(self, request: web.Request) -> web.Response:
        return web.json_response(self.snapshot())

    def snapshot(self) -> dict[str, Any]:
        """Everything that a test may want to check."""
        contents = {name: data.decode("utf-8", "replace") for name, data in self.contents.items()}
        return {
            "state": asdict(self.state),
            "calls": self.calls,
            "hanging": self.hanging,
            "jobs": self.jobs,
            "files": list(self.files.values()),
            "contents": contents,
            "chats": self.chats,
        }

    async def _change(self, request: web.Request) -> web.Response:
        changes = await request.json()
        if changes.pop("clear", False):
            self.clear()
        for key, value in changes.items():
            setattr(self.state, key, value)
        self.hanging = None
        return web.json_response({})


def serve(emulator: Emulator) -> None:
    """The command line: serves until SIGTERM or the end of stdin's parent."""
    parser = argparse.ArgumentParser(description=emulator.__doc__)
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    asyncio.run(_serve(emulator, parser.parse_args().port))


async def _serve(emulator: Emulator, port: int) -> None:
    runner = web.AppRunner(emulator.app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    bound = runner.addresses[0][1]
    emulator.origin = f"http://127.0.0.1:{bound}"
    sys.stdout.write(json.dumps({"port": bound, "base_url": emulator.origin + emulator.prefix}) + "\n")
    sys.stdout.flush()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for sign in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(sign, stop.set)
    await stop.wait()
    await runner.cleanup()
