"""Servers that the run starts, watches and stops itself: vLLM, or any command.

Each runs behind a guard in a session of its own, so that Ctrl-C reaches the run alone and no server outlives it.
What it prints goes to its log in the run directory; when it dies, the error carries the line of that log which
names the cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import httpx

from sparta_api.config.tribe import Server, TribeConfig
from sparta_api.data.rundir import file_name
from sparta_api.errors import ConfigError, EndpointError, SpartaError
from sparta_api.serving import server_guard, vllm_command
from sparta_api.serving.server_process import ServerProcess, end_orphan
from sparta_api.trainers.commands import fill

HOST = "127.0.0.1"
POLL_S = 0.2
REQUEST_S = 5.0
SLEEP_S = 120.0
"""How long vLLM may take to move its weights out of the GPU's memory, or back."""
STARTS = 2
"""How often a server is started when another program takes its port in between."""
_PORT_TAKEN = "address already in use"


@dataclass(frozen=True)
class RunningServer:
    """A server that answers. `lora_rank` is the largest one of adapters that it loads, 0 where it loads none."""

    name: str
    base_url: str
    pid: int
    log: Path
    lora_rank: int


class ServerManager:
    """The servers of a run. `running` holds those that answer at this moment.

    Args:
        config: the tribe with variables expanded and paths absolute.
        log_dir: where the servers' logs and process records go.
        root: the directory in which `command:` servers start (that of tribe.yaml).
        notice: takes warnings, one sentence each.
    """

    def __init__(
        self, config: TribeConfig, log_dir: Path, root: Path = Path(), notice: Callable[[str], None] = lambda _: None
    ) -> None:
        self._config = config
        self._log_dir = log_dir
        self._root = root
        self._notice = notice
        self._needs = {name: vllm_command.lora_needs(config, name) for name in config.servers}
        self._processes: dict[str, ServerProcess] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._ports: dict[str, int] = {}
        self._paused: dict[str, str] = {}
        self._failed = asyncio.Event()
        self.failure: SpartaError | None = None
        """Why a server ended that should not have."""
        self.running: dict[str, RunningServer] = {}

    def preflight(self) -> None:
        """Checks what can be known before anything starts. Raises ConfigError with the way out."""
        for name, server in self._config.servers.items():
            if server.backend == "vllm":
                vllm_command.require_vllm(f"servers.{name}")
                if self._needs[name].adapters and vllm_command.on_cpu():
                    vllm_command.require_dense_lora(f"servers.{name}")
                for warning in vllm_command.refuse_too_small(server, self._needs[name], f"servers.{name}"):
                    self._notice(warning)
                if server.during_training == "sleep" and vllm_command.on_cpu():
                    self._notice(f"servers.{name}: only a GPU's memory can sleep; it is kept running during training")

    async def start_all(self) -> None:
        """Starts every server that a member uses, side by side; all are stopped when one fails or this is cancelled."""
        used = {member.server for member in self._config.members}
        try:
            async with asyncio.TaskGroup() as group:
                for name in self._config.servers:
                    if name in used:
                        group.create_task(self.start(name))
        except BaseException as error:
            await self.stop_all()
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from None
            raise

    async def start(self, name: str) -> RunningServer:
        """Starts a server and waits until it answers; one that runs is returned as it is.

        Raises EndpointError when it ends or stays silent for `startup_timeout_s`, ConfigError when it cannot
        be started at all. A failed or cancelled start leaves nothing behind.
        """
        if name in self.running:
            return self.running[name]
        orphan = await end_orphan(self._record(name))
        if orphan is not None:
            self._notice(f"server '{name}': process {orphan} of an earlier start was still there and was ended")
        for last in (False,) * (STARTS - 1) + (True,):
            process = await self._launch(name)
            try:
                await self._until_ready(name, process)
                break
            except EndpointError as error:
                await self.stop(name)
                if last or _PORT_TAKEN not in str(error).lower():
                    raise
            except BaseException:
                await self.stop(name)
                raise
        self._watchers[name] = asyncio.create_task(self._watch(name, process))
        url = f"http://{HOST}:{self._ports[name]}/v1"
        self.running[name] = RunningServer(name, url, process.pid, process.log, self._lora_rank(name))
        return self.running[name]

    async def stop(self, name: str) -> None:
        """Stops a server with everything that it started; one that does not run is left alone."""
        self.running.pop(name, None)
        process = self._processes.pop(name, None)
        if process is not None:
            await process.stop()
        watcher = self._watchers.pop(name, None)
        if watcher is not None:
            await asyncio.gather(watcher, return_exceptions=True)

    async def stop_all(self) -> None:
        """Stops all servers, side by side, within a few seconds."""
        await asyncio.gather(*(self.stop(name) for name in {*self._processes, *self._watchers}))

    async def restart(self, name: str) -> RunningServer:
        """Stops and starts a server, on the same port where that is still free. Its adapters are forgotten."""
        await self.stop(name)
        return await self.start(name)

    async def watch(self) -> NoReturn:
        """Waits for ever. Raises EndpointError as soon as a server ends that should not have."""
        while self.failure is None:
            await self._failed.wait()
        raise self.failure

    async def pause(self, members: Iterable[str]) -> None:
        """Before these members are trained: lets the servers that they use sleep, or stops them, as configured."""
        names = {self._config.member(member).server for member in members}
        for name, server in self._config.servers.items():
            if name not in names or name not in self.running:
                continue
            if server.during_training == "stop":
                self._paused[name] = "stop"
                await self.stop(name)
            elif server.during_training == "sleep" and not vllm_command.on_cpu():
                self._paused[name] = "sleep"
                await self._tell(name, "/sleep", {"level": "1"})

    async def resume(self) -> list[str]:
        """After training: wakes or starts again what `pause` stopped.

        Returns the names of those that were started again: they have forgotten their adapters.
        """
        started = []
        for name, how in list(self._paused.items()):
            if how == "sleep":
                await self._tell(name, "/wake_up", {})
            else:
                await self.start(name)
                started.append(name)
            del self._paused[name]
        return started

    def models(self, name: str) -> list[str]:
        """The names under which a server's base model answers: those that its members use."""
        server = self._config.servers[name]
        modules = {part.partition("=")[0] for part in server.args if "=" in part and not part.startswith("-")}
        used = [m.model for m in self._config.members if m.server == name and m.model not in modules]
        return list(dict.fromkeys(used)) or [str(server.model)]

    def _lora_rank(self, name: str) -> int:
        server, needs = self._config.servers[name], self._needs[name]
        if server.backend != "vllm" or not needs.adapters:
            return 0
        given = vllm_command.given_number(server.args, "--max-lora-rank")
        return given or vllm_command.allowed_rank(needs.rank, f"servers.{name}")

    def _record(self, name: str) -> Path:
        return self._log_dir / f"{file_name(name)}.process.json"

    async def _launch(self, name: str) -> ServerProcess:
        server = self._config.servers[name]
        port = self._ports[name] = _free_port(self._ports.get(name, 0))
        if server.command:
            values = {"port": str(port), "host": HOST, "model": str(server.model or "")}
            command = fill([*server.command, *server.args], values, f"servers.{name}.command")
            env = {**vllm_command.visible_gpus(server.gpus), **server.env}
        else:
            command, env = self._vllm(name, server, port)
        log = self._log_dir / f"{file_name(name)}.log"
        process = await ServerProcess.launch(command, env, self._root.resolve(), log, self._record(name))
        self._processes[name] = process
        return process

    def _vllm(self, name: str, server: Server, port: int) -> tuple[list[str], dict[str, str]]:
        vllm_command.require_vllm(f"servers.{name}")
        needs = self._needs[name]
        command = vllm_command.command(server, self.models(name), port, needs, f"servers.{name}")
        return command, vllm_command.environment(server, needs)

    async def _until_ready(self, name: str, process: ServerProcess) -> None:
        seconds = self._config.servers[name].startup_timeout_s
        deadline = time.monotonic() + seconds
        url = f"http://{HOST}:{self._ports[name]}"
        async with httpx.AsyncClient(base_url=url, timeout=REQUEST_S, trust_env=False) as http:
            while not await _answers(http):
                if time.monotonic() > deadline:
                    raise EndpointError(
                        f"server '{name}' did not answer within {seconds:g} s (servers.{name}.startup_timeout_s); its "
                        f"log ends with: {process.last_words()} (log: {process.log})"
                    )
                if await process.wait(POLL_S):
                    break
        if process.code is not None:
            raise self._ended(name, process, "while it started")

    async def _watch(self, name: str, process: ServerProcess) -> None:
        await process.wait()
        if not process.stopping:
            self.running.pop(name, None)
            self._processes.pop(name, None)
            self.failure = self._ended(name, process, "while the run needed it")
            self._failed.set()
            await end_orphan(self._record(name))

    def _ended(self, name: str, process: ServerProcess, when: str) -> SpartaError:
        line = process.last_words()
        if process.code == server_guard.NOT_STARTED:
            return ConfigError(f"servers.{name}: the command cannot be started: {line} (log: {process.log})")
        return EndpointError(
            f"server '{name}' {process.how_it_ended()} {when}: {line} (log: {process.log}); "
            "correct the cause, then resume"
        )

    async def _tell(self, name: str, path: str, parameters: dict[str, str]) -> None:
        """Asks a vLLM in development mode to sleep or to wake."""
        url = self.running[name].base_url.removesuffix("/v1") + path
        try:
            async with httpx.AsyncClient(timeout=SLEEP_S, trust_env=False) as http:
                (await http.post(url, params=parameters)).raise_for_status()
        except httpx.HTTPError as error:
            raise EndpointError(
                f"server '{name}': {url} failed ({error!r}); set servers.{name}.during_training to stop or keep"
            ) from error


async def _answers(http: httpx.AsyncClient) -> bool:
    """Whether the server lists its models, or, where it has no such list, says that it is well."""
    with contextlib.suppress(httpx.HTTPError):
        status = (await http.get("/v1/models")).status_code
        if status in (404, 405, 501):
            status = (await http.get("/health")).status_code
        return status in (200, 401, 403)
    return False


def _free_port(wanted: int) -> int:
    """The wanted port where it is free, else any free one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, wanted))
        except OSError:
            probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
