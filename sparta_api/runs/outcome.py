"""Reading a run directory back into figures: for the report at the end and for `status`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparta_api.config.tribe import TribeConfig, TrlTrainer
from sparta_api.data.journal import read_lines
from sparta_api.data.rundir import IterationFiles, RunDirectory
from sparta_api.duels.standing import Standing
from sparta_api.ratings.reputation import Rating, Reputation, variant_multipliers
from sparta_api.ratings.warm_start import starting_reputations
from sparta_api.runs.bill import Bill, read_bill, read_job
from sparta_api.runs.gain import read_gain
from sparta_api.runs.models import Models
from sparta_api.show.progress import MemberTotals, TrainingProgress
from sparta_api.show.summary import IterationReport, MemberReport, RunReport, Sample

CHUNK = 1 << 20


def first_reputation(config: TribeConfig) -> Reputation:
    """The tribe's reputation before its first duel; a member's own `initial_reputation` wins over a warm start."""
    settings = config.reputation
    warm = starting_reputations(settings.warm_start, settings.floor) if isinstance(settings.warm_start, dict) else {}
    ratings = {
        m.name: Rating(m.initial_reputation or warm.get(m.name, settings.initial), settings.initial_deviation)
        for m in config.members
    }
    return Reputation(
        settings, ratings, tie_margin=config.preferences.min_margin, fixed_weights=config.verifier_weights
    )


def next_reputation(config: TribeConfig, ended: Reputation, history: list[dict[str, float]]) -> Reputation:
    """The reputation that the next iteration starts from; `history` holds those at the end of each so far."""
    return Reputation.from_json(
        config.reputation,
        ended.to_json(),
        variant_multipliers(config.reputation.variant, history),
        config.preferences.min_margin,
        config.verifier_weights,
    )


def standings(config: TribeConfig, run: RunDirectory) -> list[Standing]:
    """The standing of every iteration that was begun, read without changing a file."""
    found: list[Standing] = []
    reputation, history = first_reputation(config), []
    number = 0
    while run.iteration(number).matchups.exists():
        standing = Standing(config, run, run.iteration(number), reputation)
        standing.load(cut=False)
        found.append(standing)
        history.append(standing.reputation.reputations)
        reputation = next_reputation(config, standing.reputation, history)
        number += 1
    return found


def count_lines(path: Path) -> int:
    """How many lines a file has; 0 when it is not there."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(CHUNK), b""))


def report(run: RunDirectory, config: TribeConfig) -> RunReport:
    """The whole run's figures."""
    record = run.read_json(run.state)
    rounds = standings(config, run)
    history = tuple(_iteration(config, run, number, standing) for number, standing in enumerate(rounds))
    models = Models(run, config)
    bill = read_bill(run, config)
    members = tuple(_member(config, run, models, name, rounds, bill) for name in models.members)
    return RunReport(
        run=str(record["id"]),
        directory=str(run.root),
        finished=record["state"] == "done",
        iteration=max(0, len(rounds) - 1),
        iterations=config.iterations,
        phase=str(record.get("phase", "starting")),
        members=members,
        history=history,
        samples=samples(run),
        gain=read_gain(run, config),
        control=config.preferences.control,
        bill=bill,
        notices=tuple(record.get("notices", ())),
    )


def _iteration(config: TribeConfig, run: RunDirectory, number: int, standing: Standing) -> IterationReport:
    files = run.iteration(number)
    total = count_lines(files.matchups)
    void = dict(standing.tally.void)
    return IterationReport(
        index=number,
        total=total,
        judged=standing.folded - sum(void.values()),
        ties=sum(totals.ties for totals in standing.tally.totals.values()) // 2,
        void=void,
        owed=total - standing.folded,
        pairs=count_lines(files.preferences),
        members=tuple(
            _figures(config, member.name, standing.tally.totals[member.name], standing.before, standing.reputation)
            for member in config.members
        ),
        verifiers=standing.tally.verifiers,
    )


def _figures(
    config: TribeConfig, name: str, totals: MemberTotals, before: dict[str, float], after: Reputation
) -> MemberReport:
    rating = after.ratings[name]
    return MemberReport(
        name=name,
        roles=tuple(config.member(name).roles),
        totals=totals,
        reputation_before=before[name],
        reputation_after=rating.reputation,
        deviation=rating.deviation,
        floor_hits=totals.floor_hits,
        squared_changes=totals.squared_changes,
    )


def _member(
    config: TribeConfig, run: RunDirectory, models: Models, name: str, rounds: list[Standing], bill: Bill
) -> MemberReport:
    totals = MemberTotals()
    for standing in rounds:
        totals.add(standing.tally.totals[name])
    first = first_reputation(config)
    figures = _figures(config, name, totals, first.reputations, rounds[-1].reputation if rounds else first)
    entry = models.members[name]
    trainer = config.trainer_of(config.member(name))
    trained = entry.trained if entry.history else None
    section = config.trainers.get(trainer) if trainer else None
    return MemberReport(
        name=name,
        roles=figures.roles,
        totals=totals,
        reputation_before=figures.reputation_before,
        reputation_after=figures.reputation_after,
        deviation=figures.deviation,
        floor_hits=totals.floor_hits,
        squared_changes=totals.squared_changes,
        training_costs=bill.of(name),
        training=_training([run.iteration(n) for n in range(len(rounds))], name) if trainer else None,
        model=entry.model,
        adapter=trained.serve if trained and trained.kind == "adapter" else None,
        base_model=config.base_model_of(config.member(name), section) if section else None,
        lora_rank=section.lora.r if isinstance(section, TrlTrainer) else None,
    )


def _training(iterations: list[IterationFiles], name: str) -> TrainingProgress | None:
    """The member's last training that is recorded."""
    for files in reversed(iterations):
        record = read_job(files.job(name))
        if record:
            metrics: dict[str, Any] = record.get("metrics") or {}
            return TrainingProgress(
                state=str(record.get("status", "waiting")),
                progress=1.0 if record.get("status") == "succeeded" else None,
                loss=metrics.get("loss"),
                margin=metrics.get("rewards/margins"),
                accuracy=metrics.get("rewards/accuracies"),
                message=str(record.get("message") or record.get("reason") or ""),
            )
    return None


def samples(run: RunDirectory) -> tuple[Sample, ...]:
    """Held-out answers before the run and after its last training, per instruction and member."""
    answers: dict[tuple[str, str], dict[int, str]] = {}
    prompts: dict[str, str] = {}
    for row, _, _ in read_lines(run.heldout):
        answers.setdefault((row["instruction"], row["member"]), {})[row["trained"]] = row["content"]
        prompts[row["instruction"]] = row["prompt"]
    return tuple(
        Sample(prompts[instruction], member, stages[0], stages[max(stages)])
        for (instruction, member), stages in answers.items()
        if 0 in stages and max(stages) > 0
    )
