"""What a LoRA adapter's own configuration says: whether it can be continued, and whether it can be served."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import orjson

from sparta_api.config.tribe import Lora
from sparta_api.errors import TrainingError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


@dataclass(frozen=True)
class AdapterShape:
    """The part of an adapter_config.json that decides where the adapter fits.

    `rank` is the basic rank r, `largest_rank` the highest one of all its modules (`rank_pattern` included):
    a server's limit is compared with the latter.
    """

    path: str
    rank: int
    largest_rank: int
    alpha: float
    modules_to_save: tuple[str, ...]
    target_modules: str | frozenset[str] | None


def read_adapter(directory: Path) -> AdapterShape:
    """The shape of the adapter in a directory. Raises TrainingError that names the directory."""
    file = directory / CONFIG_FILE
    try:
        data = orjson.loads(file.read_bytes())
        rank, patterns = int(data["r"]), data.get("rank_pattern") or {}
        targets = data.get("target_modules")
        return AdapterShape(
            path=str(directory),
            rank=rank,
            largest_rank=max([rank, *(int(value) for value in patterns.values())]),
            alpha=float(data["lora_alpha"]),
            modules_to_save=tuple(data.get("modules_to_save") or ()),
            target_modules=frozenset(targets) if isinstance(targets, list) else targets,
        )
    except FileNotFoundError:
        raise TrainingError(f"{directory} is not a LoRA adapter: it holds no {CONFIG_FILE}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrainingError(f"{file} is not the configuration of a LoRA adapter ({error!r})") from None


def refuse_saved_modules(shape: AdapterShape) -> None:
    """Raises TrainingError for an adapter that carries whole modules: inference servers cannot load those."""
    if shape.modules_to_save:
        raise TrainingError(
            f"the adapter {shape.path} has modules_to_save ({', '.join(shape.modules_to_save)}), which no server "
            "loads as a LoRA; merge them into the base model or train the adapter without them"
        )


def refuse_other_shape(shape: AdapterShape, lora: Lora, place: str) -> None:
    """Raises TrainingError unless training with `lora` can go on from this adapter.

    `place` is the configuration section that would have to change ("trainers.local.lora").
    """
    if shape.rank != lora.r:
        raise TrainingError(
            f"the adapter {shape.path} has rank {shape.rank} but {place}.r is {lora.r}; "
            f"an adapter keeps its rank: set {place}.r to {shape.rank}"
        )
    if shape.alpha != lora.alpha:
        raise TrainingError(
            f"the adapter {shape.path} has lora_alpha {shape.alpha:g} but {place}.alpha is {lora.alpha:g}; "
            f"an adapter keeps its scale: set {place}.alpha to {shape.alpha:g}"
        )
    if isinstance(lora.target_modules, list) and frozenset(lora.target_modules) != shape.target_modules:
        have = shape.target_modules
        names = ", ".join(sorted(have)) if isinstance(have, frozenset) else str(have)
        raise TrainingError(
            f"the adapter {shape.path} changes the modules {names} but {place}.target_modules is "
            f"{', '.join(sorted(lora.target_modules))}; name the adapter's own modules or leave the key out"
        )
