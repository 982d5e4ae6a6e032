"""DPO by OpenAI's fine-tuning protocol, over its SDK with the SDK's own retries off: Azure and compatible servers.

A job is recognised by its metadata (and by its suffix, where a server drops metadata). The next iteration
gives the previous tuned model as the model to tune, which is then also the DPO reference; the same id is what
an endpoint serves, at once or after the user's `deploy` command.
"""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Any, ClassVar

import openai

from sparta_api.errors import TrainingError
from sparta_api.trainers.config import OpenAITrainer as Settings
from sparta_api.trainers.faults import Pace, ProviderFault, asked, raw
from sparta_api.trainers.preflight import check_parent, read_key
from sparta_api.trainers.protocol import Capabilities, Estimate, JobState, TrainedModel, TrainingSpec
from sparta_api.trainers.remote import RemoteTrainer
from sparta_api.trainers.upload import Upload

KIND = "openai"
KEY = "sparta_key"
TIMEOUT_S = 600.0
SEEDS = 2**31
EVENTS = 20
CHECKPOINTS = 100
READY_FILE = "processed"
REFUSED_FILE = ("error", "deleted", "deleting")
LAST_NEW_JOB = date(2027, 1, 6)
"""OpenAI's own announced end of new fine-tuning jobs."""
OPENAI_HOST = "https://api.openai.com/"
NOT_FOUND = 404


class OpenAITrainer(RemoteTrainer):
    """A server that speaks OpenAI's fine-tuning protocol (`backend: openai`)."""

    backend: ClassVar[str] = "openai"
    capabilities: ClassVar[Capabilities] = Capabilities(
        parents=frozenset({KIND}),
        serves="at once",
        learning_rate="multiplier",
        lora_shape="none",
        minimum_pairs=10,
        found_by="metadata",
    )
    states: ClassVar[dict[str, JobState]] = {
        "validating_files": JobState.QUEUED,
        "queued": JobState.QUEUED,
        "paused": JobState.QUEUED,
        "running": JobState.RUNNING,
        "succeeded": JobState.SUCCEEDED,
        "failed": JobState.FAILED,
        "cancelled": JobState.CANCELLED,
    }

    def __init__(self, name: str, settings: Settings, pace: Pace | None = None) -> None:
        super().__init__(name, settings.base_url, settings.max_length, settings.max_hours, pace)
        self.settings = settings
        self._opened: openai.AsyncOpenAI | None = None

    @property
    def _client(self) -> openai.AsyncOpenAI:
        if self._opened is None:
            self._opened = openai.AsyncOpenAI(
                api_key=read_key(self.settings.api_key_env, self.name),
                base_url=self.settings.base_url,
                max_retries=0,
                timeout=TIMEOUT_S,
            )
        return self._opened

    async def close(self) -> None:
        """Closes the connections."""
        if self._opened is not None:
            await self._opened.close()
            self._opened = None

    @property
    def minimum_pairs(self) -> int:
        """The fewest pairs that the provider trains on."""
        return self.settings.minimum_pairs

    async def preflight(self, spec_base: str, parent: TrainedModel | None, member: str) -> list[str]:
        """Checks key, parent, and the announced ends of the model and of the service; returns warnings."""
        check_parent(self.name, self.backend, self.capabilities.parents, parent, member)
        model = parent.train if parent else spec_base
        found = await self._calmly(lambda: self._model(model), member)
        warnings = (
            [] if found else [f"member '{member}': {self.endpoint} does not list {model}; the job may be refused"]
        )
        end = _day((found or {}).get("shutdown_date"))
        if end is not None:
            problem = f"member '{member}': {self.endpoint} shuts {model} down on {end}"
            if end <= _today():
                raise TrainingError(f"{problem}; choose another base_model for trainers.{self.name}")
            warnings.append(f"{problem}, and what is tuned from it with it")
        if self.endpoint.startswith(OPENAI_HOST):
            if _today() > LAST_NEW_JOB:
                raise TrainingError(
                    f"member '{member}': OpenAI takes no new fine-tuning jobs since {LAST_NEW_JOB}; use another trainer"
                )
            warnings.append(f"member '{member}': OpenAI takes new fine-tuning jobs until {LAST_NEW_JOB} only")
        return warnings

    async def _model(self, model: str) -> dict[str, Any] | None:
        try:
            return raw(await asked(openai, lambda: self._client.models.retrieve(model)))
        except ProviderFault as fault:
            if fault.status != NOT_FOUND:
                raise
            return None

    async def forecast(self, base_model: str, pairs: int, tokens: int) -> Estimate:
        """The cost by `price_per_million_tokens`; the protocol has no price call."""
        return self._by_price(tokens, f"{pairs} pairs")

    def _by_price(self, tokens: int, detail: str) -> Estimate:
        epochs = 1 if self.settings.epochs == "auto" else self.settings.epochs
        price = self.settings.price_per_million_tokens
        usd = None if price is None else tokens * epochs / 1e6 * price
        deploy = self.settings.deploy
        if deploy is None:
            return Estimate(usd, tokens * epochs, 0.0, detail)
        if deploy.price_per_hour is None:
            missing = f"give trainers.{self.name}.deploy.price_per_hour"
            return Estimate(usd, tokens * epochs, None, detail, missing)
        hourly, hours = deploy.price_per_hour, deploy.hours
        return Estimate(usd, tokens * epochs, hourly * hours, detail, f"{hours:g} h at {hourly:.2f} USD")

    async def _priced(self, spec: TrainingSpec, upload: Upload, file: str) -> Estimate:
        return self._by_price(upload.tokens, upload.explain())

    async def _jobs(self, spec: TrainingSpec) -> list[dict[str, Any]]:
        """Jobs with the key, whether the server filters by metadata, ignores the filter, or drops metadata."""

        async def every(**filters: Any) -> list[dict[str, Any]]:
            listed = self._client.fine_tuning.jobs.list(limit=100, **filters)
            return [job async for page in (await listed).iter_pages() for job in map(raw, page.data)]

        found = [job for job in await asked(openai, lambda: every(metadata={KEY: spec.key})) if _carries(job, spec.key)]
        return found or [job for job in await asked(openai, every) if _carries(job, spec.key)]

    async def _create(self, spec: TrainingSpec, file: str) -> dict[str, Any]:
        wanted = self.settings
        hyperparameters: Any = {
            "beta": wanted.beta,
            "n_epochs": wanted.epochs,
            "batch_size": wanted.batch_size,
            "learning_rate_multiplier": wanted.learning_rate_multiplier,
        }
        return raw(
            await asked(
                openai,
                lambda: self._client.fine_tuning.jobs.create(
                    model=spec.parent.train if spec.parent else spec.base_model,
                    training_file=file,
                    method={"type": "dpo", "dpo": {"hyperparameters": hyperparameters}},
                    suffix=spec.key,
                    seed=spec.seed % SEEDS,
                    metadata={KEY: spec.key, "sparta_run": spec.run_id[:512], "sparta_iteration": str(spec.iteration)},
                ),
            )
        )

    async def _retrieve(self, job: str) -> dict[str, Any]:
        return raw(await asked(openai, lambda: self._client.fine_tuning.jobs.retrieve(job)))

    async def _cancel(self, job: str) -> None:
        await asked(openai, lambda: self._client.fine_tuning.jobs.cancel(job))

    async def _find_file(self, upload: Upload) -> str | None:
        """The provider does not recognise content; the name holds the file's hash."""

        async def every() -> list[dict[str, Any]]:
            return [raw(file) async for file in self._client.files.list(purpose="fine-tune")]

        size = upload.path.stat().st_size
        for file in await asked(openai, every):
            same = file.get("filename") == upload.path.name and file.get("bytes") == size
            if same and file.get("status") not in REFUSED_FILE:
                return str(file["id"])
        return None

    async def _send_file(self, upload: Upload) -> str:
        sent = await asked(openai, lambda: self._client.files.create(file=upload.path, purpose="fine-tune"))
        return str(raw(sent)["id"])

    async def _file_ready(self, file: str, upload: Upload) -> bool:
        answer = raw(await asked(openai, lambda: self._client.files.retrieve(file)))
        status = answer.get("status")
        if status in REFUSED_FILE:
            raise TrainingError(
                f"{self._where()} refused the file {file} ({upload.path}) as {status}: "
                f"{answer.get('status_details') or 'no reason given'}; no job was created"
            )
        return status in (READY_FILE, None)

    async def _kept(self, job: str) -> dict[str, Any]:
        """The checkpoints that the provider has kept of a job, each a model that could be asked as well."""
        page = await asked(openai, lambda: self._client.fine_tuning.jobs.checkpoints.list(job, limit=CHECKPOINTS))
        rows = [
            {"step": one.get("step_number"), "model": one.get("fine_tuned_model_checkpoint")}
            for one in map(raw, page.data)
        ]
        return {"checkpoints": sorted(rows, key=lambda row: row["step"] or 0) or None}

    def _trained(self, job: dict[str, Any]) -> TrainedModel | None:
        model = job.get("fine_tuned_model")
        return TrainedModel(KIND, str(model), str(model)) if model else None

    def _explain(self, job: dict[str, Any]) -> str:
        error = job.get("error") or {}
        parts = (error.get("code"), error.get("message"))
        return " ".join(": ".join(str(part) for part in parts if part).split())

    async def _metrics(self, job: str) -> dict[str, float]:
        page = await asked(openai, lambda: self._client.fine_tuning.jobs.list_events(job, limit=EVENTS))
        for event in map(raw, page.data):
            if event.get("type") == "metrics" and isinstance(event.get("data"), dict):
                figures = {key.removeprefix("train_"): value for key, value in event["data"].items()}
                return {key: float(value) for key, value in figures.items() if isinstance(value, int | float)}
        return {}

    def url(self, job: str) -> str:
        """The job's address in the provider's API."""
        return f"{self.endpoint.rstrip('/')}/fine_tuning/jobs/{job}"


def _carries(job: dict[str, Any], key: str) -> bool:
    return (job.get("metadata") or {}).get(KEY) == key or job.get("user_provided_suffix") == key


def _today() -> date:
    return datetime.now(UTC).date()


def _day(value: object) -> date | None:
    """The day of an ISO date or time, or of a Unix time; None for anything else."""
    try:
        if isinstance(value, int | float):
            return datetime.fromtimestamp(value, UTC).date()
        return date.fromisoformat(str(value)[:10])
    except ValueError:
        return None
