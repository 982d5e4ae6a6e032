"""Verdicts of a real small judge: python -m bench.verdicts [ties] [injections] [calls] [--model DIR] [--markdown].

One vLLM serves SmolLM2-135M-Instruct, which answers and judges. Three tables:

ties        120 of its own answers in 60 pairs, judged under several ways of scoring: how many pairs tie, how much
            probability lies on score labels, and how far a score is from the one that a run gets by default
injections  answers with a text in them that asks for a better score (tests/data/injections.jsonl): what it changes in
            the expected score under the prompt that ships, and under the same prompt without frame, warning, cleaning
calls       whole runs with judging.stop_when_decided: the share of questions that is not asked
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.injections import injections
from bench.real_judge import NAME, STYLES, Cells, Grid, RealModel, served
from bench.stage import REPOSITORY, facts, measured, say, sparta
from bench.ties import ties
from tests.front_door import rows, tribe

MODEL = REPOSITORY / "models" / "smollm2-135m-instruct"
DUELS = 16
SAMPLED: dict[str, Any] = {"scale": [1, 10]}
EXPECTED: dict[str, Any] = {"scale": [0, 9], "scoring": "expected", "max_tokens": 12}
REGEX: dict[str, Any] = {"kind": "regex", "pattern": "because", "weight": 300}
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "sampled": (6, SAMPLED),
    "sampled at 0.7": (6, {**SAMPLED, "temperature": 0.7}),
    "expected": (6, EXPECTED),
    "expected, with a verifier of three votes": (6, {**EXPECTED, "verifiers": {"because": REGEX}}),
    "expected, more judges": (12, EXPECTED),
}
"""Members and judging of each run; every member but the two fighters judges a duel."""


async def calls(model: RealModel, directory: Path) -> Grid:
    """The questions that runs with `stop_when_decided` do not ask."""
    lines: list[Cells] = []
    for title, (members, judging) in RUNS.items():
        cells = await asyncio.to_thread(_played, model.base_url, directory / title, members, judging)
        lines.append((title, str(members - 2), *cells))
        say(f"calls: {title}")
    heads = ("judging", "judges", "duels", "tied", "questions of all judges", "not asked", "saved")
    return Grid("runs with stop_when_decided", heads, lines)


def _played(base_url: str, directory: Path, size: int, judging: Mapping[str, Any]) -> Cells:
    members = [
        {"name": f"m{n}", "model": NAME, "system_prompt": STYLES[n % 3], "sampling": {"temperature": 0.7 + n / 30}}
        for n in range(size)
    ]
    source = {"path": str(REPOSITORY / "instructions.jsonl"), "per_iteration": DUELS}
    settings = {"judging": {**judging, "stop_when_decided": True}, "reputation": {"freeze": True}}
    path = tribe(directory, base_url, members, instructions=1, **settings)
    changes = [f"instructions.{key}={value}" for key, value in source.items()]
    run = directory / "run"
    arguments = [part for change in ("defaults.timeout_s=300", *changes) for part in ("--set", change)]
    measured(sparta("run", "--tribe", path, "--run-dir", run, "--yes", *arguments), directory, None)
    status = json.loads(measured(sparta("status", run, "--json"), directory, None).out)
    played = rows(run / "iteration_000" / "duels.jsonl")
    judgments = rows(run / "iteration_000" / "judgments.jsonl")
    asked = sum(row["judge"] not in judging.get("verifiers", {}) for row in judgments)
    spared = int(status["questions_spared"])
    tied = sum(duel["void"] is None and duel["winner"] is None for duel in played)
    return [str(len(played)), str(tied), str(asked + spared), str(spared), f"{spared / (asked + spared):.0%}"]


TABLES: dict[str, Callable[[RealModel, Path], Awaitable[Grid]]] = {
    "ties": ties,
    "injections": injections,
    "calls": calls,
}


async def measure(names: Sequence[str], model: Path, directory: Path, markdown: bool) -> None:
    """Prints the tables of these names, or all."""
    async with served(model, directory / "logs") as judge:
        for name, table in TABLES.items():
            if not names or name in names:
                place = directory / name
                place.mkdir(parents=True)
                (await table(judge, place)).show(markdown)


def main() -> None:
    """Measures what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench.verdicts", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(TABLES)
    if unknown:
        parser.error(f"no table is called {min(unknown)}; there are {', '.join(TABLES)}")
    if not (arguments.model / "config.json").exists():
        parser.error(f"{arguments.model} holds no model; `make model` prepares one")
    say(facts())
    with tempfile.TemporaryDirectory(prefix="sparta-bench-") as directory:
        asyncio.run(measure(arguments.names, arguments.model, Path(directory), arguments.markdown))


if __name__ == "__main__":
    main()
