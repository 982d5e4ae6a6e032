"""Which fault hits a request, and the answer that it makes."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any

import orjson

from tests.loopback.pace import retry_after
from tests.loopback.scenario import Fault, Match, Rule, Scenario

_SURROGATE = "(lone surrogate here)"


@dataclass(slots=True)
class Facts:
    """What rules look at. `content` names a request for ever: model and messages."""

    path: str
    model: str
    role: str
    text: str
    body: dict[str, Any]
    content: bytes


@dataclass(slots=True)
class _State:
    rule: Rule
    path: re.Pattern[str]
    seen: int = 0
    applied: int = 0
    attempts: dict[bytes, int] = field(default_factory=dict)


class Rules:
    """The rules of a scenario together with what they have seen so far."""

    def __init__(self, scenario: Scenario) -> None:
        self._seed = scenario.seed
        self._states = [_State(rule, re.compile(rule.match.path)) for rule in scenario.rules]
        self.active = bool(self._states)

    def pick(self, facts: Facts) -> Fault | None:
        """The fault of the first rule that applies."""
        chosen: _State | None = None
        for number, state in enumerate(self._states):
            if self._counts(state, facts) and chosen is None and self._due(number, state, facts):
                chosen = state
        if chosen is None:
            return None
        chosen.applied += 1
        return chosen.rule.fault

    def _counts(self, state: _State, facts: Facts) -> bool:
        """Whether the conditions on the request itself hold; then it counts for nth, every and attempts."""
        if not state.path.search(facts.path) or not _describes(state.rule.match, facts):
            return False
        state.seen += 1
        if state.rule.match.attempts is not None or state.rule.match.probability is not None:
            state.attempts[facts.content] = state.attempts.get(facts.content, 0) + 1
        return True

    def _due(self, number: int, state: _State, facts: Facts) -> bool:
        match, rule = state.rule.match, state.rule
        attempt = state.attempts.get(facts.content, 0)
        if rule.times is not None and state.applied >= rule.times:
            return False
        if isinstance(match.nth, list) and state.seen not in match.nth:
            return False
        if match.every is not None and state.seen % match.every:
            return False
        if match.attempts is not None and attempt > match.attempts:
            return False
        return match.probability is None or self._draw(number, facts.content, attempt) < match.probability

    def _draw(self, number: int, content: bytes, attempt: int) -> float:
        digest = hashlib.sha256(content + f"|{self._seed}|{number}|{attempt}".encode()).digest()
        return int.from_bytes(digest[:8], "big") / 2**64


def _describes(match: Match, facts: Facts) -> bool:
    if isinstance(match.model, list) and facts.model not in match.model:
        return False
    if match.role is not None and facts.role != match.role:
        return False
    if match.contains is not None and match.contains not in facts.text:
        return False
    if match.has_field is not None and match.has_field not in facts.body:
        return False
    return match.has_role is None or match.has_role in _roles(facts.body)


def _roles(body: dict[str, Any]) -> set[str]:
    messages = body.get("messages")
    return {str(m.get("role")) for m in messages if isinstance(m, dict)} if isinstance(messages, list) else set()


def headers_of(fault: Fault) -> dict[str, str]:
    """The fault's headers, with its Retry-After."""
    headers = dict(fault.headers)
    if fault.retry_after_s is not None:
        headers["retry-after"] = f"{fault.retry_after_s:g}"
    if fault.retry_after_ms is not None:
        headers |= retry_after("ms", fault.retry_after_ms / 1000)
    if fault.retry_after_date_s is not None:
        headers |= retry_after("date", fault.retry_after_date_s)
    return headers


def body_of(fault: Fault, authorization: str) -> bytes:
    """The body of a `reply` or `echo_authorization` fault."""
    if fault.kind == "echo_authorization":
        message = f"Invalid credentials in request with headers {{'Authorization': '{authorization}'}}"
        return orjson.dumps({"error": {"message": message, "code": fault.status}})
    return fault.body.encode() if isinstance(fault.body, str) else orjson.dumps(fault.body)


def edited(fault: Fault, answer: dict[str, Any]) -> bytes:
    """The answer with the changes of an `edit`, `sse` or `surrogate` fault, as bytes."""
    choice = answer["choices"][0]
    if fault.kind == "surrogate":
        choice["message"]["content"] = f"bad {_SURROGATE} text"
        return orjson.dumps(answer).replace(_SURROGATE.encode(), rb"\udc00")
    if fault.kind == "sse":
        return stream_of(answer, fault.lines)
    choice["message"].update(fault.message)
    choice.update(fault.choice)
    answer.update(fault.set)
    for key in fault.drop:
        answer.pop(key, None)
    return orjson.dumps(answer)


def stream_of(answer: dict[str, Any], lines: list[str] | None = None) -> bytes:
    """An event stream: the given lines, or the answer as two chunks."""
    if lines is None:
        choice = answer["choices"][0]
        start = {**answer, "object": "chat.completion.chunk", "usage": None,
                 "choices": [{"index": 0, "delta": choice["message"], "finish_reason": None}]}  # fmt: skip
        last = {**answer, "object": "chat.completion.chunk",
                "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]}  # fmt: skip
        lines = [f"data: {orjson.dumps(part).decode()}\n" for part in (start, last)] + ["data: [DONE]"]
    return ("\n".join(lines) + "\n\n").encode()
