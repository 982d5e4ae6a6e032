"""The held-out figures as a reader sees them: who meets the verifiers at each stage, and what guards the gain."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sparta_api.runs.gain import Gain, Stage
from sparta_api.runs.guards import Figures
from sparta_api.show.terminal import safe

NAME_WIDTH = 24
_GUARDS: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("words", lambda f: f"{f.words:.1f}"),
    ("repeated", lambda f: f"{f.repetition:.0%}"),
    ("distinct-1", lambda f: f"{f.distinct_1:.2f}"),
    ("distinct-2", lambda f: f"{f.distinct_2:.2f}"),
    ("likelihood", lambda f: "-" if f.logprob is None else f"{f.logprob:.2f}"),
)


def show_gain(gain: Gain, console: Console) -> None:
    """Prints the table of held-out shares with their intervals, then that of the guards."""
    stages = len(gain.tribe)
    rows = [(safe(name, NAME_WIDTH), found) for name, found in gain.members.items()]
    rows.append((Text("the tribe", style="bold"), gain.tribe))
    if any(stage.met is not None for stage in gain.tribe):
        console.print("\nHeld-out answers that meet the verifiers (95 % interval)", style="bold")
        table = _table("member", *(_title(stage) for stage in range(stages)))
        for name, found in rows:
            table.add_row(name, *(_share(stage, found) for stage in found))
        console.print(table)
    console.print("\nThe held-out answers themselves, before and after", style="bold")
    table = _table("member", *(title for title, _ in _GUARDS))
    for name, found in rows:
        table.add_row(name, *(_change(found, show) for _, show in _GUARDS))
    console.print(table)


def _title(stage: int) -> str:
    return f"after iteration {stage}" if stage else "before"


def _share(stage: Stage, found: Sequence[Stage]) -> Text:
    if stage.interval is None or stage.share is None:
        return Text("-", style="dim")
    low, high = stage.interval
    gained = stage is not found[0] and found[0].interval is not None and low > found[0].interval[1]
    return Text.assemble((f"{stage.share:.0%}", "green" if gained else ""), (f" ({low:.0%}-{high:.0%})", "dim"))


def _change(found: Sequence[Stage], show: Callable[[Figures], str]) -> Text:
    first, last = show(found[0].figures), show(found[-1].figures)
    return Text(first) if len(found) == 1 else Text.assemble((f"{first} → ", "dim"), last)


def _table(*titles: str) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        header_style="dim",
        border_style="dim",
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for position, title in enumerate(titles):
        table.add_column(title, justify="left" if position == 0 else "right", no_wrap=True)
    return table
