"""Where an iteration stands: what its journals hold, what is folded, and what is still missing.

Verdicts are folded in duel order; everything before the fold pointer is settled. `index.json` remembers byte
offsets from which the journals hold open work, so that a long run is opened without reading it all again. It
is only a shortcut: without it the same state comes from reading the journals from the start.
"""

from __future__ import annotations

from typing import Any

from sparta_api.config.tribe import TribeConfig
from sparta_api.data.journal import Journal, drop_torn_tail, read_line_at, read_lines
from sparta_api.data.rundir import IterationFiles, RunDirectory
from sparta_api.duels.rows import OpenDuel, Outcome, take_judgment, verdict_row
from sparta_api.duels.tally import Tally
from sparta_api.ratings.reputation import Reputation

INDEX_EVERY = 1000
"""Folded duels, at least, between two indices."""


class Standing:
    """The journals of one iteration and the state they add up to.

    `start` is the reputation at the beginning of the iteration; with an index, the one of the index goes on.
    """

    def __init__(self, config: TribeConfig, run: RunDirectory, files: IterationFiles, start: Reputation) -> None:
        self._config = config
        self._run = run
        self._files = files
        self.reputation = start
        self.before = start.reputations
        """Reputations at the start of the iteration."""
        self.tally = Tally(config)
        self.folded = 0
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
            self.tally.count(row["fighter"], row, judged=False)
            if row["duel"] >= self.folded and not row.get("owed"):
                self._take_response(row, place, length)
        for row, _, _ in read_lines(files.judgments, offsets["judgments"]):
            self.tally.count(row["judge"], row, judged=True)
            if row["duel"] >= self.folded and not row.get("owed"):
                take_judgment(self._opened(row["duel"]), row)

    def _load_index(self) -> dict[str, int]:
        if not self._files.index.exists():
            return {"duels": 0, "responses": 0, "judgments": 0}
        index = self._run.read_json(self._files.index)
        self.folded = index["folded"]
        self.tally.restore(index)
        self.reputation = self.reputation.restored(index["reputation"])
        offsets: dict[str, int] = index["offsets"]
        return offsets

    def _replay(self, row: dict[str, Any]) -> None:
        a, b = row["fighters"]
        if row["void"] is None:
            self.reputation.update((a, b), {judge: (pair[0], pair[1]) for judge, pair in row["judges"].items()})
        self.tally.count_verdict(row)
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
        self.tally.count(row["fighter"], row, judged=False)

    def judgment(self, row: dict[str, Any]) -> None:
        """Journals a row of judgments.jsonl."""
        assert self._journals is not None
        self._journals[1].append(row)
        self.tally.count(row["judge"], row, judged=True)

    def bench(self, member: str, reason: str) -> None:
        """Records that a member is out for the rest of the iteration."""
        self.benched[member] = reason
        with Journal(self._files.benched) as journal:
            journal.append({"member": member, "reason": reason, "duels_folded": self.folded})

    def fold(self, outcome: Outcome) -> None:
        """Settles the next duel in duel order: verdict, ratings, its row in duels.jsonl."""
        assert self._journals is not None
        matchup = outcome.matchup
        assert matchup.duel == self.folded, "duels are folded in duel order"
        row = verdict_row(self.reputation, outcome)
        self._journals[2].append(row)
        self.tally.count_verdict(row)
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
            "figures": self.tally.snapshot(),
        }

    def _advance_epoch(self) -> None:
        if self._epoch is not None and self.folded >= self._epoch["settled_at"]:
            self._write_index(self._epoch)
            self._begin_epoch()

    def _write_index(self, epoch: dict[str, Any]) -> None:
        """Writes the index, after what it points into is safe from a power cut."""
        assert self._journals is not None
        self.sync()
        self._run.write_json(
            self._files.index,
            {
                "folded": self.folded,
                "offsets": {
                    "duels": self._journals[2].size,
                    "responses": epoch["responses"],
                    "judgments": epoch["judgments"],
                },
                "void": dict(self.tally.void),
                **self.tally.with_verdicts(epoch["figures"]),
                "reputation": self.reputation.to_json(),
            },
        )
