"""The duels of an iteration as they were played: what was planned, what the judges said, what came of it.

The journals hold judgments in the order of their arrival. Reading joins them to their duels with as much in memory as
duels were open at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sparta_api.data.journal import read_lines
from sparta_api.data.rundir import IterationFiles, RunDirectory
from sparta_api.duels.matchmaking import Matchup

Row = dict[str, Any]


@dataclass(slots=True)
class PlayedDuel:
    """A settled duel."""

    iteration: int
    matchup: Matchup
    row: Row
    """Its row of duels.jsonl."""
    judgments: list[Row]
    """Its rows of judgments.jsonl, in the order of their arrival; those of requests that failed included."""


def iterations(run: RunDirectory) -> Iterator[IterationFiles]:
    """The iterations that were begun."""
    number = 0
    while (files := run.iteration(number)).matchups.exists():
        yield files
        number += 1


def played(files: IterationFiles) -> Iterator[PlayedDuel]:
    """The settled duels of an iteration in duel order."""
    judgments = _Judgments(files)
    planned = read_lines(files.matchups)
    for row, _, _ in read_lines(files.duels):
        plan, _, _ = next(planned)
        a, b = plan["fighters"]
        matchup = Matchup(plan["duel"], plan["instruction"], (a, b), tuple(plan["judges"]))
        yield PlayedDuel(files.number, matchup, row, judgments.of(row["duel"]))


class _Judgments:
    """The judgments of one duel after the other. `_last` holds the position of each duel's last row in the file."""

    def __init__(self, files: IterationFiles) -> None:
        self._last = array("q")
        for position, (row, _, _) in enumerate(read_lines(files.judgments)):
            duel = row["duel"]
            if duel >= len(self._last):
                self._last.extend([-1] * (duel + 1 - len(self._last)))
            self._last[duel] = position
        self._rows = read_lines(files.judgments)
        self._position = -1
        self._ahead: dict[int, list[Row]] = {}

    def of(self, duel: int) -> list[Row]:
        """All rows of a duel; duels are asked for in ascending order."""
        last = self._last[duel] if duel < len(self._last) else -1
        while self._position < last:
            row, _, _ = next(self._rows)
            self._position += 1
            if row["duel"] >= duel:
                self._ahead.setdefault(row["duel"], []).append(row)
        return self._ahead.pop(duel, [])
