"""One chat completion on the wire: what a server's answer means. Pure functions, no I/O.

Servers differ in how they say that they are busy, full, broken or offended; everything that this project
knows about that is here. `read` turns status, headers and body into an `Answer` or raises a `Fault`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import Any

import orjson

from sparta_api.progress import Usage
from sparta_api.secrets import scrub

MESSAGE_LIMIT = 300
CHARACTERS_PER_TOKEN = 4


class Kind(StrEnum):
    """What a fault means for the request."""

    RETRY = "retry"
    """A transport or server fault; the same request may work in a moment."""
    THROTTLED = "throttled"
    """The account is over a limit; `wait` says for how long where the server told."""
    LOADING = "loading"
    """The server is up, its model is not yet."""
    EMPTY = "empty"
    """An answer without any text."""
    FILTERED = "content_filter"
    OVERFLOW = "context_overflow"
    """Prompt and max_tokens do not fit; `context` holds (window, prompt tokens) where the server told."""
    UNSUPPORTED = "unsupported"
    """The server does not take `parameter`."""
    NO_SYSTEM_ROLE = "no_system_role"
    NO_MODEL = "no_model"
    """The server does not know the model or adapter."""
    FATAL = "fatal"
    """Asking again cannot help: key, billing, address, request."""


@dataclass(slots=True)
class Fault(Exception):
    """Why a request has no answer."""

    kind: Kind
    message: str
    status: int | None = None
    wait: float | None = None
    """Seconds that the server asked to wait."""
    parameter: str | None = None
    context: tuple[int, int] | None = None
    usage: Usage = field(default_factory=Usage)

    def __str__(self) -> str:
        return f"{self.message} (HTTP {self.status})" if self.status and self.status != 200 else self.message


@dataclass(slots=True)
class Answer:
    """A chat completion. `content` is what the model says to the user, without its reasoning."""

    content: str
    finish_reason: str
    usage: Usage
    logprobs: Any = None


_PERMANENT_429 = re.compile(r"insufficient.?quota|credit|billing|balance|payment|exceeded your current quota", re.I)
_FILTER = re.compile(r"content.?filter|content.?policy|content.?management|ResponsibleAI|flagged|moderation", re.I)
_OVERFLOW = re.compile(
    r"context.?length|context.?window|maximum context|max_tokens' is too large|exceeds? the (?:available )?context"
    r"|prompt is too long|too many (?:input )?tokens|longer than the maximum model length|input is too long",
    re.I,
)
_SYSTEM_ROLE = re.compile(
    r"system role (?:is )?not supported|system messages? (?:is|are) not supported|developer instruction is not enabled",
    re.I,
)
_NO_MODEL = re.compile(
    r"model.{0,120}(?:does not exist|not found|not exist|unknown|is not (?:available|loaded))"
    r"|(?:unknown|no such|invalid) model|no adapter",
    re.I,
)
_UNSUPPORTED = re.compile(
    r"unsupported|not support|unrecognized|unknown (?:field|parameter)|unexpected|not permitted|extra inputs"
    r"|not allowed",
    re.I,
)
_LOADING = re.compile(r"loading|not ready|warming|starting up", re.I)
_LORA_SLOTS = re.compile(r"no free lora slots", re.I)
_OPTIONAL = ("temperature", "top_p", "response_format", "top_logprobs", "logprobs", "seed", "max_tokens")
_RETRYABLE = frozenset({408, 409, 423, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})


def read(status: int, headers: Mapping[str, str], body: bytes) -> Answer:
    """The answer of a chat completion request; raises Fault for everything that is none."""
    if status != 200:
        raise _fault_of(status, headers, body)
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        data = _event_stream(body)
        if data is None:
            what = "an HTML page" if _is_html(headers, body) else "a truncated or malformed body"
            raise Fault(Kind.RETRY, f"the server answered with {what}", status) from None
    if not isinstance(data, dict):
        raise Fault(Kind.RETRY, "the server's answer is not a JSON object", status)
    choices = data.get("choices")
    if not choices and data.get("error"):
        raise _fault_of(_status_of(data["error"]), headers, body)
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise Fault(Kind.RETRY, "the server's answer has no choices", status, usage=_usage(data.get("usage")))
    return _answer(choices[0], _usage(data.get("usage")))


def _answer(choice: dict[str, Any], usage: Usage) -> Answer:
    message = choice.get("message")
    if not isinstance(message, dict):
        message = {"content": choice.get("text")}
    finish_reason = str(choice.get("finish_reason") or "stop")
    if finish_reason == "content_filter":
        raise Fault(Kind.FILTERED, "the answer was filtered", 200, usage=usage)
    content = visible_text(_text(message.get("content")) or _text(message.get("refusal")))
    if not content.strip():
        reason = "was cut off before any text" if finish_reason == "length" else "has no text"
        raise Fault(Kind.EMPTY, f"the answer {reason}", 200, usage=usage)
    return Answer(content, finish_reason, usage, choice.get("logprobs"))


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, dict))
        return "".join(part for part in parts if isinstance(part, str))
    return ""


def visible_text(content: str) -> str:
    """The text after a leading reasoning block; empty where that block was never closed."""
    if "</think>" in content:
        head, _, tail = content.partition("</think>")
        if head.lstrip().startswith("<think>") or "<think>" not in head:
            return tail.lstrip()
    elif content.lstrip().startswith("<think>"):
        return ""
    return content


def _usage(data: Any) -> Usage:
    if not isinstance(data, dict):
        return Usage()
    details = data.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(_count(data.get("prompt_tokens")), _count(cached), _count(data.get("completion_tokens")))


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def estimate_tokens(characters: int) -> int:
    """A rough token count for text whose usage no server has told."""
    return characters // CHARACTERS_PER_TOKEN + 1


def _event_stream(body: bytes) -> dict[str, Any] | None:
    """A server-sent event stream put together into one completion; None when it is not such a stream."""
    if not body.lstrip().startswith((b"data:", b":", b"event:")):
        return None
    content, finish, usage = "", None, None
    seen = False
    for line in body.decode("utf-8", "replace").splitlines():
        try:
            event = orjson.loads(line.removeprefix("data:").strip()) if line.startswith("data:") else None
        except orjson.JSONDecodeError:
            continue
        if not isinstance(event, dict):
            continue
        if event.get("error"):
            return {"error": event["error"]}
        usage = event.get("usage") or usage
        for choice in event.get("choices") or []:
            delta = choice.get("delta") or choice.get("message") or {}
            content += _text(delta.get("content"))
            finish = choice.get("finish_reason") or finish
            seen = True
    if not seen:
        return None
    return {"choices": [{"message": {"content": content}, "finish_reason": finish or "stop"}], "usage": usage}


def _is_html(headers: Mapping[str, str], body: bytes) -> bool:
    return "html" in headers.get("content-type", "") or body.lstrip()[:1] == b"<"


def _status_of(error: Any) -> int:
    """The HTTP status that an error object inside a 200 stands for; 500 where it names none."""
    code = error.get("code") or error.get("status") if isinstance(error, dict) else None
    if isinstance(code, str) and code.isdigit():
        code = int(code)
    if isinstance(code, int) and 400 <= code < 600:
        return code
    text = str(error)
    return 429 if _PERMANENT_429.search(text) or "quota" in text.lower() else 500


@dataclass(slots=True)
class _Problem:
    """An error body, reduced to what matters."""

    message: str
    code: str = ""
    parameter: str = ""


def _problem(headers: Mapping[str, str], body: bytes) -> _Problem:
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        stream = _event_stream(body)
        if stream is None:
            if _is_html(headers, body):
                return _Problem("an HTML page")
            return _Problem(one_line(body[:2000].decode("utf-8", "replace")) or "an empty body")
        data = stream
    error = data.get("error", data) if isinstance(data, dict) else data
    if not isinstance(error, dict):
        return _Problem(one_line(str(error)))
    message = error.get("message") or error.get("detail") or error.get("error") or error
    metadata = error.get("metadata")
    if isinstance(metadata, dict) and metadata.get("raw"):
        provider = metadata.get("provider_name")
        message = f"{_raw_message(metadata['raw'])}{f' (provider {provider})' if provider else ''}"
    code = f"{error.get('code') or ''} {error.get('type') or ''}"
    return _Problem(one_line(str(message)), code, str(error.get("param") or ""))


def _raw_message(raw: Any) -> str:
    if isinstance(raw, str):
        try:
            raw = orjson.loads(raw)
        except orjson.JSONDecodeError:
            return str(raw)
    if isinstance(raw, dict):
        inner = raw.get("error", raw)
        return str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    return str(raw)


def one_line(text: str) -> str:
    """A server's words as one short line without secrets."""
    line = " ".join(scrub(text).split())
    return line if len(line) <= MESSAGE_LIMIT else line[: MESSAGE_LIMIT - 3] + "..."


def _fault_of(status: int, headers: Mapping[str, str], body: bytes) -> Fault:
    problem = _problem(headers, body)
    text = f"{problem.message} {problem.code}"
    wait = retry_after(headers)
    if status == 429 or status == 402:
        if status == 402 or _PERMANENT_429.search(text):
            return Fault(Kind.FATAL, f"billing/quota: {problem.message}", status)
        return Fault(Kind.THROTTLED, problem.message, status, wait)
    if _LORA_SLOTS.search(text):
        return Fault(Kind.THROTTLED, problem.message, status, wait)
    if status in _RETRYABLE or status > 501:
        return _server_fault(status, problem, wait)
    return _client_fault(status, problem, text)


def _server_fault(status: int, problem: _Problem, wait: float | None) -> Fault:
    if status == 503 and _LOADING.search(problem.message):
        return Fault(Kind.LOADING, problem.message, status, wait)
    if status in (503, 529):
        return Fault(Kind.THROTTLED, problem.message, status, wait)
    return Fault(Kind.RETRY, problem.message, status, wait)


def _client_fault(status: int, problem: _Problem, text: str) -> Fault:
    if status in (400, 403, 422, 451) and _FILTER.search(text):
        return Fault(Kind.FILTERED, problem.message, status)
    if status == 413 or (status in (400, 422) and _OVERFLOW.search(text)):
        return Fault(Kind.OVERFLOW, problem.message, status, context=_context(problem.message))
    if status in (400, 404) and _NO_MODEL.search(text):
        return Fault(Kind.NO_MODEL, problem.message, status)
    if status in (400, 422):
        if _SYSTEM_ROLE.search(text):
            return Fault(Kind.NO_SYSTEM_ROLE, problem.message, status)
        parameter = _unsupported(problem, text)
        if parameter:
            return Fault(Kind.UNSUPPORTED, problem.message, status, parameter=parameter)
    if status in (401, 403):
        return Fault(Kind.FATAL, f"the key is refused: {problem.message}", status)
    return Fault(Kind.FATAL, problem.message, status)


def _unsupported(problem: _Problem, text: str) -> str | None:
    if not _UNSUPPORTED.search(text):
        return None
    named = (name for name in _OPTIONAL if name == problem.parameter or name in problem.message)
    return next(named, None)


def _context(message: str) -> tuple[int, int] | None:
    """(context window, prompt tokens) out of a server's sentence."""
    window = re.search(
        r"(?:maximum context length|context (?:length|window|size)|n_ctx)\D{0,40}?(\d{2,})", message, re.I
    )
    prompt = re.search(
        r"(\d+) (?:input|prompt) tokens|(\d+) (?:tokens )?in the messages|prompt contains(?: at least)? (\d+)",
        message,
        re.I,
    )
    if not window or not prompt:
        return None
    return int(window.group(1)), int(next(group for group in prompt.groups() if group))


_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(text: str, now: datetime | None = None) -> float | None:
    """A wait written as seconds, as a duration like 6m0s or 500ms, as an ISO or HTTP date, or as epoch seconds."""
    text = text.strip()
    now = now or datetime.now(UTC)
    try:
        value = float(text)
    except ValueError:
        pass
    else:
        return max(0.0, value - now.timestamp() if value > 1e9 else value)
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", text)
    if parts and "".join(number + unit for number, unit in parts) == text:
        return sum(float(number) * _UNITS[unit] for number, unit in parts)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        try:
            moment = parsedate_to_datetime(text)
        except ValueError:
            return None
    return max(0.0, (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() - now.timestamp())


def server_now(headers: Mapping[str, str]) -> datetime:
    """The server's own clock where it tells it, so that a wrong local clock changes no wait."""
    try:
        return parsedate_to_datetime(headers["date"])
    except (KeyError, ValueError):
        return datetime.now(UTC)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """How long the server asks to wait: Retry-After(-Ms), else the reset of the bucket that is exhausted."""
    now = server_now(headers)
    milliseconds = headers.get("retry-after-ms")
    if milliseconds:
        value = seconds(milliseconds, now)
        if value is not None:
            return value / 1000
    if headers.get("retry-after"):
        return seconds(headers["retry-after"], now)
    resets = {}
    for bucket in ("-requests", "-tokens", ""):
        value = seconds(headers.get(f"x-ratelimit-reset{bucket}", ""), now)
        if value is not None:
            resets[bucket] = value
    exhausted = [resets[b] for b in resets if headers.get(f"x-ratelimit-remaining{b}", "").strip() in ("0", "0.0")]
    return max(exhausted) if exhausted else min(resets.values(), default=None)
