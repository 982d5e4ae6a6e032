"""DPO over Tinker (experimental, extra `tinker`): a loop that this machine drives, behind the same protocol.

Tinker has no jobs: a client sends forward and backward passes and optimizer steps. The loop therefore runs in a
process of its own (`tinker_worker`) that outlives the run; it saves its state at the service now and then and
goes on from the last one when it was killed. Its samplers answer at once, over OpenAI's protocol.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any, ClassVar

import orjson

from sparta_api.data.journal import read_lines, write_atomic
from sparta_api.errors import ConfigError, TrainingError
from sparta_api.trainers.config import TinkerTrainer as Settings
from sparta_api.trainers.preflight import check_parent, read_key
from sparta_api.trainers.process import Launch, ProcessTrainer
from sparta_api.trainers.protocol import Capabilities, Estimate, TrainedModel, TrainingSpec
from sparta_api.trainers.upload import write_upload

KIND = "tinker"
SLOTS = 8
JOB_FILE, METRICS_FILE = "tinker.json", "metrics.jsonl"
WORKER = "sparta_api.trainers.tinker_worker"
LIBRARIES = ("tinker", "torch")


class TinkerTrainer(ProcessTrainer):
    """Tinker's training service (`backend: tinker`)."""

    backend: ClassVar[str] = "tinker"
    capabilities: ClassVar[Capabilities] = Capabilities(
        parents=frozenset({KIND}), serves="at once", lora_shape="rank", loss_extras=("sft_weight",)
    )
    resumes: ClassVar[bool] = True

    def __init__(self, name: str, settings: Settings) -> None:
        super().__init__(name, SLOTS)
        self.settings = settings

    async def preflight(self, spec_base: str, parent: TrainedModel | None, member: str) -> list[str]:
        """Checks package, key and parent; returns warnings."""
        missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"member '{member}': trainer '{self.name}' needs {', '.join(missing)}; install sparta-api[tinker]"
            )
        read_key(self.settings.api_key_env, self.name)
        check_parent(self.name, self.backend, self.capabilities.parents, parent, member)
        return [f"member '{member}': trainer '{self.name}' (tinker) is experimental; its service was never tried"]

    async def forecast(self, base_model: str, pairs: int, tokens: int) -> Estimate:
        """The cost by `price_per_million_tokens`; the service has no price call."""
        return self._by_price(tokens, f"{pairs} pairs")

    async def estimate(self, spec: TrainingSpec) -> Estimate:
        """The cost of this job, by `price_per_million_tokens`; nothing more for one that was started."""
        if await self.find(spec):
            return Estimate(usd=0.0, detail="already started")
        upload = write_upload(spec, "trl", self.settings.max_length, 1)
        return self._by_price(upload.tokens, upload.explain())

    def _by_price(self, tokens: int, detail: str) -> Estimate:
        price = self.settings.price_per_million_tokens
        usd = None if price is None else tokens * self.settings.epochs / 1e6 * price
        return Estimate(usd, tokens * self.settings.epochs, 0.0, detail)

    def _launch(self, spec: TrainingSpec) -> Launch:
        upload = write_upload(spec, "trl", self.settings.max_length, 1)
        cost = self._by_price(upload.tokens, "").facts
        self._ledger(spec).update(pairs=upload.pairs, dropped=upload.dropped, **cost)
        job = {
            "settings": self.settings.model_dump(mode="json"),
            "preferences": str(upload.path.resolve()),
            "base_model": spec.base_model,
            "parent": spec.parent.train if spec.parent else None,
            "key": spec.key,
            "seed": spec.seed,
            "output": str(self.output(spec)),
        }
        path = spec.directory.resolve() / JOB_FILE
        write_atomic(path, orjson.dumps(job, option=orjson.OPT_INDENT_2))
        return Launch([sys.executable, "-m", WORKER, str(path)], {}, Path.cwd(), self.settings.max_hours * 3600)

    def _figures(self, spec: TrainingSpec) -> tuple[float | None, dict[str, float]]:
        rows = [row for row, _, _ in read_lines(self.output(spec) / METRICS_FILE)]
        if not rows:
            return None, {}
        last = rows[-1]
        figures = {key: float(value) for key, value in last.items() if key not in ("step", "steps")}
        return last["step"] / last["steps"], figures

    def _trained(self, spec: TrainingSpec, result: dict[str, Any]) -> TrainedModel:
        if result.get("kind") != KIND or not result.get("train") or not result.get("serve"):
            raise TrainingError(f"{self._place(spec)}: the loop ended without a saved state and sampler: {result}")
        return TrainedModel(KIND, str(result["train"]), str(result["serve"]))
