"""The models of `tribe.yaml`: what a user may write, with the meaning of every key beside it.

`config_file` reads the YAML and turns pydantic's complaints into `file:line` sentences. Strings keep
their `${VAR}` here; `config_file.load_tribe` makes the copy that the run works with.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from sparta_api.config.members import Member as Member
from sparta_api.config.members import Price as Price
from sparta_api.config.members import Sampling as Sampling
from sparta_api.config.members import Server as Server
from sparta_api.config.section import Flag, Gpus, Name
from sparta_api.config.section import NonNegativeFloat as NonNegativeFloat
from sparta_api.config.section import PositiveFloat as PositiveFloat
from sparta_api.config.section import PositiveInt as PositiveInt
from sparta_api.config.section import Probability as Probability
from sparta_api.config.section import Section as Section
from sparta_api.config.section import Text as Text
from sparta_api.config.verifiers import Verifier as Verifier
from sparta_api.config.verifiers import WordLimit as WordLimit
from sparta_api.runs.guards import Guards as Guards
from sparta_api.trainers.config import CommandTrainer as CommandTrainer
from sparta_api.trainers.config import Lora as Lora
from sparta_api.trainers.config import OpenAITrainer as OpenAITrainer
from sparta_api.trainers.config import ServeCommand as ServeCommand
from sparta_api.trainers.config import TinkerTrainer as TinkerTrainer
from sparta_api.trainers.config import TogetherTrainer as TogetherTrainer

Level = Annotated[int, Field(strict=True)]


class Instructions(Section):
    """Where the instructions come from."""

    path: Text
    """.jsonl .json .csv .tsv .parquet .txt relative to tribe.yaml, or hf:ORG/NAME[:SPLIT]."""
    field: Text = "prompt"
    """The column that holds a string or a list of chat messages."""
    per_iteration: PositiveInt | None = None
    """How many instructions an iteration plays; all where it is absent."""


class Heldout(Section):
    """Instructions whose answers are shown before and after each run; never trained on."""

    path: Text
    """As in `instructions`."""
    field: Text = "prompt"
    """As in `instructions`."""


class Matchmaking(Section):
    """Rule 1 of docs/algorithm.md."""

    random_match_prob: Probability = 0.2
    num_opponents: PositiveInt = 3


class Criterion(Section):
    """One line of a rubric."""

    name: Annotated[Text, Field(pattern=r"^[^\"'\\{}\[\]:,\x00-\x1f]{1,60}$")]
    """Also the key under which judges give its score."""
    description: Text
    """What earns a high score, as judges read it."""
    weight: PositiveFloat = 1


class Judging(Section):
    """Rule 2 of docs/algorithm.md. Judges take their sampling from here alone."""

    mode: Literal["pointwise", "pairwise"] = "pointwise"
    """A judge scores each response on its own, or both at once: in both orders, the mean over them counts."""
    on_flip: Literal["average", "tie"] = "average"
    """pairwise: what a judge counts whose two orders name different winners: its means, or the same for both."""
    prompt: Text = "score"
    """The name of a template in prompts/, or a path to one's own."""
    rubric: list[Criterion] = []
    """Criteria that are scored one by one; a judge's score is their weighted mean."""
    reference: Flag | Literal["optional"] = False
    """Whether judges see an instruction's `answer`; optional: where it has one."""
    scale: tuple[Level, Level] = (1, 10)
    """The worst and the best score."""
    scoring: Literal["sampled", "expected"] = "sampled"
    """The number in the reply, or the mean over the score tokens' probabilities."""
    rounds: PositiveInt = 1
    temperature: Annotated[float, Field(ge=0, le=2, strict=True)] = 0.0
    max_tokens: PositiveInt = 64
    max_attempts: PositiveInt = 3
    """How often a judge is asked until its reply holds a score; then it abstains."""
    judges_per_duel: PositiveInt | Literal["all"] = "all"
    stop_when_decided: Flag = False
    """Whether judges are asked one after another, until none that is left can change the winner; needs
    reputation.freeze."""
    verifiers: dict[Name, Verifier] = {}
    """Programs that score responses beside the judges, or alone."""
    response_format: Literal["auto", "json_schema", "text"] = "auto"
    """sampled: whether judges are held to a JSON schema; auto does so with the prompt that ships."""
    min_label_mass: Probability = 0.5
    """expected: below this probability on the score labels, the text of the reply is read instead."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.scale[0] >= self.scale[1]:
            raise ValueError("scale runs from the worst to a higher best score")
        if self.rounds > 1 and self.temperature == 0:
            raise ValueError("more than one round at temperature 0 repeats the same answer; raise judging.temperature")
        if self.scoring == "expected" and self.scale[1] - self.scale[0] > 9:
            raise ValueError("scoring: expected needs a scale of at most ten levels")
        if self.scoring == "expected" and (self.mode == "pairwise" or self.rubric):
            other = "mode: pairwise" if self.mode == "pairwise" else "a rubric"
            raise ValueError(f"scoring: expected reads one score a reply, {other} asks for several; use sampled")
        return self

    @model_validator(mode="after")
    def _readable(self) -> Self:
        names = [" ".join(criterion.name.casefold().split()) for criterion in self.rubric]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"rubric has two criteria called '{name}'")
        needed = self.reply_tokens
        if self.max_tokens < needed:
            raise ValueError(f"a reply holds about {needed} tokens with this rubric; raise judging.max_tokens to it")
        return self

    @property
    def reply_tokens(self) -> int:
        """About how many tokens a reply with all scores of a rubric takes; 0 without a rubric."""
        sides = 2 if self.mode == "pairwise" else 1
        return sum(sides * (len(criterion.name) // 3 + 8) for criterion in self.rubric) + 4 * bool(self.rubric)

    @property
    def enforces_json(self) -> bool:
        """Whether judges' requests carry a JSON schema."""
        return self.response_format == "json_schema" or (
            self.response_format == "auto" and self.prompt in ("score", "score_rubric", "pair")
        )


class ReputationConfig(Section):
    """How duels move reputations and what judges' votes weigh (rules 3 and 4 of docs/algorithm.md)."""

    model: Literal["paper", "bradley_terry", "glicko2", "uniform"] = "paper"
    """The paper's update, or an alternative; uniform leaves all ratings as they are and gives every judge one vote."""
    judge_weight: Literal["reputation", "agreement", "uniform"] = "reputation"
    """What a judge's vote weighs: its reputation, its agreement with the panels so far, or the same for all."""
    warm_start: Text | dict[str, Annotated[float, Field(allow_inf_nan=False, strict=True)]] | None = None
    """Benchmark scores per member that first reputations come from: a .json or .csv file, or a map of names."""
    prior_deviation: PositiveFloat = 1.0
    """bradley_terry, glicko2: the standard deviation of a member's log strength before its first duel."""
    update: Literal["simultaneous", "sequential"] = "simultaneous"
    """paper: both fighters from their ratings before the duel; sequential reproduces the paper's code."""
    variant: Literal["normal", "dynamic", "static"] = "normal"
    initial: PositiveFloat = 100
    initial_deviation: PositiveFloat = 0.5
    initial_k: PositiveFloat = 10
    min_k: PositiveFloat = 5
    decay_rate: Annotated[float, Field(gt=0, le=1, strict=True)] = 0.9
    decay_steps: PositiveFloat = 10
    window: Annotated[int, Field(ge=2, strict=True)] = 10
    min_deviation: NonNegativeFloat = 0.1
    epsilon: NonNegativeFloat = 0.01
    scaling_factor: PositiveFloat = 20
    floor: PositiveFloat = 10
    freeze: Flag = False

    @model_validator(mode="after")
    def _one_model(self) -> Self:
        for key, usual in (("variant", "normal"), ("update", "simultaneous")):
            if self.model != "paper" and getattr(self, key) != usual:
                raise ValueError(f"{key}: {getattr(self, key)} belongs to model: paper, not to {self.model}")
        return self

    @property
    def weighting(self) -> Literal["reputation", "agreement", "uniform"]:
        """What judges' votes weigh, by model and judge_weight together."""
        return "uniform" if self.model == "uniform" and self.judge_weight == "reputation" else self.judge_weight

    @property
    def weights_stay(self) -> bool:
        """Whether no duel changes what a judge's vote weighs."""
        return self.freeze or self.weighting == "uniform"


class Preferences(Section):
    """Which duels become preference pairs."""

    min_margin: NonNegativeFloat = 0.0
    """A margin of at most max(min_margin, 1e-9) is a tie."""
    control: Literal["none", "shuffled"] = "none"
    """shuffled: a coin decides which of two responses is chosen, by the seed. A run like that teaches nothing, so a
    gain that it shows as well is none."""


class TrlTrainer(Section):
    """DPO on this machine with TRL, one subprocess per member. Defaults are the paper's."""

    backend: Literal["trl"] = "trl"
    base_model: Text | None = None
    """Directory or hub id of the weights; by default the model that the member's server loads."""
    learning_rate: PositiveFloat = 1e-6
    beta: PositiveFloat = 0.1
    epochs: PositiveInt = 1
    lora: Lora = Lora()
    gpus: Gpus | None = None
    """The GPUs that jobs may use, one member each; all that are visible where it is absent."""
    batch_size: PositiveInt = 1
    gradient_accumulation: PositiveInt = 1
    max_length: PositiveInt = 1024
    """Tokens of prompt and answer together; pairs whose prompt fills it are dropped and counted."""
    warmup_ratio: Probability = 0.1
    weight_decay: NonNegativeFloat = 1e-5
    sft_weight: NonNegativeFloat = 0.0
    """Weight of an added likelihood term on the chosen answers (0: plain DPO)."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    checkpoint_s: PositiveFloat = 300
    """Seconds between the checkpoints that an interrupted training continues from."""
    env: dict[str, str] = {}
    serve: ServeCommand | None = None
    """For endpoints that cannot load an adapter while they run."""


Trainer = Annotated[
    TrlTrainer | TogetherTrainer | OpenAITrainer | TinkerTrainer | CommandTrainer, Field(discriminator="backend")
]


class Training(Section):
    """Which trainer members use that name none, and what its results are held to."""

    trainer: Text = "none"
    stop_on_collapse: Flag = False
    """Whether the run stops (exit code 3) before it plays on with models whose held-out answers break a guard."""
    guards: Guards = Guards()


class Limits(Section):
    """The run stops cleanly (exit code 4) before it passes one of these."""

    max_requests: PositiveInt | None = None
    """HTTP attempts."""
    max_tokens: PositiveInt | None = None
    max_cost_usd: PositiveFloat | None = None


class TribeConfig(Section):
    """A whole tribe.yaml, with `defaults` already merged into the members."""

    name: Name = "tribe"
    """Run directories are runs/<name>-<time stamp>."""
    seed: Annotated[int, Field(ge=0, strict=True)] = 0
    iterations: PositiveInt = 1
    instructions: Instructions
    heldout: Heldout | None = None
    defaults: dict[str, Any] = {}
    """Any member field; a member's own value wins, maps are merged key by key."""
    servers: dict[str, Server] = {}
    members: Annotated[list[Member], Field(min_length=2)]
    on_member_failure: Literal["stop", "bench"] = "stop"
    matchmaking: Matchmaking = Matchmaking()
    judging: Judging = Judging()
    reputation: ReputationConfig = ReputationConfig()
    preferences: Preferences = Preferences()
    trainers: dict[str, Trainer] = {}
    training: Training = Training()
    limits: Limits = Limits()

    def member(self, name: str) -> Member:
        """The member of that name; KeyError when there is none."""
        for member in self.members:
            if member.name == name:
                return member
        raise KeyError(name)

    @property
    def verifier_weights(self) -> dict[str, float]:
        """The weights of the verifiers by name, in points of reputation."""
        return {name: v.weight or self.reputation.initial for name, v in self.judging.verifiers.items()}

    @property
    def verifier_fields(self) -> list[str]:
        """The fields of instructions that verifiers read beside the prompt and the answer."""
        fields = (v.field for v in self.judging.verifiers.values() if isinstance(v, WordLimit) and v.field)
        return list(dict.fromkeys(fields))

    @property
    def fighters(self) -> list[Member]:
        """Members that duel, in the order of the file."""
        return [m for m in self.members if m.fights]

    def trainer_of(self, member: Member) -> str | None:
        """The key of the trainer that the member learns with, or None when it does not learn."""
        name = self.training.trainer if member.trainer is None else member.trainer
        return name if member.fights and name != "none" else None

    def base_model_of(self, member: Member, trainer: Trainer) -> str:
        """The weights that the member's adapter belongs to: a directory, a hub id or the provider's own name."""
        if trainer.base_model:
            return trainer.base_model
        if isinstance(trainer, TogetherTrainer | OpenAITrainer | TinkerTrainer):
            return member.model
        server = self.servers.get(member.server) if member.server else None
        return (server.model if server else None) or member.model
