"""What a run shows while it works: a live view on a terminal, a few plain lines anywhere else.

Both read `Progress` and never change it, and write to the given console (stderr) alone. Ticks come from an
asyncio task on the run's own loop, so figures never change while they are drawn.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sparta_api.secrets import scrub
from sparta_api.show.pace import ENDED, Pace
from sparta_api.show.progress import MemberTotals, Progress, TrainingProgress
from sparta_api.show.terminal import clean, clock, count, dollars, is_live, safe, shorten

TICK_S = 0.25
PLAIN_STEPS = 10
_FRAME_LINES = 8
_MIN_NAME_WIDTH = 8
_WITH_ALL_COLUMNS = 76


class Chronicle:
    """The lines that stay: phases, every tenth of the duels, trainings that ended, notices once each."""

    def __init__(self, progress: Progress, pace: Pace, say: Callable[[str, str], None], *, steps: bool) -> None:
        self._progress = progress
        self._pace = pace
        self._say = say
        self._steps = steps
        self._place: tuple[int, str] | None = None
        self._step = 0
        self._ended: set[tuple[int, str]] = set()
        self._notices_read = 0
        self._noticed: set[str] = set()

    def update(self) -> None:
        """Says what is new since the last update."""
        self._notices()
        self._phase()
        self._duels()
        self._trainings()

    def _notices(self) -> None:
        fresh = self._progress.notices[self._notices_read :]
        self._notices_read += len(fresh)
        for notice in fresh:
            if notice not in self._noticed:
                self._noticed.add(notice)
                self._say(f"warning: {shorten(clean(scrub(notice)), 2000)}", "yellow")

    def _phase(self) -> None:
        progress = self._progress
        place = (progress.iteration, progress.phase)
        if place == self._place:
            return
        self._place = place
        self._step = self._tenth()
        self._pace.enter()
        if self._steps and progress.phase not in ("starting", "done"):
            planned = f", {count(progress.duels_total)} planned" if progress.phase == "duels" else ""
            self._say(f"{_where(progress)}: {progress.phase}{planned}", "")
        if progress.phase == "done":
            self._say(f"done: {_spent(progress)}", "")

    def _duels(self) -> None:
        progress, tenth = self._progress, self._tenth()
        if progress.phase != "duels" or tenth == self._step:
            return
        self._step = tenth
        if self._steps or tenth == PLAIN_STEPS:
            done = f"{count(progress.duels_done)} of {count(progress.duels_total)} duels"
            self._say(f"{_where(progress)}: {done}{_debts(progress)}; {_spent(progress)}", "")

    def _tenth(self) -> int:
        total = self._progress.duels_total
        return self._progress.duels_done * PLAIN_STEPS // total if total else 0

    def _trainings(self) -> None:
        for name, job in self._progress.training.items():
            key = (self._progress.iteration, name)
            if job.state in ENDED and key not in self._ended:
                self._ended.add(key)
                details = ", ".join(part for part in (_figures(job), clean(scrub(job.message))) if part)
                shown = shorten(clean(name), 60)
                style = "" if job.state in ("succeeded", "skipped") else "red"
                ending = f"training of {shown} {job.state}"
                self._say(f"{_where(self._progress)}: {ending}{': ' if details else ''}{shorten(details, 600)}", style)


class LiveView:
    """`async with LiveView(progress, console):` shows a run until the block ends.

    The console must write to stderr. On a capable terminal (no NO_COLOR, no CI, TERM not dumb) four frames
    a second are drawn below the lines that stay, and vanish at the end; anywhere else only plain lines come.
    """

    def __init__(self, progress: Progress, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._progress = progress
        self._console = console
        self._pace = Pace(progress, clock)
        drawn = is_live(console)
        self._chronicle = Chronicle(progress, self._pace, self._say, steps=not drawn)
        self._live = (
            Live(console=console, get_renderable=self.frame, auto_refresh=False, transient=True, redirect_stdout=False)
            if drawn
            else None
        )
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._progress.watchers.append(self._chronicle.update)
        if self._live:
            self._live.start()
        self.tick()
        self._task = asyncio.create_task(self._ticks())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:  # fmt: skip
        if self._task:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self.tick()
        if self._live:
            self._live.stop()
        self._progress.watchers.remove(self._chronicle.update)

    def tick(self) -> None:
        """Says what is new and draws one frame."""
        self._pace.sample()
        self._chronicle.update()
        if self._live:
            self._live.refresh()

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()

    def _say(self, line: str, style: str) -> None:
        stamp = clock(self._pace.elapsed())
        if self._live:
            row = Table.grid(padding=(0, 1))
            row.add_row(Text(f"{stamp:>7}", style="dim", no_wrap=True), Text(line, style=style))
            self._console.print(row)
            return
        with contextlib.suppress(OSError):
            self._console.file.write(f"[{stamp}] {line}\n")
            self._console.file.flush()

    def frame(self) -> RenderableType:
        """The live area at this moment, never taller than the terminal."""
        progress, width = self._progress, self._console.width
        rows = max(self._console.height - _FRAME_LINES, 1)
        training = progress.phase == "training" and progress.training
        body = _training_table(progress, width, rows) if training else _member_table(progress, self._pace, width, rows)
        bar = [_duel_bar(progress, width)] if progress.duels_total else []
        return Group("", _header(progress, self._pace, width), *bar, "", body)


def _where(progress: Progress) -> str:
    return f"iteration {progress.iteration + 1} of {progress.iterations}"


def _debts(progress: Progress) -> str:
    void = f", {count(progress.duels_void)} void" if progress.duels_void else ""
    return void + (f", {count(progress.owed)} owed" if progress.owed else "")


def _spent(progress: Progress) -> str:
    known = "" if not progress.spent_usd else f", {dollars(progress.spent_usd)}"
    return f"{count(progress.requests)} requests, {count(progress.tokens)} tokens{known}"


def _figures(job: TrainingProgress) -> str:
    figures = (("loss", job.loss), ("margin", job.margin), ("accuracy", job.accuracy))
    return ", ".join(f"{name} {value:.3f}" for name, value in figures if value is not None)


def _header(progress: Progress, pace: Pace, width: int) -> RenderableType:
    left = pace.seconds_left()
    times = f"{clock(pace.elapsed())} elapsed" + ("" if left is None else f", about {clock(left)} left")
    place = f"{_where(progress)}  {progress.phase}"
    name = shorten(clean(progress.run), max(width - len(place) - len(times) - 6, 8))
    top = Text.assemble((name, "bold"), "  ", (place, "cyan"), "  ", (times, "dim"))
    return Group(_fit(top), _fit(Text(_spent(progress), style="dim")))


def _fit(line: Text) -> Text:
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _duel_bar(progress: Progress, width: int) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    done = f"{count(progress.duels_done)} of {count(progress.duels_total)} duels{_debts(progress)}"
    bar = _bar(progress.duels_done, progress.duels_total, min(40, max(width - len(done) - 2, 8)))
    grid.add_row(bar, _fit(Text(done)))
    return grid


def _bar(done: float, total: float, width: int) -> ProgressBar:
    return ProgressBar(total=max(total, 1e-9), completed=done, width=width, complete_style="cyan")


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for position, column in enumerate(columns):
        justify: JustifyMethod = "left" if column in ("member", "role", "training") else "right"
        table.add_column(column, justify=justify, no_wrap=position > 0, overflow="ellipsis")
    return table


def _member_table(progress: Progress, pace: Pace, width: int, rows: int) -> Table:
    names = list(dict.fromkeys([*progress.reputation, *progress.totals, *progress.in_flight]))
    wide = width >= _WITH_ALL_COLUMNS
    more = ("role", "abstained") if wide else ()
    table = _table("member", *more[:1], "reputation", "in flight", "done", "failed", *more[1:], "tokens/s")
    for name in names[:rows]:
        totals = progress.totals.get(name) or MemberTotals()
        role, abstained = Text(_role(progress.roles.get(name, ())), style="dim"), _number(totals.abstained, "yellow")
        table.add_row(
            safe(name, min(max(width - 66, _MIN_NAME_WIDTH), 40)),
            *([role] if wide else []),
            _reputation(progress, name),
            _number(progress.in_flight.get(name, 0)),
            _number(totals.responses + totals.judgments),
            _number(totals.failed, "red"),
            *([abstained] if wide else []),
            _number(round(pace.tokens_per_second(name))),
        )
    return _cut(table, len(names) - rows)


def _cut(table: Table, hidden: int) -> Table:
    if hidden > 0:
        table.add_row(Text(f"+{hidden} more", style="dim", no_wrap=True))
    return table


def _role(roles: tuple[str, ...]) -> str:
    return "both" if len(roles) > 1 else "".join(roles)


def _number(value: int, style: str = "") -> Text:
    return Text(count(value), style=style if value else "dim")


def _reputation(progress: Progress, name: str) -> Text:
    now = progress.reputation.get(name)
    if now is None:
        return Text("")
    change = now - progress.reputation_before.get(name, now)
    shown = f"{change:+.1f}" if abs(change) >= 0.05 else ""
    return Text.assemble(f"{now:.1f} ", (shown.rjust(5), "green" if change > 0 else "red"))


def _training_table(progress: Progress, width: int, rows: int) -> Table:
    table = _table("member", "training", "progress", "loss", "margin", "accuracy")
    for name, job in list(progress.training.items())[:rows]:
        style = "green" if job.state == "succeeded" else "red" if job.state in ("failed", "cancelled") else ""
        table.add_row(
            safe(name, min(max(width - 60, _MIN_NAME_WIDTH), 40)),
            Text(job.state, style=style),
            _bar(1.0 if job.state in ENDED else job.progress or 0.0, 1.0, 14),
            *(Text("" if value is None else f"{value:.3f}") for value in (job.loss, job.margin, job.accuracy)),
        )
    return _cut(table, len(progress.training) - rows)
