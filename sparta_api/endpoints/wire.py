"""One chat completion on the wire: what a server's answer holds. Pure functions, no I/O.

`read` turns status, headers and body into an `Answer` or raises a `Fault`; what refusals mean is in `faults`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparta_api.data.loose_json import parse
from sparta_api.endpoints.faults import Fault, Kind, error_status, fault_of, is_html
from sparta_api.secrets import mask
from sparta_api.show.progress import Usage

CHARACTERS_PER_TOKEN = 4
MOST_TOKENS = 1 << 40
"""A count beyond this is nonsense and read as none."""


@dataclass(slots=True)
class Answer:
    """A chat completion. `content` is what the model says to the user, without its reasoning."""

    content: str
    finish_reason: str
    usage: Usage
    logprobs: Any = None
    prompt_logprobs: Any = None
    """What vLLM tells of the prompt's own tokens when it is asked."""


def read(status: int, headers: Mapping[str, str], body: bytes) -> Answer:
    """The answer of a chat completion request; raises Fault for everything that is none."""
    body = mask(body)
    if status != 200:
        raise fault_of(status, headers, body)
    data = parse(body)
    if data is None:
        what = "an HTML page" if is_html(headers, body) else "a truncated or malformed body"
        raise Fault(Kind.RETRY, f"the server answered with {what}", status)
    if not isinstance(data, dict):
        raise Fault(Kind.RETRY, "the server's answer is not a JSON object", status)
    choices = data.get("choices")
    if not choices and data.get("error"):
        raise fault_of(error_status(data["error"]), headers, body, data)
    usage = _usage(data.get("usage"))
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise Fault(Kind.RETRY, "the server's answer has no choices", status, usage=usage)
    choice = choices[0]
    if choice.get("error"):
        fault = fault_of(error_status(choice["error"]), headers, body, choice)
        fault.usage = usage
        raise fault
    answer = _answer(choice, usage)
    answer.prompt_logprobs = data.get("prompt_logprobs")
    return answer


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
    return int(value) if isinstance(value, int | float) and 0 < value < MOST_TOKENS else 0


def estimate_tokens(characters: int) -> int:
    """A rough token count for text whose usage no server has told."""
    return characters // CHARACTERS_PER_TOKEN + 1
