"""Which reputation model and which judge weighting withstand which judges: two simulated tribes with known strengths.

    python -m bench.tribes [--seeds N] [--duels N] [--markdown]

Ten members duel; member i's responses have quality theta_i + noise, and the better response of a duel is the true
winner. In the tribe "skilled" the stronger members also judge better, as the paper assumes; in "unskilled" judging has
nothing to do with strength, and the bad judges are the strongest but one. Half of the judges are bad: one is taken by
length, one by its own family, one gives random scores, and two collude. The harm of a kind is the accuracy lost when
only that kind is bad, against the same tribe, with the same duels and noise, in which all judge honestly. All settings
meet the same duels with opponents at random, so that only weights and ratings differ; a real run's matchmaking follows
them.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from statistics import fmean, stdev

from rich.console import Console
from rich.table import Table

from sparta_api.config.tribe import Matchmaking, ReputationConfig
from sparta_api.duels.matchmaking import Matchup, plan
from sparta_api.ratings.reputation import Rating, Reputation

SIZE = 10
STRENGTHS = [-1.5 + 3.0 * place / (SIZE - 1) for place in range(SIZE)]
"""Mean quality of the members' responses, weakest first."""
FAMILIES = 3
KINDS = ("length", "family", "random", "collude")
RESPONSE_NOISE = 0.8
POINTS_PER_QUALITY = 1.4
MIDDLE = 5.5
SETTINGS = [
    *product(("paper", "bradley_terry", "glicko2"), ("reputation", "agreement", "uniform")),
    ("uniform", "uniform"),
]


@dataclass(frozen=True, slots=True)
class Response:
    quality: float
    length: float
    """Standardised."""
    author: int


@dataclass(frozen=True, slots=True, eq=False)
class Tribe:
    name: str
    noise: tuple[float, ...]
    """Standard deviation of each judge's scores, in points."""
    bad: dict[int, str]
    """Bad judges and their `KINDS`."""

    def score(self, judge: int, response: Response, draw: random.Random, kinds: Collection[str]) -> float:
        """A judge's score, 1 to 10, when only bad judges of these kinds are bad; always draws two numbers."""
        noise, luck = draw.gauss(0.0, self.noise[judge]), draw.uniform(0.5, 10.5)
        points = MIDDLE + POINTS_PER_QUALITY * response.quality + noise
        kind = self.bad.get(judge)
        match kind if kind in kinds else None:
            case "length":
                points = MIDDLE + 2.5 * response.length + noise
            case "family" if response.author % FAMILIES == judge % FAMILIES:
                points += 4.0
            case "random":
                points = luck
            case "collude":
                friends = self.bad.get(response.author) == "collude"
                points = 10.0 if friends else points - 3.0
        return float(min(10, max(1, round(points))))


TRIBES = (
    Tribe(
        "skilled",
        noise=tuple(3.5 - 2.5 * place / (SIZE - 1) for place in range(SIZE)),
        bad={0: "random", 2: "length", 4: "family", 1: "collude", 3: "collude"},
    ),
    Tribe(
        "unskilled",
        noise=(2.0, 1.0, 3.0, 1.5, 2.5, 2.0, 1.5, 3.0, 1.0, 2.5),
        bad={9: "random", 7: "length", 5: "family", 6: "collude", 8: "collude"},
    ),
)


@dataclass(frozen=True, slots=True)
class Duel:
    fighters: tuple[str, str]
    scores: dict[str, tuple[float, float]]
    better: str
    """Whose response has more quality."""


@dataclass(frozen=True, slots=True)
class Played:
    accuracy: float
    """Share of duels won by the better response; a tie counts one half."""
    correlation: float
    """Kendall's tau-b of final reputations and true strengths."""


NAMES = [f"m{place}" for place in range(SIZE)]


@cache
def duels_of(tribe: Tribe, seed: int, count: int, kinds: tuple[str, ...]) -> list[Duel]:
    """The duels of one seed. Nothing that is drawn depends on which judges are bad."""
    instructions = [str(number) for number in range(count)]
    at_random = Matchmaking(random_match_prob=1.0)
    planned = plan(seed, 0, dict.fromkeys(NAMES, 100.0), instructions, NAMES, NAMES, at_random)
    return [_duel(tribe, matchup, random.Random(f"{seed}/{matchup.duel}"), kinds) for matchup in planned]


def _duel(tribe: Tribe, matchup: Matchup, draw: random.Random, kinds: Collection[str]) -> Duel:
    a, b = (
        Response(STRENGTHS[place] + draw.gauss(0.0, RESPONSE_NOISE), draw.gauss(0.0, 1.0), place)
        for place in map(NAMES.index, matchup.fighters)
    )
    judges = [(judge, NAMES.index(judge)) for judge in matchup.judges]
    scores = {
        judge: (tribe.score(place, a, draw, kinds), tribe.score(place, b, draw, kinds)) for judge, place in judges
    }
    return Duel(matchup.fighters, scores, matchup.fighters[a.quality < b.quality])


def play(duels: list[Duel], config: ReputationConfig) -> Played:
    """Folds the duels as a run does."""
    reputation = Reputation(config, {name: Rating(config.initial, config.initial_deviation) for name in NAMES})
    hits = 0.0
    for duel in duels:
        winner = reputation.update(duel.fighters, duel.scores).winner
        hits += 0.5 if winner is None else winner == duel.better
    final = reputation.reputations
    return Played(hits / len(duels), tau_b([final[name] for name in NAMES], STRENGTHS))


def tau_b(x: list[float], y: list[float]) -> float:
    """Kendall's tau-b; nan where one side does not distinguish anything."""
    signs = [((x[i] > x[j]) - (x[i] < x[j]), (y[i] > y[j]) - (y[i] < y[j])) for i, j in combinations(range(len(x)), 2)]
    kept = math.sqrt(sum(a != 0 for a, _ in signs) * sum(b != 0 for _, b in signs))
    return sum(a * b for a, b in signs) / kept if kept else math.nan


@dataclass(frozen=True, slots=True)
class Line:
    """One setting in one tribe; accuracies and harms are shares of duels."""

    tribe: str
    model: str
    weight: str
    accuracy: float
    """With all bad judges."""
    error: float
    """Standard error of `accuracy` over the seeds."""
    honest: float
    """The accuracy without any."""
    harm: dict[str, float]
    correlation: float

    def cells(self) -> tuple[str, ...]:
        """The line as text, in per cent."""
        tau = "–" if math.isnan(self.correlation) else f"{self.correlation:.2f}"
        accuracy = f"{100 * self.accuracy:.1f} ± {100 * self.error:.1f}"
        harms = [f"{round(100 * harm, 1) + 0.0:.1f}" for harm in (*self.harm.values(), self.honest - self.accuracy)]
        return (self.tribe, self.model, self.weight, f"{100 * self.honest:.1f}", accuracy, tau, *harms)


TITLES = ("tribe", "model", "judge_weight", "honest", "accuracy", "tau", *(f"harm: {kind}" for kind in KINDS), "all")


def measure(tribe: Tribe, model: str, weight: str, seeds: int, duels: int) -> Line:
    """Plays one setting. Verdicts depend on the model only where judges weigh what their reputation says."""
    config = ReputationConfig.model_validate({"model": model, "judge_weight": weight})
    quick = config if weight == "reputation" else config.model_copy(update={"model": "uniform"})

    def accuracy(*kinds: str) -> float:
        return fmean(play(duels_of(tribe, seed, duels, kinds), quick).accuracy for seed in range(seeds))

    runs = [play(duels_of(tribe, seed, duels, KINDS), config) for seed in range(seeds)]
    honest = accuracy()
    accuracies = [run.accuracy for run in runs]
    return Line(
        tribe.name,
        model,
        weight,
        fmean(accuracies),
        stdev(accuracies) / math.sqrt(seeds) if seeds > 1 else math.nan,
        honest,
        {kind: honest - accuracy(kind) for kind in KINDS},
        fmean(run.correlation for run in runs),
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Reputation models and judge weightings on simulated tribes.")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--duels", type=int, default=500, help="of each run")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    lines = [
        measure(tribe, model, weight, arguments.seeds, arguments.duels)
        for tribe in TRIBES
        for model, weight in SETTINGS
    ]
    if arguments.markdown:
        rows = [TITLES, ("---",) * len(TITLES), *(line.cells() for line in lines)]
        print("\n".join("| " + " | ".join(row) + " |" for row in rows))
        return
    table = Table(*TITLES, title=f"{arguments.duels} duels, {arguments.seeds} seeds")
    for line in lines:
        table.add_row(*line.cells())
    Console().print(table)


if __name__ == "__main__":
    main()
