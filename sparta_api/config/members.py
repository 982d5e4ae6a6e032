"""The models of `members` and `servers` in `tribe.yaml`."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from sparta_api.config.section import EnvName, Gpus, Name, NonNegativeFloat, PositiveFloat, PositiveInt, Section, Text


def _json_body(body: dict[str, Any]) -> dict[str, Any]:
    for key in ("messages", "model", "n", "stream"):
        if key in body:
            raise ValueError(f"{key} is set by every request itself; remove it here")
    try:
        json.dumps(body, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise ValueError("the values have to be plain JSON: text, finite numbers, true, false, null") from error
    return body


class Sampling(Section):
    """How a fighter's answers are sampled."""

    temperature: Annotated[float, Field(ge=0, le=2, strict=True)] = 0.7
    top_p: Annotated[float, Field(gt=0, le=1, strict=True)] = 0.95
    max_tokens: PositiveInt = 512


class Price(Section):
    """USD per million tokens."""

    input: NonNegativeFloat
    cached_input: NonNegativeFloat | None = None
    """Price of input tokens served from the provider's cache; `input` where it is absent."""
    output: NonNegativeFloat


class Server(Section):
    """A server that the run starts, watches and stops."""

    backend: Literal["vllm", "command"] = "vllm"
    model: Text | None = None
    """A model directory relative to tribe.yaml, or a hub id."""
    gpus: Gpus | None = None
    """The GPUs it may see; all where it is absent."""
    args: list[str] = []
    """More arguments for vLLM's API server."""
    command: list[str] | None = None
    """The whole command instead of vLLM; {port}, {host} and {model} are replaced."""
    env: dict[str, str] = {}
    during_training: Literal["keep", "sleep", "stop"] = "keep"
    """Whether it goes on, sleeps or is stopped while members that it serves are trained."""
    startup_timeout_s: PositiveFloat = 600

    @model_validator(mode="after")
    def _command_or_model(self) -> Self:
        if self.backend == "command" and not self.command:
            raise ValueError("backend command needs a command")
        if self.backend == "vllm" and self.command:
            raise ValueError("command goes with backend: command")
        if self.backend == "vllm" and not self.model:
            raise ValueError("backend vllm needs a model")
        if self.backend == "command" and self.during_training == "sleep":
            raise ValueError("only backend vllm can sleep during training; use keep or stop")
        return self

    @model_validator(mode="before")
    @classmethod
    def _command_implies_backend(cls, data: Any) -> Any:
        if isinstance(data, dict) and "command" in data and "backend" not in data:
            return {**data, "backend": "command"}
        return data


Role = Literal["fight", "judge"]


class Member(Section):
    """One model behind an endpoint, known everywhere by its name."""

    name: Name
    server: Text | None = None
    """A key of `servers`."""
    base_url: Text | Annotated[list[Text], Field(min_length=1)] | None = None
    """An OpenAI-style base URL, or a list of replicas of the same model."""
    model: Text
    adapter: Text | None = None
    """A LoRA that the member starts from: a directory relative to tribe.yaml, or a hub id."""
    system_prompt: str | None = None
    sampling: Sampling = Sampling()
    roles: Annotated[list[Role], Field(min_length=1)] = ["fight", "judge"]
    trainer: Text | None = None
    """A key of `trainers`, or none; the default is `training.trainer`."""
    api_key_env: EnvName | None = None
    """The environment variable that holds the key."""
    concurrency: PositiveInt | Literal["auto"] = 16
    """Requests in flight per account."""
    requests_per_minute: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None
    timeout_s: PositiveFloat = 120
    """Of one request, from the moment it is sent."""
    max_attempts: PositiveInt = 6
    max_wait_s: PositiveFloat = 300
    """A longer Retry-After stops the run instead."""
    startup_timeout_s: PositiveFloat = 120
    """How long a server may answer "loading"."""
    system_role: Literal["send", "fold"] = "send"
    """fold puts the system text on top of the first user message."""
    context_window: PositiveInt | None = None
    """Tokens of prompt and answer together, where the server does not say."""
    price: Price | None = None
    headers: dict[str, str] = {}
    extra_body: Annotated[dict[str, Any], AfterValidator(_json_body)] = {}
    """Sent along with every request."""
    initial_reputation: PositiveFloat | None = None
    path_map: dict[str, str] = {}
    """Path prefixes on this machine: the same directories as the endpoint sees them (for adapters)."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.server is None) == (self.base_url is None):
            raise ValueError(f"member '{self.name}' needs either server or base_url")
        if len(set(self.roles)) != len(self.roles):
            raise ValueError("a role is named once")
        return self

    @property
    def fights(self) -> bool:
        """Whether the member duels."""
        return "fight" in self.roles

    @property
    def judges(self) -> bool:
        """Whether the member judges the duels of others."""
        return "judge" in self.roles
