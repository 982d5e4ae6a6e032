"""`--dry-run`: what a run would ask, and what it would cost where prices are known."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from sparta_api.config.file import LoadedTribe
from sparta_api.config.tribe import Limits, TribeConfig
from sparta_api.duels.matchmaking import Matchup, plan
from sparta_api.duels.preferences import with_system
from sparta_api.endpoints.seats import usage_cost
from sparta_api.endpoints.wire import estimate_tokens
from sparta_api.judging.bench import Bench, Message
from sparta_api.runs.outcome import first_reputation
from sparta_api.runs.session import instruction_rows, read_source
from sparta_api.runs.training_plan import JobPlan, plan_jobs, usd
from sparta_api.show.progress import Usage
from sparta_api.show.terminal import count, counted, safe
from sparta_api.trainers.factory import make_trainers

ENCODING_OVERHEAD = 8
"""Tokens that a chat template adds to a message."""


@dataclass(slots=True)
class MemberPlan:
    """What one member would be asked over the whole run, its answers at their full length."""

    name: str
    answers: int = 0
    judgments: int = 0
    usage: Usage = field(default_factory=Usage)
    cost_usd: float | None = 0.0


@dataclass(slots=True)
class Plan:
    """A whole run."""

    iterations: int
    duels: int
    duplicates: int
    members: list[MemberPlan]
    jobs: list[JobPlan]
    limits: Limits = field(default_factory=Limits)

    @property
    def requests(self) -> int:
        """Requests when every one is answered at once."""
        return sum(member.answers + member.judgments for member in self.members)

    @property
    def total_usd(self) -> float | None:
        """Requests, training and deployments of the whole run; None where a part is not known."""
        costs = [*(member.cost_usd for member in self.members), *(job.cost_usd for job in self.jobs)]
        return None if None in costs else math.fsum(cost for cost in costs if cost is not None)

    @property
    def costs_money(self) -> bool:
        """Whether anything of it has a price, or may have one."""
        return any(m.cost_usd is None or m.cost_usd > 0 for m in self.members) or any(
            job.cost_usd is None or job.cost_usd > 0 for job in self.jobs
        )


async def forecast(loaded: LoadedTribe) -> Plan:
    """The plan of a run from its configuration and data; asks no endpoint anything.

    Raises ConfigError for unusable data.
    """
    config = loaded.resolved
    instructions = read_source(loaded)
    rows = {row["id"]: row["prompt"] for row in instruction_rows(instructions)}
    reputations = first_reputation(config).reputations
    members = {member.name: MemberPlan(member.name) for member in config.members}
    duels = 0
    for iteration in range(config.iterations):
        matchups = list(
            plan(
                config.seed,
                iteration,
                reputations,
                list(rows),
                [m.name for m in config.members if m.fights],
                [m.name for m in config.members if m.judges],
                config.matchmaking,
                config.instructions.per_iteration,
                config.judging.judges_per_duel,
            )
        )
        duels += len(matchups)
        _count(config, matchups, {key: rows[key] for key in {m.instruction for m in matchups}}, members)
    for member in config.members:
        known = member.price or member.server
        figures = members[member.name]
        figures.cost_usd = usage_cost(figures.usage, member.price) if member.price else 0.0 if known else None
    trainers = make_trainers(loaded)
    try:
        jobs = await plan_jobs(config, trainers, [message["content"] for row in rows.values() for message in row])
    finally:
        for trainer in trainers.values():
            await trainer.close()
    return Plan(config.iterations, duels, instructions.duplicates, list(members.values()), jobs, config.limits)


def _count(
    config: TribeConfig,
    matchups: list[Matchup],
    prompts: dict[str, list[dict[str, str]]],
    members: dict[str, MemberPlan],
) -> None:
    """Adds the requests and estimated tokens of some matchups to the members."""
    bench = Bench(config, 0)
    judged = Counter[str]()
    rubric = sum(len(m["content"]) for m in _empty_question(bench))
    responses = len(bench.shows(("a", "b"))[0])
    for matchup in matchups:
        question = prompts[matchup.instruction]
        for fighter in matchup.fighters:
            member = config.member(fighter)
            figures = members[fighter]
            figures.answers += 1
            text = with_system([dict(m) for m in question], member.system_prompt)
            figures.usage.prompt += sum(estimate_tokens(len(m["content"])) + ENCODING_OVERHEAD for m in text)
            figures.usage.completion += member.sampling.max_tokens
            shown = estimate_tokens(rubric + sum(len(m["content"]) for m in question))
            shown += member.sampling.max_tokens * responses
            for judge in matchup.judges:
                members[judge].judgments += config.judging.rounds
                members[judge].usage.prompt += (shown + ENCODING_OVERHEAD) * config.judging.rounds
                judged[judge] += config.judging.rounds
    for judge, times in judged.items():
        members[judge].usage.completion += times * config.judging.max_tokens


def _empty_question(bench: Bench) -> list[Message]:
    shown = bench.shows(("a", "b"))[0]
    return bench.messages([{"role": "user", "content": ""}], [""] * len(shown), 0, shown)


def show(plan: Plan, console: Console) -> None:
    """Prints a plan."""
    table = Table(box=None, pad_edge=False)
    for title in ("member", "answers", "judgments", "tokens in", "tokens out", "USD"):
        table.add_column(title, justify="left" if title == "member" else "right")
    for member in plan.members:
        usage = member.usage
        figures = (member.answers, member.judgments, usage.prompt, usage.completion)
        table.add_row(safe(member.name), *(count(figure) for figure in figures), usd(member.cost_usd))
    console.print(table)
    duplicates = f", {plan.duplicates} duplicate instructions left out" if plan.duplicates else ""
    console.print(
        f"{counted(plan.iterations, 'iteration')}, {plan.duels} duels, {plan.requests} requests{duplicates}; "
        "tokens are estimates, with answers at their full length"
    )
    for job in plan.jobs:
        console.print(safe(f"training of {job.member}: {job.sentence}"), soft_wrap=True)
    if plan.costs_money:
        console.print(safe(f"in all {usd(plan.total_usd)} USD{_beyond(plan)}"), soft_wrap=True)


def _beyond(plan: Plan) -> str:
    limit, total = plan.limits.max_cost_usd, plan.total_usd
    if limit is None or total is None:
        return ""
    return f", more than limits.max_cost_usd ({limit:g}): the run would stop there" if total > limit else ""
