"""Models that answer by their id as soon as they are trained."""

from __future__ import annotations

from sparta_api.trainers.protocol import ServedModel, TrainedModel


class Instant:
    """A provider whose chat endpoint takes the tuned model's id; nothing has to be brought up or taken down."""

    keep = True

    def __init__(self, base_url: str, key_variable: str) -> None:
        self._base_url = base_url
        self._key_variable = key_variable

    async def deploy(self, model: TrainedModel, base_model: str, member: str, iteration: int) -> ServedModel:
        """Where the model answers."""
        return ServedModel(model.serve, self._base_url, self._key_variable)

    def up(self) -> list[str]:
        """Nothing that has to be taken down."""
        return []

    async def cleanup(self) -> list[str]:
        """Nothing is up."""
        return []

    async def close(self) -> None:
        """Nothing is held open."""
