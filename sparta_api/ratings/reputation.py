"""Verdicts and ratings: rules 3 and 4 of docs/algorithm.md, one duel at a time.

How ratings move is `ratings`' business: `paper` (Sparta Alignment's rule), `bradley_terry`, `glicko2`. Sums are exactly
rounded (`math.fsum`), so the order in which judges are listed changes no digit of a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any, Self

from sparta_api.config.tribe import ReputationConfig
from sparta_api.ratings.agreement import Agreement
from sparta_api.ratings.bradley_terry import BradleyTerry
from sparta_api.ratings.glicko2 import Glicko2
from sparta_api.ratings.model import Rating as Rating
from sparta_api.ratings.model import RatingModel, Still
from sparta_api.ratings.paper import Paper
from sparta_api.ratings.paper import gap_factor as gap_factor
from sparta_api.ratings.paper import variant_multipliers as variant_multipliers

TIE = 1e-9
"""A margin of at most this many points is a tie whatever `min_margin` says: it is rounding noise."""


@dataclass(frozen=True, slots=True)
class Change:
    """What one duel did. Mappings hold the two fighters by name.

    `scores` are the weighted means of the two fighters in their order, before any multiplier; `margin` is
    their distance, `winner` None for a tie; `k` the step size used, 0 where the model has none; `deviation` the one
    after the duel.
    """

    scores: tuple[float, float]
    winner: str | None
    margin: float
    k: float
    before: dict[str, float]
    after: dict[str, float]
    deviation: dict[str, float]


Rounds = Sequence[float | None]


def panel_scores(rounds: Mapping[str, tuple[Rounds, Rounds]]) -> dict[str, tuple[float, float]]:
    """Each judge's mean over its scored rounds, per fighter; None marks a round without a score.

    A judge without a scored round for one or both fighters abstains and is absent from the result.
    """
    scores: dict[str, tuple[float, float]] = {}
    for judge, (rounds_a, rounds_b) in rounds.items():
        scored_a = [score for score in rounds_a if score is not None]
        scored_b = [score for score in rounds_b if score is not None]
        if scored_a and scored_b:
            scores[judge] = (fsum(scored_a) / len(scored_a), fsum(scored_b) / len(scored_b))
    return scores


class Reputation:
    """The ratings of a tribe, updated duel by duel.

    `ratings` names every member that fights or judges. `deltas` are each member's last applied changes
    (after minus before, points, oldest first); at most `config.window` are kept, and with `model: paper` two or more
    of them replace the given deviation. `updates` is the number of duels folded before. `multipliers` come from
    `variant_multipliers`. A margin of at most max(`tie_margin`, 1e-9) points is a tie. `fixed_weights` are judges that
    are no members, such as verifiers: their weights in points, where `config.initial` is one ordinary vote.
    `stored` is what `to_json` told, for what models and judge weights know beyond the other arguments.

    Raises ValueError for a reputation that is not positive and finite, a negative or infinite deviation, or
    deltas and multipliers of members without a rating.
    """

    def __init__(
        self,
        config: ReputationConfig,
        ratings: Mapping[str, Rating],
        deltas: Mapping[str, Sequence[float]] | None = None,
        updates: int = 0,
        multipliers: Mapping[str, float] | None = None,
        tie_margin: float = TIE,
        fixed_weights: Mapping[str, float] | None = None,
        stored: Mapping[str, Any] | None = None,
    ) -> None:
        self.multipliers = dict(multipliers or {})
        """By member, from `variant_multipliers`; 1 where absent."""
        _check(ratings, [*(deltas or {}), *self.multipliers])
        self.config = config
        self.updates = updates
        """Duels folded so far; void ones and those of frozen ratings do not count."""
        self.fixed_weights = dict(fixed_weights or {})
        """By judge that is no member, in points."""
        self._moves = not config.freeze and config.model != "uniform"
        self._tie = max(tie_margin, TIE)
        self._model = self._make_model(ratings, deltas or {}, stored)
        self._reputation = self._model.reputation
        self._weighting = config.weighting
        unit = 1.0 if self._weighting == "reputation" else config.initial
        self._fixed = {judge: weight / unit for judge, weight in self.fixed_weights.items()}
        self._voters = {*ratings, *self._fixed}
        known = stored["members"].items() if stored else ()
        self._agreement: Agreement | None = None
        if self._weighting == "agreement":
            self._agreement = Agreement(ratings, {name: entry["agreement"] for name, entry in known})

    def _make_model(
        self,
        ratings: Mapping[str, Rating],
        deltas: Mapping[str, Sequence[float]],
        stored: Mapping[str, Any] | None,
    ) -> RatingModel:
        match self.config.model:
            case "bradley_terry":
                return BradleyTerry(self.config, ratings, deltas, stored)
            case "glicko2":
                return Glicko2(self.config, ratings, deltas, stored)
            case "uniform":
                return Still(self.config, ratings, deltas)
            case _:
                return Paper(self.config, ratings, deltas, self.multipliers)

    @property
    def ratings(self) -> dict[str, Rating]:
        """Every member's rating at this moment (a copy)."""
        return {name: Rating(value, self._model.deviation(name)) for name, value in self._reputation.items()}

    @property
    def reputations(self) -> dict[str, float]:
        """Every member's reputation at this moment (a copy)."""
        return dict(self._reputation)

    @property
    def deltas(self) -> dict[str, list[float]]:
        """Every member's last applied changes, oldest first (a copy)."""
        return {name: list(values) for name, values in self._model.deltas.items()}

    @property
    def k(self) -> float:
        """K after the duels so far: max(min_k, initial_k * decay_rate^(updates / decay_steps)); 0 without a step."""
        return self._model.k(self.updates) if isinstance(self._model, Paper) else 0.0

    def weights(self, judges: Iterable[str]) -> list[float]:
        """What the votes of these judges weigh at this moment. KeyError for one that is unknown."""
        if self._weighting == "reputation":
            if not self._fixed:
                reputation = self._reputation
                return [reputation[judge] for judge in judges]
            return [self._fixed[judge] if judge in self._fixed else self._reputation[judge] for judge in judges]
        agreement = self._agreement
        if agreement is None:
            return [self._fixed.get(judge, 1.0) for judge in judges]
        return [self._fixed[judge] if judge in self._fixed else agreement.weight(judge) for judge in judges]

    def update(self, fighters: tuple[str, str], scores: Mapping[str, tuple[float, float]]) -> Change:
        """Folds one duel that is not void; `scores` are each judge's points for the two fighters in order.

        Judges weigh what `config.judge_weight` says, by the state before the duel; by default their reputation.
        Judges that abstained are left out of `scores`. Raises ValueError, and changes nothing, when no judge is
        left, a judge is a fighter, a member has no rating, the fighters are one, or a score is not finite.
        """
        a, b = fighters
        weights = self._votes(a, b, scores)
        score_a, score_b = self._verdict(a, b, scores, weights)
        reputation, model = self._reputation, self._model
        before_a, before_b = reputation[a], reputation[b]
        margin = abs(score_a - score_b)
        winner = None if margin <= self._tie else (a if score_a > score_b else b)
        if self._moves:
            self.updates += 1
            model.fold(a, b, (score_a, score_b), winner, self.updates)
        if self._agreement is not None and not self.config.freeze:
            self._agreement.record(scores, weights)
        return Change(
            scores=(score_a, score_b),
            winner=winner,
            margin=margin,
            k=self.k,
            before={a: before_a, b: before_b},
            after={a: reputation[a], b: reputation[b]},
            deviation={a: model.deviation(a), b: model.deviation(b)},
        )

    def _votes(self, a: str, b: str, scores: Mapping[str, tuple[float, float]]) -> list[float]:
        """The weights of the duel's judges; ValueError when they may not judge it."""
        members = self._reputation
        if a not in members or b not in members or not self._voters.issuperset(scores):
            strangers = [*({a, b} - members.keys()), *(set(scores) - self._voters)]
            raise ValueError(f"member {min(strangers)!r} has no rating")
        if a == b or a in scores or b in scores:
            raise ValueError(f"{a!r} and {b!r} cannot fight themselves or judge their own duel")
        if not scores:
            raise ValueError(f"no judge scored the duel of {a!r} and {b!r}: it is void and changes no rating")
        return self.weights(scores)

    def _verdict(
        self, a: str, b: str, scores: Mapping[str, tuple[float, float]], weights: list[float]
    ) -> tuple[float, float]:
        total = fsum(weights)
        score_a = fsum([weight * score for weight, (score, _) in zip(weights, scores.values(), strict=True)]) / total
        score_b = fsum([weight * score for weight, (_, score) in zip(weights, scores.values(), strict=True)]) / total
        if not (math.isfinite(score_a) and math.isfinite(score_b)):
            raise ValueError(f"a score in the duel of {a!r} and {b!r} is not finite: leave out judges that abstain")
        return score_a, score_b

    def to_json(self) -> dict[str, Any]:
        """The contents of ratings.json; numbers survive JSON exactly."""
        members = {name: self._member_json(name) for name in self._reputation}
        return {"updates": self.updates, "members": members} | self._model.shared_state()

    def _member_json(self, name: str) -> dict[str, Any]:
        model = self._model
        entry: dict[str, Any] = {
            "reputation": self._reputation[name],
            "deviation": model.deviation(name),
            "deltas": list(model.deltas[name]),
        } | model.state(name)
        return entry if self._agreement is None else entry | {"agreement": self._agreement.state(name)}

    def restored(self, data: Mapping[str, Any]) -> Self:
        """The same settings with the state that `to_json` told."""
        return self.from_json(self.config, data, self.multipliers, self._tie, self.fixed_weights)

    @classmethod
    def from_json(
        cls,
        config: ReputationConfig,
        data: Mapping[str, Any],
        multipliers: Mapping[str, float] | None = None,
        tie_margin: float = TIE,
        fixed_weights: Mapping[str, float] | None = None,
    ) -> Self:
        """The inverse of `to_json`; going on from it gives the same digits as never having stopped."""
        members = data["members"]
        ratings = {name: Rating(entry["reputation"], entry["deviation"]) for name, entry in members.items()}
        deltas = {name: entry["deltas"] for name, entry in members.items()}
        return cls(config, ratings, deltas, data["updates"], multipliers, tie_margin, fixed_weights, data)


def _check(ratings: Mapping[str, Rating], named: Iterable[str]) -> None:
    for name, rating in ratings.items():
        if not (math.isfinite(rating.reputation) and rating.reputation > 0):
            raise ValueError(f"the reputation of {name!r} must be positive and finite, not {rating.reputation}")
        if not (math.isfinite(rating.deviation) and rating.deviation >= 0):
            raise ValueError(f"the deviation of {name!r} must be finite and not negative, not {rating.deviation}")
    unknown = sorted(set(named) - set(ratings))
    if unknown:
        raise ValueError(f"deltas or multipliers of members without a rating: {', '.join(unknown)}")
