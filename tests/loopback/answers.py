"""Answers as a pure function of the model, its adapter's content, the messages, the temperature and the seed.

A fighter's answer begins with its quality ("tier-a" worst to "tier-j" best); a judge reads it back out of its
prompt, adds its bias and a deviation that depends on the text alone, and replies with a score.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import orjson

from tests.loopback.scenario import Judge, ModelSettings, Scale

_SYLLABLES = ("ba", "ce", "di", "fo", "gu", "ha", "ke", "li", "mo", "nu", "pa", "re", "si", "to", "vu", "wa")
WORDS = [f" {a}{b}" for a in _SYLLABLES for b in _SYLLABLES]
TIER = "tier-"
LEVELS = 10
_VERDICT = re.compile(r'\{("[^"\n]+": n(?:, "[^"\n]+": n)*)\}')
"""The shape in which a prompt asks for several scores."""
ABSENT = -25.0
"""Log probability of a token that was asked for by id and is no label."""

Reply = list[tuple[str, list[tuple[str, float]]]]
"""Tokens of an answer, each with the tokens that compete for its place and their log probabilities, best first."""


@dataclass(slots=True)
class Ask:
    """One chat request, reduced to what its answer depends on."""

    identity: str
    model: str
    settings: ModelSettings
    body: dict[str, Any]
    text: str
    messages: bytes
    role: Literal["fight", "judge"]

    def draw(self, size: int) -> bytes:
        """`size` bytes that depend on identity, messages, temperature and seed."""
        knobs = f"\0{self.body.get('temperature')}\0{self.body.get('seed')}\0{self.identity}".encode()
        return hashlib.shake_128(self.messages + knobs).digest(size)


def text_of(messages: Any) -> str:
    """The text of all messages, parts included, one a line."""
    texts: list[str] = []
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            texts.append(content)
        elif isinstance(content, list):
            texts.extend(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "\n".join(texts)


def role_of(text: str, settings: ModelSettings, judge: Judge) -> Literal["fight", "judge"]:
    """Whether a prompt asks for a score."""
    if settings.role is not None:
        return settings.role
    if judge.pattern is not None:
        return "judge" if _compiled(judge.pattern).search(text) else "fight"
    lowered = text.lower()
    return "judge" if "score" in lowered and ("json" in lowered or "digit" in lowered) else "fight"


@lru_cache(maxsize=32)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def completion(ask: Ask, judge: Judge) -> dict[str, Any]:
    """The chat completion object that answers the request."""
    reply = _judge_reply(ask, judge) if ask.role == "judge" else _fighter_reply(ask)
    limit = ask.body.get("max_completion_tokens") or ask.body.get("max_tokens")
    kept = reply if limit is None else reply[:limit]
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": "".join([token for token, _ in kept])},
        "finish_reason": "stop" if len(kept) == len(reply) else "length",
    }
    if ask.body.get("logprobs") and judge.logprobs != "none":
        choice["logprobs"] = _logprobs(kept, ask.body, judge.logprobs)
    prompt = prompt_tokens(ask)
    return {
        "id": "chatcmpl-loopback",
        "object": "chat.completion",
        "created": 0,
        "model": ask.model,
        "choices": [choice],
        "usage": {"prompt_tokens": prompt, "completion_tokens": len(kept), "total_tokens": prompt + len(kept)},
    }


def prompt_tokens(ask: Ask) -> int:
    """The size of a prompt: four characters a token."""
    return len(ask.text) // 4 + 4


def _fighter_reply(ask: Ask) -> Reply:
    low, high = ask.settings.words
    drawn = ask.draw(high + 4)
    quality = min(LEVELS - 1, max(0, round(drawn[0] * LEVELS / 256 - 0.5 + ask.settings.skill)))
    words = [f"{TIER}{chr(97 + quality)}"]
    words += [WORDS[byte] for byte in drawn[4 : 3 + low + drawn[1] % (high - low + 1)]]
    return [(word, [(word, -0.1)]) for word in words]


def _qualities(text: str) -> list[int]:
    marks = []
    start = text.find(TIER)
    while start >= 0:
        mark = ord(text[start + len(TIER) : start + len(TIER) + 1] or " ") - 97
        if 0 <= mark < LEVELS:
            marks.append(mark)
        start = text.find(TIER, start + 1)
    return marks


def _judge_reply(ask: Ask, judge: Judge) -> Reply:
    drawn = ask.draw(4)
    marks = _qualities(ask.text) or [drawn[2] * LEVELS // 256]
    shift = ask.settings.bias + (drawn[0] / 127.5 - 1) * ask.settings.noise
    centres = [min(LEVELS - 1.0, max(0.0, mark + shift)) for mark in (marks[-1], marks[0], marks[-1])]
    shape = judge.reply
    wanted = _VERDICT.search(ask.text)
    if shape in ("auto", "json") and wanted and wanted[1] != '"score": n':
        return _sheet(re.findall(r'"([^"]+)": n', wanted[1]), centres, ask, judge)
    if shape == "auto":
        limit = ask.body.get("max_completion_tokens") or ask.body.get("max_tokens") or LEVELS
        shape = "digit" if ask.body.get("logprobs") or limit <= 2 else "json"
    if shape == "digit":
        return _score_tokens(centres[0], judge.digits, judge)
    if shape == "json":
        start: Reply = [(token, [(token, -0.01)]) for token in ('{"', "score", '":', " ")]
        return [*start, *_score_tokens(centres[0], judge.scale, judge), ("}", [("}", -0.01)])]
    values = {"$score": centres[0], "$first": centres[1], "$second": centres[2]}
    text = shape.replace("$digit", str(_level(centres[0], judge.digits)))
    for name, centre in values.items():
        text = text.replace(name, str(_level(centre, judge.scale)))
    return [(token, [(token, -0.1)]) for token in re.findall(r"\s*\S+\s*$|\s*\S+", text)]


def _sheet(keys: list[str], centres: list[float], ask: Ask, judge: Judge) -> Reply:
    """A JSON object with a score under every key; those that end with _a and _b are about either response of a pair."""
    fields = []
    for key in keys:
        centre = centres[0]
        if key.endswith(("_a", "_b")):
            centre = centres[1] + ask.settings.position_bias if key.endswith("_a") else centres[2]
        criterion = key.removesuffix("_a").removesuffix("_b")
        if criterion != "score":
            centre += len(criterion) % 3 - 1
        fields.append(f'"{key}": {_level(min(LEVELS - 1.0, max(0.0, centre)), judge.scale)}')
    return [(token, [(token, -0.1)]) for token in re.findall(r"\s*\S+", "{" + ", ".join(fields) + "}")]


def _level(centre: float, scale: Scale) -> int:
    return scale[0] + round(centre / (LEVELS - 1) * (scale[1] - scale[0]))


def _score_tokens(centre: float, scale: Scale, judge: Judge) -> Reply:
    """A number as one token per digit; the first one carries the distribution over the scale's first digits."""
    value = str(_level(centre, scale))
    middle = scale[0] + centre / (LEVELS - 1) * (scale[1] - scale[0])
    weights: dict[str, float] = {}
    for level in range(scale[0], scale[1] + 1):
        weight = math.exp(-((level - middle) ** 2) / (2 * judge.sharpness**2))
        weights[str(level)[0]] = weights.get(str(level)[0], 0.0) + weight
    total = sum(weights.values())
    ranked = {token: judge.label_mass * weight / total for token, weight in weights.items()}
    rest = 1 - judge.label_mass
    if rest > 0:
        ranked |= {"The": rest * 0.6, " ": rest * 0.4}
    rivals = [(t, max(ABSENT, math.log(p))) for t, p in sorted(ranked.items(), key=lambda x: (-x[1], x[0])) if p > 0]
    return [(value[0], rivals), *[(digit, [(digit, -0.01)]) for digit in value[1:]]]


def _logprobs(reply: Reply, body: dict[str, Any], shape: str) -> dict[str, Any]:
    count = body.get("top_logprobs") or 0
    wanted = body.get("logprob_token_ids")
    rows = []
    for token, rivals in reply:
        known = dict(rivals)
        if wanted is not None:
            top = sorted(((chr(i), known.get(chr(i), ABSENT)) for i in wanted), key=lambda x: -x[1])
        else:
            top = rivals[:count]
        rows.append((token, known.get(token, ABSENT), top))
    if shape == "legacy":
        return {
            "tokens": [token for token, _, _ in rows],
            "token_logprobs": [logprob for _, logprob, _ in rows],
            "top_logprobs": [dict(top) for _, _, top in rows],
        }
    return {
        "content": [
            {**_entry(token, logprob), "top_logprobs": [_entry(*rival) for rival in top]}
            for token, logprob, top in rows
        ]
    }


def _entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}


def canonical(messages: Any) -> bytes:
    """The messages as bytes that do not depend on how the client spaced its JSON."""
    return orjson.dumps(messages)
