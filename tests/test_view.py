"""The live view and its plain lines, as they reach a terminal or a pipe."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import re
import select
import subprocess
import sys
from collections.abc import Callable

import pytest
from rich.console import Console

from sparta_api.secrets import register
from sparta_api.show.progress import MemberTotals, Progress, TrainingProgress, Usage
from sparta_api.show.terminal import clean, clock, count, dollars, shorten
from sparta_api.show.view import LiveView

HOSTILE = "[bold red]x[/] [link=http://evil]\x1b[35mred\x1b]8;;http://evil\x07y\u202eevil\x00\u200b\ud800"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def capable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "CI", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def tribe(*names: str) -> Progress:
    progress = Progress(run="quickstart", iterations=2)
    for name in names:
        progress.totals[name] = MemberTotals()
        progress.reputation[name] = 100.0
        progress.roles[name] = ("fight", "judge")
    progress.begin_iteration(0)
    progress.duels_total = 40
    return progress


def shown(progress: Progress, act: Callable[[LiveView], None], *, terminal: bool = False,
          width: int = 80, height: int = 24) -> str:  # fmt: skip
    """What stands on stderr after `act`, for a view that is ticked by hand between its start and its end."""
    file = Terminal() if terminal else io.StringIO()

    async def session() -> None:
        async with LiveView(progress, Console(file=file, width=width, height=height)) as view:
            act(view)

    asyncio.run(session())
    return file.getvalue()


def frame(progress: Progress, width: int = 80, height: int = 24, view: LiveView | None = None) -> str:
    console = Console(file=io.StringIO(), width=width, height=height)
    console.print((view or LiveView(progress, console)).frame())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_frame_shows_the_run_and_every_member() -> None:
    progress = tribe("plain", "terse")
    progress.enter("duels")
    progress.duels_done, progress.duels_void, progress.owed = 12, 2, 1
    progress.totals["plain"] = MemberTotals(responses=7, judgments=4, abstained=3, failed=2)
    progress.in_flight["plain"] = 16
    progress.reputation["plain"] = 104.5
    progress.requests, progress.tokens, progress.spent_usd = 1234, 345_600, 0.12
    text = frame(progress)
    assert "quickstart  iteration 1 of 2  duels" in text
    assert "12 of 40 duels, 2 void, 1 owed" in text
    assert "1,234 requests, 345.6k tokens, 0.12 USD" in text
    row = next(line for line in text.splitlines() if line.startswith("plain"))
    assert row.split() == ["plain", "both", "104.5", "+4.5", "16", "11", "2", "3", "0"]
    assert any(line.startswith("terse") and "100.0" in line for line in text.splitlines())


def test_during_training_the_jobs_are_shown() -> None:
    progress = tribe("plain", "terse")
    progress.training = {
        "plain": TrainingProgress("running", 0.5, 0.6931, 0.0123, 0.61),
        "terse": TrainingProgress(),
    }
    progress.enter("training")
    lines = frame(progress).splitlines()
    assert any(line.split()[:2] == ["plain", "running"] and "0.693" in line and "0.610" in line for line in lines)
    assert any(line.split()[:2] == ["terse", "waiting"] for line in lines)


@pytest.mark.parametrize("phase", ["duels", "training"])
@pytest.mark.parametrize("size", [(80, 24), (140, 40), (60, 14)])
def test_ten_members_fit_the_terminal(phase: str, size: tuple[int, int]) -> None:
    names = [f"organisation/a-rather-long-model-name-{number}" for number in range(10)]
    progress = tribe(*names)
    progress.training = {name: TrainingProgress("running", 0.1, 0.69, 0.1, 0.5) for name in names}
    progress.enter(phase)
    width, height = size
    lines = frame(progress, width, height).splitlines()
    assert len(lines) < height
    assert all(len(line) <= width for line in lines)
    members = [line for line in lines if line.startswith("org")]
    if height < 24:
        assert f"+{10 - len(members)} more" in lines[-1]
    else:
        assert [line.split()[0][-2:] for line in members] == [f"-{number}" for number in range(10)]


def test_speed_and_time_left_come_from_this_phase_alone() -> None:
    now = [0.0]
    progress = tribe("plain")
    view = LiveView(progress, Console(file=io.StringIO(), width=100), clock=lambda: now[0])
    progress.answers_expected = 400
    progress.totals["plain"].responses = 100
    progress.phase = "duels"
    view.tick()
    for _ in range(20):
        now[0] += 1.0
        progress.totals["plain"].responses += 10
        progress.totals["plain"].usage.completion += 50
        view.tick()
    text = frame(progress, 100, view=view)
    assert "0:20 elapsed, about 0:10 left" in text
    assert next(line for line in text.splitlines() if line.startswith("plain")).split()[-1] == "50"


def test_a_pipe_gets_phases_tenths_and_trainings_without_control_codes() -> None:
    progress = tribe("plain")

    def play(view: LiveView) -> None:
        progress.enter("duels")
        for done in range(1, 41):
            progress.duels_done = done
            progress.duels_void = done // 20
            view.tick()
        progress.training = {"plain": TrainingProgress("running", 0.5)}
        progress.enter("training")
        progress.training["plain"] = TrainingProgress("failed", None, 0.71, message="loss is not ln 2")
        view.tick()
        view.tick()
        progress.enter("done")

    lines = shown(progress, play).splitlines()
    assert [re.sub(r"^\[\d+:\d\d\] ", "", line) for line in lines if "planned" in line] == [
        "iteration 1 of 2: duels, 40 planned"
    ]
    assert [line.split(": ")[1].split(" duels")[0] for line in lines if " of 40 duels" in line] == [
        f"{done} of 40" for done in range(4, 41, 4)
    ]
    assert sum("training of plain failed: loss 0.710, loss is not ln 2" in line for line in lines) == 1
    assert lines[-1].endswith("done: 0 requests, 0 tokens")
    assert all(line.isprintable() for line in lines)


def test_a_phase_between_two_ticks_is_not_missed() -> None:
    progress = tribe("plain")

    def play(view: LiveView) -> None:
        for iteration in range(2):
            progress.begin_iteration(iteration)
            progress.duels_total = 3
            progress.enter("duels")
            progress.duels_done = 3
            progress.enter("preferences")

    text = shown(progress, play)
    for iteration in (1, 2):
        assert f"iteration {iteration} of 2: 3 of 3 duels" in text
        assert f"iteration {iteration} of 2: preferences" in text


@pytest.mark.parametrize("setting", [("NO_COLOR", "1"), ("CI", "true"), ("TERM", "dumb")])
@pytest.mark.usefixtures("capable")
def test_a_terminal_that_wants_it_plain(monkeypatch: pytest.MonkeyPatch, setting: tuple[str, str]) -> None:
    monkeypatch.setenv(*setting)
    progress = tribe("plain")
    text = shown(progress, lambda view: progress.enter("duels"), terminal=True)
    assert "\x1b" not in text
    assert "iteration 1 of 2: duels" in text


@pytest.mark.usefixtures("capable")
def test_forced_colours_do_not_reach_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    progress = tribe("plain")
    progress.notices.append("a warning")
    text = shown(progress, lambda view: progress.enter("duels"))
    assert "warning: a warning\n" in text
    assert "\x1b" not in text


@pytest.mark.usefixtures("capable")
def test_notices_stand_above_the_live_area_once_each() -> None:
    progress = tribe("plain")

    def play(view: LiveView) -> None:
        progress.notices += ["first [red]notice[/red]", "second notice"]
        view.tick()
        progress.notices.append("second notice")
        view.tick()

    text = shown(progress, play, terminal=True)
    assert text.count("first [red]notice[/red]") == 1
    assert text.count("second notice") == 1
    assert text.index("second notice") < text.rindex("quickstart")


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.usefixtures("capable")
def test_hostile_text_is_shown_literally_and_secrets_are_masked(terminal: bool) -> None:
    register("very-secret-value")
    progress = tribe(HOSTILE)
    progress.run = HOSTILE
    progress.notices.append(f"{HOSTILE} very-secret-value\nsecond line")
    progress.training = {HOSTILE: TrainingProgress("failed", message=f"{HOSTILE} very-secret-value")}
    progress.enter("training")
    text = shown(progress, lambda view: None, terminal=terminal, width=200)
    for leaked in ("\x1b[35m", "\x1b]8", "\u202e", "\x00", "\u200b", "\ud800", "very-secret-value"):
        assert leaked not in text
    assert "[bold red]x[/]" in text
    assert "\nsecond line" not in text
    text.encode("utf-8")


SCRIPT = """
import asyncio
from rich.console import Console
from sparta_api.show.progress import Progress
from sparta_api.show.view import LiveView

async def main():
    progress = Progress(run="quickstart", iterations=1, reputation={"plain": 100.0})
    async with LiveView(progress, Console(stderr=True)):
        progress.enter("duels")
        await asyncio.sleep(0.6)
    print("the result")

asyncio.run(main())
"""


def test_a_closed_pipe_does_not_stop_the_run() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        child = subprocess.run([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=writer, timeout=30)
    finally:
        os.close(writer)
    assert child.stdout == b"the result\n"


def test_on_a_real_terminal_the_view_is_drawn_on_stderr_and_the_cursor_comes_back() -> None:
    master, slave = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "CI")} | {"TERM": "xterm-256color"}
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=slave, stdin=slave, env=environment
    )
    os.close(slave)
    drawn = b""
    try:
        while select.select([master], [], [], 30)[0]:
            try:
                part = os.read(master, 65536)
            except OSError:
                break
            if not part:
                break
            drawn += part
        stdout, _ = child.communicate(timeout=30)
    finally:
        os.close(master)
        child.kill()
        child.wait()
    assert child.returncode == 0
    assert stdout == b"the result\n"
    assert b"iteration 1 of 1" in drawn
    assert drawn.rindex(b"\x1b[?25h") > drawn.rindex(b"\x1b[?25l")


def test_clean_and_shorten() -> None:
    assert clean("a\x1b[1;31mb\x9b2Jc\x1b]0;title\x07d\x1b(Be") == "abcde"
    assert clean("a\r\nb\tc\u2028d") == "a b c d"
    assert clean("a\r\nb", lines=True) == "a\nb"
    assert clean("ok\udc00\u202e\u2066") == "ok\N{REPLACEMENT CHARACTER}"
    assert len(clean("e" + "\u0301" * 50)) == 4
    assert shorten("org/model-name-v2", 9) == "org/…e-v2"
    assert shorten("日本語日本語", 5) == "日…語"
    assert shorten("short", 5) == "short"


def test_numbers() -> None:
    assert [count(n) for n in (0, 950, 9999, 12_345, 999_949, 999_950, 4_500_000, 1.2e9)] == [
        "0", "950", "9,999", "12.3k", "999.9k", "1.0M", "4.5M", "1.2G"
    ]  # fmt: skip
    assert [clock(s) for s in (7, 724, 3723)] == ["0:07", "12:04", "1:02:03"]
    assert [dollars(c) for c in (0.0, 12.3, 0.0034, None)] == ["0.00 USD", "12.30 USD", "0.0034 USD", "unknown"]


def test_a_new_iteration_starts_its_figures_anew() -> None:
    progress = tribe("plain")
    progress.totals["plain"] = MemberTotals(duels=3, usage=Usage(prompt=5))
    progress.reputation["plain"] = 112.0
    progress.duels_done = 40
    progress.begin_iteration(1)
    assert progress.totals == {"plain": MemberTotals()}
    assert progress.reputation_before == {"plain": 112.0}
    assert (progress.iteration, progress.duels_done, progress.duels_total) == (1, 0, 0)
