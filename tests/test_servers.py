"""Servers of the run, started for real: small HTTP servers in place of vLLM, and every way in which they die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from sparta_api.config.tribe import TribeConfig
from sparta_api.errors import ConfigError, EndpointError
from sparta_api.serving import server_guard
from sparta_api.serving.servers import RunningServer, ServerManager

REPOSITORY = Path(__file__).parents[1]
PATIENCE_S = 30
SERVER = """
import http.server, json, os, signal, subprocess, sys, threading, time
port, mode = int(sys.argv[1]), sys.argv[2]
print("on stdout", flush=True)
print("on stderr", file=sys.stderr, flush=True)
if mode == "raises":
    raise ValueError("the weights are missing")
if mode == "silent":
    time.sleep(3600)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode == "family":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    print("child", child.pid, flush=True)

def die():
    print("RuntimeError: the device fell off the bus", flush=True)
    os._exit(3)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/die":
            threading.Timer(0.05, die).start()
        known = self.path in ("/v1/models", "/die", "/env") and not (mode == "health" and self.path == "/v1/models")
        self.send_response(200 if known or self.path == "/health" else 404)
        self.end_headers()
        self.wfile.write(json.dumps(dict(os.environ)).encode() if self.path == "/env" else b"{}")
    def log_message(self, *_):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

Work = Callable[[ServerManager], Coroutine[Any, Any, None]]


def tribe(directory: Path, modes: dict[str, str], **server: Any) -> TribeConfig:
    """Servers named as the keys of `modes`, each with a member of its own, and one without a server."""
    script = directory / "server.py"
    script.write_text(SERVER)
    servers = {
        name: {
            "command": [sys.executable, "-u", str(script), "{port}", mode],
            "startup_timeout_s": PATIENCE_S,
            **server,
        }
        for name, mode in modes.items()
    }
    members: list[dict[str, Any]] = [{"name": f"on {name}", "server": name, "model": "m"} for name in modes]
    members.append({"name": "elsewhere", "base_url": "http://127.0.0.1:9/v1", "model": "m"})
    return TribeConfig.model_validate({"instructions": {"path": "x"}, "servers": servers, "members": members})


def manage(directory: Path, mode: str, work: Work, **server: Any) -> None:
    """Does the work with a manager of one server, `local`, and stops what is left."""

    async def all_of_it() -> None:
        manager = ServerManager(tribe(directory, {"local": mode}, **server), directory / "logs")
        try:
            await work(manager)
        finally:
            await manager.stop_all()

    asyncio.run(asyncio.wait_for(all_of_it(), PATIENCE_S))


def alive(pid: int) -> bool:
    return server_guard.identity(pid) is not None


def gone(pid: int) -> bool:
    """Whether the process ends within a while."""
    deadline = time.monotonic() + PATIENCE_S
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def appears(record: Path) -> dict[str, object]:
    """The process record, as soon as it is written."""
    deadline = time.monotonic() + PATIENCE_S
    while (known := server_guard.read_record(record)) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert known is not None
    return known


def ask(server: RunningServer, path: str) -> httpx.Response:
    return httpx.get(server.base_url.removesuffix("/v1") + path, trust_env=False, timeout=PATIENCE_S)


def log_of(directory: Path) -> str:
    return (directory / "logs" / "local.log").read_text()


@pytest.mark.parametrize("mode", ["plain", "health"])
def test_a_server_answers_is_logged_and_ends_with_all_that_it_started(tmp_path: Path, mode: str) -> None:
    async def work(manager: ServerManager) -> None:
        server = await manager.start("local")
        assert ask(server, "/health").status_code == 200
        assert await manager.start("local") is server
        assert alive(server.pid)
        await manager.stop("local")
        assert not alive(server.pid)
        assert manager.running == {}

    manage(tmp_path, mode, work)
    assert "on stdout" in log_of(tmp_path) and "on stderr" in log_of(tmp_path)
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["local.log"]


def test_children_of_the_server_end_with_it(tmp_path: Path) -> None:
    async def work(manager: ServerManager) -> None:
        await manager.start("local")
        child = int(log_of(tmp_path).partition("child ")[2].split()[0])
        assert alive(child)
        await manager.stop("local")
        assert gone(child)

    manage(tmp_path, "family", work)


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparta_api.serving.server_process.GRACE_S", 0.3)

    async def work(manager: ServerManager) -> None:
        server = await manager.start("local")
        await manager.stop("local")
        assert not alive(server.pid)

    manage(tmp_path, "stubborn", work)


def test_a_server_that_dies_while_it_starts_names_the_cause(tmp_path: Path) -> None:
    async def work(manager: ServerManager) -> None:
        with pytest.raises(EndpointError) as caught:
            await manager.start("local")
        text = str(caught.value)
        assert "server 'local' ended with exit code 1" in text
        assert "ValueError: the weights are missing" in text
        assert str(tmp_path / "logs" / "local.log") in text
        assert "Traceback" not in text

    manage(tmp_path, "raises", work)


def test_a_server_that_never_answers_is_stopped(tmp_path: Path) -> None:
    async def work(manager: ServerManager) -> None:
        with pytest.raises(EndpointError, match=r"did not answer within 0\.5 s \(servers\.local\.startup_timeout_s\)"):
            await manager.start("local")

    manage(tmp_path, "silent", work, startup_timeout_s=0.5)
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["local.log"]


def test_a_command_that_cannot_be_started(tmp_path: Path) -> None:
    async def work(manager: ServerManager) -> None:
        with pytest.raises(ConfigError, match=r"servers\.local.*no-such-program: No such file or directory"):
            await manager.start("local")

    manage(tmp_path, "plain", work, command=["no-such-program", "{port}"])


def test_an_unknown_placeholder_is_named(tmp_path: Path) -> None:
    async def work(manager: ServerManager) -> None:
        with pytest.raises(ConfigError, match=r"servers\.local\.command.*\{ports\}"):
            await manager.start("local")

    manage(tmp_path, "plain", work, command=["server", "--port", "{ports}"])


def test_a_death_reaches_whoever_watches(tmp_path: Path) -> None:
    async def work(manager: ServerManager) -> None:
        server = await manager.start("local")
        watching = asyncio.create_task(manager.watch())
        await asyncio.to_thread(ask, server, "/die")
        with pytest.raises(EndpointError, match=r"exit code 3 while the run needed it.*the device fell off the bus"):
            await watching
        assert manager.running == {}
        assert manager.failure is not None

    manage(tmp_path, "plain", work)


def test_a_killed_server_is_called_killed(tmp_path: Path) -> None:
    async def work(manager: ServerManager) -> None:
        server = await manager.start("local")
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(EndpointError, match="was killed by SIGKILL"):
            await manager.watch()

    manage(tmp_path, "plain", work)


def test_a_cancelled_start_leaves_nothing(tmp_path: Path) -> None:
    async def work(manager: ServerManager) -> None:
        starting = asyncio.create_task(manager.start_all())
        record = tmp_path / "logs" / "local.process.json"
        known = await asyncio.to_thread(appears, record)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert not alive(int(str(known["pid"])))
        assert not record.exists()

    manage(tmp_path, "silent", work)


def test_one_that_fails_takes_the_others_down(tmp_path: Path) -> None:
    config = tribe(tmp_path, {"good": "plain", "bad": "raises"})

    async def work() -> None:
        manager = ServerManager(config, tmp_path / "logs")
        with pytest.raises(EndpointError, match="server 'bad'"):
            await manager.start_all()
        assert manager.running == {}

    asyncio.run(asyncio.wait_for(work(), PATIENCE_S))
    assert not list((tmp_path / "logs").glob("*.process.json"))


def test_the_servers_environment_and_gpus(tmp_path: Path) -> None:
    async def work(manager: ServerManager) -> None:
        seen = ask(await manager.start("local"), "/env").json()
        assert (seen["CUDA_VISIBLE_DEVICES"], seen["SOME_SETTING"]) == ("1,3", "on")

    manage(tmp_path, "plain", work, gpus=[1, 3], env={"SOME_SETTING": "on"})


def test_a_server_that_stops_during_training_comes_back_in_its_place(tmp_path: Path) -> None:
    async def work(manager: ServerManager) -> None:
        before = await manager.start("local")
        await manager.pause(["elsewhere"])
        assert alive(before.pid)
        await manager.pause(["on local", "elsewhere"])
        assert not alive(before.pid)
        assert await manager.resume() == ["local"]
        after = manager.running["local"]
        assert after.base_url == before.base_url
        assert ask(after, "/health").status_code == 200
        assert await manager.resume() == []

    manage(tmp_path, "plain", work, during_training="stop")


def test_a_server_that_is_kept_goes_on_during_training(tmp_path: Path) -> None:
    async def work(manager: ServerManager) -> None:
        server = await manager.start("local")
        await manager.pause(["on local"])
        assert alive(server.pid)
        assert await manager.resume() == []
        assert (await manager.restart("local")).pid != server.pid

    manage(tmp_path, "plain", work)


RUN = """
import asyncio, json, sys
from pathlib import Path
from sparta_api.config.tribe import TribeConfig
from sparta_api.serving.servers import ServerManager

async def main():
    manager = ServerManager(TribeConfig.model_validate_json(sys.stdin.read()), Path(sys.argv[1]))
    print((await manager.start("local")).pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


def run_beside(directory: Path, config: TribeConfig) -> tuple[subprocess.Popen[str], int]:
    """Starts another process that starts the server; returns both."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(directory / "logs")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        start_new_session=True,
    )
    assert process.stdin and process.stdout
    process.stdin.write(config.model_dump_json())
    process.stdin.close()
    return process, int(process.stdout.readline())


def ended(process: subprocess.Popen[str]) -> None:
    process.wait(PATIENCE_S)
    assert process.stdout
    process.stdout.close()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@linux
def test_the_server_of_a_run_that_was_killed_ends(tmp_path: Path) -> None:
    process, server = run_beside(tmp_path, tribe(tmp_path, {"local": "family"}))
    child = int(log_of(tmp_path).partition("child ")[2].split()[0])
    assert alive(server) and alive(child)
    process.kill()
    assert gone(server) and gone(child)
    ended(process)


@linux
def test_ctrl_c_reaches_the_run_and_not_its_server(tmp_path: Path) -> None:
    process, server = run_beside(tmp_path, tribe(tmp_path, {"local": "plain"}))
    assert os.getpgid(server) not in (os.getpgid(process.pid), os.getpgid(parent_of(server)))
    assert os.getsid(server) != os.getsid(process.pid)
    process.kill()
    assert gone(server)
    ended(process)


@linux
def test_a_server_whose_guard_was_killed_too_is_ended_by_the_next_run(tmp_path: Path) -> None:
    config = tribe(tmp_path, {"local": "plain"})
    process, server = run_beside(tmp_path, config)
    os.kill(process.pid, signal.SIGSTOP)
    os.kill(parent_of(server), signal.SIGKILL)
    process.kill()
    ended(process)
    assert alive(server)
    notices: list[str] = []

    async def next_run() -> None:
        manager = ServerManager(config, tmp_path / "logs", notice=notices.append)
        assert (await manager.start("local")).pid != server
        await manager.stop_all()

    asyncio.run(next_run())
    assert not alive(server)
    assert notices == [f"server 'local': process {server} of an earlier start was still there and was ended"]


@linux
def test_a_process_that_merely_has_the_old_number_is_left_alone(tmp_path: Path) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
    record = tmp_path / "logs" / "local.process.json"
    record.parent.mkdir()
    known = server_guard.identity(stranger.pid)
    assert known is not None
    record.write_text(json.dumps({**known, "started": int(str(known["started"])) - 5}))

    async def work(manager: ServerManager) -> None:
        await manager.start("local")

    manage(tmp_path, "plain", work)
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()
