"""What a server's refusal means. Pure functions, no I/O.

Servers differ in how they say that they are busy, full, broken or offended; what this project knows about that
is here. Bodies are hostile: no shape of one is taken for granted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from sparta_api.data.loose_json import parse
from sparta_api.endpoints.waits import retry_after
from sparta_api.secrets import scrub
from sparta_api.show.progress import Usage

MESSAGE_LIMIT = 300
READ_AT_MOST = 2000
"""Bytes of a body that is no JSON which are looked at."""


class Kind(StrEnum):
    """What a fault means for the request."""

    RETRY = "retry"
    """A transport or server fault; the same request may work in a moment."""
    UNREACHABLE = "unreachable"
    """No connection came about."""
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

    @property
    def passes(self) -> bool:
        """Whether the same request may work later, without anybody repairing anything."""
        return self in _PASSING


_PASSING = frozenset({Kind.RETRY, Kind.UNREACHABLE, Kind.THROTTLED, Kind.LOADING})


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
    elsewhere: bool = False
    """Whether another replica may be asked at once."""

    def __str__(self) -> str:
        return f"{self.message} (HTTP {self.status})" if self.status and self.status != 200 else self.message


_EMPTY_ACCOUNT = re.compile(
    r"insufficient.?(?:quota|balance|credit|funds)|credit.?balance|billing.?(?:hard.?)?(?:limit|not.?active)"
    r"|payment.?required|out of credits?|no credits|credits? (?:are |is |have been )?(?:exhausted|depleted|used up)",
    re.I,
)
_MAYBE_EMPTY_ACCOUNT = re.compile(r"exceeded your current quota", re.I)
"""One provider says it of an empty account, another of a minute's share; the second one tells how long to wait."""
_WAIT_IN_TEXT = re.compile(r"(?:try again|retry) in \d", re.I)
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
    r"|not allowed|unavailable",
    re.I,
)
_LOADING = re.compile(r"loading|not ready|warming|starting up", re.I)
_LORA_SLOTS = re.compile(r"no free lora slots", re.I)
_OPTIONAL = (
    "temperature", "top_p", "response_format", "top_logprobs", "logprobs", "seed",
    "max_tokens", "max_completion_tokens",
)  # fmt: skip
"""Request fields that may be left out."""
_RETRYABLE = frozenset({408, 409, 423, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})


@dataclass(slots=True)
class _Problem:
    """An error body, reduced to what matters."""

    message: str
    code: str = ""
    parameter: str = ""

    @property
    def text(self) -> str:
        return f"{self.message} {self.code}"


def fault_of(status: int, headers: Mapping[str, str], body: bytes, data: Any = None) -> Fault:
    """The fault that an answer stands for; `data` is its body where that was parsed already."""
    problem = _problem(headers, body, data if data is not None else parse(body))
    wait = retry_after(headers)
    if 300 <= status < 400:
        place = one_line(headers.get("location", "")) or "elsewhere"
        return Fault(Kind.FATAL, f"redirected to {place}, which is not followed; set base_url to it", status)
    if status in (402, 429):
        return _limit_fault(status, problem, wait)
    if _LORA_SLOTS.search(problem.text):
        return Fault(Kind.THROTTLED, problem.message, status, wait)
    if status in _RETRYABLE or status > 501:
        return _server_fault(status, problem, wait)
    return _client_fault(status, problem)


def error_status(error: Any) -> int:
    """The HTTP status that an error object inside a 200 stands for; 500 where it names none."""
    code = error.get("code") or error.get("status") if isinstance(error, dict) else None
    if isinstance(code, str) and code.isdigit():
        code = int(code)
    if isinstance(code, int) and 400 <= code < 600:
        return code
    text = str(error).lower()
    return 429 if "quota" in text or _EMPTY_ACCOUNT.search(text) else 500


def is_html(headers: Mapping[str, str], body: bytes) -> bool:
    """Whether a page came instead of data."""
    return "html" in headers.get("content-type", "") or body.lstrip()[:1] == b"<"


def one_line(text: str) -> str:
    """A server's words as one short line without secrets."""
    line = " ".join(scrub(text).split())
    return line if len(line) <= MESSAGE_LIMIT else line[: MESSAGE_LIMIT - 3] + "..."


def _problem(headers: Mapping[str, str], body: bytes, data: Any) -> _Problem:
    if data is None:
        if is_html(headers, body):
            return _Problem("an HTML page")
        return _Problem(one_line(body[:READ_AT_MOST].decode("utf-8", "replace")) or "an empty body")
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
    data = parse(raw.encode("utf-8", "replace")) if isinstance(raw, str) else raw
    if isinstance(data, dict):
        inner = data.get("error", data)
        return str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    return str(raw)


def _limit_fault(status: int, problem: _Problem, wait: float | None) -> Fault:
    told_to_wait = wait is not None or _WAIT_IN_TEXT.search(problem.message)
    empty = _EMPTY_ACCOUNT.search(problem.text) or (_MAYBE_EMPTY_ACCOUNT.search(problem.message) and not told_to_wait)
    if status == 402 or empty:
        return Fault(Kind.FATAL, f"billing/quota: {problem.message}", status)
    return Fault(Kind.THROTTLED, problem.message, status, wait)


def _server_fault(status: int, problem: _Problem, wait: float | None) -> Fault:
    if status == 503 and _LOADING.search(problem.message):
        return Fault(Kind.LOADING, problem.message, status, wait)
    if status in (503, 529):
        return Fault(Kind.THROTTLED, problem.message, status, wait)
    return Fault(Kind.RETRY, problem.message, status, wait)


def _client_fault(status: int, problem: _Problem) -> Fault:
    if status in (400, 403, 422, 451) and _FILTER.search(problem.text):
        return Fault(Kind.FILTERED, problem.message, status)
    if status == 413 or (status in (400, 422) and _OVERFLOW.search(problem.text)):
        return Fault(Kind.OVERFLOW, problem.message, status, context=_context(problem.message))
    if status in (400, 404) and _NO_MODEL.search(problem.text):
        return Fault(Kind.NO_MODEL, problem.message, status)
    if status in (400, 422):
        if _SYSTEM_ROLE.search(problem.text):
            return Fault(Kind.NO_SYSTEM_ROLE, problem.message, status)
        parameter = _unsupported(problem)
        if parameter:
            return Fault(Kind.UNSUPPORTED, problem.message, status, parameter=parameter)
    if status in (401, 403):
        return Fault(Kind.FATAL, f"the key is refused: {problem.message}", status)
    return Fault(Kind.FATAL, problem.message, status)


def _unsupported(problem: _Problem) -> str | None:
    """The optional request field that the server names as one that it does not take."""
    if not _UNSUPPORTED.search(problem.text):
        return None
    first = problem.parameter.split(".")[0]
    if first in _OPTIONAL:
        return first
    return next((name for name in _OPTIONAL if re.search(rf"\b{name}\b", problem.message)), None)


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
