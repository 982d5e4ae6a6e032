"""DPO by Together's fine-tuning service, over its SDK with the SDK's own retries off.

A job is recognised by its suffix, which is the spec's key. The next iteration continues the previous job
(`from_checkpoint`), whose result is then also the DPO reference. The handle to train on is the job's id, the
handle to serve is the model object (ml_...), which needs a deployment (`together_deploy`).
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import together

from sparta_api.errors import TrainingError
from sparta_api.trainers.config import TogetherTrainer as Settings
from sparta_api.trainers.faults import Pace, ProviderFault, asked, raw
from sparta_api.trainers.preflight import check_parent
from sparta_api.trainers.protocol import Capabilities, Estimate, JobState, TrainedModel, TrainingSpec
from sparta_api.trainers.remote import RemoteTrainer
from sparta_api.trainers.together_client import TogetherPrices, api_root, make_client
from sparta_api.trainers.upload import Upload

KIND = "together"
SEEDS = 2**31
PENDING_FILE = (None, "PENDING")
CHECKED_FILE = "COMPLETED"
REFUSED_FILE = ("FAILED", "INVALID_FORMAT")


class TogetherTrainer(RemoteTrainer):
    """The fine-tuning service of Together (`backend: together`)."""

    backend: ClassVar[str] = "together"
    capabilities: ClassVar[Capabilities] = Capabilities(
        parents=frozenset({KIND}),
        serves="deployment",
        loss_extras=("rpo_alpha", "simpo_gamma", "length_normalized"),
        estimates=True,
        found_by="suffix",
    )
    states: ClassVar[dict[str, JobState]] = {
        "pending": JobState.QUEUED,
        "queued": JobState.QUEUED,
        "running": JobState.RUNNING,
        "compressing": JobState.RUNNING,
        "uploading": JobState.RUNNING,
        "cancel_requested": JobState.RUNNING,
        "completed": JobState.SUCCEEDED,
        "cancelled": JobState.CANCELLED,
        "error": JobState.FAILED,
        "user_error": JobState.FAILED,
    }

    def __init__(self, name: str, settings: Settings, pace: Pace | None = None) -> None:
        super().__init__(name, settings.base_url, settings.max_length, settings.max_hours, pace)
        self.settings = settings
        self._opened: together.AsyncTogether | None = None
        self._deployments = TogetherPrices(name, settings)
        self._limits: dict[str, Any] = {}
        self._nudged: set[str] = set()

    @property
    def _client(self) -> together.AsyncTogether:
        if self._opened is None:
            self._opened = make_client(self.settings, self.name)
        return self._opened

    async def close(self) -> None:
        """Closes the connections."""
        if self._opened is not None:
            await self._opened.close()
            self._opened = None

    async def preflight(self, spec_base: str, parent: TrainedModel | None, member: str) -> list[str]:
        """Checks key, parent, and the service's limits for the model; returns warnings."""
        check_parent(self.name, self.backend, self.capabilities.parents, parent, member)
        limits = await self._calmly(lambda: self._model_limits(spec_base), member)
        problem = self._beyond(raw(limits))
        if parent is not None:
            job = await self._calmly(lambda: self._retrieve(parent.train), member)
            problem = problem or self._other_shape(job)
        if problem:
            raise TrainingError(f"member '{member}': {self._where()} cannot train {spec_base}: {problem}")
        return [
            f"trainer '{self.name}': models that are tuned at {self.endpoint} answer at {self.settings.answers_at}, "
            "each on a deployment that is billed while it is up"
        ]

    def _beyond(self, limits: dict[str, Any]) -> str:
        """The first setting that the service's limits for the model do not allow, or ""."""
        wanted, lora = self.settings, limits.get("lora_training") or {}
        batch = 0 if wanted.batch_size == "max" else wanted.batch_size
        bounds = (
            ("learning_rate", wanted.learning_rate, limits.get("min_learning_rate"), limits.get("max_learning_rate")),
            ("epochs", wanted.epochs, 1, limits.get("max_num_epochs")),
            ("lora.r", wanted.lora.r, 1, lora.get("max_rank")),
            ("batch_size", batch, lora.get("min_batch_size") if batch else None, lora.get("max_batch_size_dpo")),
            (
                "max_length",
                wanted.max_length,
                limits.get("min_max_seq_length"),
                limits.get("max_seq_length_dpo"),
            ),
        )
        for key, value, low, high in bounds:
            if value is not None and ((low is not None and value < low) or (high is not None and value > high)):
                return f"{key} {value:g} is outside {low} to {high}; change it under trainers.{self.name}"
        return ""

    def _other_shape(self, parent: dict[str, Any]) -> str:
        """Why the parent's adapter is not of the configured shape, or ""."""
        rank = (parent.get("training_type") or {}).get("lora_r")
        if rank is None or int(rank) == self.settings.lora.r:
            return ""
        return f"the previous job {parent['id']} made an adapter of rank {rank}, but lora.r is {self.settings.lora.r}"

    async def forecast(self, base_model: str, pairs: int, tokens: int) -> Estimate:
        """The cost by `price_per_million_tokens` and the deployment's hours: the service prices only real files."""
        price = self.settings.price_per_million_tokens
        usd = None if price is None else tokens * self.settings.epochs / 1e6 * price
        return await self._with_deployment(usd, tokens * self.settings.epochs, f"{pairs} pairs")

    async def _with_deployment(self, usd: float | None, tokens: int, detail: str) -> Estimate:
        return Estimate(usd, tokens, await self._deployments.price(), detail, await self._deployments.explain())

    async def _model_limits(self, model: str) -> Any:
        if model not in self._limits:
            call = self._client.fine_tuning.model_limits
            self._limits[model] = await asked(together, lambda: call(model_name=model))
        return self._limits[model]

    async def _jobs(self, spec: TrainingSpec) -> list[dict[str, Any]]:
        listed = raw(await asked(together, self._client.fine_tuning.list))
        return [
            job
            for job in listed.get("data") or []
            if job.get("suffix") == spec.key or spec.key in str(job.get("model_output_name"))
        ]

    async def _create(self, spec: TrainingSpec, file: str) -> dict[str, Any]:
        wanted = self.settings
        source, limited = self._source(spec), spec.parent.train if spec.parent else spec.base_model
        limits = await self._model_limits(limited)
        try:
            created = await asked(
                together,
                lambda: self._client.fine_tuning.create(
                    training_file=file,
                    training_method="dpo",
                    n_epochs=wanted.epochs,
                    batch_size=wanted.batch_size,
                    gradient_accumulation_steps=wanted.gradient_accumulation,
                    learning_rate=wanted.learning_rate,
                    warmup_ratio=wanted.warmup_ratio,
                    weight_decay=wanted.weight_decay,
                    max_seq_length=wanted.max_length,
                    suffix=spec.key,
                    random_seed=spec.seed % SEEDS,
                    dpo_beta=wanted.beta,
                    dpo_normalize_logratios_by_length=wanted.length_normalized,
                    rpo_alpha=wanted.rpo_alpha,
                    simpo_gamma=wanted.simpo_gamma,
                    model_limits=limits,
                    **source,
                    **self._shape(spec),
                ),
            )
        except ValueError as error:
            raise ProviderFault(str(error)) from error
        return raw(created)

    def _source(self, spec: TrainingSpec) -> dict[str, Any]:
        """Where the job starts: the model for the first, the previous job for every other."""
        return {"from_checkpoint": spec.parent.train} if spec.parent else {"model": spec.base_model}

    def _shape(self, spec: TrainingSpec) -> dict[str, Any]:
        """The adapter's shape; a continued job inherits its parent's."""
        if spec.parent:
            return {"lora": None}
        lora = self.settings.lora
        modules = lora.target_modules if isinstance(lora.target_modules, str) else ",".join(lora.target_modules)
        return {
            "lora": True,
            "lora_r": lora.r,
            "lora_alpha": int(lora.alpha),
            "lora_dropout": lora.dropout,
            "lora_trainable_modules": modules,
        }

    async def _priced(self, spec: TrainingSpec, upload: Upload, file: str) -> Estimate:
        wanted = self.settings
        method = {
            "method": "dpo",
            "dpo_beta": wanted.beta,
            "dpo_normalize_logratios_by_length": wanted.length_normalized or wanted.simpo_gamma is not None,
            "dpo_reference_free": wanted.simpo_gamma is not None,
            "rpo_alpha": wanted.rpo_alpha or 0,
            "simpo_gamma": wanted.simpo_gamma or 0,
        }
        shape = {key: value for key, value in self._shape(spec).items() if key != "lora"}
        call = self._client.fine_tuning.estimate_price
        answer = raw(
            await self._calmly(
                lambda: asked(
                    together,
                    lambda: call(
                        training_file=file,
                        n_epochs=wanted.epochs,
                        n_evals=0,
                        training_method=cast(Any, method),
                        training_type=cast(Any, {"type": "Lora", **shape}) if shape else None,
                        **self._source(spec),
                    ),
                ),
                spec.member,
            )
        )
        if answer.get("allowed_to_proceed") is False:
            raise TrainingError(
                f"member '{spec.member}': {self._where()} would not allow the job: its price is "
                f"{answer.get('estimated_total_price')} USD and the account's limit {answer.get('user_limit')} USD; "
                "nothing was started: raise the limit there, then resume"
            )
        tokens = answer.get("estimated_train_token_count") or upload.tokens * wanted.epochs
        usd = answer.get("estimated_total_price")
        detail = upload.explain()
        if usd is None and wanted.price_per_million_tokens is not None:
            usd = tokens / 1e6 * wanted.price_per_million_tokens
        if answer.get("estimation_available") is False:
            detail += f", no price from the service ({answer.get('unavailable_reason')})"
        return await self._with_deployment(usd, int(tokens), detail)

    async def _retrieve(self, job: str) -> dict[str, Any]:
        return raw(await asked(together, lambda: self._client.fine_tuning.retrieve(job)))

    async def _cancel(self, job: str) -> None:
        await asked(together, lambda: self._client.fine_tuning.cancel(job))

    async def _find_file(self, upload: Upload) -> str | None:
        return None

    async def _send_file(self, upload: Upload) -> str:
        """The service recognises a file that it has by its hash."""
        try:
            sent = await asked(together, lambda: self._client.files.upload(upload.path, purpose="fine-tune"))
        except (ValueError, together.FileTypeError) as error:
            raise ProviderFault(f"{upload.path}: {error}") from error
        return str(raw(sent)["id"])

    async def _file_ready(self, file: str, upload: Upload) -> bool:
        answer = raw(await asked(together, lambda: self._client.files.retrieve(file)))
        status, report = answer.get("processing_status"), answer.get("validation_report") or {}
        if status in REFUSED_FILE:
            raise TrainingError(
                f"{self._where()} refused the file {file} ({upload.path}) as {status}: "
                f"{report.get('error') or report or 'no reason given'}; no job was created"
            )
        if status in PENDING_FILE and file not in self._nudged:
            self._nudged.add(file)
            await asked(together, lambda: self._client.post(f"/v1/files/{file}/preprocess", cast_to=object))
        lines = report.get("nlines")
        if status == CHECKED_FILE and lines not in (None, upload.pairs):
            raise TrainingError(
                f"{self._where()} counts {lines} lines in the file {file} ({upload.path}), which has {upload.pairs}; "
                "no job was created"
            )
        return bool(status == CHECKED_FILE)

    def _trained(self, job: dict[str, Any]) -> TrainedModel | None:
        serve = job.get("model_object_id") or job.get("adapter_object_id") or job.get("model_output_name")
        return TrainedModel(KIND, str(job["id"]), str(serve)) if serve else None

    def _explain(self, job: dict[str, Any]) -> str:
        events = job.get("events") or []
        return " ".join(str(events[-1].get("message", "")).split()) if events else ""

    def _figures(self, job: dict[str, Any]) -> tuple[float | None, dict[str, float]]:
        steps = [
            event for event in job.get("events") or [] if event.get("total_steps") and event.get("step") is not None
        ]
        return (min(1.0, steps[-1]["step"] / steps[-1]["total_steps"]), {}) if steps else (None, {})

    async def _metrics(self, job: str) -> dict[str, float]:
        answer = raw(await asked(together, lambda: self._client.fine_tuning.list_metrics(job)))
        rows: list[dict[str, float]] = answer.get("metrics") or []
        return {key.removeprefix("train/"): value for row in rows for key, value in row.items()}

    def url(self, job: str) -> str:
        """The job's address in the service's API."""
        return f"{api_root(self.settings)}/v1/fine-tunes/{job}"
