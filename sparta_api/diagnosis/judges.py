"""`sparta-api judges`: reading a run back, judge by judge. docs/judging.md explains every figure.

Duels are read one after the other; what is kept grows with members and judges, not with duels, except for one small
sketch per response where instructions were played more than once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import fsum
from typing import Any

from sparta_api.config.tribe import TribeConfig
from sparta_api.data.journal import read_lines
from sparta_api.data.rundir import RunDirectory
from sparta_api.diagnosis.figures import Average, JudgeFigures, Sight
from sparta_api.diagnosis.likeness import Sketch, family, similarity, sketch
from sparta_api.diagnosis.played import PlayedDuel, iterations, played
from sparta_api.diagnosis.replay import load_again
from sparta_api.diagnosis.truth import is_right
from sparta_api.duels.preferences import Answers
from sparta_api.endpoints.seats import usage_cost
from sparta_api.ratings.agreement import opinion
from sparta_api.ratings.bradley_terry import Wins, bootstrap, count_result
from sparta_api.ratings.reputation import TIE, Reputation
from sparta_api.runs.outcome import first_reputation, next_reputation
from sparta_api.runs.session import InstructionStore
from sparta_api.show.progress import Usage

DRAWS = 200
"""Bootstrap refits behind an interval."""


@dataclass(slots=True)
class Diagnosis:
    """What a run tells of its judges."""

    run: str
    judges: dict[str, JudgeFigures]
    families: dict[str, str]
    """By member."""
    weights: dict[str, float] = field(default_factory=dict)
    """What the judges' votes weigh at the end."""
    reputations: dict[str, float] = field(default_factory=dict)
    duels: int = 0
    """Judged ones."""
    void: int = 0
    truth: Average = field(default_factory=Average)
    """Of the whole panel."""
    intervals: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """Fighters' Bradley-Terry reputations, refitted to all verdicts, with the limits of their 95 % intervals."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Measures that this run cannot give, and why."""

    def to_json(self) -> dict[str, Any]:
        """A plain mapping with stable keys; what is not known is null."""
        return {
            "run": self.run,
            "duels": {"judged": self.duels, "void": self.void},
            "panel": {"truth_accuracy": self.truth.mean, "truth_duels": self.truth.n},
            "judges": [self._judge(name, one) for name, one in self.judges.items()],
            "ratings": [
                {"member": name, "reputation": self.reputations[name], "bradley_terry": fit, "low": low, "high": high}
                for name, (fit, low, high) in self.intervals.items()
            ],
            "skipped": self.skipped,
        }

    def _judge(self, name: str, one: JudgeFigures) -> dict[str, Any]:
        asked = one.duels + one.abstained
        calls = one.judgments
        return {
            "name": name,
            "kind": "member" if name in self.families else "verifier",
            "family": self.families.get(name),
            "weight": self.weights[name],
            "duels": one.duels,
            "abstained": one.abstained,
            "abstention_share": one.abstained / asked if asked else None,
            "tau": one.panel.tau,
            "pairwise_accuracy": one.panel.accuracy,
            "mean_score": one.score.mean,
            "offset": one.offset.mean,
            "spread": one.score.deviation,
            "length_correlation": one.length.correlation,
            "length_excess": one.length_excess.correlation,
            "flip_rate": one.flips / one.duels if one.first.n and one.duels else None,
            "first_place_points": one.first.mean,
            "family_favour": one.family_favour.mean,
            "family_favour_error": one.family_favour.error,
            "family_duels": one.family_favour.n,
            "own_likeness": one.likeness.correlation,
            "own_likeness_duels": one.likeness.n,
            "label_mass": one.mass.mean,
            "read_from_text": one.from_text,
            "judgments": calls,
            "tokens_per_judgment": one.tokens / calls if calls else None,
            "cost_usd": one.cost_usd,
            "cost_per_judgment_usd": one.cost_usd / calls if calls and one.cost_usd is not None else None,
            "decisive": one.decisive,
            "reversing": one.reversing,
            "alone": one.alone,
            "truth_accuracy": one.truth.mean,
            "truth_duels": one.truth.n,
        }


def diagnose(run: RunDirectory) -> Diagnosis:
    """Reads a whole run; one that is not finished gives the figures so far."""
    config = load_again(run).resolved
    reader = _Reader(run, config)
    reputation, history = first_reputation(config), []
    for files in iterations(run):
        answers = Answers(row for row, _, _ in read_lines(files.responses) if "error" not in row)
        for duel in played(files):
            reader.take(duel, answers, reputation)
        history.append(reputation.reputations)
        ended, reputation = reputation, next_reputation(config, reputation, history)
        reader.found.reputations = ended.reputations
    return reader.end(reputation)


class _Reader:
    """Adds a run's duels up."""

    def __init__(self, run: RunDirectory, config: TribeConfig) -> None:
        self._config = config
        self._tie = max(config.preferences.min_margin, TIE)
        self._instructions = InstructionStore(run.instructions)
        self._own = _OwnAnswers(run)
        self._wins: Wins = {}
        self._answered = False
        judges = {m.name: JudgeFigures() for m in config.members if m.judges}
        judges |= {name: JudgeFigures() for name in config.judging.verifiers}
        for member in config.members:
            if member.judges and member.price is None and member.server is None:
                judges[member.name].cost_usd = None
        families = {member.name: family(member.model) for member in config.members}
        self._prices = {member.name: member.price for member in config.members}
        self.found = Diagnosis(str(run.root), judges, families)

    def take(self, duel: PlayedDuel, answers: Answers, reputation: Reputation) -> None:
        """Adds one duel and folds it into the reputation."""
        row, found = duel.row, self.found
        for judgment in duel.judgments:
            self._count(judgment)
        for judge in row["abstained"]:
            found.judges[judge].abstained += 1
        for judge in row.get("flipped", ()):
            found.judges[judge].flips += 1
        if row["void"] is not None:
            found.void += 1
            return
        found.duels += 1
        a, b = duel.matchup.fighters
        count_result(self._wins, a, b, row["winner"])
        scores = {judge: (pair[0], pair[1]) for judge, pair in row["judges"].items()}
        self._see(duel, scores, reputation.weights(scores), answers.of(row["duel"], (a, b)))
        reputation.update((a, b), scores)

    def _count(self, judgment: Mapping[str, Any]) -> None:
        """What an answer cost, and what it alone tells."""
        name = judgment["judge"]
        one = self.found.judges[name]
        spent = judgment.get("usage") or {}
        usage = Usage(spent.get("prompt_tokens", 0), spent.get("cached_tokens", 0), spent.get("completion_tokens", 0))
        one.tokens += usage.prompt + usage.completion
        price = self._prices.get(name)
        if price is not None and one.cost_usd is not None:
            one.cost_usd += usage_cost(usage, price)
        if judgment.get("owed"):
            return
        one.judgments += 1
        if judgment.get("mass") is not None:
            one.mass.add(judgment["mass"])
        expected = self._config.judging.scoring == "expected" and name in self.found.families
        if expected and judgment["score"] is not None:
            unusable = (judgment.get("mass") or 0.0) < self._config.judging.min_label_mass
            one.from_text = (one.from_text or 0) + unusable
        if judgment["fighter"] is None and judgment["scores"] is not None:
            first, second = judgment["scores"]
            one.first.add(first - second)

    def _see(
        self,
        duel: PlayedDuel,
        scores: dict[str, tuple[float, float]],
        weights: list[float],
        texts: tuple[str, str],
    ) -> None:
        """What every judge of a duel did beside the others, and what would be without it."""
        matchup, families, found = duel.matchup, self.found.families, self.found
        a, b = matchup.fighters
        instruction = self._instructions.row(matchup.instruction)
        right = self._right(instruction, texts)
        if right:
            found.truth.add(0.5 + 0.5 * right * _side(duel))
        sketches = self._own.sketches(matchup.instruction, texts)
        whole = fsum(weights)
        totals = [fsum(w * pair[side] for w, pair in zip(weights, scores.values(), strict=True)) for side in (0, 1)]
        longer = math.log((len(texts[0]) + 1) / (len(texts[1]) + 1))
        for (judge, pair), weight in zip(scores.items(), weights, strict=True):
            rest = None
            if len(scores) > 1:
                left = whole - weight
                rest = ((totals[0] - weight * pair[0]) / left, (totals[1] - weight * pair[1]) / left)
            own = families.get(judge)
            akin = (families[a] == own) - (families[b] == own)
            likeness = self._own.likeness(judge, matchup.instruction, sketches)
            one = found.judges[judge]
            one.see(Sight(pair, rest, longer, right, akin, likeness))
            if rest is not None:
                without = _decided(rest[0] - rest[1], self._tie)
                one.decisive += without != _side(duel)
                one.reversing += without * _side(duel) < 0

    def _right(self, instruction: Mapping[str, Any], texts: tuple[str, str]) -> int:
        """1 where only the first response is right, -1 where only the second is, else 0."""
        if instruction.get("answer") is None:
            return 0
        self._answered = True
        return is_right(texts[0], instruction) - is_right(texts[1], instruction)

    def end(self, reputation: Reputation) -> Diagnosis:
        """The sums, with what only a whole run tells."""
        found, config = self.found, self._config
        found.weights = dict(zip(found.judges, reputation.weights(found.judges), strict=True))
        found.reputations = found.reputations or reputation.reputations
        settings = config.reputation
        fighters = [member.name for member in config.fighters]
        found.intervals = bootstrap(
            self._wins, fighters, settings.prior_deviation, settings.initial, DRAWS, config.seed
        )
        figures = found.judges.values()
        if not self._answered:
            found.skipped["truth"] = "no instruction that was judged carries an `answer`"
        if config.judging.mode != "pairwise":
            found.skipped["position"] = "judges see one response at a time"
        if config.judging.scoring != "expected":
            found.skipped["label_mass"] = "scores were sampled, not expected"
        if not any(one.family_favour.n for one in figures):
            found.skipped["family"] = "no judge saw a duel of its own family against another"
        if not any(one.likeness.n for one in figures):
            found.skipped["own_likeness"] = "no judge answered an instruction itself that it judged, in any iteration"
        return found


def _side(duel: PlayedDuel) -> int:
    """1 where the first fighter won, -1 where the second did, 0 for a tie."""
    winner = duel.row["winner"]
    return 0 if winner is None else 1 if winner == duel.matchup.fighters[0] else -1


def _decided(difference: float, tie: float) -> int:
    return 0 if abs(difference) <= tie else opinion(difference)


class _OwnAnswers:
    """Sketches of members' answers to instructions that were played more than once, from any iteration."""

    def __init__(self, run: RunDirectory) -> None:
        played_ = Counter(row["instruction"] for files in iterations(run) for row, _, _ in read_lines(files.matchups))
        self._repeated = {instruction for instruction, times in played_.items() if times > 1}
        self._sketches: dict[tuple[str, str], Sketch] = {}
        for files in iterations(run) if self._repeated else ():
            asked = [row["instruction"] for row, _, _ in read_lines(files.matchups)]
            for row, _, _ in read_lines(files.responses):
                instruction = asked[row["duel"]]
                if instruction in self._repeated and "content" in row:
                    self._sketches.setdefault((instruction, row["fighter"]), sketch(row["content"]))

    def sketches(self, instruction: str, texts: tuple[str, str]) -> tuple[Sketch, Sketch] | None:
        """Those of two responses, where somebody else may have answered the instruction, too."""
        return (sketch(texts[0]), sketch(texts[1])) if instruction in self._repeated else None

    def likeness(self, judge: str, instruction: str, sketches: tuple[Sketch, Sketch] | None) -> float | None:
        """How much more the first response is like the judge's own than the second; None without an own one."""
        own = self._sketches.get((instruction, judge))
        if own is None or sketches is None:
            return None
        return similarity(own, sketches[0]) - similarity(own, sketches[1])
