"""What the held-out answers show: how many meet the verifiers at each stage, and whether the models still answer.

A stage is how many iterations the models have been trained for: 0 before the run, then 1, 2, ... The figures are read
from the run directory alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sparta_api.config.tribe import TribeConfig
from sparta_api.data.journal import read_lines
from sparta_api.data.rundir import RunDirectory
from sparta_api.errors import TrainingError
from sparta_api.runs.guards import Figures, broken, figures, wilson


@dataclass(frozen=True, slots=True)
class Stage:
    """The held-out answers of one member, or of all, at one stage."""

    met: int | None
    """How many got the best score of every verifier; None where no verifier scored any."""
    scored: int
    """How many every verifier has scored."""
    figures: Figures

    @property
    def share(self) -> float | None:
        """Of the scored answers, those that meet the verifiers."""
        return self.met / self.scored if self.met is not None else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the share, by Wilson."""
        return None if self.met is None else wilson(self.met, self.scored)

    def to_json(self) -> dict[str, Any]:
        """A plain mapping with stable keys."""
        interval = self.interval
        return {
            "met": self.met,
            "scored": self.scored,
            "share": self.share,
            "interval": interval and list(interval),
            **self.figures.to_json(),
        }


@dataclass(frozen=True, slots=True)
class Gain:
    """All stages so far. `tribe` and the members' lists hold the stages in order, from 0."""

    tribe: tuple[Stage, ...]
    members: dict[str, tuple[Stage, ...]]
    collapsed: tuple[dict[str, list[str]], ...]
    """Per stage the members that break a guard, with a clause for each guard."""

    def to_json(self) -> dict[str, Any]:
        """A plain mapping with stable keys."""
        stages = range(len(self.tribe))
        return {
            "stages": [
                {
                    "trained": stage,
                    "tribe": self.tribe[stage].to_json(),
                    "members": {name: found[stage].to_json() for name, found in self.members.items()},
                    "collapsed": self.collapsed[stage],
                }
                for stage in stages
            ]
        }


@dataclass(slots=True)
class _Answer:
    content: str
    scores: dict[str, float | None] | None = None
    likelihood: tuple[float, int] | None = None


def read_gain(run: RunDirectory, config: TribeConfig) -> Gain | None:
    """The held-out figures of a run; None before its first held-out answers are complete."""
    answers = _answers(run)
    names = [member.name for member in config.fighters]
    wanted = max((len(answers.get((0, name), {})) for name in names), default=0)
    stages = 0
    while wanted and all(len(answers.get((stages, name), {})) == wanted for name in names):
        stages += 1
    if not stages:
        return None
    best = config.judging.scale[1]
    members = {
        name: tuple(_stage(answers[stage, name].values(), config, best) for stage in range(stages)) for name in names
    }
    tribe = tuple(
        _stage([answer for name in names for answer in answers[stage, name].values()], config, best)
        for stage in range(stages)
    )
    guards = config.training.guards
    collapsed = tuple(
        {
            name: clauses
            for name, found in members.items()
            if (clauses := broken(found[0].figures, found[stage].figures, guards))
        }
        for stage in range(stages)
    )
    return Gain(tribe, members, collapsed)


def _answers(run: RunDirectory) -> dict[tuple[int, str], dict[str, _Answer]]:
    """By stage and member the answers by instruction."""
    found: dict[tuple[int, str], dict[str, _Answer]] = {}
    for row, _, _ in read_lines(run.heldout):
        found.setdefault((row["trained"], row["member"]), {})[row["instruction"]] = _Answer(row["content"])
    for row, _, _ in read_lines(run.heldout_scores):
        answer = found.get((row["trained"], row["member"]), {}).get(row["instruction"])
        if answer is not None:
            answer.scores = row["scores"]
            answer.likelihood = None if row["logprob"] is None else (row["logprob"], row["tokens"])
    return found


def _stage(answers: Iterable[_Answer], config: TribeConfig, best: int) -> Stage:
    answers = list(answers)
    scored = [scores for a in answers if (scores := _scores(a.scores, config.judging.verifiers)) is not None]
    met = sum(all(score >= best for score in scores) for scores in scored)
    likelihoods = [answer.likelihood for answer in answers if answer.likelihood is not None]
    return Stage(met if scored else None, len(scored), figures([answer.content for answer in answers], likelihoods))


def _scores(scores: Mapping[str, float | None] | None, verifiers: Mapping[str, object]) -> list[float] | None:
    """The scores of all verifiers; None where one has not scored, or there is none."""
    found = [scores.get(name) for name in verifiers] if scores else []
    known = [score for score in found if score is not None]
    return known if known and len(known) == len(found) else None


def collapse_sentences(gain: Gain) -> list[str]:
    """A clause for every member whose last held-out answers break a guard."""
    stage = len(gain.tribe) - 1
    return [
        f"the held-out answers of '{name}' have collapsed after iteration {stage}: {'; '.join(clauses)}"
        for name, clauses in gain.collapsed[stage].items()
    ]


def stop_at_collapse(run: RunDirectory, config: TribeConfig) -> None:
    """Raises TrainingError where the last held-out answers of a member break a guard."""
    gain = read_gain(run, config)
    found = collapse_sentences(gain) if gain else []
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise TrainingError(
            f"{found[0]}{more}; start again with fewer epochs, a lower learning_rate or more sft_weight, or go on with"
            " them: resume with --set training.stop_on_collapse=false"
        )
