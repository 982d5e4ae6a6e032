"""Any other trainer: a command that reads a preference file and prints which model it left, as JSON."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, ClassVar

from sparta_api.errors import ConfigError, TrainingError
from sparta_api.trainers.commands import fill
from sparta_api.trainers.config import CommandTrainer as Settings
from sparta_api.trainers.process import Launch, ProcessTrainer
from sparta_api.trainers.protocol import Capabilities, Estimate, TrainedModel, TrainingSpec
from sparta_api.trainers.upload import write_upload

ADAPTER = "adapter"
ADAPTER_FILE = "adapter_config.json"
PLACEHOLDERS = ("preferences", "format", "base_model", "parent", "output", "member", "iteration", "seed", "key")


class CommandTrainer(ProcessTrainer):
    """The user's own command (`backend: command`). `root` is what it is run in: the directory of tribe.yaml."""

    backend: ClassVar[str] = "command"
    capabilities: ClassVar[Capabilities] = Capabilities(
        parents=frozenset(), serves="adapter", learning_rate="own", loss_extras=("own",)
    )

    def __init__(self, name: str, settings: Settings, root: Path = Path()) -> None:
        super().__init__(name, settings.slots)
        self.settings = settings
        self._root = root

    async def preflight(self, spec_base: str, parent: TrainedModel | None, member: str) -> list[str]:
        """Checks that the program exists and its placeholders are known; returns warnings."""
        what = f"member '{member}': trainer '{self.name}'"
        fill(self.settings.command, dict.fromkeys(PLACEHOLDERS, ""), what)
        program = self.settings.command[0]
        if "{" not in program and shutil.which(program, path=None) is None and not (self._root / program).exists():
            raise ConfigError(f"{what}: the program {program} is not found; install it or correct the path")
        if parent is not None and not any("{parent}" in part for part in self.settings.command):
            return [f"{what}: the command has no {{parent}}, so it must find the model to continue in SPARTA_PARENT"]
        return []

    @property
    def _price(self) -> Estimate:
        known = self.settings.price_per_job
        return Estimate(known, detail="" if known is not None else f"give trainers.{self.name}.price_per_job")

    async def forecast(self, base_model: str, pairs: int, tokens: int) -> Estimate:
        """The cost by `price_per_job`."""
        return self._price

    async def estimate(self, spec: TrainingSpec) -> Estimate:
        """The cost by `price_per_job`."""
        return self._price

    def _launch(self, spec: TrainingSpec) -> Launch:
        upload = write_upload(spec, self.settings.format, None, 1)
        self._ledger(spec).update(pairs=upload.pairs, dropped=upload.dropped, **self._price.facts)
        values = {
            "preferences": str(upload.path.resolve()),
            "format": self.settings.format,
            "base_model": spec.base_model,
            "parent": spec.parent.train if spec.parent else "",
            "output": str(self.output(spec)),
            "member": spec.member,
            "iteration": str(spec.iteration),
            "seed": str(spec.seed),
            "key": spec.key,
        }
        command = fill(self.settings.command, values, f"trainer '{self.name}'")
        variables = {f"SPARTA_{name.upper()}": value for name, value in values.items()}
        root = self._root.resolve()
        return Launch(command, {**variables, **self.settings.env}, root, self.settings.max_hours * 3600)

    def _trained(self, spec: TrainingSpec, result: dict[str, Any]) -> TrainedModel:
        kind = result.get("kind", ADAPTER)
        train = result.get("train", str(self.output(spec)) if kind == ADAPTER else None)
        serve = result.get("serve", train)
        if not (_text(kind) and _text(train) and _text(serve)):
            raise TrainingError(
                f"{self._place(spec)}: the command must print an object with the texts kind, train and serve, but "
                f"printed {result}"
            )
        if kind == ADAPTER and not (Path(str(train)) / ADAPTER_FILE).is_file():
            raise TrainingError(
                f"{self._place(spec)}: the command names the adapter {train}, which has no {ADAPTER_FILE}"
            )
        return TrainedModel(str(kind), str(train), str(serve))


def _text(value: object) -> bool:
    return isinstance(value, str) and bool(value)
