"""Verdicts and ratings: rules 3 and 4 of docs/algorithm.md, one duel at a time.

The equations are those of Sparta Alignment (arXiv 2506.04721, algorithm 1) with the scaling constant of
its code. Sums are exactly rounded (`math.fsum`), so the order in which judges are listed changes no digit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any, Self

from sparta_api.config import ReputationConfig

TIE = 1e-9
"""A margin of at most this many points is a tie whatever `min_margin` says: it is rounding noise."""

_VARIANT_SCALING = {"dynamic": 10.0, "static": 20.0}
_VARIANT_DECAY_RATE = 0.9
_VARIANT_DECAY_STEPS = 10.0
_VARIANT_MIN_DEVIATION = 0.1
_VARIANT_STEP = 0.1
_VARIANT_LAST_ITERATION = 7


@dataclass(frozen=True, slots=True)
class Rating:
    """A member's reputation (R, points; also its weight as a judge) and deviation (sigma, points)."""

    reputation: float
    deviation: float


@dataclass(frozen=True, slots=True)
class Change:
    """What one duel did. Mappings hold the two fighters by name.

    `scores` are the weighted means of the two fighters in their order, before any multiplier; `margin` is
    their distance, `winner` None for a tie; `k` the step size used; `deviation` the one after the duel.
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


def variant_multipliers(variant: str, history: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What members' received scores are multiplied with in the next iteration; members not named keep 1.

    `history` holds the reputations at the end of each iteration so far, so its length is the number of the
    next iteration. From iteration 2 on, `dynamic` gives the t-1 lowest of the previous iteration 0, 0.1,
    0.2, ...; `static` lets each of the iterations 1..t-1 name its worst member not named before. Both stay as
    they are in iteration 7. Equal reputations go by name. Source: the paper's code, not its text.
    """
    iteration = min(len(history), _VARIANT_LAST_ITERATION)
    if variant == "normal" or iteration < 2:
        return {}
    if variant == "dynamic":
        listed = _ascending(history[iteration - 1])[: iteration - 1]
    else:
        listed = []
        for ratings in history[1:iteration]:
            listed += [name for name in _ascending(ratings) if name not in listed][:1]
    return {name: _VARIANT_STEP * place for place, name in enumerate(listed)}


def _ascending(ratings: Mapping[str, float]) -> list[str]:
    return sorted(ratings, key=lambda name: (ratings[name], name))


def gap_factor(difference: float, deviation_a: float, deviation_b: float, epsilon: float) -> float:
    """max(|Phi(z) - Phi(-z)|, epsilon) with z = difference / sqrt(sigma_a^2 + sigma_b^2), in 0..1.

    |Phi(z) - Phi(-z)| = erf(|z| / sqrt 2). With both deviations 0 it is 1 for any gap and 0 for none.
    """
    spread = math.sqrt(2.0 * (deviation_a * deviation_a + deviation_b * deviation_b))
    if spread == 0.0:
        return max(1.0 if difference else 0.0, epsilon)
    return max(math.erf(abs(difference) / spread), epsilon)


class Reputation:
    """The ratings of a tribe, updated duel by duel.

    `ratings` names every member that fights or judges. `deltas` are each member's last applied changes
    (after minus before, points, oldest first); at most `config.window` are kept, and two or more of them
    replace the given deviation. `updates` is the number of duels folded before. `multipliers` come from
    `variant_multipliers`. A margin of at most max(`tie_margin`, 1e-9) points is a tie.

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
    ) -> None:
        for name, rating in ratings.items():
            if not (math.isfinite(rating.reputation) and rating.reputation > 0):
                raise ValueError(f"the reputation of {name!r} must be positive and finite, not {rating.reputation}")
            if not (math.isfinite(rating.deviation) and rating.deviation >= 0):
                raise ValueError(f"the deviation of {name!r} must be finite and not negative, not {rating.deviation}")
        unknown = sorted({*(deltas or {}), *(multipliers or {})} - set(ratings))
        if unknown:
            raise ValueError(f"deltas or multipliers of members without a rating: {', '.join(unknown)}")
        fixed = config.variant != "normal"
        self.config = config
        self.updates = updates
        """Duels folded so far; void ones and those of frozen ratings do not count."""
        self._freeze = config.freeze
        self._sequential = config.update == "sequential"
        self._initial_k, self._min_k = config.initial_k, config.min_k
        self._epsilon, self._floor, self._window = config.epsilon, config.floor, config.window
        self._tie = max(tie_margin, TIE)
        self._scaling = _VARIANT_SCALING.get(config.variant, config.scaling_factor)
        self._decay_rate = _VARIANT_DECAY_RATE if fixed else config.decay_rate
        self._decay_steps = _VARIANT_DECAY_STEPS if fixed else config.decay_steps
        self._min_deviation = _VARIANT_MIN_DEVIATION if fixed else config.min_deviation
        self.multipliers = dict(multipliers or {})
        """By member, from `variant_multipliers`; 1 where absent."""
        self._reputation = {name: float(rating.reputation) for name, rating in ratings.items()}
        self._deviation = {name: float(rating.deviation) for name, rating in ratings.items()}
        self._deltas = {name: list((deltas or {}).get(name, ()))[-config.window :] for name in ratings}
        for name in ratings:
            self._refresh_deviation(name)

    @property
    def ratings(self) -> dict[str, Rating]:
        """Every member's rating at this moment (a copy)."""
        return {name: Rating(value, self._deviation[name]) for name, value in self._reputation.items()}

    @property
    def reputations(self) -> dict[str, float]:
        """Every member's reputation at this moment (a copy)."""
        return dict(self._reputation)

    @property
    def deltas(self) -> dict[str, list[float]]:
        """Every member's last applied changes, oldest first (a copy)."""
        return {name: list(values) for name, values in self._deltas.items()}

    @property
    def k(self) -> float:
        """K after the duels so far: max(min_k, initial_k * decay_rate^(updates / decay_steps))."""
        decay = math.pow(self._decay_rate, self.updates / self._decay_steps)
        return max(self._min_k, self._initial_k * decay)

    def update(self, fighters: tuple[str, str], scores: Mapping[str, tuple[float, float]]) -> Change:
        """Folds one duel that is not void; `scores` are each judge's points for the two fighters in order.

        Judges weigh as much as their reputation before the duel. Judges that abstained are left out of
        `scores`. Raises ValueError, and changes nothing, when no judge is left, a judge is a fighter, a
        member has no rating, the fighters are one, or a score is not finite.
        """
        a, b = fighters
        score_a, score_b = self._verdict(a, b, scores)
        before_a, before_b = self._reputation[a], self._reputation[b]
        if not self._freeze:
            self.updates += 1
            self._move(a, b, score_a, score_b)
        margin = abs(score_a - score_b)
        return Change(
            scores=(score_a, score_b),
            winner=None if margin <= self._tie else (a if score_a > score_b else b),
            margin=margin,
            k=self.k,
            before={a: before_a, b: before_b},
            after={a: self._reputation[a], b: self._reputation[b]},
            deviation={a: self._deviation[a], b: self._deviation[b]},
        )

    def _verdict(self, a: str, b: str, scores: Mapping[str, tuple[float, float]]) -> tuple[float, float]:
        reputation = self._reputation
        for name in (a, b, *scores):
            if name not in reputation:
                raise ValueError(f"member {name!r} has no rating")
        if a == b or a in scores or b in scores:
            raise ValueError(f"{a!r} and {b!r} cannot fight themselves or judge their own duel")
        if not scores:
            raise ValueError(f"no judge scored the duel of {a!r} and {b!r}: it is void and changes no rating")
        weights = [reputation[judge] for judge in scores]
        total = fsum(weights)
        score_a = fsum([weight * score for weight, (score, _) in zip(weights, scores.values(), strict=True)]) / total
        score_b = fsum([weight * score for weight, (_, score) in zip(weights, scores.values(), strict=True)]) / total
        if not (math.isfinite(score_a) and math.isfinite(score_b)):
            raise ValueError(f"a score in the duel of {a!r} and {b!r} is not finite: leave out judges that abstain")
        return score_a, score_b

    def _move(self, a: str, b: str, score_a: float, score_b: float) -> None:
        """Both fighters' new ratings; `sequential` lets b's gap see a's new reputation, as the paper's code."""
        reputation, deviation, epsilon = self._reputation, self._deviation, self._epsilon
        before_a, before_b = reputation[a], reputation[b]
        deviation_a, deviation_b = deviation[a], deviation[b]
        if self.multipliers:
            score_a *= self.multipliers.get(a, 1.0)
            score_b *= self.multipliers.get(b, 1.0)
        step = self.k / self._scaling * (score_a - score_b)
        gap = gap_factor(before_a - before_b, deviation_a, deviation_b, epsilon)
        after_a = max(self._floor, before_a + step * math.tanh(deviation_a) * gap)
        if self._sequential:
            gap = gap_factor(after_a - before_b, deviation_a, deviation_b, epsilon)
        after_b = max(self._floor, before_b - step * math.tanh(deviation_b) * gap)
        for name, before, after in ((a, before_a, after_a), (b, before_b, after_b)):
            reputation[name] = after
            deltas = self._deltas[name]
            deltas.append(after - before)
            if len(deltas) > self._window:
                del deltas[0]
            self._refresh_deviation(name)

    def _refresh_deviation(self, name: str) -> None:
        deltas = self._deltas[name]
        count = len(deltas)
        if count >= 2:
            mean = fsum(deltas) / count
            variance = fsum([(delta - mean) * (delta - mean) for delta in deltas]) / count
            self._deviation[name] = max(math.sqrt(variance), self._min_deviation)

    def to_json(self) -> dict[str, Any]:
        """The contents of ratings.json; numbers survive JSON exactly."""
        members = {
            name: {"reputation": value, "deviation": self._deviation[name], "deltas": list(self._deltas[name])}
            for name, value in self._reputation.items()
        }
        return {"updates": self.updates, "members": members}

    @classmethod
    def from_json(
        cls,
        config: ReputationConfig,
        data: Mapping[str, Any],
        multipliers: Mapping[str, float] | None = None,
        tie_margin: float = TIE,
    ) -> Self:
        """The inverse of `to_json`; going on from it gives the same digits as never having stopped."""
        members = data["members"]
        return cls(
            config,
            ratings={name: Rating(entry["reputation"], entry["deviation"]) for name, entry in members.items()},
            deltas={name: entry["deltas"] for name, entry in members.items()},
            updates=data["updates"],
            multipliers=multipliers,
            tie_margin=tie_margin,
        )
