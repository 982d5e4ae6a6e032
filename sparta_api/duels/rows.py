"""What the journals' rows mean: duels that are open, what they came to, and the rows themselves.

docs/run-directory.md describes the files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sparta_api.duels.matchmaking import Matchup
from sparta_api.endpoints.questions import Reply, Spent
from sparta_api.judging.bench import Shown
from sparta_api.ratings.reputation import Reputation
from sparta_api.show.progress import Usage


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


def usage_of(row: dict[str, Any]) -> Usage:
    """The usage that a journal row tells."""
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


def response_row(model: str, reply: Reply) -> dict[str, Any]:
    """The part of a row of responses.jsonl that the answer makes up."""
    return {
        "model": model,
        "content": reply.answer.content,
        "finish_reason": reply.answer.finish_reason,
        "usage": usage_json(reply.spent),
        "latency_s": round(reply.latency_s, 3),
        "attempts": reply.spent.attempts,
    }


def judgment_row(duel: int, judge: str, shown: Shown, number: int, result: dict[str, Any]) -> dict[str, Any]:
    """The beginning of a row of judgments.jsonl, up to what the answer cost."""
    row: dict[str, Any] = {"duel": duel, "judge": judge}
    values = result["values"]
    if len(shown) == 1:
        row |= {"fighter": shown[0], "round": number, "score": None if values is None else values[0]}
    else:
        row |= {"fighter": None, "round": number, "order": list(shown), "scores": values}
    return row | {key: value for key, value in result.items() if key != "values"}
