"""How likely an answer is to the model that the run began with: its tokens' log probabilities, asked of the server.

vLLM tells them for a chat that ends with the answer itself (`continue_final_message` with `prompt_logprobs`). An
endpoint that cannot leaves the figure empty; it is asked once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparta_api.duels.preferences import with_system
from sparta_api.endpoints.client import Client
from sparta_api.endpoints.faults import Fault
from sparta_api.endpoints.questions import MemberDown, Owed, Question, Unanswered
from sparta_api.endpoints.seats import Seat

FIELDS = {
    "temperature": 0.0,
    "max_tokens": 1,
    "add_generation_prompt": False,
    "continue_final_message": True,
    "echo": True,
    "prompt_logprobs": 0,
}
"""`echo` gives the answer back, so that an end right behind it is not taken for an empty reply."""


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The natural logarithm of an answer's probability after its prompt, and of how many tokens it is the sum."""

    logprob: float
    tokens: int


class _InitialSeat(Seat):
    """A member's seat as it was at the beginning: the same endpoint, another model, and no second way to ask."""

    def __init__(self, seat: Seat, model: str) -> None:
        self.__dict__.update(seat.__dict__)
        self.model = model
        self.reload = None

    def adapt(self, fault: Fault) -> str | None:
        """Nothing may be left out of these requests."""
        return None


class InitialModel:
    """Asks one member's endpoint for likelihoods under the model of that name, until it turns out not to tell them."""

    def __init__(self, seat: Seat, model: str, client: Client) -> None:
        self.seat = _InitialSeat(seat, model)
        self.lack: str | None = None
        """Why the endpoint cannot tell, once that is known."""
        self._client = client

    async def likelihood(self, row: Mapping[str, Any], messages: list[dict[str, Any]]) -> Likelihood | None:
        """The likelihood of a held-out answer (a row of heldout.jsonl) to those messages; None where it is not told.

        The prompt's share of the tokens is what the endpoint counted for the question, so an answer that took
        more than one attempt is left out.
        """
        usage = row.get("usage") or {}
        if self.lack or not row["content"].strip() or row.get("attempts") != 1 or usage.get("estimated"):
            return None
        prompt = with_system(messages, self.seat.member.system_prompt)
        question = Question([*prompt, {"role": "assistant", "content": row["content"]}], dict(FIELDS), False)
        try:
            reply = await self._client.ask(self.seat, question)
        except (Unanswered, Owed, MemberDown) as error:
            self.lack = f"the endpoint of '{self.seat.name}' refuses to tell it ({error})"
            return None
        told = reply.answer.prompt_logprobs
        if not isinstance(told, list):
            self.lack = f"the endpoint of '{self.seat.name}' does not tell it; vLLM does"
            return None
        values = [_chosen(token) for token in told[usage["prompt_tokens"] :]]
        known = [value for value in values if value is not None]
        return Likelihood(sum(known), len(known)) if known else None


def _chosen(token: Any) -> float | None:
    """The log probability in {token id: {"logprob": x, ...}} with one token: that of the prompt itself."""
    if not isinstance(token, dict) or not token:
        return None
    value = next(iter(token.values()))
    logprob = value.get("logprob") if isinstance(value, dict) else None
    return float(logprob) if isinstance(logprob, int | float) else None
