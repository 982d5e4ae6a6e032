"""What a run's training would cost, before there are pairs: for `--dry-run` and `check`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparta_api.config.tribe import TribeConfig
from sparta_api.endpoints.wire import estimate_tokens
from sparta_api.trainers.protocol import Estimate, Priced, Trainer


@dataclass(frozen=True, slots=True)
class JobPlan:
    """One member's training jobs: one in each iteration. `estimate` is of one; None where it trains on this machine."""

    member: str
    trainer: str
    jobs: int
    estimate: Estimate | None

    @property
    def cost_usd(self) -> float | None:
        """USD of all of them and of the deployments of their models; None where a part is not known."""
        if self.estimate is None:
            return 0.0
        total = self.estimate.total_usd
        return None if total is None else total * self.jobs

    @property
    def sentence(self) -> str:
        """Such as '2 jobs with together, 0.10 USD each (6 pairs), its deployment 1.75 USD an iteration (0.5 h at 3.50
        USD), 3.70 USD in all'."""
        what = f"{self.jobs} {'job' if self.jobs == 1 else 'jobs'} with {self.trainer}"
        if self.estimate is None:
            return f"{what}, on this machine"
        known = self.estimate
        parts = [what, f"{usd(known.usd)} USD each" + (f" ({known.detail})" if known.detail else "")]
        if known.deployment:
            parts.append(f"its deployment {usd(known.deployment_usd)} USD an iteration ({known.deployment})")
        return ", ".join([*parts, f"{usd(self.cost_usd)} USD in all"])


def usd(cost: float | None) -> str:
    """An amount with as many digits as it needs."""
    return "unknown" if cost is None else f"{cost:.4f}" if 0 < cost < 1 else f"{cost:.2f}"


async def plan_jobs(config: TribeConfig, trainers: Mapping[str, Trainer], instructions: Sequence[str]) -> list[JobPlan]:
    """The training of every learning member, when each duel gives a pair and answers have their full length.

    `instructions` are the texts of all messages; a service that has a price list may be asked for it.
    """
    pairs = config.instructions.per_iteration or max(1, len(instructions))
    answer = max(member.sampling.max_tokens for member in config.fighters)
    prompt = sum(map(estimate_tokens, map(len, instructions))) // max(1, len(instructions))
    jobs = []
    for member in config.members:
        name = config.trainer_of(member)
        if name:
            tokens = pairs * 2 * (answer + prompt + estimate_tokens(len(member.system_prompt or "")))
            base = config.base_model_of(member, config.trainers[name])
            jobs.append(JobPlan(member.name, name, config.iterations, await _ask(trainers[name], base, pairs, tokens)))
    return jobs


async def _ask(trainer: Trainer, base_model: str, pairs: int, tokens: int) -> Estimate | None:
    return await trainer.forecast(base_model, pairs, tokens) if isinstance(trainer, Priced) else None
