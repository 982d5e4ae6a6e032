"""The models that a server knows, and LoRA adapters loaded at run time as vLLM does it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.loopback.scenario import Lora, ModelSettings, Scenario

Answer = tuple[int, Any]
"""Status and body: a mapping for JSON, a string for plain text."""


def error_body(scenario: Scenario, status: int, message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    """vLLM's error body, or its older flat form."""
    if scenario.flat_errors:
        return {"object": "error", "message": message, "type": kind, "param": param, "code": status}
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


@dataclass(frozen=True, slots=True)
class Adapter:
    """A loaded adapter; `identity` depends on its base and its content, never on its name or place."""

    name: str
    path: str
    base: str
    identity: str


def content_hash(directory: Path) -> str:
    """A digest of an adapter's shape and weights, the same for the same training whatever its directory."""
    config = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
    modules = config.get("target_modules")
    shape = [config.get("r"), config.get("lora_alpha"), sorted(modules) if isinstance(modules, list) else modules]
    digest = hashlib.sha256(json.dumps(shape).encode())
    for weights in sorted(directory.glob("adapter_model.*")):
        digest.update(weights.read_bytes())
    return digest.hexdigest()


def rank_of(directory: Path) -> int:
    """The largest rank that any module of the adapter has."""
    config = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
    return max([int(config.get("r", 8)), *map(int, (config.get("rank_pattern") or {}).values())])


class Registry:
    """Names that a request's `model` may have."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.adapters: dict[str, Adapter] = {}

    def resolve(self, name: Any) -> tuple[str, ModelSettings] | None:
        """Identity and settings of a model; None when the server does not know it."""
        settings = self.scenario.models.get(name) if isinstance(name, str) else None
        if settings is not None:
            return name, settings
        adapter = self.adapters.get(name) if isinstance(name, str) else None
        if adapter is not None:
            return adapter.identity, self.scenario.models.get(adapter.base, self.scenario.default_model)
        if self.scenario.any_model and isinstance(name, str) and name:
            return name, self.scenario.default_model
        return None

    def unknown(self, name: Any) -> Answer:
        """The 404 of an unknown model."""
        if self.scenario.flavour == "openai":
            message = f"The model `{name}` does not exist or you do not have access to it."
            body = {"message": message, "type": "invalid_request_error", "param": None, "code": "model_not_found"}
            return 404, {"error": body}
        return 404, error_body(self.scenario, 404, f"The model `{name}` does not exist.", "NotFoundError", "model")

    def listing(self) -> dict[str, Any]:
        """The body of GET /v1/models."""
        cards = [
            {"id": name, "object": "model", "created": 0, "owned_by": "vllm", "root": name, "parent": None,
             "max_model_len": settings.max_model_len}
            for name, settings in self.scenario.models.items()
        ]  # fmt: skip
        cards += [
            {"id": a.name, "object": "model", "created": 0, "owned_by": "vllm", "root": a.path, "parent": a.base,
             "max_model_len": None}
            for a in self.adapters.values()
        ]  # fmt: skip
        return {"object": "list", "data": cards}

    def load(self, lora: Lora, body: dict[str, Any]) -> Answer:
        """POST /v1/load_lora_adapter."""
        name, path = body.get("lora_name"), body.get("lora_path")
        if not isinstance(name, str) or not isinstance(path, str) or not name or not path:
            return self._refused(400, "Both 'lora_name' and 'lora_path' must be provided.", "InvalidUserInput")
        if name in self.scenario.models:
            message = f"The lora adapter '{name}' conflicts with a served base model."
            return self._refused(400, message, "InvalidUserInput")
        if name in self.adapters and not body.get("load_inplace"):
            message = (
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True."
            )
            return self._refused(400, message, "InvalidUserInput")
        base = lora.base or next(iter(self.scenario.models), "base")
        directory = Path(path)
        if (directory / "adapter_config.json").is_file():
            rank = rank_of(directory)
            if rank > lora.max_rank:
                message = f"LoRA rank {rank} is greater than max_lora_rank {lora.max_rank}."
                return self._refused(500, message, "InternalServerError")
            identity = f"{base}+{content_hash(directory)}"
        elif lora.unknown_path == "accept":
            identity = f"{base}+{name}"
        else:
            return self._refused(404, f"Loading lora {name} failed: No adapter found for {path}", "NotFoundError")
        self.adapters[name] = Adapter(name, path, base, identity)
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, body: dict[str, Any]) -> Answer:
        """POST /v1/unload_lora_adapter."""
        name = body.get("lora_name")
        if not isinstance(name, str) or not name:
            message = "'lora_name' needs to be provided to unload a LoRA adapter."
            return self._refused(400, message, "InvalidUserInput")
        if name not in self.adapters:
            return self._refused(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        del self.adapters[name]
        return 200, f"Success: LoRA adapter '{name}' removed successfully."

    def _refused(self, status: int, message: str, kind: str) -> Answer:
        return status, error_body(self.scenario, status, message, kind)
