"""The figures of a run while it runs: the engine writes them, the live view and the report read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self


@dataclass(slots=True)
class Usage:
    """Tokens that an endpoint counted, summed over attempts. Reasoning tokens are part of `completion`."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0

    def add(self, other: Usage) -> None:
        """Adds another usage to this one."""
        self.prompt += other.prompt
        self.cached += other.cached
        self.completion += other.completion


@dataclass(slots=True)
class MemberTotals:
    """One member's counts within one iteration. `requests` are HTTP attempts, failed ones included;
    `duels` are those it fought, void ones included; `judged` those it gave a verdict on and `abstained`
    those it was asked about and gave none; `judgments` are its journaled answers as a judge."""

    duels: int = 0
    wins: int = 0
    losses: int = 0
    ties: int = 0
    void: int = 0
    responses: int = 0
    judgments: int = 0
    judged: int = 0
    abstained: int = 0
    flips: int = 0
    """pairwise: duels in which its two orders named different winners."""
    spared: int = 0
    """Questions that it was not asked, because the other judges had decided the duel."""
    failed: int = 0
    requests: int = 0
    usage: Usage = field(default_factory=Usage)
    cost_usd: float | None = 0.0
    """None where a price is not known."""
    floor_hits: int = 0
    """Duels after which the reputation lay on the floor."""
    squared_changes: float = 0.0
    """Sum over the duels of the squared change of reputation."""

    def add(self, other: MemberTotals) -> None:
        """Adds another iteration's counts to these."""
        for count in fields(self):
            mine, theirs = getattr(self, count.name), getattr(other, count.name)
            if count.name == "usage":
                self.usage.add(other.usage)
            elif mine is None or theirs is None:
                setattr(self, count.name, None)
            else:
                setattr(self, count.name, mine + theirs)

    def to_json(self) -> dict[str, Any]:
        """A plain mapping, for the index and for `status --json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of `to_json`."""
        return cls(**{**data, "usage": Usage(**data["usage"])})


@dataclass(slots=True)
class TrainingProgress:
    """One member's training as it is shown: state, 0..1 progress, loss, reward margin and accuracy.

    `state` is "waiting", "skipped" (no pairs, or no trainer) or a `JobState`.
    """

    state: str = "waiting"
    progress: float | None = None
    loss: float | None = None
    margin: float | None = None
    accuracy: float | None = None
    message: str = ""


@dataclass(slots=True)
class Progress:
    """Everything the live view shows, at this moment."""

    run: str
    iterations: int
    iteration: int = 0
    phase: str = "starting"
    """starting, serving, duels, preferences, training, done."""
    duels_total: int = 0
    duels_done: int = 0
    duels_void: int = 0
    owed: int = 0
    totals: dict[str, MemberTotals] = field(default_factory=dict)
    in_flight: dict[str, int] = field(default_factory=dict)
    reputation: dict[str, float] = field(default_factory=dict)
    reputation_before: dict[str, float] = field(default_factory=dict)
    training: dict[str, TrainingProgress] = field(default_factory=dict)
    spent_usd: float | None = 0.0
    requests: int = 0
    tokens: int = 0
    notices: list[str] = field(default_factory=list)
    """Warnings, oldest first; each is shown once."""
    roles: dict[str, tuple[str, ...]] = field(default_factory=dict)
    answers_expected: int = 0
    """Responses and judgments of the whole iteration, for the time left; 0 while unknown."""
    watchers: list[Callable[[], None]] = field(default_factory=list, repr=False)
    """Called around every change of phase, so that no short phase goes by unseen."""

    def enter(self, phase: str) -> None:
        """Changes the phase; watchers see the last figures of the old one first."""
        self._tell()
        self.phase = phase
        self._tell()

    def begin_iteration(self, iteration: int) -> None:
        """Starts the figures of an iteration (from 0) anew; reputations become those before it."""
        self._tell()
        self.iteration = iteration
        self.phase = "starting"
        self.duels_total = self.duels_done = self.duels_void = self.owed = self.answers_expected = 0
        self.totals = {name: MemberTotals() for name in self.totals}
        self.training = {}
        self.reputation_before = dict(self.reputation)

    def _tell(self) -> None:
        for watcher in self.watchers:
            watcher()
