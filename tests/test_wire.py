"""What an answer on the wire means: every shape that servers have been seen to send, and hostile ones."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from sparta_api import secrets
from sparta_api.endpoints.faults import Fault, Kind
from sparta_api.endpoints.rates import AutoLimit, Pace
from sparta_api.endpoints.waits import retry_after, seconds
from sparta_api.endpoints.wire import Answer, read

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
USAGE = {"prompt_tokens": 50, "completion_tokens": 20, "total_tokens": 70}


def completion(content: Any = "hello", finish: Any = "stop", **rest: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": content, **rest.pop("message", {})}
    return {"choices": [{"index": 0, "finish_reason": finish, "message": message, **rest}], "usage": USAGE}


def answer(body: Any) -> Answer:
    return read(200, {}, body if isinstance(body, bytes) else json.dumps(body).encode())


def fault(status: int, body: Any, headers: dict[str, str] | None = None) -> Fault:
    with pytest.raises(Fault) as caught:
        read(status, headers or {}, body if isinstance(body, bytes) else json.dumps(body).encode())
    return caught.value


def error(message: str, **rest: Any) -> dict[str, Any]:
    return {"error": {"message": message, **rest}}


@pytest.mark.parametrize(
    ("body", "content"),
    [
        (completion("hello"), "hello"),
        (completion([{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]), "hello"),
        (completion("<think>draft 4</think>\n{\"score\": 6}"), '{"score": 6}'),
        (completion("draft 4\n</think>\n\n8"), "8"),
        (completion("what <think> does </think> mean"), "what <think> does </think> mean"),
        (completion(None, message={"refusal": "I cannot."}), "I cannot."),
        ({"choices": [{"text": "old style", "finish_reason": "stop"}]}, "old style"),
        (completion("cut", "length"), "cut"),
        (completion("odd", {"reason": "stop"}), "odd"),
        (b'{"choices":[{"message":{"content":"bad \\udc00 text"}}]}', "bad \ufffd text"),
        (b'{"choices":[{"message":{"content":"x"},"logprobs":{"content":[{"logprob":-Infinity}]}}]}', "x"),
        (b'data: : keepalive\n\ndata: {"choices":[{"delta":{"content":"ok"}}]}\n\ndata: [DONE]\n', "ok"),
        (b'data: {"choices":[7,{"delta":{"content":"a"}}]}\ndata: {"choices":[{"delta":5,"finish_reason":"x"}]}', "a"),
    ],
)  # fmt: skip
def test_what_the_model_says(body: Any, content: str) -> None:
    assert answer(body).content == content


def test_usage_is_counted_with_cached_and_reasoning_tokens() -> None:
    details = {"prompt_tokens_details": {"cached_tokens": 2000}, "completion_tokens_details": {"reasoning_tokens": 90}}
    usage = answer({**completion(), "usage": {"prompt_tokens": 3000, "completion_tokens": 100, **details}}).usage
    assert (usage.prompt, usage.cached, usage.completion) == (3000, 2000, 100)


@pytest.mark.parametrize(
    "usage", [None, 7, [], {"prompt_tokens": "many", "completion_tokens": -5}, {"prompt_tokens": 10**30}]
)
def test_nonsense_usage_counts_as_none(usage: Any) -> None:
    found = answer({**completion(), "usage": usage}).usage
    assert (found.prompt, found.cached, found.completion) == (0, 0, 0)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (completion(None), Kind.EMPTY),
        (completion(None, message={"reasoning": None}), Kind.EMPTY),
        (completion("", message={"reasoning": "The answer is 42."}), Kind.EMPTY),
        (completion("", "length"), Kind.EMPTY),
        (completion("<think>no end", "length"), Kind.EMPTY),
        (completion(["x", 5, {"image": 1}]), Kind.EMPTY),
        (completion({"text": "x"}), Kind.EMPTY),
        (completion(None, "content_filter"), Kind.FILTERED),
        (completion("half of it", "content_filter"), Kind.FILTERED),
        ({"choices": []}, Kind.RETRY),
        ({"choices": [], "prompt_filter_results": [{"prompt_index": 0}]}, Kind.RETRY),
        ({"choices": [None]}, Kind.RETRY),
        ({"choices": "no"}, Kind.RETRY),
        ({}, Kind.RETRY),
        ([], Kind.RETRY),
        (b"null", Kind.RETRY),
        (b"", Kind.RETRY),
        (b'{"choices":[{"message":{"con', Kind.RETRY),
        (b"[" * 200_000, Kind.RETRY),
        (b"<html>welcome</html>", Kind.RETRY),
        ({"error": {"message": "upstream failed", "code": 502}}, Kind.RETRY),
        ({"error": "overloaded"}, Kind.RETRY),
        ({"choices": None, "error": {"message": "Provider returned error", "code": 429}}, Kind.THROTTLED),
        ({"choices": None, "error": {"message": "no", "code": "401"}}, Kind.FATAL),
        ({"choices": [{"error": {"code": 502, "message": "cut"}, "finish_reason": "error"}]}, Kind.RETRY),
        (b'data: {"error":{"message":"quota exceeded"}}\n\ndata: [DONE]', Kind.THROTTLED),
        (b'data: {"choices":[{"delta":{"content":"half of"}}]}\n\n', Kind.RETRY),
        (b"data: [DONE]\n\n", Kind.RETRY),
    ],
)
def test_a_200_that_holds_no_answer(body: Any, kind: Kind) -> None:
    assert fault(200, body).kind is kind


@pytest.mark.parametrize(
    ("status", "body", "kind", "says"),
    [
        (400, {"error": {"message": "Provider returned error", "code": 400, "metadata": {
            "raw": '{"error":{"message":"Model foo supports at most 8 stop words"}}', "provider_name": "acme"}}},
         Kind.FATAL, "at most 8 stop words (provider acme)"),
        (400, error("The response was filtered", param="prompt", code="content_filter", status=400), Kind.FILTERED, ""),
        (403, error("Your input was flagged by moderation"), Kind.FILTERED, ""),
        (400, {"object": "error", "message": "System role not supported", "code": 400}, Kind.NO_SYSTEM_ROLE, ""),
        (400, error("Unsupported value: 'temperature' does not support 0.2", param="temperature",
                    code="unsupported_value"), Kind.UNSUPPORTED, ""),
        (400, error("This response_format type is unavailable now"), Kind.UNSUPPORTED, "response_format"),
        (404, error("The model `m1-r2` does not exist."), Kind.NO_MODEL, "m1-r2"),
        (404, b"<html>nothing here</html>", Kind.FATAL, "an HTML page"),
        (401, error("Incorrect API key provided."), Kind.FATAL, "the key is refused"),
        (402, error("pay first"), Kind.FATAL, "billing/quota"),
        (429, error("You have no credits remaining", type="insufficient_quota", code="credit_balance_exhausted"),
         Kind.FATAL, "billing/quota"),
        (429, error("You exceeded your current quota, please check your billing details."), Kind.FATAL, "quota"),
        (429, error("You exceeded your current quota, please check your plan. Please retry in 37.5s."),
         Kind.THROTTLED, ""),
        (429, error("Rate limit reached. Please add a payment method to your account to increase your rate limit."),
         Kind.THROTTLED, ""),
        (429, error("the load balancer is busy"), Kind.THROTTLED, ""),
        (408, error("Request timeout"), Kind.RETRY, ""),
        (409, error("Conflict"), Kind.RETRY, ""),
        (425, error("Too early"), Kind.RETRY, ""),
        (500, b"Internal Server Error", Kind.RETRY, "Internal Server Error (HTTP 500)"),
        (502, b"<!DOCTYPE html><html><h1>502</h1></html>", Kind.RETRY, "an HTML page"),
        (503, error("Loading model", code=503), Kind.LOADING, ""),
        (503, error("busy"), Kind.THROTTLED, ""),
        (529, {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}, Kind.THROTTLED, ""),
        (500, error("No free lora slots!"), Kind.THROTTLED, ""),
        (501, error("Not implemented"), Kind.FATAL, ""),
        (413, b"", Kind.OVERFLOW, ""),
        (418, {"detail": [{"loc": ["body"], "msg": "x"}]}, Kind.FATAL, "loc"),
        (500, b"\xff\xfe\x00", Kind.RETRY, ""),
        (400, b"[1, 2]", Kind.FATAL, "[1, 2]"),
    ],
)  # fmt: skip
def test_refusals(status: int, body: Any, kind: Kind, says: str) -> None:
    found = fault(status, body)
    assert found.kind is kind
    assert says in str(found)
    assert "\n" not in str(found)


@pytest.mark.parametrize(
    ("message", "param", "parameter"),
    [
        ("Unsupported value: 'temperature' does not support 0.2", "temperature", "temperature"),
        (
            "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead.",
            "",
            "max_tokens",
        ),
        ("Invalid parameter: not supported", "response_format.json_schema", "response_format"),
        ("top_logprobs is not supported", "", "top_logprobs"),
        ("Unrecognized request argument supplied: seed", None, "seed"),
    ],
)
def test_the_field_that_is_not_taken(message: str, param: str | None, parameter: str) -> None:
    assert fault(400, error(message, param=param)).parameter == parameter


@pytest.mark.parametrize(
    ("message", "context"),
    [
        ("'max_tokens' is too large: 2048. This model's maximum context length is 4096 tokens and your request has "
         "3000 input tokens", (4096, 3000)),
        ("This model's maximum context length is 4096 tokens. However, you requested 5048 tokens (3000 in the "
         "messages, 2048 in the completion).", (4096, 3000)),
        ("This model's maximum context length is 64 tokens. However, your prompt contains 81 input tokens", (64, 81)),
        ("the request exceeds the available context size", None),
    ],
)  # fmt: skip
def test_context_overflow(message: str, context: tuple[int, int] | None) -> None:
    found = fault(400, error(message))
    assert found.kind is Kind.OVERFLOW
    assert found.context == context


def test_a_redirect_names_its_target_and_is_final() -> None:
    found = fault(307, b"", {"location": "https://elsewhere.example/v1"})
    assert found.kind is Kind.FATAL
    assert "https://elsewhere.example/v1" in str(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("60", 60.0), ("0", 0.0), ("1.5", 1.5), ("-3", 0.0), ("6m0s", 360.0), ("500ms", 0.5), ("1h2m3s", 3723.0),
        ("2d", 172800.0), ("1m30.5s", 90.5), ("2026-03-01T12:00:10Z", 10.0), ("2026-03-01T13:00:10+01:00", 10.0),
        ("2026-03-01T11:00:00Z", 0.0), ("Sun, 01 Mar 2026 12:00:07 GMT", 7.0), (str(NOW.timestamp() + 9), 9.0),
        (str(int(NOW.timestamp() * 1000) + 4000), 4.0), ("", None), ("soon", None), ("nan", None), ("inf", None),
        ("5 apples", None), ("s", None),
    ],
)  # fmt: skip
def test_waits_in_all_their_forms(text: str, expected: float | None) -> None:
    assert seconds(text, NOW) == (None if expected is None else pytest.approx(expected, abs=1e-3))


def test_a_point_in_time_far_away() -> None:
    assert seconds("2100-01-01T00:00:00Z", NOW) == (datetime(2100, 1, 1, tzinfo=UTC) - NOW).total_seconds()


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after-ms": "250", "retry-after": "1"}, 0.25),
        ({"retry-after": "later", "x-ratelimit-reset-requests": "2s"}, 2.0),
        ({"x-ratelimit-reset-requests": "6m0s", "x-ratelimit-reset-tokens": "500ms",
          "x-ratelimit-remaining-requests": "0", "x-ratelimit-remaining-tokens": "900"}, 360.0),
        ({"x-ratelimit-reset-requests": "6m0s", "x-ratelimit-reset-tokens": "500ms",
          "x-ratelimit-remaining-requests": "5", "x-ratelimit-remaining-tokens": "0"}, 0.5),
        ({"x-ratelimit-reset-requests": "6m0s", "x-ratelimit-reset-tokens": "500ms"}, 0.5),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "3"}, 3.0),
        ({}, None),
    ],
)  # fmt: skip
def test_how_long_a_server_asks_to_wait(headers: dict[str, str], expected: float | None) -> None:
    assert retry_after(headers) == expected


@pytest.mark.parametrize("skew_h", [-30, 0, 30])
def test_dates_are_measured_by_the_servers_own_clock(skew_h: int) -> None:
    """A local clock that is wrong, or jumps, changes no wait."""
    theirs = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=skew_h)
    headers = {
        "date": format_datetime(theirs, usegmt=True),
        "retry-after": format_datetime(theirs + timedelta(seconds=20), usegmt=True),
    }
    assert retry_after(headers) == 20.0


def test_echoed_keys_are_masked_in_errors_and_answers() -> None:
    key = 'synthetic"key/with specials+0123456789'
    secrets.register(key)
    for body in (error(f"bad header Bearer {key}"), f"<p>no page with {key}".encode(), key.encode()):
        assert "synthetic" not in str(fault(400, body))
    assert answer(completion(f"your key is {key}.")).content == "your key is ***."


def test_a_placeholder_key_stays_a_word_in_answers() -> None:
    secrets.register("EMPTY")
    assert answer(completion("The set is EMPTY.")).content == "The set is EMPTY."


def test_many_refusals_at_once_are_one_step_back() -> None:
    limit = AutoLimit()
    limit.limit = 64
    for _ in range(64):
        limit.refused()
    assert limit.limit == 48
    limit.refused()
    assert limit.limit == 36


@pytest.mark.parametrize("per_minute", [1, 7, 60, 600, 200_000])
def test_no_minute_holds_more_than_its_rate(per_minute: int) -> None:
    pace, now, taken = Pace(per_minute), 1000.0, []
    unit = 1 if per_minute <= 600 else 900
    while now < 1000.0 + 300:
        delay = pace.delay(now, unit)
        now += delay + 1e-9
        pace.take(unit)
        taken.append(now)
    fullest = max(sum(start <= moment < start + 60 for moment in taken) for start in taken)
    assert unit * fullest <= max(per_minute, unit)
    assert unit * len(taken) >= per_minute * 5 * 0.45
