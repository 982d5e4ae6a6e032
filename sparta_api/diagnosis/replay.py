"""Verdicts, reputations and preferences of a run under other settings, from its journals alone.

Matchups stay as they were played and nothing is asked: what the judges said is weighed anew. So the ablations of the
paper (reputation off, other constants, margins) cost nothing, as long as it is remembered that under other reputations
others would have met.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sparta_api.config.diff import changed_keys
from sparta_api.config.file import LoadedTribe, dump_tribe, load_tribe
from sparta_api.config.tribe import TribeConfig
from sparta_api.data.journal import read_lines, write_atomic, write_lines
from sparta_api.data.rundir import IterationFiles, RunDirectory
from sparta_api.diagnosis.played import PlayedDuel, iterations, played
from sparta_api.duels.panel import Panel
from sparta_api.duels.preferences import PairCounts, configured
from sparta_api.duels.rows import OpenDuel, Outcome, take_judgment, verdict_row
from sparta_api.errors import ConfigError
from sparta_api.judging.bench import Orders
from sparta_api.ratings.reputation import Reputation
from sparta_api.runs.outcome import count_lines, first_reputation, next_reputation, standings
from sparta_api.runs.session import InstructionStore
from sparta_api.show.terminal import clean, safe


def _needs_no_request(keys: tuple[str, ...]) -> bool:
    match keys:
        case ("reputation" | "preferences", *_) | ("judging", "on_flip"):
            return True
        case ("members", _, "initial_reputation") | ("judging", "verifiers", _, "weight"):
            return True
    return False


def load_again(run: RunDirectory, overrides: Sequence[str] = ()) -> LoadedTribe:
    """The run's own configuration with overrides, read without its environment."""
    base = Path(run.read_json(run.state)["base_dir"])
    return load_tribe(run.tribe, overrides, base_dir=base, keys=False)


def _changed(run: RunDirectory, old: LoadedTribe, new: LoadedTribe) -> list[str]:
    """The paths that differ; ConfigError for changes that would need new requests, naming them."""
    changes = changed_keys(old.config, new.config)
    refused = [change.path for change in changes if not _needs_no_request(change.keys)]
    if refused:
        raise ConfigError(
            f"{run.root}: a replay cannot change {', '.join(refused)}: that would need new requests; it can change "
            "reputation.*, preferences.*, judging.on_flip, members.NAME.initial_reputation and weights of verifiers"
        )
    return [change.path for change in changes]


@dataclass(slots=True)
class Compared:
    """One iteration as it was played and as it is replayed."""

    duels: int = 0
    """Settled and not void."""
    flipped: int = 0
    """Verdicts with another winner, or a tie where there was none."""
    reversed: int = 0
    """Of these, the ones that name the other fighter."""
    ties_before: int = 0
    ties_after: int = 0
    pairs_before: int | None = None
    """None where the iteration was not played to its end."""
    pairs_after: int = 0

    def count(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        """Adds a duel by its two rows of duels.jsonl."""
        if after["void"] is not None:
            return
        self.duels += 1
        self.ties_before += before["winner"] is None
        self.ties_after += after["winner"] is None
        if before["winner"] != after["winner"]:
            self.flipped += 1
            self.reversed += None not in (before["winner"], after["winner"])


@dataclass(slots=True)
class Replayed:
    """What a replay came to; reputations are those at the end, by member."""

    changed: list[str]
    reputation_before: dict[str, float]
    reputation_after: dict[str, float] = field(default_factory=dict)
    iterations: list[Compared] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """A plain mapping with stable keys."""
        return asdict(self)


def replay(run: RunDirectory, overrides: Sequence[str], out: Path | None = None) -> Replayed:
    """Replays a run; with `out`, writes tribe.yaml, ratings.json, duels.jsonl and preferences.jsonl there.

    Raises ConfigError for overrides that need requests, and for an `out` that holds something already.
    """
    loaded = load_again(run, overrides)
    old, new = load_again(run), loaded.resolved
    changed = _changed(run, old, loaded)
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: there is something already; name a new directory")
    target = RunDirectory(out) if out is not None else None
    as_played = standings(old.resolved, run)
    reputation, history = first_reputation(new), []
    result = Replayed(changed, (as_played[-1].reputation if as_played else first_reputation(old.resolved)).reputations)
    instructions = InstructionStore(run.instructions)
    for files in iterations(run):
        compared = Compared(pairs_before=count_lines(files.preferences) if files.preferences.exists() else None)
        rows = _verdicts(new, files, reputation, compared)
        compared.pairs_after = _pairs(rows, files, instructions, new, target)
        result.iterations.append(compared)
        history.append(reputation.reputations)
        if target is not None:
            target.write_json(target.ratings, reputation.to_json())
        result.reputation_after = reputation.reputations
        reputation = next_reputation(new, reputation, history)
    if target is not None:
        write_atomic(target.tribe, dump_tribe(loaded.config).encode())
    return result


def _verdicts(
    config: TribeConfig, files: IterationFiles, reputation: Reputation, compared: Compared
) -> Iterator[dict[str, Any]]:
    """The rows of duels.jsonl as they come out now; folds them into the reputation on the way."""
    judges = [*reputation.reputations, *config.judging.verifiers]
    weights = dict(zip(judges, reputation.weights(judges), strict=True))
    panel = Panel(config, Orders(config.judging), weights)
    for duel in played(files):
        row = verdict_row(reputation, outcome_again(panel, duel))
        compared.count(duel.row, row)
        yield row


def outcome_again(panel: Panel, duel: PlayedDuel) -> Outcome:
    """What a duel came to, from its judgments; judges that were not asked then are not asked now."""
    opened = OpenDuel()
    reason = duel.row["void"]
    for fighter in duel.matchup.fighters:
        if reason is not None and reason.endswith(f": {fighter}"):
            opened.errors[fighter] = reason.removesuffix(f": {fighter}")
    for judgment in duel.judgments:
        if not judgment.get("owed"):
            take_judgment(opened, judgment)
    outcome = panel.outcome(duel.matchup, opened)
    unasked = [judge for judge in duel.row.get("skipped", ()) if judge in outcome.abstained]
    if unasked:
        outcome.abstained = [judge for judge in outcome.abstained if judge not in unasked]
        outcome.skipped = [*unasked, *(outcome.skipped or ())]
    return outcome


def _pairs(
    rows: Iterator[dict[str, Any]],
    files: IterationFiles,
    instructions: InstructionStore,
    config: TribeConfig,
    target: RunDirectory | None,
) -> int:
    """Makes the pairs of the verdicts and returns their number; writes both where there is a target."""
    responses = (row for row, _, _ in read_lines(files.responses) if "error" not in row)
    counts = PairCounts()
    number, prompts = files.number, instructions.messages
    if target is None:
        deque(configured(config, number, rows, responses, prompts, counts), maxlen=0)
        return counts.pairs
    written = target.iteration(files.number)
    write_lines(written.duels, rows)
    duels = (row for row, _, _ in read_lines(written.duels))
    write_lines(written.preferences, configured(config, number, duels, responses, prompts, counts))
    return counts.pairs


def show(result: Replayed, console: Console) -> None:
    """Prints what the other settings change."""
    changed = ", ".join(result.changed) or "nothing"
    console.print(Text(f"\nReplayed with other settings of: {clean(changed)}"))
    verdicts = plain_table("iteration", "duels", "flipped", "reversed", "tied", "tied now", "pairs", "pairs now")
    for number, one in enumerate(result.iterations, 1):
        pairs = "" if one.pairs_before is None else str(one.pairs_before)
        cells = (number, one.duels, one.flipped, one.reversed, one.ties_before, one.ties_after, pairs, one.pairs_after)
        verdicts.add_row(*map(str, cells))
    console.print("", verdicts, sep="\n")
    ratings = plain_table("member", "reputation", "now", "place", "now")
    before, after = (_places(one) for one in (result.reputation_before, result.reputation_after))
    for name in sorted(after, key=lambda name: after[name]):
        cells_ = (f"{result.reputation_before[name]:.1f}", f"{result.reputation_after[name]:.1f}")
        ratings.add_row(safe(name, 48), *cells_, str(before[name]), str(after[name]))
    console.print("", ratings, sep="\n")
    console.print("\nMatchups stay as they were played; under these settings others might have met.", style="dim")


def _places(reputations: Mapping[str, float]) -> dict[str, int]:
    """The ranks, from 1; equal reputations share the better one."""
    ordered = sorted(reputations.values(), reverse=True)
    return {name: ordered.index(value) + 1 for name, value in reputations.items()}


def plain_table(*titles: str) -> Table:
    """A table in the manner of the report: the first column is text, the others are numbers."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="dim", border_style="dim", pad_edge=False)
    for position, title in enumerate(titles):
        table.add_column(title, justify="left" if position == 0 else "right", no_wrap=True)
    return table
