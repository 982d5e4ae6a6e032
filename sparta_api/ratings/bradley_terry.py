"""Bradley-Terry reputations: the strengths under which the duels so far were most likely, held in by a prior.

Member i has a log strength theta_i, and a beats b with probability 1 / (1 + exp(theta_b - theta_a)) (Bradley and
Terry 1952). A tie counts as half a win for either side. theta_i has a normal prior around its start with standard
deviation `prior_deviation`, so strengths stay finite where somebody never lost, and maximising the posterior is a
concave problem with one solution: Newton's method finds it. The reputation is initial * exp(theta_i): positive, with
a geometric mean that stays, and R_a / (R_a + R_b) is the probability that a beats b.

The result after n duels depends on their results alone, not on their order, and does not grow without end.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from operator import mul
from typing import Any

from sparta_api.config.tribe import ReputationConfig
from sparta_api.ratings.model import Rating, RatingModel

_CONVERGED = 1e-7
"""Newton's steps square the error: after one as small as this, what is left is below rounding."""
_MOST_STEPS = 100
_LONGEST_STEP = 2.0

Wins = dict[tuple[str, str], list[float]]
"""By pair (a, b), each pair once: how often a won and how often b won; a tie is half a win for both."""


def count_result(wins: Wins, a: str, b: str, winner: str | None, weight: float = 1.0) -> None:
    """Adds one duel."""
    pair, flipped = ((a, b), False) if (b, a) not in wins else ((b, a), True)
    entry = wins.setdefault(pair, [0.0, 0.0])
    share = 0.5 if winner is None else 1.0 if winner == a else 0.0
    entry[flipped] += weight * share
    entry[not flipped] += weight * (1.0 - share)


class Fit:
    """The strengths that fit the wins best. `start` holds every member's prior mean (log strength)."""

    def __init__(self, start: Mapping[str, float], prior_deviation: float) -> None:
        self._start = dict(start)
        self._index = {name: number for number, name in enumerate(start)}
        self._prior = 1.0 / (prior_deviation * prior_deviation)

    def solve(self, wins: Wins, theta: dict[str, float]) -> None:
        """Moves `theta` in place to the maximum of the posterior."""
        for _ in range(_MOST_STEPS):
            slope, curvature = self._derivatives(wins, theta)
            step = solve(cholesky(curvature), slope)
            longest = max(map(abs, step), default=0.0)
            scale = min(1.0, _LONGEST_STEP / longest) if longest else 1.0
            for name, change in zip(self._index, step, strict=True):
                theta[name] += scale * change
            if longest <= _CONVERGED:
                return

    def factor(self, wins: Wins, theta: Mapping[str, float]) -> list[list[float]]:
        """The Cholesky factor of the posterior's curvature, whose inverse is the covariance of the strengths."""
        return cholesky(self._derivatives(wins, theta)[1])

    def spread(self, factor: list[list[float]], name: str) -> float:
        """The posterior standard deviation of a member's log strength (Laplace's approximation)."""
        unit = [0.0] * len(self._index)
        place = self._index[name]
        unit[place] = 1.0
        return math.sqrt(solve(factor, unit)[place])

    def _derivatives(self, wins: Wins, theta: Mapping[str, float]) -> tuple[list[float], list[list[float]]]:
        """Gradient and negated Hessian of the log posterior."""
        size = len(self._index)
        slope = [self._prior * (self._start[name] - theta[name]) for name in self._index]
        curvature = [[0.0] * size for _ in range(size)]
        for place in range(size):
            curvature[place][place] = self._prior
        for (a, b), (won, lost) in wins.items():
            i, j = self._index[a], self._index[b]
            expected = 0.5 + 0.5 * math.tanh(0.5 * (theta[a] - theta[b]))
            surplus = won - (won + lost) * expected
            slope[i] += surplus
            slope[j] -= surplus
            weight = (won + lost) * expected * (1.0 - expected)
            curvature[i][i] += weight
            curvature[j][j] += weight
            curvature[i][j] -= weight
            curvature[j][i] -= weight
        return slope, curvature


def cholesky(matrix: list[list[float]]) -> list[list[float]]:
    """The lower triangle L with L L^T = the matrix, which is symmetric and positive definite."""
    lower: list[list[float]] = []
    for i, values in enumerate(matrix):
        row: list[float] = []
        for j in range(i):
            other = lower[j]
            row.append((values[j] - sum(map(mul, row, other))) / other[j])
        row.append(math.sqrt(values[i] - sum(map(mul, row, row))))
        lower.append(row)
    return lower


def solve(lower: list[list[float]], right: Sequence[float]) -> list[float]:
    """x with L L^T x = right."""
    found: list[float] = []
    for row, value in zip(lower, right, strict=True):
        found.append((value - sum(map(mul, row, found))) / row[len(found)])
    for i in range(len(found) - 1, -1, -1):
        found[i] /= lower[i][i]
        for j in range(i):
            found[j] -= lower[i][j] * found[i]
    return found


class BradleyTerry(RatingModel):
    """Every duel is followed by a refit of all strengths to all results so far.

    `data` is what `state` and `shared_state` told when the ratings were stored; without it the ratings are a start.
    """

    def __init__(
        self,
        config: ReputationConfig,
        ratings: Mapping[str, Rating],
        deltas: Mapping[str, Sequence[float]],
        data: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(config, ratings, deltas)
        self._initial = config.initial
        members = data["members"] if data else {}
        start = {
            name: float(members[name]["start"]) if members else math.log(rating.reputation / self._initial)
            for name, rating in ratings.items()
        }
        self._start = start
        self._theta = {name: float(members[name]["strength"]) if members else start[name] for name in ratings}
        self._fit = Fit(start, config.prior_deviation)
        self._wins: Wins = {(a, b): [won, lost] for a, b, won, lost in (data["results"] if data else ())}
        self._factor: list[list[float]] | None = None

    def fold(self, a: str, b: str, scores: tuple[float, float], winner: str | None, updates: int) -> None:
        """Counts the result and refits; members that did not fight move a little, too."""
        before = {name: self.reputation[name] for name in (a, b)}
        count_result(self._wins, a, b, winner)
        self._fit.solve(self._wins, self._theta)
        self._factor = None
        for name, theta in self._theta.items():
            self.reputation[name] = max(self._floor, self._initial * math.exp(theta))
        for name, reputation in before.items():
            self._moved(name, reputation)

    def deviation(self, name: str) -> float:
        """The posterior standard deviation of the log strength, carried over to points (delta method)."""
        if self._factor is None:
            self._factor = self._fit.factor(self._wins, self._theta)
        return self.reputation[name] * self._fit.spread(self._factor, name)

    def state(self, name: str) -> dict[str, Any]:
        """The log strength and where its prior lies."""
        return {"strength": self._theta[name], "start": self._start[name]}

    def shared_state(self) -> dict[str, Any]:
        """The results so far: [a, b, won by a, won by b], ties half and half."""
        return {"results": [[a, b, won, lost] for (a, b), (won, lost) in self._wins.items()]}


def bootstrap(
    wins: Wins, members: Iterable[str], prior_deviation: float, initial: float, draws: int, seed: int
) -> dict[str, tuple[float, float, float]]:
    """Each member's reputation from all results at once, with the limits of its 95 % interval.

    The duels are reweighted with independent exponential weights (the Bayesian bootstrap, Rubin 1981), which for
    `c` duels with the same pair and result sum to a gamma variate of shape c; the limits are percentiles of the refits.
    """
    start = dict.fromkeys(members, 0.0)
    fit = Fit(start, prior_deviation)
    best = dict(start)
    fit.solve(wins, best)
    random_ = random.Random(seed)
    found: dict[str, list[float]] = {name: [] for name in start}
    for _ in range(draws):
        drawn = {pair: [_gamma(random_, won), _gamma(random_, lost)] for pair, (won, lost) in wins.items()}
        theta = dict(best)
        fit.solve(drawn, theta)
        for name, value in theta.items():
            found[name].append(value)
    low, high = round(0.025 * (draws - 1)), round(0.975 * (draws - 1))
    result: dict[str, tuple[float, float, float]] = {}
    for name, values in found.items():
        values.sort()
        middle, least, most = (initial * math.exp(value) for value in (best[name], values[low], values[high]))
        result[name] = (middle, least, most)
    return result


def _gamma(random_: random.Random, shape: float) -> float:
    return random_.gammavariate(shape, 1.0) if shape > 0 else 0.0
