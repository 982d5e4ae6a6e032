"""How much of the judge prompts the real vLLM takes from its prefix cache: python -m bench.prefix_cache [--tribe FILE].

Plays one iteration of the quickstart's tribe without training, on the vLLM that the run starts itself. Two figures
are printed: the hit rate by vLLM's own counters (vllm:prefix_cache_hits / vllm:prefix_cache_queries, in tokens),
read while the server runs, and by the journals, from the cached tokens that the server reported with every answer.
A prompt is found again in whole blocks only, so a short prompt's end is never cached; blocks of 32 tokens are the
smallest that vLLM takes on CPUs, where its default is 128.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console

from bench.stage import REPOSITORY, Process, Row, facts, say, show, sparta, start
from tests.front_door import rows

EVERY_S = 0.5
ARGS = '["--enable-prompt-tokens-details", "--block-size", "32"]'
_URL = re.compile(r"http://127\.0\.0\.1:\d+")
_COUNTER = re.compile(r"^vllm:prefix_cache_(queries|hits)_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Tokens:
    """Prompt tokens, and those of them that came from the cache."""

    prompt: float
    cached: float

    @property
    def rate(self) -> float:
        """The share from the cache."""
        return self.cached / self.prompt if self.prompt else 0.0


def _server(run: Path) -> str | None:
    """Where the run's server listens, by the server's log."""
    for log in run.glob("logs/*.log"):
        found = _URL.findall(log.read_text(encoding="utf-8", errors="replace"))
        if found:
            return str(found[-1])
    return None


def _counters(url: str) -> Tokens | None:
    """vLLM's counters at this moment; None when it does not answer."""
    try:
        text = httpx.get(f"{url}/metrics", timeout=5, trust_env=False).text
    except httpx.HTTPError:
        return None
    sums = {"queries": 0.0, "hits": 0.0}
    for name, value in _COUNTER.findall(text):
        sums[name] += float(value)
    return Tokens(sums["queries"], sums["hits"])


def _watched(process: Process, run: Path) -> Tokens:
    """The counters as they were last read before the run stopped its server."""
    last = Tokens(0, 0)
    while process.popen.poll() is None:
        url = _server(run)
        last = (_counters(url) if url else None) or last
        time.sleep(EVERY_S)
    if process.popen.returncode != 0:
        raise RuntimeError(f"the run ended with {process.popen.returncode}: {process.files[1].read_text()[-2000:]}")
    return last


def _journaled(paths: Iterable[Path]) -> Tokens:
    usages = [row["usage"] for path in paths for row in rows(path) if row.get("usage")]
    return Tokens(sum(u["prompt_tokens"] for u in usages), sum(u["cached_tokens"] for u in usages))


def prefix_cache(directory: Path, tribe: Path) -> list[Row]:
    """The rows of the table."""
    run = directory / "run"
    arguments = ["--trainer", "none", "--iterations", "1", "--set", f"servers.local.args={ARGS}", "--yes"]
    counters = _watched(start(sparta("run", "--tribe", tribe, "--run-dir", run, *arguments), directory, None), run)
    rounds = sorted(run.glob("iteration_*"))
    judged = _journaled(path / "judgments.jsonl" for path in rounds)
    answered = _journaled(path / "responses.jsonl" for path in rounds)
    return [
        Row("prefix cache", "hit rate by vLLM's counters", counters.rate, None, note=f"{counters.prompt:,.0f} tokens"),
        Row("prefix cache", "hit rate of judgments", judged.rate, None, note=f"{judged.prompt:,.0f} tokens"),
        Row("prefix cache", "hit rate of answers", answered.rate, None, note=f"{answered.prompt:,.0f} tokens"),
    ]


def main() -> None:
    """Plays, reads, prints."""
    parser = argparse.ArgumentParser(prog="python -m bench.prefix_cache", description=__doc__)
    parser.add_argument("--tribe", type=Path, default=REPOSITORY / "tribe.yaml")
    arguments = parser.parse_args()
    say(facts())
    with tempfile.TemporaryDirectory(prefix="sparta-bench-") as directory:
        show(prefix_cache(Path(directory), arguments.tribe), Console(width=140))


if __name__ == "__main__":
    main()
