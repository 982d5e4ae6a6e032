"""models.json: which model every member is at this moment, what to train it from, and how it came to that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sparta_api.config.tribe import TribeConfig
from sparta_api.data.rundir import RunDirectory
from sparta_api.trainers.protocol import ServedModel, TrainedModel


@dataclass(slots=True)
class MemberModel:
    """One member's entry. `served` None means: the model that tribe.yaml names, at its own place."""

    model: str
    trained: TrainedModel | None = None
    served: ServedModel | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    """Per trained iteration: its number, the model's name, and the handles to train on and to serve."""


class Models:
    """The ledger of models; every change is written at once."""

    def __init__(self, run: RunDirectory, config: TribeConfig) -> None:
        self._run = run
        self.members = {member.name: MemberModel(member.model) for member in config.members}
        self.trained_iterations = 0
        for member in config.members:
            if member.adapter is not None:
                self.members[member.name].trained = TrainedModel("adapter", member.adapter, member.adapter)
        if run.models.exists():
            written = run.read_json(run.models)
            self.trained_iterations = written["trained_iterations"]
            for name, data in written["members"].items():
                self.members[name] = MemberModel(
                    model=data["model"],
                    trained=TrainedModel(**data["trained"]) if data["trained"] else None,
                    served=ServedModel(**data["served"]) if data["served"] else None,
                    history=data["history"],
                )

    def trained(self, member: str) -> TrainedModel | None:
        """What the member's next training continues; None for the base model."""
        return self.members[member].trained

    def is_served(self, member: str) -> bool:
        """Whether the member's current model is known to answer somewhere."""
        entry = self.members[member]
        return entry.trained is None or entry.served is not None

    def stage(self, member: str) -> int:
        """How many trainings are behind the member's current model."""
        return len(self.members[member].history)

    def learned(self, iteration: int) -> bool:
        """Whether the models of an iteration's training are recorded."""
        return iteration < self.trained_iterations

    def set_trained(self, iteration: int, learned: Mapping[str, TrainedModel | None]) -> None:
        """Records what an iteration's training left, all members at once; nothing of it is served yet."""
        for name, trained in learned.items():
            if trained is not None:
                entry = self.members[name]
                entry.trained, entry.served = trained, None
                entry.history.append({"iteration": iteration, "model": None, **asdict(trained)})
        self.trained_iterations = iteration + 1
        self.save()

    def set_served(self, member: str, served: ServedModel) -> None:
        """Records where the member's current model answers, and under which name."""
        entry = self.members[member]
        entry.served = served
        entry.model = served.model
        if entry.history:
            entry.history[-1]["model"] = served.model
        self.save()

    def save(self) -> None:
        """Writes models.json."""
        members = {
            name: {
                "model": entry.model,
                "trained": asdict(entry.trained) if entry.trained else None,
                "served": asdict(entry.served) if entry.served else None,
                "history": entry.history,
            }
            for name, entry in self.members.items()
        }
        self._run.write_json(self._run.models, {"trained_iterations": self.trained_iterations, "members": members})
