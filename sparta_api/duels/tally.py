"""The figures of an iteration: every journal row and every verdict, added to its member's totals."""

from __future__ import annotations

from collections import Counter
from typing import Any

from sparta_api.config.tribe import TribeConfig
from sparta_api.duels.rows import usage_of
from sparta_api.endpoints.seats import usage_cost
from sparta_api.show.progress import MemberTotals

VERDICT_FIELDS = (
    "duels", "wins", "losses", "ties", "void", "judged", "abstained", "flips", "spared", "floor_hits",
    "squared_changes",
)  # fmt: skip
"""The counts that come from duels.jsonl; the others come from the two journals."""


class Tally:
    """Totals by member and by verifier, and void duels by reason."""

    def __init__(self, config: TribeConfig) -> None:
        self._floor = config.reputation.floor
        self._questions = 2 * config.judging.rounds
        """What a judge is asked in a duel."""
        self._prices = {member.name: member.price for member in config.members}
        free = {member.name for member in config.members if member.server is not None}
        self.totals = {
            name: MemberTotals(cost_usd=0.0 if price or name in free else None) for name, price in self._prices.items()
        }
        self.verifiers = {name: MemberTotals() for name in config.judging.verifiers}
        self.void: Counter[str] = Counter()

    def restore(self, index: dict[str, Any]) -> None:
        """Takes the figures of an index over."""
        self.void.update(index["void"])
        for name, data in index["totals"].items():
            self.totals[name] = MemberTotals.from_json(data)
        for name, data in index.get("verifiers", {}).items():
            self.verifiers[name] = MemberTotals.from_json(data)

    def snapshot(self) -> dict[str, Any]:
        """The totals at this moment, as an index holds them."""
        return {
            "totals": {name: totals.to_json() for name, totals in self.totals.items()},
            "verifiers": {name: totals.to_json() for name, totals in self.verifiers.items()},
        }

    def with_verdicts(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        """An earlier snapshot with the verdicts' counts of now: for an index, whose journals are read on from then."""
        for name, data in (snapshot["totals"] | snapshot["verifiers"]).items():
            now = self.judge(name)
            data.update({key: getattr(now, key) for key in VERDICT_FIELDS})
        return snapshot

    def count(self, member: str, row: dict[str, Any], judged: bool) -> None:
        """Adds a journal row to the figures of its member, or of its verifier."""
        if member in self.verifiers:
            self.verifiers[member].judgments += 1
            return
        totals = self.totals[member]
        usage = usage_of(row)
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

    def count_verdict(self, row: dict[str, Any]) -> None:
        """Adds a row of duels.jsonl to the figures of its members."""
        winner, void, floor = row["winner"], row["void"], self._floor
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
            self.judge(judge).judged += 1
        for judge in row["abstained"]:
            self.judge(judge).abstained += 1
        for judge in row.get("flipped", ()):
            self.judge(judge).flips += 1
        for judge in row.get("skipped", ()):
            self.judge(judge).spared += self._questions

    def judge(self, name: str) -> MemberTotals:
        """The figures of a judge, member or verifier."""
        totals = self.totals.get(name)
        return self.verifiers[name] if totals is None else totals
