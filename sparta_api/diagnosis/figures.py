"""How far judges can be trusted: the figures of one judge, added up duel by duel in constant memory.

`rest` is always the panel without the judge: the mean of the other judges' scores with the weights that they had at
that duel. docs/judging.md gives the formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sparta_api.ratings.agreement import opinion


@dataclass(slots=True)
class Average:
    """A mean that grows."""

    n: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        """Counts one value."""
        self.n += 1
        self.total += value
        self.squares += value * value

    @property
    def mean(self) -> float | None:
        """None without values."""
        return self.total / self.n if self.n else None

    @property
    def deviation(self) -> float | None:
        """The population standard deviation; None without values."""
        if not self.n:
            return None
        mean = self.total / self.n
        return math.sqrt(max(0.0, self.squares / self.n - mean * mean))

    @property
    def error(self) -> float | None:
        """The standard error of the mean; None for fewer than two values."""
        deviation = self.deviation
        return deviation / math.sqrt(self.n - 1) if deviation is not None and self.n > 1 else None


@dataclass(slots=True)
class Association:
    """The correlation of two differences between a and b, taken through the origin.

    sum(xy) / sqrt(sum(x^2) sum(y^2)): naming a duel's fighters the other way round changes nothing.
    """

    n: int = 0
    xy: float = 0.0
    xx: float = 0.0
    yy: float = 0.0

    def add(self, x: float, y: float) -> None:
        """Counts one duel."""
        self.n += 1
        self.xy += x * y
        self.xx += x * x
        self.yy += y * y

    @property
    def correlation(self) -> float | None:
        """-1..1; None where one side never differed."""
        product = self.xx * self.yy
        return self.xy / math.sqrt(product) if product > 0 else None


@dataclass(slots=True)
class Concordance:
    """How two sides order the same pairs of responses."""

    agreed: int = 0
    contradicted: int = 0
    tied_own: int = 0
    """Only the judge saw no difference."""
    tied_rest: int = 0
    """Only the rest saw none."""
    tied_both: int = 0

    def add(self, own: float, rest: float) -> None:
        """Counts a duel by the two differences of scores."""
        mine, theirs = opinion(own), opinion(rest)
        if mine and theirs:
            if mine == theirs:
                self.agreed += 1
            else:
                self.contradicted += 1
        elif mine:
            self.tied_rest += 1
        elif theirs:
            self.tied_own += 1
        else:
            self.tied_both += 1

    @property
    def tau(self) -> float | None:
        """Kendall's tau-b over the duels' pairs (Kendall 1945); None where one side only saw ties."""
        decided = self.agreed + self.contradicted
        product = (decided + self.tied_own) * (decided + self.tied_rest)
        return (self.agreed - self.contradicted) / math.sqrt(product) if product else None

    @property
    def accuracy(self) -> float | None:
        """The share of pairs that both sides order, or tie, alike (Deutsch et al. 2023); None without duels."""
        total = self.agreed + self.contradicted + self.tied_own + self.tied_rest + self.tied_both
        return (self.agreed + self.tied_both) / total if total else None


@dataclass(slots=True)
class Sight:
    """What one judge did in one duel, beside what the rest of its panel did; differences are a minus b."""

    scores: tuple[float, float]
    rest: tuple[float, float] | None
    """None where it was the only judge."""
    longer: float
    """log of the length of a's response over that of b's."""
    right: int
    """1 where only a's response is right, -1 where only b's is, else 0."""
    akin: int
    """1 where only a is of the judge's family, -1 where only b is, else 0."""
    likeness: float | None
    """How much more a's response is like the judge's own than b's; None where it has none."""


@dataclass(slots=True)
class JudgeFigures:
    """One judge over a whole run."""

    duels: int = 0
    abstained: int = 0
    judgments: int = 0
    """Answers to questions; those that failed are not among them."""
    tokens: int = 0
    cost_usd: float | None = 0.0
    panel: Concordance = field(default_factory=Concordance)
    score: Average = field(default_factory=Average)
    offset: Average = field(default_factory=Average)
    length: Association = field(default_factory=Association)
    length_excess: Association = field(default_factory=Association)
    family_favour: Average = field(default_factory=Average)
    likeness: Association = field(default_factory=Association)
    flips: int = 0
    first: Average = field(default_factory=Average)
    """Points for the response shown first beyond the one shown second."""
    mass: Average = field(default_factory=Average)
    from_text: int | None = None
    """Scores read from the replies' text where expected ones were wanted; None where they were not."""
    truth: Average = field(default_factory=Average)
    """1 for siding with the only right response, 0 for the other, one half for a tie."""
    decisive: int = 0
    """Verdicts that would be others without it."""
    reversing: int = 0
    """Of these, the ones with another winner."""
    alone: int = 0
    """Duels in which it was the only judge."""

    def see(self, sight: Sight) -> None:
        """Adds a duel that it judged."""
        self.duels += 1
        difference = sight.scores[0] - sight.scores[1]
        for score in sight.scores:
            self.score.add(score)
        self.length.add(sight.longer, difference)
        if sight.right:
            self.truth.add(0.5 + 0.5 * sight.right * opinion(difference))
        if sight.rest is None:
            self.alone += 1
            return
        of_rest = sight.rest[0] - sight.rest[1]
        excess = difference - of_rest
        self.panel.add(difference, of_rest)
        for own, others in zip(sight.scores, sight.rest, strict=True):
            self.offset.add(own - others)
        self.length_excess.add(sight.longer, excess)
        if sight.akin:
            self.family_favour.add(sight.akin * excess)
        if sight.likeness is not None:
            self.likeness.add(sight.likeness, excess)
