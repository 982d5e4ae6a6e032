"""First reputations from benchmark scores: `reputation.warm_start`.

The file's contents take the place of its name when tribe.yaml is read, so that a run directory knows them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, pstdev

from sparta_api.config.keys import nearest
from sparta_api.config.tribe import TribeConfig
from sparta_api.data.rows import open_rows
from sparta_api.errors import ConfigError

MEAN = 100.0
DEVIATION = 20.0
_COLUMNS = ("member", "score")


def starting_reputations(scores: Mapping[str, float], floor: float) -> dict[str, float]:
    """The scores normalised to mean 100 and population standard deviation 20; all 100 where they are equal.

    If any is negative then, all are shifted up until the lowest is 0. None is less than `floor`, for a
    reputation is a weight. Source: the "unfair" start of the paper's code (which has no floor here).
    """
    values = list(scores.values())
    spread = pstdev(values) if values else 0.0
    if spread == 0.0:
        return dict.fromkeys(scores, MEAN)
    mean = fmean(values)
    normal = {name: MEAN + DEVIATION * (score - mean) / spread for name, score in scores.items()}
    shift = max(0.0, -min(normal.values()))
    return {name: max(floor, value + shift) for name, value in normal.items()}


def read_scores(path: Path) -> dict[str, float]:
    """Scores by member from a .json file {name: score}, or a .csv file with the columns member and score.

    Raises ConfigError that names the file and line.
    """
    if path.suffix.lower() == ".csv":
        return _table(path)
    if path.suffix.lower() != ".json":
        raise ConfigError(f"{path}: a warm start is a .json or .csv file")
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: {(error.strerror or str(error)).lower()}; it is named by warm_start") from error
    except ValueError as error:
        raise ConfigError(f"{path}: this is not JSON in UTF-8 ({error}); write {{name: score, ...}}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: the file has to hold one object, {{name: score, ...}}")
    return {name: _score(value, f"{path}: the score of '{name}'") for name, value in data.items()}


def _table(path: Path) -> dict[str, float]:
    source = open_rows(str(path), path)
    scores: dict[str, float] = {}
    for position, row in source.rows:
        place = source.place(position)
        if missing := [column for column in _COLUMNS if column not in row]:
            raise ConfigError(f"{place}: no column '{missing[0]}'; a warm start has the columns member and score")
        name = str(row["member"]).strip()
        if name in scores:
            raise ConfigError(f"{place}: '{name}' has a score already; leave one")
        scores[name] = _score(row["score"], f"{place}: the score of '{name}'")
    return scores


def _score(value: object, what: str) -> float:
    try:
        score = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        score = math.nan
    if not math.isfinite(score):
        raise ConfigError(f"{what} is {value!r}; it should be a number")
    return score


def member_problem(config: TribeConfig, scores: Mapping[str, float]) -> str | None:
    """What is wrong with the names of a warm start: strangers, or members that have no start at all."""
    names = [member.name for member in config.members]
    for name in scores:
        if name not in names:
            return f"'{name}' is no member{nearest(name, names)}"
    lacking = [m.name for m in config.members if m.name not in scores and m.initial_reputation is None]
    if lacking:
        shown = ", ".join(f"'{name}'" for name in lacking)
        return f"there is no score for {shown}; add it, or give the member an initial_reputation"
    return None
