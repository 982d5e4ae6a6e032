"""The training stage of an iteration: one job per trainable member, side by side as far as back ends allow.

A job that was started before is found again and only waited for; one that fails does not stop the others.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparta_api.config.tribe import Member
from sparta_api.data.rundir import IterationFiles
from sparta_api.endpoints.budget import Budget
from sparta_api.errors import LimitReached, SpartaError, TrainingError
from sparta_api.runs.bill import job_costs, read_job
from sparta_api.runs.models import Models
from sparta_api.runs.session import Session
from sparta_api.show.progress import Progress, TrainingProgress
from sparta_api.trainers.protocol import JobState, Priced, TrainedModel, Trainer, TrainingSpec

POLL_S = 0.5
SEED_BITS = 31


def training_seed(seed: int, iteration: int, member: str) -> int:
    """A seed of its own for every job, the same whenever it is asked for."""
    digest = hashlib.sha256(f"{seed}/{iteration}/{member}/training".encode()).digest()
    return int.from_bytes(digest[:8]) % (1 << SEED_BITS)


class TrainingStage:
    """Trains all trainable members on the preferences of one iteration."""

    def __init__(
        self, session: Session, models: Models, trainers: Mapping[str, Trainer], progress: Progress, budget: Budget
    ) -> None:
        self._session = session
        self._models = models
        self._trainers = trainers
        self._progress = progress
        self._budget = budget
        self._slots = {name: asyncio.Semaphore(trainer.slots) for name, trainer in trainers.items()}

    async def train(self, files: IterationFiles, pairs: int) -> dict[str, TrainedModel | None]:
        """The new model of every trainable member; None where there was nothing to learn from.

        Raises TrainingError for the members that failed, after all others have ended.
        """
        config = self._session.config
        learners = [member for member in config.members if config.trainer_of(member)]
        self._progress.training = {member.name: TrainingProgress() for member in learners}
        jobs = [asyncio.create_task(self._train(files, member, pairs)) for member in learners]
        try:
            results = await asyncio.gather(*jobs, return_exceptions=True)
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
        failed = [result for result in results if isinstance(result, BaseException)]
        for error in failed:
            if not isinstance(error, SpartaError):
                raise error
        if failed:
            sentences = dict.fromkeys(str(error) for error in failed)
            limited = all(isinstance(error, LimitReached) for error in failed)
            raise (LimitReached if limited else TrainingError)("\n".join(sentences)) from failed[0]
        return {
            member.name: result
            for member, result in zip(learners, results, strict=True)
            if not isinstance(result, BaseException)
        }

    async def _train(self, files: IterationFiles, member: Member, pairs: int) -> TrainedModel | None:
        path = files.job(member.name)
        record = read_job(path)
        shown = self._progress.training[member.name]
        if record.get("status") == "succeeded" and "result" in record:
            _show(shown, "succeeded", record.get("metrics", {}), 1.0)
            return TrainedModel(**record["result"])
        if pairs == 0:
            shown.state = "skipped"
            shown.message = "no preference pairs in this iteration; the model stays"
            self._session.run.write_json(path, {"status": "skipped", "reason": "no preference pairs"})
            return None
        trainer = self._trainers[str(self._session.config.trainer_of(member))]
        spec = self.spec(files, member, pairs)
        async with self._slots[trainer.name]:
            return await self._job(trainer, spec, path, shown)

    def spec(self, files: IterationFiles, member: Member, pairs: int) -> TrainingSpec:
        """What the member's job of this iteration is made of."""
        config = self._session.config
        trainer = config.trainers[str(config.trainer_of(member))]
        return TrainingSpec(
            run_id=self._session.id,
            iteration=files.number,
            member=member.name,
            preferences=files.preferences,
            pairs=pairs,
            system_prompt=member.system_prompt,
            fold_system=member.system_role == "fold",
            base_model=config.base_model_of(member, trainer),
            parent=self._models.trained(member.name),
            directory=files.training(member.name),
            seed=training_seed(config.seed, files.number, member.name),
        )

    async def _start(self, trainer: Trainer, spec: TrainingSpec, path: Path) -> str:
        """The id of the member's job: an existing one, else a new one that the limits allow."""
        counted = job_costs(read_job(path)).total
        job = await trainer.find(spec)
        found = job_costs(read_job(path)).total
        if job is not None:
            self._budget.cost += found - counted
            return job
        if isinstance(trainer, Priced):
            await self._afford(trainer, spec, path)
        return await trainer.submit(spec)

    async def _afford(self, trainer: Priced, spec: TrainingSpec, path: Path) -> None:
        """Counts a job's estimate; LimitReached when it would pass the limit, or is not known where there is one.

        A job that only goes on, as its record says, was counted when it was first started.
        """
        estimate = await trainer.estimate(spec)
        record = read_job(path)
        if estimate.total_usd is None and self._session.config.limits.max_cost_usd is not None:
            missing = "; ".join(text for text in (estimate.detail, estimate.deployment) if text)
            raise LimitReached(
                f"member '{spec.member}': what its job costs is not known ({missing}), so limits.max_cost_usd cannot "
                "hold it and it was not started; give its price, or set the limit to null, with --set, then resume"
            )
        self._budget.spend(estimate.known_usd - (record.get("cost_usd", 0.0) if record.get("job") else 0.0))

    async def _job(self, trainer: Trainer, spec: TrainingSpec, path: Path, shown: TrainingProgress) -> TrainedModel:
        job = await self._start(trainer, spec, path)
        if not read_job(path).get("job"):
            backend = self._session.config.trainers[trainer.name].backend
            self._session.run.write_json(
                path, {"backend": backend, "job": job, "status": "running", "base": spec.base_model, "key": spec.key}
            )
        status = await trainer.poll(job)
        while not status.state.ended:
            _show(shown, status.state.value, status.metrics, status.progress)
            await asyncio.sleep(POLL_S)
            status = await trainer.poll(job)
        _show(shown, status.state.value, status.metrics, status.progress)
        record = {**read_job(path), **trainer.describe(job), "job": job, "status": status.state.value}
        record["metrics"] = status.metrics
        if status.state is not JobState.SUCCEEDED:
            shown.message = status.message
            self._session.run.write_json(path, record)
            raise TrainingError(status.message or f"member '{spec.member}': job {job} {status.state.value}")
        result = await trainer.result(job)
        record["result"] = {"kind": result.kind, "train": result.train, "serve": result.serve}
        self._session.run.write_json(path, record)
        self._tell(spec.member, record)
        return result

    def _tell(self, member: str, record: Mapping[str, Any]) -> None:
        """Shows what a job's record warns of, and the pairs that it did without."""
        texts = list(record.get("warnings", []))
        if dropped := {reason: number for reason, number in (record.get("dropped") or {}).items() if number}:
            gone = ", ".join(f"{number} {reason}" for reason, number in dropped.items())
            texts.append(f"trained on {record['pairs']} pairs, {sum(dropped.values())} were left out ({gone})")
        self._progress.notices += [f"member '{member}': {text}" for text in texts]


def _show(shown: TrainingProgress, state: str, metrics: Mapping[str, float], progress: float | None) -> None:
    shown.state = state
    shown.progress = progress
    shown.loss = metrics.get("loss", shown.loss)
    shown.margin = metrics.get("rewards/margins", shown.margin)
    shown.accuracy = metrics.get("rewards/accuracies", shown.accuracy)
