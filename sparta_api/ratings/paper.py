"""The paper's reputation update: rule 4 of docs/algorithm.md.

The equations are those of Sparta Alignment (arXiv 2506.04721, algorithm 1) with the scaling constant of its code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from math import fsum

from sparta_api.config.tribe import ReputationConfig
from sparta_api.ratings.model import Rating, RatingModel

_VARIANT_SCALING = {"dynamic": 10.0, "static": 20.0}
_VARIANT_DECAY_RATE = 0.9
_VARIANT_DECAY_STEPS = 10.0
_VARIANT_MIN_DEVIATION = 0.1
_VARIANT_STEP = 0.1
_VARIANT_LAST_ITERATION = 7


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


class Paper(RatingModel):
    """R += K/scaling * (s_own - s_other) * tanh(sigma) * gap, sigma from the last changes.

    `multipliers` come from `variant_multipliers`. Two or more deltas replace a given deviation.
    """

    has_steps = True

    def __init__(
        self,
        config: ReputationConfig,
        ratings: Mapping[str, Rating],
        deltas: Mapping[str, Sequence[float]],
        multipliers: Mapping[str, float],
    ) -> None:
        super().__init__(config, ratings, deltas)
        fixed = config.variant != "normal"
        self._sequential = config.update == "sequential"
        self._initial_k, self._min_k = config.initial_k, config.min_k
        self._epsilon = config.epsilon
        self._scaling = _VARIANT_SCALING.get(config.variant, config.scaling_factor)
        self._decay_rate = _VARIANT_DECAY_RATE if fixed else config.decay_rate
        self._decay_steps = _VARIANT_DECAY_STEPS if fixed else config.decay_steps
        self._min_deviation = _VARIANT_MIN_DEVIATION if fixed else config.min_deviation
        self._multipliers = multipliers
        self._deviation = {name: float(rating.deviation) for name, rating in ratings.items()}
        for name in ratings:
            self._refresh_deviation(name)

    def k(self, updates: int) -> float:
        """max(min_k, initial_k * decay_rate^(updates / decay_steps))."""
        return max(self._min_k, self._initial_k * math.pow(self._decay_rate, updates / self._decay_steps))

    def deviation(self, name: str) -> float:
        """Population standard deviation of the last changes, at least `min_deviation`."""
        return self._deviation[name]

    def fold(self, a: str, b: str, scores: tuple[float, float], winner: str | None, updates: int) -> None:
        """Both fighters' new ratings; `sequential` lets b's gap see a's new reputation, as the paper's code."""
        score_a, score_b = scores
        reputation, deviation, epsilon = self.reputation, self._deviation, self._epsilon
        before_a, before_b = reputation[a], reputation[b]
        deviation_a, deviation_b = deviation[a], deviation[b]
        if self._multipliers:
            score_a *= self._multipliers.get(a, 1.0)
            score_b *= self._multipliers.get(b, 1.0)
        step = self.k(updates) / self._scaling * (score_a - score_b)
        gap = gap_factor(before_a - before_b, deviation_a, deviation_b, epsilon)
        after_a = max(self._floor, before_a + step * math.tanh(deviation_a) * gap)
        if self._sequential:
            gap = gap_factor(after_a - before_b, deviation_a, deviation_b, epsilon)
        after_b = max(self._floor, before_b - step * math.tanh(deviation_b) * gap)
        for name, before, after in ((a, before_a, after_a), (b, before_b, after_b)):
            reputation[name] = after
            self._moved(name, before)
            self._refresh_deviation(name)

    def _refresh_deviation(self, name: str) -> None:
        deltas = self.deltas[name]
        count = len(deltas)
        if count >= 2:
            mean = fsum(deltas) / count
            variance = fsum([(delta - mean) * (delta - mean) for delta in deltas]) / count
            self._deviation[name] = max(math.sqrt(variance), self._min_deviation)
