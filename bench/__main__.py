"""`python -m bench [NAME ...]`: runs the benches, or those named, and prints one table of ratios."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from bench.autolimit import autolimit
from bench.makespan import makespan
from bench.size import size
from bench.stage import Effort, Row, facts, say, show
from bench.throughput import throughput

BENCHES: dict[str, Callable[[Path, Effort], list[Row]]] = {
    "throughput": throughput,
    "makespan": makespan,
    "size": size,
    "auto": autolimit,
}


def main() -> None:
    """Runs what is asked for; everything lies in a temporary directory that is removed at the end."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHES))
    parser.add_argument("--scale", type=float, default=1.0, help="below 1: fewer requests, for a first look")
    parser.add_argument("--whole", action="store_true", help="size: play all 100,000 duels")
    parser.add_argument("--keep", type=Path, help="work in this directory and keep it")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(BENCHES)
    if unknown:
        parser.error(f"no bench is called {min(unknown)}; there are {', '.join(BENCHES)}")
    say(facts())
    directory = arguments.keep or Path(tempfile.mkdtemp(prefix="sparta-bench-"))
    rows: list[Row] = []
    try:
        for name, bench in BENCHES.items():
            if not arguments.names or name in arguments.names:
                rows += bench(directory / name, Effort(arguments.scale, arguments.whole))
    finally:
        if arguments.keep is None:
            shutil.rmtree(directory, ignore_errors=True)
    show(rows, Console(width=140))


if __name__ == "__main__":
    main()
