"""The figures of a run while it runs: the engine writes them, the live view and the report read them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
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
    """One member's counts within one iteration. `requests` are HTTP attempts, failed ones included."""

    duels: int = 0
    wins: int = 0
    losses: int = 0
    ties: int = 0
    void: int = 0
    responses: int = 0
    judgments: int = 0
    abstained: int = 0
    failed: int = 0
    requests: int = 0
    usage: Usage = field(default_factory=Usage)
    cost_usd: float | None = 0.0
    """None where a price is not known."""

    def to_json(self) -> dict[str, Any]:
        """A plain mapping, for the index and for `status --json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of `to_json`."""
        return cls(**{**data, "usage": Usage(**data["usage"])})


@dataclass(slots=True)
class TrainingProgress:
    """One member's training as it is shown: state, 0..1 progress, loss, reward margin and accuracy."""

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
