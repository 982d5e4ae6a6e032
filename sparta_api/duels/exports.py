"""`export`: the preference pairs of a run as files for other tools."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

from sparta_api.data.journal import read_lines, write_atomic
from sparta_api.data.rundir import RunDirectory
from sparta_api.duels.preferences import export_openai, export_trl, validate_pairs
from sparta_api.errors import ConfigError


class Format(StrEnum):
    """The forms that can be written."""

    trl = "trl"
    openai = "openai"


def export(run: RunDirectory, format_: Format, iteration: int | None, out: Path | None) -> None:
    """Writes the pairs of one iteration, or of all in order, to a file or stdout; the same bytes every time.

    Raises ConfigError when there are none.
    """
    run.read_json(run.state)
    numbers = range(run.newest_iteration() + 1) if iteration is None else [iteration]
    paths = [path for number in numbers if (path := run.iteration(number).preferences).exists()]
    if not paths:
        which = "any iteration" if iteration is None else f"iteration {iteration}"
        raise ConfigError(f"{run.root}: there are no preferences of {which} yet; `sparta-api status` tells where it is")
    lines = (line for path in paths for line in _lines(path, format_))
    if out is None:
        for line in lines:
            sys.stdout.buffer.write(line)
    else:
        write_atomic(out, b"".join(lines))


def _lines(path: Path, format_: Format) -> Iterator[bytes]:
    rows: Iterator[Any] = (row for row, _, _ in read_lines(path))
    pairs = validate_pairs(rows, str(path))
    return export_trl(pairs) if format_ is Format.trl else export_openai(pairs)
