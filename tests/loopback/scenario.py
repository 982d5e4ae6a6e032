"""What a loopback server is told to be: models, pace, limits and faults. Unknown keys are errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tests.loopback.presets import PRESETS

Scale = tuple[int, int]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSettings(Part):
    """How one model answers."""

    role: Literal["fight", "judge"] | None = None
    """None: told by the prompt (see `Judge.pattern`)."""
    latency_s: float = 0.0
    latency: Literal["fixed", "exponential"] = "fixed"
    """exponential: mean `latency_s`, drawn from the request's content."""
    words: Scale = (6, 24)
    """Shortest and longest answer, in words; a word counts as a token."""
    skill: float = 0.0
    """Shifts the quality (0..9) of a fighter's answers."""
    bias: float = 0.0
    """Shifts a judge's scores, in steps of the ten-level quality."""
    position_bias: float = 0.0
    """Added to a judge's score of the first of two responses, in the same steps."""
    noise: float = 1.5
    """Half-width of a judge's deviation from the response's quality."""
    max_model_len: int | None = None


class Judge(Part):
    """How judges are told from fighters and how they reply."""

    pattern: str | None = None
    """A regular expression over the text of all messages; None: "score" together with "json" or "digit"."""
    reply: str = "auto"
    """json, digit, auto (digit when logprobs or at most two tokens are asked for), or a text that holds
    $score, $digit, $first or $second (the scores of the first and second response in the prompt)."""
    scale: Scale = (1, 10)
    digits: Scale = (0, 9)
    """The labels of a one-digit reply: the worst and the best."""
    label_mass: float = 0.95
    """Probability of all score labels together at the position of the score."""
    sharpness: float = 1.0
    """Standard deviation of the scores' distribution, in levels."""
    logprobs: Literal["openai", "legacy", "none"] = "openai"


class Capacity(Part):
    """A server that slows down above `concurrent` and refuses above `queue`."""

    concurrent: int
    """Requests at full speed; above, latency grows in proportion."""
    queue: int | None = None
    """Requests in flight above which one is refused."""
    status: int = 503
    saturation: float | None = None
    """A continuous batch instead: `concurrent` requests run at once, the others wait in line, and n that run together
    are n / (1 + (n - 1) / saturation) times as fast as one."""


class RateLimit(Part):
    """A token bucket per API key, reported in x-ratelimit-* headers."""

    requests: int | None = None
    tokens: int | None = None
    window_s: float = 60.0
    retry_after: Literal["seconds", "ms", "date", "none"] = "seconds"
    headers: bool = True


class Lora(Part):
    """Runtime LoRA as vLLM has it."""

    base: str | None = None
    """The model that adapters belong to; the first one where it is absent."""
    max_rank: int = 16
    unknown_path: Literal["error", "accept"] = "error"
    """accept: an adapter whose directory does not exist answers by its name."""


class Fault(Part):
    """What goes wrong. Written as a mapping, as {"preset": NAME, ...changes} or as the preset's name."""

    name: str
    kind: Literal[
        "reply", "edit", "reset", "reset_in_body", "close", "half_json", "hang", "drip", "delay", "forget_adapters",
        "echo_authorization", "sse", "surrogate", "exit",
    ]  # fmt: skip
    status: int = 200
    headers: dict[str, str] = {}
    body: Any = None
    """reply: a mapping or list is sent as JSON, a string as it is."""
    content_type: str = "application/json"
    retry_after_s: float | None = None
    retry_after_ms: int | None = None
    retry_after_date_s: int | None = None
    """Retry-After as an HTTP date so many seconds from now."""
    message: dict[str, Any] = {}
    """edit: keys set in choices[0].message."""
    choice: dict[str, Any] = {}
    """edit: keys set in choices[0]."""
    set: dict[str, Any] = {}
    """edit: keys set at the top of the answer."""
    drop: list[str] = []
    """edit: keys removed from the top of the answer."""
    length: Literal["sent", "whole", "chunked"] = "sent"
    """half_json: what the framing promises."""
    seconds: float = 0.0
    """delay: how long; hang: when the connection is dropped after all (0: never)."""
    chunk: int = 1
    interval_s: float = 0.01
    """drip: bytes at a time, and the pause between."""
    lines: list[str] | None = None
    """sse: the lines of the stream; None: the answer as one event."""
    code: int = 1
    """exit: the exit code of the server's process."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        if isinstance(data, str):
            data = {"preset": data}
        if isinstance(data, dict) and "preset" in data:
            name = data["preset"]
            if name not in PRESETS:
                raise ValueError(f"no fault is called '{name}'; there are {', '.join(PRESETS)}")
            rest = {k: v for k, v in data.items() if k != "preset"}
            return {"name": name, **PRESETS[name], **rest}
        if isinstance(data, dict):
            return {"name": data.get("kind", ""), **data}
        return data


class Match(Part):
    """Which requests a rule is about; every condition that is given must hold."""

    path: str = r"/chat/completions$"
    """A regular expression over the path."""
    model: str | list[str] | None = None
    role: Literal["fight", "judge"] | None = None
    contains: str | None = None
    """A text within the messages."""
    has_role: str | None = None
    """A message of this role is present."""
    has_field: str | None = None
    """The body has this key."""
    attempts: int | None = None
    """Only the first so many requests of the same content."""
    nth: list[int] | int | None = None
    """Only these of the requests that the conditions above leave, counted from 1."""
    every: int | None = None
    """Only each so many-th of them."""
    probability: Annotated[float, Field(ge=0, le=1)] | None = None
    """Drawn from the scenario's seed, the content and how often it was sent."""

    @field_validator("model", "nth", mode="after")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return value if value is None or isinstance(value, list) else [value]


class Rule(Part):
    """A fault and when it happens; the first rule that applies wins."""

    match: Match = Match()
    fault: Fault
    times: int | None = None


class Scenario(Part):
    """A whole loopback server."""

    seed: int = 0
    models: dict[str, ModelSettings] = {}
    any_model: bool = False
    """Answer for unknown names too."""
    default_model: ModelSettings = ModelSettings()
    """The settings of such models and of adapters' bases that are not listed."""
    judge: Judge = Judge()
    capacity: Capacity | None = None
    rate_limit: RateLimit | None = None
    lora: Lora | None = Lora()
    """None: the server has no LoRA routes."""
    tokenize: bool = False
    """Whether POST /tokenize and logprob_token_ids work (a token is a character)."""
    flavour: Literal["vllm", "openai"] = "vllm"
    """Whose body an unknown model gets."""
    flat_errors: bool = False
    """Error bodies without the "error" key, as older vLLM has them."""
    api_keys: list[str] = []
    """Keys that are let in; all where it is empty."""
    log_bodies: bool = False
    """Whether the log holds the whole JSON body of each request."""
    rules: list[Rule] = []

    @model_validator(mode="after")
    def _some_model(self) -> Scenario:
        if not self.models and not self.any_model:
            raise ValueError("a scenario needs models or any_model: true")
        return self
