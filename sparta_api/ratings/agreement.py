"""What judges' votes weigh by how often they agreed with the rest of their panels.

A judge's opinion of a duel is the sign of its difference between the two fighters; the rest of the panel's is the
sign of the weighted mean difference of the other judges. Agreeing counts 1, contradicting 0, and a tie on either side
one half. With A agreements in n duels, the estimate shrunk towards its prior is

    p = (A + PRIOR * STRENGTH) / (n + STRENGTH)

and the weight is log(p / (1 - p)) / log(PRIOR / (1 - PRIOR)), at least `LEAST`. So everyone starts at 1 and stays near
it until there is evidence, a judge that tosses coins (p near 1/2) loses its vote, and one that always agrees gains.
Log odds are the weights with which independent voters of competence p decide best (Nitzan and Paroush,
International Economic Review 23, 1982); agreement with a panel that is right more often than not stands in for the
unknown competence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from math import fsum

PRIOR = 0.75
"""How often a judge is expected to agree with the rest of its panel before anything is known of it."""
STRENGTH = 20.0
"""How many duels the prior counts for."""
LEAST = 0.05
"""No vote is ever lost for good."""
_TIE = 1e-9


def opinion(difference: float) -> int:
    """1, -1, or 0 for a tie."""
    return 0 if abs(difference) <= _TIE else 1 if difference > 0 else -1


def share_agreed(own: int, others: int) -> float:
    """1 when two opinions are the same side, 0 when opposite, 0.5 when one or both are ties."""
    return 0.5 + 0.5 * own * others


class Agreement:
    """How often each judge agreed so far. `counts` are [agreed, duels] by name."""

    def __init__(self, judges: Iterable[str], counts: Mapping[str, Sequence[float]] | None = None) -> None:
        known = counts or {}
        self._counts: dict[str, list[float]] = {name: [*known.get(name, (0.0, 0))] for name in judges}

    def weight(self, judge: str) -> float:
        """The vote's weight, 1 before any duel."""
        agreed, duels = self._counts[judge]
        p = (agreed + PRIOR * STRENGTH) / (duels + STRENGTH)
        return max(LEAST, math.log(p / (1.0 - p)) / math.log(PRIOR / (1.0 - PRIOR)))

    def record(self, scores: Mapping[str, tuple[float, float]], weights: Sequence[float]) -> None:
        """Compares each judge of a duel with the rest, whose votes had these weights. One judge alone tells nothing.

        Judges without a count here (fixed weights) are heard but not counted.
        """
        if len(scores) < 2:
            return
        differences = [a - b for a, b in scores.values()]
        total = fsum([weight * difference for weight, difference in zip(weights, differences, strict=True)])
        whole = fsum(weights)
        for judge, weight, difference in zip(scores, weights, differences, strict=True):
            count = self._counts.get(judge)
            if count is not None:
                rest = (total - weight * difference) / (whole - weight)
                count[0] += share_agreed(opinion(difference), opinion(rest))
                count[1] += 1

    def state(self, judge: str) -> list[float]:
        """[agreed, duels], for ratings.json."""
        return list(self._counts[judge])
