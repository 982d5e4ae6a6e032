"""What every back end checks before anything is sent: its key, and whether it can go on from a model."""

from __future__ import annotations

import os

from sparta_api.errors import ConfigError, TrainingError
from sparta_api.secrets import register
from sparta_api.trainers.protocol import TrainedModel


def read_key(variable: str, trainer: str) -> str:
    """The key in an environment variable, registered as a secret; ConfigError when it is not set."""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"trainer '{trainer}': the environment variable {variable} is not set; export the key in it")
    register(key)
    return key


def check_parent(trainer: str, backend: str, kinds: frozenset[str], parent: TrainedModel | None, member: str) -> None:
    """TrainingError when a back end cannot go on from a model that another one made."""
    if parent is not None and parent.kind not in kinds:
        raise TrainingError(
            f"member '{member}': trainer '{trainer}' ({backend}) cannot continue {parent.train}, a model of kind "
            f"'{parent.kind}' (it continues {', '.join(sorted(kinds)) or 'none'}); keep the trainer that made it, or "
            "start a new run from the base model"
        )
