"""Glicko-2 reputations: strengths with an uncertainty of their own, moved duel by duel.

Source: Mark E. Glickman, "Example of the Glicko-2 system" (2013, glicko.net/glicko/glicko2.pdf); the numbered steps
are his. On his internal scale a member has a rating mu, a deviation phi and a volatility sigma; mu is a log strength,
so the reputation is initial * exp(mu), as in `bradley_terry`. Each duel is a rating period of its two fighters; the
others' deviations stay, for they have no duels to miss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparta_api.config.tribe import ReputationConfig
from sparta_api.ratings.model import Rating, RatingModel

VOLATILITY = 0.06
"""Everyone's first volatility, as Glickman suggests."""
TAU = 0.5
"""How much volatilities may change; Glickman suggests 0.3 to 1.2."""
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Player:
    """A member on Glickman's internal scale."""

    mu: float
    phi: float
    volatility: float


def rated(player: Player, results: Sequence[tuple[Player, float]]) -> Player:
    """The player after one rating period; `results` are the opponents before it, with 1, 0.5 or 0 for the player.

    Steps 3 to 7.
    """
    information, surplus = 0.0, 0.0
    for opponent, result in results:
        weight = 1.0 / math.sqrt(1.0 + 3.0 * opponent.phi * opponent.phi / (math.pi * math.pi))
        expected = 1.0 / (1.0 + math.exp(-weight * (player.mu - opponent.mu)))
        information += weight * weight * expected * (1.0 - expected)
        surplus += weight * (result - expected)
    variance = 1.0 / information
    volatility = _volatility(player, variance, variance * surplus)
    widened = player.phi * player.phi + volatility * volatility
    phi = 1.0 / math.sqrt(1.0 / widened + information)
    return Player(player.mu + phi * phi * surplus, phi, volatility)


def _volatility(player: Player, variance: float, improvement: float) -> float:
    """Step 5: the root of f by the Illinois variant of regula falsi."""
    phi2, delta2 = player.phi * player.phi, improvement * improvement
    start = math.log(player.volatility * player.volatility)

    def f(x: float) -> float:
        e = math.exp(x)
        total = phi2 + variance + e
        return e * (delta2 - total) / (2.0 * total * total) - (x - start) / (TAU * TAU)

    low = start
    if delta2 > phi2 + variance:
        high = math.log(delta2 - phi2 - variance)
    else:
        steps = 1
        while f(start - steps * TAU) < 0:
            steps += 1
        high = start - steps * TAU
    f_low, f_high = f(low), f(high)
    while abs(high - low) > _TOLERANCE:
        middle = low + (low - high) * f_low / (f_high - f_low)
        f_middle = f(middle)
        if f_middle * f_high <= 0:
            low, f_low = high, f_high
        else:
            f_low /= 2.0
        high, f_high = middle, f_middle
    return math.exp(low / 2.0)


class Glicko2(RatingModel):
    """Both fighters from their ratings before the duel. A deviation starts at `prior_deviation` (log strength).

    `data` is what `state` told when the ratings were stored; without it the ratings are a start.
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
        self._players = {
            name: Player(members[name]["strength"], members[name]["spread"], members[name]["volatility"])
            if members
            else Player(math.log(rating.reputation / self._initial), config.prior_deviation, VOLATILITY)
            for name, rating in ratings.items()
        }

    def fold(self, a: str, b: str, scores: tuple[float, float], winner: str | None, updates: int) -> None:
        """One rating period with one duel in it."""
        player_a, player_b = self._players[a], self._players[b]
        share = 0.5 if winner is None else 1.0 if winner == a else 0.0
        for name, player in (
            (a, rated(player_a, [(player_b, share)])),
            (b, rated(player_b, [(player_a, 1.0 - share)])),
        ):
            before = self.reputation[name]
            self._players[name] = player
            self.reputation[name] = max(self._floor, self._initial * math.exp(player.mu))
            self._moved(name, before)

    def deviation(self, name: str) -> float:
        """The deviation of the log strength, carried over to points (delta method)."""
        return self.reputation[name] * self._players[name].phi

    def state(self, name: str) -> dict[str, Any]:
        """The member on Glickman's scale."""
        player = self._players[name]
        return {"strength": player.mu, "spread": player.phi, "volatility": player.volatility}
