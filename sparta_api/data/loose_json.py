"""JSON as servers really send it: lone surrogates, NaN, event streams where one object was asked for."""

from __future__ import annotations

import json
from typing import Any

import orjson

from sparta_api.data.journal import without_surrogates


def parse(body: bytes) -> Any:
    """The value in a body; None when it holds no JSON. An event stream becomes the completion that it adds up to."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        pass
    try:
        return without_surrogates(json.loads(body.decode("utf-8", "replace")))
    except (ValueError, RecursionError):
        return _event_stream(body)


def _event_stream(body: bytes) -> dict[str, Any] | None:
    """A server-sent event stream put together into one completion; None when it is none, or was cut off."""
    if not body.lstrip().startswith((b"data:", b":", b"event:")):
        return None
    content: list[str] = []
    finish: Any = None
    usage: Any = None
    ended = False
    for line in body.decode("utf-8", "replace").splitlines():
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        ended = ended or data == "[DONE]"
        event = _event(data)
        if event.get("error"):
            return {"error": event["error"]}
        usage = event.get("usage") or usage
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else []:
            if isinstance(choice, dict):
                content.append(_delta(choice))
                finish = choice.get("finish_reason") or finish
    if not content or not (ended or finish):
        return None
    message = {"content": "".join(content)}
    return {"choices": [{"message": message, "finish_reason": finish or "stop"}], "usage": usage}


def _event(data: str) -> dict[str, Any]:
    try:
        event = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}
    return event if isinstance(event, dict) else {}


def _delta(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or choice.get("message")
    text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
    return text if isinstance(text, str) else ""
