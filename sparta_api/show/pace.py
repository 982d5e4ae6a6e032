"""How fast a run goes and how long its phase will still take, from the figures in `Progress`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from sparta_api.show.progress import Progress
from sparta_api.trainers.protocol import JobState

RATE_WINDOW_S = 10.0
ENDED = frozenset(state.value for state in JobState if state.ended) | {"skipped"}
"""The states of a `TrainingProgress` after which nothing more comes."""


class Pace:
    """Speeds and the time left, from figures sampled at every tick."""

    def __init__(self, progress: Progress, clock: Callable[[], float]) -> None:
        self._progress = progress
        self._clock = clock
        self.started = self.phase_started = clock()
        self._phase_base = 0.0
        self._samples: deque[tuple[float, dict[str, int]]] = deque()

    def enter(self) -> None:
        """A phase begins: what was done before it says nothing about its speed."""
        self.phase_started = self._clock()
        self._phase_base = self._done()[0]
        self._samples.clear()

    def sample(self) -> None:
        """Notes the members' generated tokens at this moment."""
        now = self._clock()
        self._samples.append((now, {n: t.usage.completion for n, t in self._progress.totals.items()}))
        while now - self._samples[0][0] > RATE_WINDOW_S:
            self._samples.popleft()

    def elapsed(self) -> float:
        """Seconds since the view began."""
        return self._clock() - self.started

    def phase_elapsed(self) -> float:
        """Seconds since the phase began."""
        return self._clock() - self.phase_started

    def tokens_per_second(self, member: str) -> float:
        """Generated tokens per second over the last ten seconds."""
        if len(self._samples) < 2:
            return 0.0
        (first, before), (last, after) = self._samples[0], self._samples[-1]
        gained = after.get(member, 0) - before.get(member, 0)
        return max(gained, 0) / max(last - first, 1e-3)

    def seconds_left(self) -> float | None:
        """Of this phase, at its mean speed so far; None before anything is known."""
        done, expected = self._done()
        gained = done - self._phase_base
        if gained <= 0 or expected <= 0:
            return None
        return self.phase_elapsed() / gained * max(expected - done, 0.0)

    def _done(self) -> tuple[float, float]:
        progress = self._progress
        if progress.phase == "training":
            jobs = progress.training.values()
            return sum(1.0 if job.state in ENDED else job.progress or 0.0 for job in jobs), float(len(jobs))
        if progress.phase != "duels":
            return 0.0, 0.0
        if progress.answers_expected:
            answers = sum(t.responses + t.judgments for t in progress.totals.values())
            return float(answers), float(progress.answers_expected)
        return float(progress.duels_done), float(progress.duels_total)
