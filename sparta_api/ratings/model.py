"""What every rating model offers: reputations that a duel moves, folded in duel order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparta_api.config.tribe import ReputationConfig


@dataclass(frozen=True, slots=True)
class Rating:
    """A member's reputation (R, points; also its weight as a judge) and deviation (sigma, points)."""

    reputation: float
    deviation: float


class RatingModel(ABC):
    """The reputations of a tribe. `deltas` are each member's last changes by its own duels, oldest first."""

    has_steps = False
    """Whether duels move ratings by a step size K."""

    def __init__(
        self, config: ReputationConfig, ratings: Mapping[str, Rating], deltas: Mapping[str, Sequence[float]]
    ) -> None:
        self.reputation = {name: float(rating.reputation) for name, rating in ratings.items()}
        self.deltas = {name: list(deltas.get(name, ()))[-config.window :] for name in ratings}
        self._window = config.window
        self._floor = config.floor

    @abstractmethod
    def fold(self, a: str, b: str, scores: tuple[float, float], winner: str | None, updates: int) -> None:
        """Moves the ratings by one duel; `scores` are the weighted means, `updates` counts this duel too."""

    @abstractmethod
    def deviation(self, name: str) -> float:
        """How uncertain, or unsteady, a member's reputation is, in points."""

    def state(self, name: str) -> dict[str, Any]:
        """What the model knows of a member beyond its rating, for ratings.json."""
        return {}

    def shared_state(self) -> dict[str, Any]:
        """What the model knows beyond the members, for ratings.json."""
        return {}

    def _moved(self, name: str, before: float) -> None:
        """Notes what a duel has done to one of its fighters."""
        deltas = self.deltas[name]
        deltas.append(self.reputation[name] - before)
        if len(deltas) > self._window:
            del deltas[0]


class Still(RatingModel):
    """Ratings that stay as they are (`model: uniform`)."""

    def __init__(
        self, config: ReputationConfig, ratings: Mapping[str, Rating], deltas: Mapping[str, Sequence[float]]
    ) -> None:
        super().__init__(config, ratings, deltas)
        self._deviation = {name: rating.deviation for name, rating in ratings.items()}

    def fold(self, a: str, b: str, scores: tuple[float, float], winner: str | None, updates: int) -> None:
        """Does nothing."""

    def deviation(self, name: str) -> float:
        """The deviation that the member came with."""
        return self._deviation[name]
