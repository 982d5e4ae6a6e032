"""The keys of `trainers:` in `tribe.yaml` for the back ends that do not train on this machine.

`sparta_api.config.tribe` joins them with `TrlTrainer` to one union, told apart by `backend`. A back end names
the hyper-parameters that it cannot express in `inexpressible`: writing one is an error of the file, with
the reason, so that nothing is ever dropped on the way to a provider.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from sparta_api.config.section import EnvName, NonNegativeFloat, PositiveFloat, PositiveInt, Probability, Section, Text

Command = Annotated[list[Text], Field(min_length=1)]


class Lora(Section):
    """The shape of the adapter that a trainer makes."""

    r: PositiveInt = 16
    alpha: PositiveFloat = 32
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_modules: Literal["all-linear"] | list[str] = "all-linear"


class ServeCommand(Section):
    """A command that makes an endpoint serve a trained adapter where none can be loaded while it runs."""

    command: Command
    """{adapter}, {merged}, {base_model}, {member}, {iteration} and {name} are replaced. The last line that it
    prints is JSON: {"base_url": ..., "model": ...}."""
    undeploy: Command | None = None
    """Takes a model down again; {model}, {base_url}, {member} and {name} are replaced."""
    timeout_s: PositiveFloat = 1800
    keep: bool = True
    """Whether the models stay up when the run ends; `sparta-api cleanup` takes them down in any case."""

    @property
    def merges(self) -> bool:
        """Whether the adapter has to be merged into its base model first."""
        return any("{merged}" in part for part in self.command)


class DeployCommand(ServeCommand):
    """A command that deploys a tuned model at a provider that bills for it; {model} is the model."""

    keep: bool = False
    """Whether deployments stay up, and are billed, when the run ends."""
    hours: PositiveFloat = 1
    """How long one iteration keeps a deployment up, for estimates and limits."""
    price_per_hour: NonNegativeFloat | None = None
    """USD per hour of one member's deployment; 0 where the provider bills the requests alone."""


class BackendSection(Section):
    """Base of the training back ends: says why a foreign hyper-parameter is refused."""

    inexpressible: ClassVar[dict[str, str]] = {}
    """Hyper-parameters of other back ends, and what this one offers instead."""

    @model_validator(mode="before")
    @classmethod
    def _expressible(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key, reason in cls.inexpressible.items():
                if key in data:
                    raise ValueError(f"backend {data.get('backend')} cannot express {key}: {reason}")
        return data

    @property
    def unpriced(self) -> list[str]:
        """The keys, below the trainer, that would have to be given before its cost can be held to a limit."""
        return []


class RemoteSection(BackendSection):
    """What the hosted back ends have in common."""

    base_model: Text | None = None
    """The provider's name of the model to tune; the member's model where it is absent."""
    max_length: PositiveInt | None = None
    """Tokens of prompt and answer together; pairs that are longer by the rule of four characters a token are
    dropped before the upload and counted."""
    price_per_million_tokens: NonNegativeFloat | None = None
    """USD per million trained tokens; for estimates before a run, and where the service gives none."""
    max_hours: PositiveFloat = 24
    """How long a job may take before the run stops waiting for it (the job itself goes on)."""


class Deployment(Section):
    """How Together serves a member's model: a dedicated deployment, billed by the minute while it is up."""

    config: Text | None = None
    """projects/{id}/configs/{cr_...}: hardware and engine; the first that fits the model where it is absent."""
    replicas: PositiveInt = 1
    inactive_timeout_min: Annotated[int, Field(ge=30, le=1440)] = 60
    """Minutes without a request after which the service may stop it by itself."""
    hours: PositiveFloat = 1
    """How long one iteration keeps it up, for estimates and limits."""
    price_per_hour: NonNegativeFloat | None = None
    """USD per hour and replica, where the service's own list names no price."""
    ready_timeout_s: PositiveFloat = 3600
    keep: bool = False
    """Whether deployments stay up, and are billed, when the run ends."""


class TogetherTrainer(RemoteSection):
    """DPO by the fine-tuning service of Together."""

    inexpressible: ClassVar[dict[str, str]] = {
        "sft_weight": "its name is rpo_alpha there",
        "gpus": "the service chooses the hardware",
        "precision": "the service chooses the precision",
        "learning_rate_multiplier": "give an absolute learning_rate",
    }

    backend: Literal["together"]
    base_url: Text = "https://api.together.ai"
    inference_url: Text | None = None
    """Where the deployed models answer; the service's own inference host, or base_url where that was changed."""
    api_key_env: EnvName = "TOGETHER_API_KEY"
    learning_rate: PositiveFloat = 1e-6
    beta: PositiveFloat = 0.1
    epochs: PositiveInt = 1
    lora: Lora = Lora()
    """Of the first job; later jobs continue its adapter and keep the shape."""
    rpo_alpha: NonNegativeFloat | None = None
    """Weight of an added likelihood term on the chosen answers."""
    simpo_gamma: PositiveFloat | None = None
    """SimPO's margin: no reference model, log-probabilities normalised by length."""
    length_normalized: bool = False
    batch_size: PositiveInt | Literal["max"] = "max"
    gradient_accumulation: PositiveInt | None = None
    warmup_ratio: Probability = 0.1
    weight_decay: NonNegativeFloat = 1e-5
    deployment: Deployment = Deployment()
    deployments: Literal["parallel", "serial"] = "parallel"
    """serial brings up one after another and takes a member's old deployment down before its next comes up."""

    @property
    def unpriced(self) -> list[str]:
        """The service prices jobs itself; a deployment needs a price, or hardware that has one in its list."""
        known = self.deployment.price_per_hour is not None or self.deployment.config is not None
        return [] if known else ["deployment.price_per_hour"]

    @field_validator("lora")
    @classmethod
    def _whole_alpha(cls, lora: Lora) -> Lora:
        if lora.alpha != int(lora.alpha):
            raise ValueError(f"backend together takes a whole number for lora.alpha, not {lora.alpha:g}")
        return lora

    @property
    def answers_at(self) -> str:
        """Base URL, with /v1, of the chat endpoint that serves deployed models."""
        default = "https://api.together.ai"
        api = self.base_url.rstrip("/").removesuffix("/v1")
        host = self.inference_url or ("https://api-inference.together.ai" if api == default else api)
        return host.rstrip("/").removesuffix("/v1") + "/v1"


class OpenAITrainer(RemoteSection):
    """DPO by OpenAI's fine-tuning protocol, which Azure and other servers speak too."""

    inexpressible: ClassVar[dict[str, str]] = {
        "learning_rate": "the protocol has learning_rate_multiplier only",
        "lora": "the provider chooses the adapter's shape",
        "rpo_alpha": "the protocol's DPO has beta, epochs, batch size and a learning rate multiplier only",
        "simpo_gamma": "the protocol's DPO has beta, epochs, batch size and a learning rate multiplier only",
        "sft_weight": "the protocol's DPO has beta, epochs, batch size and a learning rate multiplier only",
        "warmup_ratio": "the provider chooses the schedule",
        "weight_decay": "the provider chooses the optimizer",
        "gpus": "the provider chooses the hardware",
        "precision": "the provider chooses the precision",
        "gradient_accumulation": "use batch_size",
    }

    backend: Literal["openai"]
    base_url: Text = "https://api.openai.com/v1"
    api_key_env: EnvName = "OPENAI_API_KEY"
    beta: Annotated[float, Field(gt=0, le=2)] | Literal["auto"] = 0.1
    epochs: PositiveInt | Literal["auto"] = 1
    batch_size: PositiveInt | Literal["auto"] = "auto"
    learning_rate_multiplier: PositiveFloat | Literal["auto"] = "auto"
    minimum_pairs: PositiveInt = 10
    """The provider's own minimum of examples."""
    deploy: DeployCommand | None = None
    """For providers that want a deployment before a model answers (Azure). Where it is absent the model's id is used
    at once."""

    @property
    def unpriced(self) -> list[str]:
        """The protocol has no price call."""
        jobs = ["price_per_million_tokens"] if self.price_per_million_tokens is None else []
        deployed = self.deploy is not None and self.deploy.price_per_hour is None
        return [*jobs, "deploy.price_per_hour"] if deployed else jobs


class TinkerTrainer(RemoteSection):
    """DPO as a loop that this machine drives over Tinker (experimental)."""

    inexpressible: ClassVar[dict[str, str]] = {
        "gpus": "the service chooses the hardware",
        "precision": "the service chooses the precision",
        "learning_rate_multiplier": "give an absolute learning_rate",
        "simpo_gamma": "the loop is DPO with its reference",
        "rpo_alpha": "its name is sft_weight there",
    }

    backend: Literal["tinker"]
    base_url: Text | None = None
    inference_url: Text = "https://tinker.thinkingmachines.dev/services/tinker-prod/oai/api/v1"
    """Where the service's OpenAI-compatible sampling answers."""
    api_key_env: EnvName = "TINKER_API_KEY"
    learning_rate: PositiveFloat = 1e-5
    beta: PositiveFloat = 0.1
    epochs: PositiveInt = 1
    rank: PositiveInt = 16
    """Of the adapter; its other shape is the service's."""
    batch_size: PositiveInt = 16
    sft_weight: NonNegativeFloat = 0.0
    """Weight of an added likelihood term on the chosen answers (0: plain DPO)."""
    checkpoint_every: PositiveInt = 20
    """Steps between saved states, from which an interrupted loop goes on."""

    @property
    def unpriced(self) -> list[str]:
        """The service has no price call."""
        return ["price_per_million_tokens"] if self.price_per_million_tokens is None else []


class CommandTrainer(BackendSection):
    """Any other trainer: a command that reads a preference file and leaves a model."""

    inexpressible: ClassVar[dict[str, str]] = {
        key: "write it into the command or its environment"
        for key in ("learning_rate", "beta", "epochs", "lora", "gpus", "precision", "rpo_alpha", "simpo_gamma")
    }

    backend: Literal["command"]
    command: Command
    """{preferences}, {format}, {base_model}, {parent}, {output}, {member}, {iteration}, {seed} and {key} are
    replaced. The last line that it prints is JSON: {"kind": ..., "train": ..., "serve": ...}."""
    base_model: Text | None = None
    format: Literal["trl", "openai"] = "trl"
    """The form of the preference file."""
    slots: PositiveInt = 1
    """How many of its jobs may run side by side."""
    env: dict[str, str] = {}
    """More environment variables for the command."""
    max_hours: PositiveFloat = 24
    """A longer job is stopped and counts as failed."""
    price_per_job: NonNegativeFloat | None = None
    """USD for one job and whatever serves its model for an iteration; 0 where it runs on machines of your own."""
    serve: ServeCommand | None = None
    """For adapters that the member's endpoint cannot load by itself."""

    @property
    def unpriced(self) -> list[str]:
        """Only its user knows where it trains."""
        return ["price_per_job"] if self.price_per_job is None else []

    @model_validator(mode="after")
    def _writes_somewhere(self) -> Self:
        if not any("{preferences}" in part for part in self.command):
            raise ValueError("command needs {preferences}, the file to train on")
        return self


RemoteTrainerSection = TogetherTrainer | OpenAITrainer | TinkerTrainer
