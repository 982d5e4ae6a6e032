"""Where an iteration stands: what its journals hold, what is folded, and what is still missing.

Verdicts are folded in duel order; everything before the fold pointer is settled. `index.json` remembers byte
offsets from which the journals hold open work, so that a long run is opened without reading it all again. It
is only a shortcut: without it the same state comes from reading the journals from the start.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from sparta_api.config import TribeConfig
from sparta_api.journal import Journal, drop_torn_tail, read_line_at, read_lines
from sparta_api.judging import Shown
from sparta_api.matchmaking import Matchup
from sparta_api.progress import MemberTotals, Usage
from sparta_api.questions import Spent
from sparta_api.reputation import Reputation
from sparta_api.rundir import IterationFiles, RunDirectory
from sparta_api.seats import usage_cost

INDEX_EVERY = 1000
"""Folded duels, at least, between two indices."""
VERDICT_FIELDS = (
    "duels", "wins", "losses", "ties", "void", "judged", "abstained", "flips", "spared", "floor_hits",
    "squared_changes",
)  # fmt: skip
"""The counts that come from duels.jsonl; the others come from the two journals."""


@dataclass(slots=True)
class OpenDuel:
    """A duel that is not folded yet; fighters and judges are named."""

    texts: dict[str, str] = field(default_factory=dict)
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Offset and length of responses that were read back from responses.jsonl."""
    errors: dict[str, str] = field(default_factory=dict)
    """Why a fighter has no response, for good."""
    scores: dict[tuple[str, Shown, int], tuple[float, ...] | None] = field(default_factory=dict)
    """By judge, fighters shown and round, one score for each of those; None where the judge gave no score."""
    missing: int = 0
    owed: bool = False

    def knows(self, fighter: str) -> bool:
        """Whether the fighter's response, or its lack for good, is known."""
        return fighter in self.texts or fighter in self.places or fighter in self.errors


@dataclass(slots=True)
class Outcome:
    """What a duel came to, ready to be folded: scores per judge, or why it is void."""

    matchup: Matchup
    judges: dict[str, tuple[float, float]]
    abstained: list[str]
    void: str | None
    flipped: list[str] | None = None
    """Judges whose two orders named different winners; None where judges see one response at a time."""
    skipped: list[str] | None = None
    """Judges that were not asked, for the duel was decided; None where all are asked."""


def usage_json(spent: Spent) -> dict[str, Any]:
    """`usage` as the journals hold it."""
    row: dict[str, Any] = {
        "prompt_tokens": spent.usage.prompt,
        "cached_tokens": spent.usage.cached,
        "completion_tokens": spent.usage.completion,
    }
    return row | {"estimated": True} if spent.estimated else row


def _usage(row: dict[str, Any]) -> Usage:
    usage = row.get("usage") or {}
    return Usage(usage.get("prompt_tokens", 0), usage.get("cached_tokens", 0), usage.get("completion_tokens", 0))


def take_judgment(duel: OpenDuel, row: dict[str, Any]) -> None:
    """Adds a row of judgments.jsonl, that is not owed, to what its duel knows."""
    if row["fighter"] is None:
        shown, values = tuple(row["order"]), row["scores"]
    else:
        shown, values = (row["fighter"],), None if row["score"] is None else (row["score"],)
    duel.scores[row["judge"], shown, row["round"]] = None if values is None else tuple(values)


def verdict_row(reputation: Reputation, outcome: Outcome) -> dict[str, Any]:
    """Folds a duel into the reputation; returns its row of duels.jsonl."""
    matchup = outcome.matchup
    row: dict[str, Any] = {
        "duel": matchup.duel,
        "instruction": matchup.instruction,
        "fighters": matchup.fighters,
        "judges": outcome.judges,
        "abstained": outcome.abstained,
    }
    if outcome.flipped is not None:
        row["flipped"] = outcome.flipped
    if outcome.skipped is not None:
        row["skipped"] = outcome.skipped
    if outcome.void is not None:
        ratings = reputation.ratings
        now = {name: ratings[name].reputation for name in matchup.fighters}
        deviation = {name: ratings[name].deviation for name in matchup.fighters}
        return row | {
            "judges": {},
            "scores": None,
            "winner": None,
            "margin": None,
            "void": outcome.void,
            "k": None,
            "before": now,
            "after": now,
            "deviation": deviation,
        }
    change = reputation.update(matchup.fighters, outcome.judges)
    return row | {
        "scores": change.scores,
        "winner": change.winner,
        "margin": change.margin,
        "void": None,
        "k": change.k,
        "before": change.before,
        "after": change.after,
        "deviation": change.deviation,
    }


class Standing:
    """The journals of one iteration and the state they add up to.

    `start` is the reputation at the beginning of the iteration; with an index, the one of the index goes on.
    """

    def __init__(self, config: TribeConfig, run: RunDirectory, files: IterationFiles, start: Reputation) -> None:
        self._config = config
        self._run = run
        self._files = files
        self._questions = 2 * config.judging.rounds
        """What a judge is asked in a duel."""
        self._prices = {member.name: member.price for member in config.members}
        self._free = {m.name for m in config.members if m.server is not None}
        self.reputation = start
        self.before = start.reputations
        """Reputations at the start of the iteration."""
        self.totals = {
            name: MemberTotals(cost_usd=0.0 if price or name in self._free else None)
            for name, price in self._prices.items()
        }
        self.verifiers = {name: MemberTotals() for name in config.judging.verifiers}
        """The counts of the verifiers as judges."""
        self.folded = 0
        self.void: Counter[str] = Counter()
        """Void duels by reason."""
        self.open: dict[int, OpenDuel] = {}
        self.benched: dict[str, str] = {}
        """Members that failed for good in this iteration, and why."""
        self.dropped = 0
        """Bytes of half-written lines that were cut off."""
        self._newest = -1
        self._epoch: dict[str, Any] | None = None
        self._journals: tuple[Journal, Journal, Journal] | None = None

    # Reading

    def load(self, cut: bool = True) -> None:
        """Reads index and journals back. With `cut`, torn tails are cut off the files."""
        files = self._files
        if cut:
            self.dropped = sum(drop_torn_tail(path) for path in (files.responses, files.judgments, files.duels))
        offsets = self._load_index()
        for row, _, _ in read_lines(files.benched):
            self.benched[row["member"]] = row["reason"]
        for row, _, _ in read_lines(files.duels, offsets["duels"]):
            self._replay(row)
        for row, place, length in read_lines(files.responses, offsets["responses"]):
            self.count(row["fighter"], row, judged=False)
            if row["duel"] >= self.folded and not row.get("owed"):
                self._take_response(row, place, length)
        for row, _, _ in read_lines(files.judgments, offsets["judgments"]):
            self.count(row["judge"], row, judged=True)
            if row["duel"] >= self.folded and not row.get("owed"):
                take_judgment(self._opened(row["duel"]), row)

    def _load_index(self) -> dict[str, int]:
        if not self._files.index.exists():
            return {"duels": 0, "responses": 0, "judgments": 0}
        index = self._run.read_json(self._files.index)
        self.folded = index["folded"]
        self.void.update(index["void"])
        self.reputation = self.reputation.restored(index["reputation"])
        for name, data in index["totals"].items():
            self.totals[name] = MemberTotals.from_json(data)
        for name, data in index.get("verifiers", {}).items():
            self.verifiers[name] = MemberTotals.from_json(data)
        offsets: dict[str, int] = index["offsets"]
        return offsets

    def _replay(self, row: dict[str, Any]) -> None:
        a, b = row["fighters"]
        if row["void"] is None:
            self.reputation.update((a, b), {judge: (pair[0], pair[1]) for judge, pair in row["judges"].items()})
        self._count_verdict(row)
        self.folded = row["duel"] + 1

    def _opened(self, duel: int) -> OpenDuel:
        self._newest = max(self._newest, duel)
        opened = self.open.get(duel)
        if opened is None:
            opened = self.open[duel] = OpenDuel()
        return opened

    def _take_response(self, row: dict[str, Any], place: int, length: int) -> None:
        duel = self._opened(row["duel"])
        if "error" in row:
            duel.errors[row["fighter"]] = row["error"]
        else:
            duel.places[row["fighter"]] = (place, length)

    def text(self, duel: OpenDuel, fighter: str) -> str:
        """A response's text, from memory or from the journal."""
        text = duel.texts.get(fighter)
        if text is None:
            text = str(read_line_at(self._files.responses, *duel.places[fighter])["content"])
        return text

    # Writing

    def start(self) -> None:
        """Opens the journals for appending."""
        self._journals = (Journal(self._files.responses), Journal(self._files.judgments), Journal(self._files.duels))
        self._begin_epoch()

    def close(self) -> None:
        """Syncs and closes the journals; an iteration that is folded to its end gets its index."""
        if self._journals is not None and not self.open:
            self._begin_epoch()
            assert self._epoch is not None
            self._write_index(self._epoch)
        for journal in self._journals or ():
            journal.close()
        self._journals = None

    def sync(self) -> None:
        """Waits until everything appended so far would survive a power cut."""
        for journal in self._journals or ():
            journal.sync()

    def opened(self, duel: int) -> OpenDuel:
        """The state of a duel that the engine takes up: read back, or new."""
        return self._opened(duel)

    def response(self, row: dict[str, Any]) -> None:
        """Journals a row of responses.jsonl."""
        assert self._journals is not None
        self._journals[0].append(row)
        self.count(row["fighter"], row, judged=False)

    def judgment(self, row: dict[str, Any]) -> None:
        """Journals a row of judgments.jsonl."""
        assert self._journals is not None
        self._journals[1].append(row)
        self.count(row["judge"], row, judged=True)

    def bench(self, member: str, reason: str) -> None:
        """Records that a member is out for the rest of the iteration."""
        self.benched[member] = reason
        with Journal(self._files.benched) as journal:
            journal.append({"member": member, "reason": reason, "duels_folded": self.folded})

    def count(self, member: str, row: dict[str, Any], judged: bool) -> None:
        """Adds a journal row to the figures of its member, or of its verifier."""
        if member in self.verifiers:
            self.verifiers[member].judgments += 1
            return
        totals = self.totals[member]
        usage = _usage(row)
        totals.usage.add(usage)
        totals.requests += row.get("attempts", 0)
        if row.get("owed"):
            totals.failed += 1
        elif judged:
            totals.judgments += 1
        else:
            totals.responses += 1
        price = self._prices[member]
        if price is not None and totals.cost_usd is not None:
            totals.cost_usd += usage_cost(usage, price)

    def _count_verdict(self, row: dict[str, Any]) -> None:
        """Adds a row of duels.jsonl to the figures of its members."""
        winner, void, floor = row["winner"], row["void"], self._config.reputation.floor
        if void is not None:
            self.void[void.partition(":")[0]] += 1
        for name in row["fighters"]:
            totals = self.totals[name]
            totals.duels += 1
            if void is not None:
                totals.void += 1
                continue
            if winner is None:
                totals.ties += 1
            elif winner == name:
                totals.wins += 1
            else:
                totals.losses += 1
            before, after = row["before"][name], row["after"][name]
            totals.floor_hits += after <= floor
            totals.squared_changes += (after - before) * (after - before)
        for judge in row["judges"]:
            self._judge(judge).judged += 1
        for judge in row["abstained"]:
            self._judge(judge).abstained += 1
        for judge in row.get("flipped", ()):
            self._judge(judge).flips += 1
        for judge in row.get("skipped", ()):
            self._judge(judge).spared += self._questions

    def _judge(self, name: str) -> MemberTotals:
        """The figures of a judge, member or verifier."""
        totals = self.totals.get(name)
        return self.verifiers[name] if totals is None else totals

    def fold(self, outcome: Outcome) -> None:
        """Settles the next duel in duel order: verdict, ratings, its row in duels.jsonl."""
        assert self._journals is not None
        matchup = outcome.matchup
        assert matchup.duel == self.folded, "duels are folded in duel order"
        row = verdict_row(self.reputation, outcome)
        self._journals[2].append(row)
        self._count_verdict(row)
        self.open.pop(matchup.duel, None)
        self.folded += 1
        self._advance_epoch()

    # The index

    def _begin_epoch(self) -> None:
        """Notes how far the journals reach now; once all duels opened so far are folded, work begins there."""
        assert self._journals is not None
        responses, judgments, _ = self._journals
        self._epoch = {
            "settled_at": max(self._newest + 1, self.folded + INDEX_EVERY),
            "responses": responses.size,
            "judgments": judgments.size,
            "totals": {name: totals.to_json() for name, totals in self.totals.items()},
            "verifiers": {name: totals.to_json() for name, totals in self.verifiers.items()},
        }

    def _advance_epoch(self) -> None:
        if self._epoch is not None and self.folded >= self._epoch["settled_at"]:
            self._write_index(self._epoch)
            self._begin_epoch()

    def _write_index(self, epoch: dict[str, Any]) -> None:
        """Writes the index, after what it points into is safe from a power cut."""
        assert self._journals is not None
        self.sync()
        for name, data in (epoch["totals"] | epoch["verifiers"]).items():
            now = self._judge(name)
            data.update({key: getattr(now, key) for key in VERDICT_FIELDS})
        self._run.write_json(
            self._files.index,
            {
                "folded": self.folded,
                "offsets": {
                    "duels": self._journals[2].size,
                    "responses": epoch["responses"],
                    "judgments": epoch["judgments"],
                },
                "void": dict(self.void),
                "totals": epoch["totals"],
                **({"verifiers": epoch["verifiers"]} if self.verifiers else {}),
                "reputation": self.reputation.to_json(),
            },
        )
