"""What a run came to, as data: the figures behind the final tables and `status --json`.

The run directory is read elsewhere; here are the records, their sums, and what they warn of.
"""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparta_api.runs.bill import Bill, Costs
from sparta_api.runs.gain import Gain, collapse_sentences
from sparta_api.secrets import scrub
from sparta_api.show.progress import MemberTotals, TrainingProgress, Usage

CONTROL = (
    "a control run: coins decide which response of a pair is chosen (preferences.control: shuffled), so nothing that it"
    " shows comes from the verdicts"
)
VOID_WARNING = 0.10
ABSTENTION_WARNING = 0.10
FLIP_WARNING = 0.05
VLLM_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_NORMAL_95 = 1.6449


@dataclass(frozen=True, slots=True)
class MemberReport:
    """One member over one iteration or a whole run."""

    name: str
    roles: tuple[str, ...]
    totals: MemberTotals
    reputation_before: float
    reputation_after: float
    deviation: float | None = None
    """Sigma after the last duel."""
    floor_hits: int = 0
    """Duels after which its reputation lay on the floor."""
    squared_changes: float = 0.0
    """Sum over its duels of the squared change of its reputation; what `separated` compares with."""
    training_costs: Costs = field(default_factory=Costs)
    """What its training jobs and their deployments cost."""
    training: TrainingProgress | None = None
    """The last training; None when it is not trained."""
    model: str = ""
    """The name that its endpoint is asked for now."""
    adapter: str | None = None
    """Absolute path of the adapter that this run trained last."""
    base_model: str | None = None
    """The weights that the adapter belongs to."""
    lora_rank: int | None = None

    @property
    def spent_usd(self) -> float | None:
        """What its requests, its training and its deployments cost; None when a price is not known."""
        requests = self.totals.cost_usd
        return None if requests is None or self.training_costs.partial else requests + self.training_costs.total

    @property
    def abstention_share(self) -> float:
        """Of the duels that it was asked to judge, those in which it abstained, 0..1."""
        asked = self.totals.judged + self.totals.abstained
        return self.totals.abstained / asked if asked else 0.0

    def to_json(self) -> dict[str, Any]:
        """A plain mapping with stable keys."""
        training = self.training
        return {
            "name": self.name,
            "roles": list(self.roles),
            **self.totals.to_json(),
            "abstention_share": self.abstention_share,
            "reputation_before": _finite(self.reputation_before),
            "reputation_after": _finite(self.reputation_after),
            "deviation": _finite(self.deviation),
            "floor_hits": self.floor_hits,
            "training_costs": self.training_costs.to_json(),
            "training": training
            and {
                "state": training.state,
                "progress": _finite(training.progress),
                "loss": _finite(training.loss),
                "margin": _finite(training.margin),
                "accuracy": _finite(training.accuracy),
                "message": scrub(training.message),
            },
            "model": self.model,
            "adapter": self.adapter,
            "base_model": self.base_model,
        }


@dataclass(frozen=True, slots=True)
class IterationReport:
    """The duels of one iteration (`index` from 0). What is neither judged nor void is still open or owed."""

    index: int
    total: int
    judged: int
    ties: int
    void: dict[str, int]
    """How many duels are void, by reason."""
    owed: int = 0
    pairs: int = 0
    members: tuple[MemberReport, ...] = ()
    verifiers: dict[str, MemberTotals] = field(default_factory=dict)
    """The counts of verifiers as judges."""

    def to_json(self) -> dict[str, Any]:
        """A plain mapping with stable keys."""
        return {
            "iteration": self.index,
            "duels": duel_counts([self]),
            "pairs": self.pairs,
            "members": [member.to_json() for member in self.members],
            "verifiers": verifier_counts([self]),
        }


@dataclass(frozen=True, slots=True)
class Sample:
    """One member's answers to one held-out instruction before and after the run."""

    prompt: str
    member: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class RunReport:
    """A whole run. `iteration` counts from 0; `members` hold the sums over all iterations, in file order."""

    run: str
    directory: str
    finished: bool
    iteration: int
    iterations: int
    phase: str
    members: tuple[MemberReport, ...]
    history: tuple[IterationReport, ...] = ()
    samples: tuple[Sample, ...] = ()
    gain: Gain | None = None
    """The figures of the held-out answers."""
    control: str = "none"
    """`preferences.control`."""
    bill: Bill = field(default_factory=Bill)
    """What its training and deployments cost, and what has not ended."""
    notices: tuple[str, ...] = ()
    """Warnings that were given while it ran."""

    @property
    def spent_usd(self) -> float | None:
        """What requests, training and deployments cost; None when a price is not known."""
        costs = [member.spent_usd for member in self.members]
        return None if None in costs else math.fsum(cost for cost in costs if cost is not None)

    @property
    def usage(self) -> Usage:
        """All tokens of all members."""
        total = Usage()
        for member in self.members:
            total.add(member.totals.usage)
        return total

    @property
    def requests(self) -> int:
        """HTTP attempts of all members."""
        return sum(member.totals.requests for member in self.members)

    @property
    def next_command(self) -> str | None:
        """What continues the run; None when it is finished."""
        return None if self.finished else f"sparta-api resume {shlex.quote(self.directory)}"

    def to_json(self) -> dict[str, Any]:
        """What `status --json` prints: stable keys, no NaN."""
        usage = self.usage
        return {
            "run": self.run,
            "directory": self.directory,
            "finished": self.finished,
            "iteration": self.iteration,
            "iterations": self.iterations,
            "phase": self.phase,
            "duels": duel_counts(self.history),
            "requests": self.requests,
            "usage": {"prompt": usage.prompt, "cached": usage.cached, "completion": usage.completion},
            "spent_usd": self.spent_usd,
            "training_costs": self.bill.total.to_json(),
            "up": list(self.bill.up),
            "separated": separated(self.members),
            "questions_spared": sum(member.totals.spared for member in self.members),
            "members": [member.to_json() for member in self.members],
            "verifiers": verifier_counts(self.history),
            "history": [iteration.to_json() for iteration in self.history],
            "heldout": self.gain and self.gain.to_json(),
            "control": self.control,
            "warnings": warnings(self),
            "next": self.next_command,
        }


def duel_counts(history: Iterable[IterationReport]) -> dict[str, Any]:
    """The counts of duels over some iterations, with the reasons of the void ones (most frequent first)."""
    history = list(history)
    reasons: Counter[str] = Counter()
    for iteration in history:
        for reason, number in iteration.void.items():
            reasons[scrub(reason)] += number
    return {
        "n_total": sum(iteration.total for iteration in history),
        "n_judged": sum(iteration.judged for iteration in history),
        "n_void": reasons.total(),
        "n_owed": sum(iteration.owed for iteration in history),
        "n_tied": sum(iteration.ties for iteration in history),
        "void_reasons": dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))),
    }


def verifier_counts(history: Iterable[IterationReport]) -> dict[str, dict[str, int]]:
    """Duels that each verifier gave a verdict on and abstained from, over some iterations."""
    counts: dict[str, dict[str, int]] = {}
    for iteration in history:
        for name, totals in iteration.verifiers.items():
            sums = counts.setdefault(name, {"judged": 0, "abstained": 0})
            sums["judged"] += totals.judged
            sums["abstained"] += totals.abstained
    return counts


def separated(members: Sequence[MemberReport]) -> bool | None:
    """Whether the duels moved the fighters apart further than coin tosses would; None before any duel counted.

    If every duel of F fighters had been decided by a coin, a fighter's total change of reputation D would have
    mean 0 and variance S = sum of its squared changes, and the sum of D^2 over the fighters, divided by the
    sum of S, would be about chi-squared / (F - 1) with F - 1 degrees of freedom. The ranking counts as
    separated when the ratio lies above the 95th percentile of that (Wilson and Hilferty's approximation).
    Reputations that differed from the start do not count: they are not a result of these duels.
    """
    fighters = [member for member in members if "fight" in member.roles]
    expected = math.fsum(member.squared_changes for member in fighters)
    if len(fighters) < 2 or (expected == 0 and not any(member.totals.ties for member in fighters)):
        return None
    moved = math.fsum((m.reputation_after - m.reputation_before) ** 2 for m in fighters)
    freedom = len(fighters) - 1
    spread = 2 / (9 * freedom)
    return moved > expected * (1 - spread + _NORMAL_95 * math.sqrt(spread)) ** 3


def warnings(report: RunReport) -> list[str]:
    """What a reader of the figures has to know before trusting them, one sentence each."""
    duels = duel_counts(report.history)
    found = _of_the_run(report)
    ended = duels["n_judged"] + duels["n_void"]
    if ended and duels["n_void"] / ended > VOID_WARNING:
        share = f"{duels['n_void'] / ended:.0%} of the duels are void"
        found.append(f"{share}, so the figures rest on the other {duels['n_judged']} of {ended} alone")
    for member in report.members:
        if member.abstention_share > ABSTENTION_WARNING:
            found.append(
                f"judge '{member.name}' abstained from {member.abstention_share:.0%} of its duels; "
                "its replies in judgments.jsonl show why"
            )
        if member.totals.judged and member.totals.flips / member.totals.judged > FLIP_WARNING:
            found.append(
                f"position bias: judge '{member.name}' names the other winner in"
                f" {member.totals.flips / member.totals.judged:.1%} of its duels when the responses change places"
            )
        if member.floor_hits:
            hits = f"{member.floor_hits} {'duel' if member.floor_hits == 1 else 'duels'}"
            found.append(f"the reputation of '{member.name}' lay on the floor after {hits}")
        if member.training and member.training.state in ("failed", "cancelled"):
            found.append(f"the training of '{member.name}' {member.training.state}: {member.training.message}")
    for name, counts in verifier_counts(report.history).items():
        asked = sum(counts.values())
        if asked and counts["abstained"] / asked > ABSTENTION_WARNING:
            share = f"{counts['abstained'] / asked:.0%} of the duels"
            found.append(f"verifier '{name}' abstained from {share}; judgments.jsonl shows why")
    if separated(report.members) is False:
        found.append(
            "the ranking is not separated: coin tosses would spread the reputations as much, so read no order into them"
        )
    return [scrub(sentence) for sentence in found]


def _of_the_run(report: RunReport) -> list[str]:
    """What was noticed on the way, a control, and models that collapsed."""
    found = list(dict.fromkeys(report.notices))
    if report.control != "none":
        found.insert(0, CONTROL)
    found += report.bill.sentences(Path(report.directory), report.finished)
    return found + (collapse_sentences(report.gain) if report.gain else [])


def serve_commands(members: Sequence[MemberReport]) -> list[str]:
    """For each set of base weights the vLLM command that serves all adapters trained on it, by model name."""
    bases: dict[str, list[MemberReport]] = {}
    for member in members:
        if member.adapter and member.base_model:
            bases.setdefault(member.base_model, []).append(member)
    return [_serve_command(base, group) for base, group in bases.items()]


def _serve_command(base: str, members: Sequence[MemberReport]) -> str:
    needed = max(member.lora_rank or 16 for member in members)
    rank = next((rank for rank in VLLM_LORA_RANKS if rank >= needed), VLLM_LORA_RANKS[-1])
    slots = f" --max-loras {len(members)}" if len(members) > 1 else ""
    modules = [shlex.quote(_lora_module(member)) for member in members]
    start = f"vllm serve {shlex.quote(base)} --enable-lora --max-lora-rank {rank}{slots} --lora-modules"
    return " \\\n  ".join([start, *modules])


def _lora_module(member: MemberReport) -> str:
    plain = f"{member.model}={member.adapter}"
    if "," in plain or "=" in member.model:
        return json.dumps({"name": member.model, "path": member.adapter})
    return plain


def load_command(member: MemberReport, base_url: str = "http://localhost:8000/v1") -> str:
    """The call that loads the adapter into a vLLM that runs already (with runtime LoRA updating allowed)."""
    body = json.dumps({"lora_name": member.model, "lora_path": member.adapter})
    return (
        f"curl -X POST {shlex.quote(base_url)}/load_lora_adapter "
        f"-H 'Content-Type: application/json' -d {shlex.quote(body)}"
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
