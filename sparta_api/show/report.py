"""The figures of `summary` as a reader sees them: tables, warnings, samples, where the adapters lie.

Everything is printed to the given console (stdout), fits its width, and is plain text where it is a pipe.
Commands are printed in one piece, so that they can be copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sparta_api.secrets import scrub
from sparta_api.show.report_gain import show_gain
from sparta_api.show.summary import (
    IterationReport,
    MemberReport,
    RunReport,
    Sample,
    duel_counts,
    load_command,
    serve_commands,
    warnings,
)
from sparta_api.show.terminal import ELLIPSIS, clean, count, counted, dollars, safe

__all__ = [
    "IterationReport",
    "MemberReport",
    "RunReport",
    "Sample",
    "iteration_table",
    "member_table",
    "member_tables",
    "render",
]

SIDE_BY_SIDE_WIDTH = 110
SAMPLES = 4
"""Of how many held-out instructions the answers are shown."""
SAMPLE_LINES = 3
_GAP = 2


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    cell: Callable[[MemberReport], Text]


def render(report: RunReport, console: Console) -> None:
    """Prints a whole report: the end of `run` and the answer of `status`."""
    _title(report, console)
    for table in member_tables(report.members, console.width):
        console.print("", table, sep="\n")
    if report.history:
        console.print("", iteration_table(report.history), sep="\n")
    _voids(report, console)
    if report.gain is not None:
        show_gain(report.gain, console)
    _samples(report.samples, console)
    _adapters(report.members, console)
    _warnings(report, console)
    if report.next_command:
        console.print("\nContinue with:", style="bold")
        _command(report.next_command, console)


def member_tables(rows: Sequence[MemberReport], width: int) -> list[Table]:
    """The figures per member as one table, or as two (duels, then work) where one would not fit the width."""
    whole = member_table(rows, width)
    names = max(cell_len(clean(row.name)) for row in rows)
    if _name_width(rows, [*_DUELS, *_work(rows)], width) >= min(names, 24):
        return [whole]
    return [_ranked_table(rows, _DUELS, width), _ranked_table(rows, _work(rows), width)]


def member_table(rows: Sequence[MemberReport], width: int) -> Table:
    """All figures per member in one table, best reputation first and judges without duels last."""
    return _ranked_table(rows, [*_DUELS, *_work(rows)], width)


def iteration_table(history: Sequence[IterationReport]) -> Table:
    """One row per iteration: its duels and the pairs that they gave."""
    table = _table("iteration", "duels", "judged", "tied", "void", "owed", "pairs")
    for iteration in history:
        void = sum(iteration.void.values())
        figures = (iteration.total, iteration.judged, iteration.ties, void, iteration.owed, iteration.pairs)
        table.add_row(Text(str(iteration.index + 1)), *(_number(figure) for figure in figures))
    return table


def _title(report: RunReport, console: Console) -> None:
    place = f"iteration {report.iteration + 1} of {report.iterations}"
    state = f"finished, {counted(report.iterations, 'iteration')}" if report.finished else f"{place}, {report.phase}"
    console.print(Text.assemble("\n", safe(report.directory, style="bold"), "  ", (state, "cyan")))
    usage = report.usage
    spent = f", {dollars(report.spent_usd)}" if report.spent_usd != 0 else ""
    training, serving = report.bill.total.training, report.bill.total.deployments
    if training or serving:
        spent += f" ({dollars(training)} of it for training, {dollars(serving)} for deployments)"
    tokens = f"{count(usage.prompt)} tokens in, {count(usage.completion)} out"
    spared = sum(member.totals.spared for member in report.members)
    saved = f", {count(spared)} questions to judges spared" if spared else ""
    console.print(Text(f"{count(report.requests)} requests, {tokens}{spent}{saved}", style="dim"))


def _ranked_table(rows: Sequence[MemberReport], columns: Sequence[_Column], width: int) -> Table:
    table = _table("member", *(column.title for column in columns))
    name_width = max(_name_width(rows, columns, width), 8)
    for row in sorted(rows, key=lambda row: ("fight" not in row.roles, -row.reputation_after)):
        table.add_row(safe(row.name, name_width), *(column.cell(row) for column in columns))
    return table


def _name_width(rows: Sequence[MemberReport], columns: Sequence[_Column], width: int) -> int:
    """What the figures leave of the width; figures are never cut."""
    taken = (max(cell_len(column.title), *(column.cell(row).cell_len for row in rows)) + _GAP for column in columns)
    return min(width - sum(taken), 48)


def _table(*titles: str) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        header_style="dim",
        border_style="dim",
        pad_edge=False,
        padding=(0, _GAP - 1, 0, 0),
    )
    for position, title in enumerate(titles):
        table.add_column(title, justify="left" if position == 0 else "right", no_wrap=True, overflow="ellipsis")
    return table


def _number(value: int, style: str = "") -> Text:
    return Text(count(value), style=style if value else "dim")


def _reputation(row: MemberReport) -> Text:
    change = row.reputation_after - row.reputation_before
    style = "" if abs(change) < 0.05 else "green" if change > 0 else "red"
    return Text.assemble((f"{row.reputation_before:.1f} → ", "dim"), (f"{row.reputation_after:.1f}", style))


def _abstained(row: MemberReport) -> Text:
    share = f" ({row.abstention_share:.0%})" if row.totals.abstained else ""
    return Text(f"{count(row.totals.abstained)}{share}", style="yellow" if row.totals.abstained else "dim")


def _cost(row: MemberReport) -> Text:
    return Text(dollars(row.spent_usd).removesuffix(" USD"), style="" if row.spent_usd else "dim")


def _margin(row: MemberReport) -> Text:
    return _figure(row.training.margin if row.training and row.training.state == "succeeded" else None)


def _loss(row: MemberReport) -> Text:
    """The loss of a training that succeeded, the state of any other."""
    if row.training is None or row.training.state == "succeeded":
        return _figure(row.training.loss if row.training else None)
    return Text(row.training.state, style="red" if row.training.state in ("failed", "cancelled") else "dim")


def _figure(value: float | None) -> Text:
    return Text("" if value is None else f"{value:.3f}")


_DUELS = (
    _Column("duels", lambda row: _number(row.totals.duels)),
    _Column("won", lambda row: _number(row.totals.wins)),
    _Column("lost", lambda row: _number(row.totals.losses)),
    _Column("tied", lambda row: _number(row.totals.ties)),
    _Column("void", lambda row: _number(row.totals.void, "yellow")),
    _Column("reputation", _reputation),
)


def _work(rows: Sequence[MemberReport]) -> list[_Column]:
    columns = [
        _Column("tokens in", lambda row: _number(row.totals.usage.prompt)),
        _Column("out", lambda row: _number(row.totals.usage.completion)),
        _Column("abstained", _abstained),
    ]
    if any(row.spent_usd != 0 for row in rows):
        columns.append(_Column("USD", _cost))
    if any(row.training for row in rows):
        columns += [
            _Column("loss", _loss),
            _Column("margin", _margin),
        ]
    return columns


def _voids(report: RunReport, console: Console) -> None:
    duels = duel_counts(report.history)
    if not duels["n_void"]:
        return
    reasons = ", ".join(f"{clean(reason)} ({number})" for reason, number in duels["void_reasons"].items())
    numbers = f"{duels['n_total']} duels, {duels['n_judged']} judged, {duels['n_void']} void"
    console.print("", Text(f"{numbers}: {reasons}"), sep="\n")


def _warnings(report: RunReport, console: Console) -> None:
    found = warnings(report)
    if not found:
        return
    console.print("\nWarnings", style="bold")
    grid = Table.grid(padding=(0, 1))
    for sentence in found:
        grid.add_row(Text("!", style="yellow"), Text(clean(sentence)))
    console.print(grid)


def _samples(samples: Sequence[Sample], console: Console) -> None:
    if not samples:
        return
    console.print("\nHeld-out instructions, before and after", style="bold")
    wide = console.width >= SIDE_BY_SIDE_WIDTH
    name_width = min(max(cell_len(clean(sample.member)) for sample in samples), 16)
    text_width = (console.width - name_width - 6) // 2 if wide else console.width - name_width - 11
    shown = list(dict.fromkeys(sample.prompt for sample in samples))[:SAMPLES]
    for prompt in shown:
        group = [sample for sample in samples if sample.prompt == prompt]
        console.print(Text("\n" + _excerpt(prompt, 2 * console.width), style="italic"))
        grid = Table.grid(padding=(0, 2, 0, 0))
        if wide:
            grid.add_row("", Text("before", style="dim"), Text("after", style="dim"))
        for sample in group:
            name = safe(sample.member, name_width, "cyan")
            before, after = (_answer(text, text_width) for text in (sample.before, sample.after))
            if wide:
                grid.add_row(name, before, after)
            else:
                grid.add_row(name, Text("before", style="dim"), before)
                grid.add_row("", Text("after", style="dim"), after)
        console.print(grid)


def _answer(text: str, width: int) -> Text:
    shown = _excerpt(text, SAMPLE_LINES * width - width // 4)
    return Text(shown) if shown else Text("(empty)", style="dim")


def _excerpt(text: str, cells: int) -> str:
    flat = " ".join(clean(scrub(text)).split())
    return flat if cell_len(flat) <= cells else set_cell_size(flat, cells - 1).rstrip() + ELLIPSIS


def _adapters(members: Sequence[MemberReport], console: Console) -> None:
    trained = [member for member in members if member.adapter]
    if not trained:
        return
    console.print("\nTrained adapters", style="bold")
    names = [safe(member.name, 32, "cyan") for member in trained]
    for member, name in zip(trained, names, strict=True):
        gap = " " * (max(name.cell_len for name in names) - name.cell_len + 2)
        console.print(Text.assemble("  ", name, gap, clean(member.adapter or "")), soft_wrap=True)
    for command in serve_commands(trained):
        console.print(f"\nServe {'it' if len(trained) == 1 else 'them'} with vLLM:")
        _command(command, console)
    console.print("\nOr load one into a vLLM started with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True:")
    _command(load_command(trained[0]), console)


def _command(command: str, console: Console) -> None:
    shown = "\n".join(f"  {line}" for line in clean(command, lines=True).split("\n"))
    console.print(Text(shown, style="green"), soft_wrap=True)
