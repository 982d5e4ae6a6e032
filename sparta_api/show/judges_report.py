"""The answer of `sparta-api judges` as a reader sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from sparta_api.diagnosis.figures import JudgeFigures
from sparta_api.diagnosis.judges import Diagnosis
from sparta_api.diagnosis.replay import plain_table
from sparta_api.show.terminal import clean, count, safe

_Cell = Callable[[JudgeFigures], str]

_NOTES = (
    ("", "tau, same: agreement with the rest of the panel: Kendall's tau-b, and the share of pairs ordered alike"),
    ("", "offset, spread: points above the rest of the panel; standard deviation of its scores"),
    ("", "decides, reverses: verdicts that would be others without it; those with another winner"),
    ("", "length, excess: correlation with length within duels; of its points beyond the rest of the panel"),
    ("family", "family: points for its own family beyond the rest of the panel, with their standard error"),
    ("position", "flips, first: duels whose two orders named different winners; points for the first place"),
    ("own_likeness", "own: correlation of its points beyond the rest with likeness to its own answers"),
    ("truth", "truth: how often it sided with the only right response"),
)
"""What the columns mean, and the measure that they belong to where a run may lack it."""


def show(found: Diagnosis, console: Console) -> None:
    """Prints the figures of all judges, then the fighters' intervals."""
    console.print(Text(f"\n{count(found.duels)} duels judged, {count(found.void)} void"))
    if found.truth.n:
        panel = _share(found.truth.mean)
        console.print(Text(f"The panel sided with the only right response in {panel} of {found.truth.n} duels."))
    _table(found, _AGREEMENT, console)
    _table(found, _bias(found), console)
    _table(found, _WORK, console)
    ratings = plain_table("fighter", "reputation", "Bradley-Terry", "95 %")
    for name, (fit, low, high) in sorted(found.intervals.items(), key=lambda item: -item[1][0]):
        ratings.add_row(safe(name, 40), f"{found.reputations[name]:.1f}", f"{fit:.1f}", f"{low:.1f} – {high:.1f}")
    console.print("", ratings, "", sep="\n")
    for measure, meaning in _NOTES:
        if measure not in found.skipped:
            console.print(Text(meaning, style="dim"))
    for measure, reason in found.skipped.items():
        console.print(Text(f"{measure.replace('_', ' ')}: not measured, {clean(reason)}", style="dim"))


def _table(found: Diagnosis, columns: Sequence[tuple[str, _Cell]], console: Console) -> None:
    table = plain_table("judge", *(title for title, _ in columns))
    for name, one in found.judges.items():
        table.add_row(safe(name, 32), *(cell(one) for _, cell in columns))
    console.print("", table, sep="\n")


def _number(value: float | None, digits: int = 2, sign: bool = False) -> str:
    return "" if value is None else f"{value:{'+' if sign else ''}.{digits}f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _family(one: JudgeFigures) -> str:
    error = one.family_favour.error
    return _number(one.family_favour.mean, sign=True) + (f" ± {error:.2f}" if error is not None else "")


def _cost(one: JudgeFigures) -> str:
    if one.cost_usd is None:
        return "unknown"
    return f"{one.cost_usd / one.judgments:.6f}" if one.judgments else ""


_AGREEMENT: tuple[tuple[str, _Cell], ...] = (
    ("duels", lambda one: count(one.duels)),
    ("abstained", lambda one: count(one.abstained)),
    ("tau", lambda one: _number(one.panel.tau)),
    ("same", lambda one: _share(one.panel.accuracy)),
    ("offset", lambda one: _number(one.offset.mean, sign=True)),
    ("spread", lambda one: _number(one.score.deviation)),
    ("decides", lambda one: count(one.decisive)),
    ("reverses", lambda one: count(one.reversing)),
)

_WORK: tuple[tuple[str, _Cell], ...] = (
    ("judgments", lambda one: count(one.judgments)),
    ("tokens each", lambda one: _number(one.tokens / one.judgments, 0) if one.judgments else ""),
    ("USD each", _cost),
    ("label mass", lambda one: _number(one.mass.mean)),
    ("from text", lambda one: "" if one.from_text is None else count(one.from_text)),
)


def _bias(found: Diagnosis) -> list[tuple[str, _Cell]]:
    """The columns of what the run can measure."""
    columns: list[tuple[str, _Cell]] = [
        ("length", lambda one: _number(one.length.correlation, sign=True)),
        ("excess", lambda one: _number(one.length_excess.correlation, sign=True)),
    ]
    if "family" not in found.skipped:
        columns.append(("family", _family))
    if "position" not in found.skipped:
        columns.append(("flips", lambda one: _share(one.flips / one.duels if one.duels and one.first.n else None)))
        columns.append(("first", lambda one: _number(one.first.mean, sign=True)))
    if "own_likeness" not in found.skipped:
        columns.append(("own", lambda one: _number(one.likeness.correlation, sign=True)))
    if "truth" not in found.skipped:
        columns.append(("truth", lambda one: _share(one.truth.mean)))
    return columns
