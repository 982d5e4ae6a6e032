"""Runs that die: killed, told to stop, out of disk. Nothing is lost, and nothing is asked twice that was answered."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.front_door import Ended, kill, results, rows, sparta, started, tribe
from tests.loopback import LoopbackProcess, start_loopback

KILLS = int(os.environ.get("SPARTA_KILLS", "12"))
"""kill -9 so many times in one run of 500 duels; `SPARTA_KILLS=50` for the long proof."""
PATIENCE_S = 60
BYTES_PER_REQUEST = 400
"""About what the server's log grows by."""
JOURNALS = ("responses", "judgments", "duels")


def until(ready: Callable[[], bool], process: subprocess.Popen[str]) -> bool:
    """Waits until it is so; False when the process ended first."""
    deadline = time.monotonic() + PATIENCE_S
    while not ready():
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline, "the run came to a standstill"
        time.sleep(0.002)
    return True


def asked(server: LoopbackProcess) -> list[dict[str, Any]]:
    return server.requests("/chat/completions")


def repeated(server: LoopbackProcess) -> int:
    """How many requests were made more often than once."""
    counts = Counter((r["model"], r["messages"]) for r in asked(server))
    return sum(counts.values()) - len(counts)


def every_duel_once(run: Path, duels: int) -> None:
    assert [row["duel"] for row in rows(run / "iteration_000" / "duels.jsonl")] == list(range(duels))
    responses = rows(run / "iteration_000" / "responses.jsonl")
    assert set(Counter((row["duel"], row["fighter"]) for row in responses).values()) == {1}
    judgments = rows(run / "iteration_000" / "judgments.jsonl")
    keys = Counter((row["duel"], row["judge"], row["fighter"], row["round"]) for row in judgments)
    assert set(keys.values()) == {1}


def snapshot(run: Path) -> dict[str, bytes]:
    return {path.relative_to(run).as_posix(): path.read_bytes() for path in run.rglob("*") if path.is_file()}


# Killed


def test_killed_at_many_moments_of_500_duels(tmp_path: Path) -> None:
    """The server's own log shows that at most the requests in flight at each kill are made again."""
    concurrency, duels, requests = 8, 500, 2000
    moments = random.Random(5)
    with start_loopback({"any_model": True}, tmp_path) as server:
        file = tribe(tmp_path, server.base_url, members=3, instructions=duels, defaults={"concurrency": concurrency})
        assert sparta("run", "--tribe", file, "--run-dir", tmp_path / "whole").code == 0
        assert repeated(server) == 0
        server.log_path.unlink()
        server.restart()
        working = 0
        for number in range(KILLS):
            process = started("run", "--tribe", file, "--run-dir", tmp_path / "run")
            if number % 4 == 3:
                time.sleep(moments.uniform(0.05, 0.8))
            else:
                target = log_size(server) + moments.randrange(1, 2 * requests // KILLS) * BYTES_PER_REQUEST
                working += until(lambda enough=target: log_size(server) >= enough, process)  # type: ignore[misc]
            kill(process)
        assert working >= KILLS // 2
        tear(tmp_path / "run")
        ended = sparta("resume", tmp_path / "run")
        assert ended.code == 0, ended.err
        assert repeated(server) <= concurrency * KILLS
        assert len({(r["model"], r["messages"]) for r in asked(server)}) == requests
    assert results(tmp_path / "run") == results(tmp_path / "whole")
    every_duel_once(tmp_path / "run", duels)
    assert list((tmp_path / "run").rglob(".*.tmp")) == []


def log_size(server: LoopbackProcess) -> int:
    return server.log_path.stat().st_size if server.log_path.exists() else 0


def tear(run: Path) -> None:
    """Half a line at the end of every journal, as a crash of the machine leaves it."""
    for name in JOURNALS:
        with (run / "iteration_000" / f"{name}.jsonl").open("ab") as file:
            file.write(b'{"duel": 1, "fighter": "m')


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[tuple[LoopbackProcess, Path]]:
    """A run of 24 duels that was killed half way."""
    with start_loopback({"any_model": True, "default_model": {"latency_s": 0.02}}, tmp_path) as server:
        file = tribe(tmp_path, server.base_url, members=3, instructions=24)
        process = started("run", "--tribe", file, "--run-dir", tmp_path / "run")
        folded = tmp_path / "run" / "iteration_000" / "duels.jsonl"
        assert until(lambda: folded.exists() and folded.read_bytes().count(b"\n") >= 8, process)
        kill(process)
        yield server, tmp_path / "run"


def test_torn_lines_are_dropped_and_their_work_is_done_again(stopped: tuple[LoopbackProcess, Path]) -> None:
    """A line of each journal is cut in half, twice; the run comes out right and says what it did."""
    server, run = stopped
    first = {name: (run / "iteration_000" / f"{name}.jsonl").read_bytes() for name in JOURNALS}
    for name, content in first.items():
        lines = content.splitlines(keepends=True)
        torn = b"".join(lines[:-1]) + lines[-1][: len(lines[-1]) // 2]
        (run / "iteration_000" / f"{name}.jsonl").write_bytes(torn)
    process = started("resume", run)
    asked_before = len(asked(server))
    until(lambda: len(asked(server)) > asked_before, process)
    kill(process)
    tear(run)
    ended = sparta("resume", run)
    assert ended.code == 0, ended.err
    assert "half-written line" in ended.out + ended.err
    every_duel_once(run, 24)
    reference = run.parent / "reference"
    assert sparta("run", "--tribe", run.parent / "tribe.yaml", "--run-dir", reference).code == 0
    assert results(run) == results(reference)


def test_without_the_index_the_same_comes_from_the_journals(stopped: tuple[LoopbackProcess, Path]) -> None:
    server, run = stopped
    assert sparta("resume", run).code == 0
    before, count = results(run), len(asked(server))
    shutil.copytree(run, run.with_name("copy"))
    (run.with_name("copy") / "iteration_000" / "index.json").unlink()
    figures = [json.loads(sparta("status", where, "--json").out) for where in (run, run.with_name("copy"))]
    for name in ("run", "directory"):
        figures[0].pop(name), figures[1].pop(name)
    assert figures[0] == figures[1]
    assert sparta("resume", run.with_name("copy")).code == 0
    assert results(run.with_name("copy")) == before
    assert len(asked(server)) == count


def test_a_complete_run_is_left_as_it_is(stopped: tuple[LoopbackProcess, Path]) -> None:
    server, run = stopped
    assert sparta("resume", run).code == 0
    files, count = snapshot(run), len(asked(server))
    again = [sparta("resume", run), sparta("run", "--tribe", run.parent / "tribe.yaml", "--run-dir", run)]
    assert [ended.code for ended in again] == [0, 0]
    assert again[0].out == again[1].out
    assert len(asked(server)) == count
    assert snapshot(run) == files


def test_more_iterations_go_on_from_a_complete_run(stopped: tuple[LoopbackProcess, Path]) -> None:
    server, run = stopped
    assert sparta("resume", run).code == 0
    before = len(asked(server))
    ended = sparta("resume", run, "--set", "iterations=2")
    assert ended.code == 0, ended.err
    assert len(asked(server)) == before + 4 * 24
    reference = run.parent / "reference"
    whole = sparta("run", "--tribe", run.parent / "tribe.yaml", "--run-dir", reference, "--iterations", "2")
    assert whole.code == 0, whole.err
    assert results(run) == results(reference)
    (change,) = json.loads((run / "run.json").read_text())["changes"]
    assert (change["key"], change["old"], change["new"]) == ("iterations", 1, 2)


# Told to stop


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[LoopbackProcess, Path]]:
    """A tribe whose requests take 0.3 s, or never end when they are about number 5."""
    rules = [{"match": {"contains": "thing number 5 in"}, "fault": "hang"}]
    scenario = {"any_model": True, "default_model": {"latency_s": 0.3}, "rules": rules}
    with start_loopback(scenario, tmp_path) as server:
        yield server, tribe(tmp_path, server.base_url, members=3, instructions=24, defaults={"timeout_s": 100})


def interrupted(process: subprocess.Popen[str], *signals: int) -> tuple[Ended, float]:
    begun = time.monotonic()
    for number, signum in enumerate(signals):
        if number:
            time.sleep(0.3)
        process.send_signal(signum)
    out, err = process.communicate(timeout=30)
    return Ended(process.returncode, out, err), time.monotonic() - begun


@pytest.mark.parametrize(
    ("signals", "code"),
    [([signal.SIGINT], 130), ([signal.SIGTERM], 143), ([signal.SIGINT, signal.SIGINT], 130)],
)
def test_a_signal_stops_the_run_cleanly(slow: tuple[LoopbackProcess, Path], signals: list[int], code: int) -> None:
    """Within 5 s, although a request hangs; with the command that goes on, and nothing lost."""
    server, file = slow
    run = file.parent / "run"
    process = started("run", "--tribe", file, "--run-dir", run)
    responses = run / "iteration_000" / "responses.jsonl"
    assert until(lambda: responses.exists() and responses.read_bytes().count(b"\n") >= 12, process)
    assert until(lambda: any(r["outcome"] is None for r in asked(server)), process)
    ended, took = interrupted(process, *signals)
    assert ended.code == code, ended.err
    assert took < 5
    assert f"sparta-api: to go on: sparta-api resume {run}" in ended.err
    assert "Traceback" not in ended.err
    assert json.loads((run / "run.json").read_text())["state"] == "stopped"
    first = asked(server)
    journaled = [row for name in JOURNALS[:2] for row in rows(run / "iteration_000" / f"{name}.jsonl")]
    answered = sum(r["outcome"] == "200" for r in first)
    assert len(journaled) >= answered - (8 if len(signals) > 1 else 0)
    server.control(json={"rules": [], "default_model": {}})
    resumed = sparta("resume", run)
    assert resumed.code == 0, resumed.err
    assert len(asked(server)) - len(first) == 4 * 24 - len(journaled)
    every_duel_once(run, 24)


def test_a_signal_while_the_run_is_stopping_for_another_reason(tmp_path: Path) -> None:
    """A member fails for good while a request of another account hangs; Ctrl-C does not wait for that one."""
    with start_loopback({"any_model": True, "rules": [{"fault": "hang"}]}, tmp_path / "a") as hanging:
        rules = [{"match": {"nth": [4]}, "fault": "401"}]
        with start_loopback({"any_model": True, "rules": rules}, tmp_path / "b") as failing:
            members = [{"name": "slow", "model": "s", "base_url": hanging.base_url}]
            members += [{"name": f"m{n}", "model": f"m{n}", "base_url": failing.base_url} for n in range(3)]
            file = tribe(tmp_path, failing.base_url, members, instructions=12, defaults={"timeout_s": 100})
            process = started("run", "--tribe", file, "--run-dir", tmp_path / "run")
            assert until(lambda: any(r["outcome"] == "401" for r in asked(failing)), process)
            ended, took = interrupted(process, signal.SIGINT)
    assert ended.code == 130, ended.err
    assert took < 5
    assert "Traceback" not in ended.err


# The directory


def test_a_second_process_is_refused_and_a_dead_ones_lock_is_not(slow: tuple[LoopbackProcess, Path]) -> None:
    server, file = slow
    run = file.parent / "run"
    process = started("run", "--tribe", file, "--run-dir", run)
    assert until(lambda: len(asked(server)) > 0, process)
    for second in (sparta("resume", run), sparta("run", "--tribe", file, "--run-dir", run)):
        assert second.code == 2
        assert f"{run}: process {process.pid} is working in this run directory" in second.err
        assert len(second.err.strip().splitlines()) == 1
    assert json.loads(sparta("status", run, "--json").out)["finished"] is False
    kill(process)
    server.control(json={"rules": [], "default_model": {}})
    assert sparta("resume", run).code == 0


def test_a_process_that_was_killed_before_its_run_began_is_no_run(tmp_path: Path) -> None:
    with start_loopback({"any_model": True}, tmp_path) as server:
        file = tribe(tmp_path, server.base_url, members=3, instructions=3)
        run = tmp_path / "run"
        run.mkdir()
        (run / "instructions.jsonl").write_text('{"id": "half')
        (run / ".run.json.123.tmp").write_text("{")
        assert sparta("resume", run).code == 2
        assert sparta("run", "--tribe", file, "--run-dir", run).code == 0
    every_duel_once(run, 3)
    assert not (run / ".run.json.123.tmp").exists()


def mounted(path: Path, *options: str) -> bool:
    path.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", *options, str(path)], capture_output=True, check=False)
    return done.returncode == 0


@pytest.mark.parametrize("size", ["48k", "160k"])
def test_a_full_disk_stops_the_run_and_loses_nothing(tmp_path: Path, size: str) -> None:
    run = tmp_path / "disk" / "run"
    if not mounted(run.parent, "-t", "tmpfs", "-o", f"size={size}", "tmpfs"):
        pytest.skip("a file system of a given size can only be mounted by root")
    try:
        with start_loopback({"any_model": True}, tmp_path) as server:
            file = tribe(tmp_path, server.base_url, members=3, instructions=120)
            ended = sparta("run", "--tribe", file, "--run-dir", run)
            assert ended.code == 3, ended.err
            assert "No space left on device" in ended.err
            assert str(run) in ended.err.splitlines()[-1]
            assert "Traceback" not in ended.err
            assert "Unclosed" not in ended.err
            journaled = sum(len(complete(run / "iteration_000" / f"{name}.jsonl")) for name in JOURNALS[:2])
            first = len(asked(server))
            assert first - journaled <= 16
            subprocess.run(["mount", "-o", "remount,size=4m", str(run.parent)], check=True)
            resumed = sparta("run", "--tribe", file, "--run-dir", run)
            assert resumed.code == 0, resumed.err
            assert len(asked(server)) - first == 4 * 120 - journaled
            assert sparta("run", "--tribe", file, "--run-dir", tmp_path / "whole").code == 0
        assert results(run) == results(tmp_path / "whole")
    finally:
        subprocess.run(["umount", str(run.parent)], check=True)


def complete(path: Path) -> list[bytes]:
    return (
        [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")] if path.exists() else []
    )


def test_a_read_only_directory_stops_before_anything_is_sent(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    if not mounted(place, "-t", "tmpfs", "-o", "size=1m", "tmpfs"):
        pytest.skip("a read-only file system can only be mounted by root")
    try:
        with start_loopback({"any_model": True}, tmp_path) as server:
            file = tribe(tmp_path, server.base_url, members=3, instructions=3)
            assert (
                sparta("run", "--tribe", file, "--run-dir", place / "old", "--set", "limits.max_requests=5").code == 4
            )
            before = len(asked(server))
            subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
            new = sparta("run", "--tribe", file, "--run-dir", place / "new")
            for ended in (new, sparta("resume", place / "old")):
                assert ended.code == 3, ended.err
                assert str(place) in ended.err
                assert "Read-only file system" in ended.err
                assert len(ended.err.strip().splitlines()) == 1
            assert len(asked(server)) == before
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_path_below_a_file_is_no_place_for_a_run(tmp_path: Path) -> None:
    with start_loopback({"any_model": True}, tmp_path) as server:
        file = tribe(tmp_path, server.base_url, members=3, instructions=3)
        ended = sparta("run", "--tribe", file, "--run-dir", file / "run")
        assert asked(server) == []
    assert ended.code == 3
    assert "Not a directory" in ended.err
    assert len(ended.err.strip().splitlines()) == 1


# Changed configurations


def test_changes_that_would_change_results_are_refused_by_name(stopped: tuple[LoopbackProcess, Path]) -> None:
    server, run = stopped
    before, count = snapshot(run), len(asked(server))
    changes = ("seed=8", "members.m1.sampling.temperature=0.1", "judging.scale=[1, 5]", "reputation.floor=1")
    ended = sparta("resume", run, *(part for change in changes for part in ("--set", change)))
    assert ended.code == 2
    for key in ("seed", "members.m1.sampling.temperature", "judging.scale", "reputation.floor"):
        assert key in ended.err
    source = run.parent / "instructions.jsonl"
    text = source.read_text()
    source.write_text(text.replace("thing number 3", "thing number three"))
    edited = sparta("run", "--tribe", run.parent / "tribe.yaml", "--run-dir", run)
    source.write_text(text)
    assert edited.code == 2
    assert "instructions (their contents)" in edited.err
    assert len(asked(server)) == count
    assert {k: v for k, v in snapshot(run).items() if k != ".lock"} == {k: v for k, v in before.items() if k != ".lock"}


def test_changes_of_place_and_pace_are_taken_and_recorded(stopped: tuple[LoopbackProcess, Path]) -> None:
    server, run = stopped
    with start_loopback({"any_model": True}, run.parent / "other") as other:
        changes = [f"members.m{n}.base_url={other.base_url}" for n in range(3)]
        changes += ["members.m0.concurrency=3", "members.m1.timeout_s=9", "limits.max_requests=100000"]
        before = len(asked(server))
        ended = sparta("resume", run, *(part for change in changes for part in ("--set", change)))
        assert ended.code == 0, ended.err
        assert len(asked(server)) == before
        assert 0 < len(asked(other)) < 4 * 24
    recorded = {row["key"]: row["new"] for row in json.loads((run / "run.json").read_text())["changes"]}
    assert recorded["members.m0.base_url"] == other.base_url
    assert recorded["members.m1.timeout_s"] == 9
    assert recorded["limits.max_requests"] == 100000
    every_duel_once(run, 24)


def test_the_lock_is_the_kernels_and_ends_with_its_process(stopped: tuple[LoopbackProcess, Path]) -> None:
    """A pid of a dead process in the lock file, or one that was given to somebody else, blocks nothing."""
    _, run = stopped
    (run / ".lock").write_text("1\n")
    assert sparta("resume", run).code == 0
    with (run / ".lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4242\n")
        lock.flush()
        ended = sparta("resume", run)
    assert ended.code == 2
    assert "process 4242" in ended.err
