"""Faults by name, as they were seen at real endpoints."""

from __future__ import annotations

from typing import Any


def _error(message: str, **rest: Any) -> dict[str, Any]:
    return {"error": {"message": message, **rest}}


def _reply(status: int, body: Any, **rest: Any) -> dict[str, Any]:
    return {"kind": "reply", "status": status, "body": body, **rest}


_SLOW_DOWN = _error("Rate limit reached, slow down.", type="rate_limit_error", code="rate_limit_exceeded")
_HTML = "<!DOCTYPE html>\n<html><head><title>502</title></head>\n<body><h1>502 Bad gateway</h1></body></html>\n"
_UPSTREAM = '{"error":{"message":"Model foo supports at most 8 stop words"}}'
_OVERFLOW = (
    "'max_tokens' is too large: 2048. This model's maximum context length is 4096 tokens "
    "and your request has 3000 input tokens"
)

_STATUS_FAULTS: dict[str, dict[str, Any]] = {
    "429": _reply(429, _SLOW_DOWN),
    "429_seconds": _reply(429, _SLOW_DOWN, retry_after_s=1),
    "429_date": _reply(429, _SLOW_DOWN, retry_after_date_s=2),
    "429_ms": _reply(429, _SLOW_DOWN, retry_after_ms=200),
    "429_reset_headers": _reply(
        429,
        _error("slow down"),
        headers={
            "x-ratelimit-remaining-requests": "0",
            "x-ratelimit-reset-requests": "1s",
            "x-ratelimit-remaining-tokens": "5000",
            "x-ratelimit-reset-tokens": "500ms",
        },
    ),
    "quota": _reply(
        429, _error("You have no credits remaining", type="insufficient_quota", code="credit_balance_exhausted")
    ),
    "400": _reply(400, _error("Invalid request.", type="invalid_request_error", code="invalid_value")),
    "400_provider_error": _reply(
        400, _error("Provider returned error", code=400, metadata={"raw": _UPSTREAM, "provider_name": "acme"})
    ),
    "400_temperature": _reply(
        400,
        _error("Unsupported value: 'temperature' does not support 0.2", param="temperature", code="unsupported_value"),
    ),
    "400_temperature_parameter": _reply(
        400,
        _error(
            "Unsupported parameter: 'temperature' is not supported with this model.",
            param="temperature",
            code="unsupported_parameter",
        ),
    ),
    "400_max_tokens": _reply(
        400,
        _error(
            "Unsupported parameter: 'max_tokens' is not supported with this model. "
            "Use 'max_completion_tokens' instead.",
            param="max_tokens",
            code="unsupported_parameter",
        ),
    ),
    "400_system_role": _reply(
        400,
        {
            "object": "error",
            "message": "System role not supported",
            "type": "BadRequestError",
            "param": None,
            "code": 400,
        },
    ),
    "400_context_overflow": _reply(
        400, {"object": "error", "message": _OVERFLOW, "type": "BadRequestError", "code": 400}
    ),
    "400_content_filter": _reply(
        400, _error("The response was filtered", param="prompt", code="content_filter", status=400)
    ),
    "401": _reply(401, _error("Incorrect API key provided.", type="invalid_request_error", code="invalid_api_key")),
    "402": _reply(402, _error("Insufficient balance", type="insufficient_balance", code=402)),
    "403": _reply(403, _error("You have no access to this model.", type="permission_error", code=403)),
    "408": _reply(408, _error("Request timeout", type="timeout", code=408)),
    "409": _reply(409, _error("Conflict", type="conflict", code=409)),
    "425": _reply(425, _error("Too early", type="too_early", code=425)),
    "500": _reply(500, _error("Internal server error", type="server_error", code=500)),
    "500_text": _reply(500, "Internal Server Error", content_type="text/plain"),
    "502": _reply(502, _error("Bad gateway", code=502)),
    "502_html": _reply(502, _HTML, content_type="text/html"),
    "503": _reply(503, _error("Service unavailable", code=503)),
    "503_loading": _reply(503, _error("Loading model", code=503, type="unavailable_error")),
    "504": _reply(504, _error("Gateway timeout", code=504)),
    "529": _reply(529, {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}),
    "200_html": _reply(200, _HTML, content_type="text/html"),
    "200_error_object": _reply(200, _error("upstream failed", type="server_error", code=502)),
    "404_model": _reply(
        404, {"object": "error", "message": "The model `m1-r2` does not exist.", "type": "NotFoundError", "code": 404}
    ),
}

_ANSWER_FAULTS: dict[str, dict[str, Any]] = {
    "choices_null": {
        "kind": "edit",
        "set": {
            "id": None,
            "choices": None,
            "error": {
                "message": "Provider returned error",
                "code": 429,
                "metadata": {"raw": "Too Many Requests", "provider_name": "acme"},
            },
        },
    },
    "empty_choices": {"kind": "edit", "set": {"choices": [], "prompt_filter_results": [{"prompt_index": 0}]}},
    "content_null": {"kind": "edit", "message": {"content": None, "reasoning": None}},
    "content_empty": {"kind": "edit", "message": {"content": ""}},
    "reasoning_only": {"kind": "edit", "message": {"content": "", "reasoning": "The answer is 42."}},
    "content_filter": {"kind": "edit", "message": {"content": None}, "choice": {"finish_reason": "content_filter"}},
    "length_with_text": {"kind": "edit", "choice": {"finish_reason": "length"}},
    "length_without_text": {"kind": "edit", "message": {"content": ""}, "choice": {"finish_reason": "length"}},
    "no_score": {"kind": "edit", "message": {"content": "I would rather not grade this."}},
    "no_usage": {"kind": "edit", "drop": ["usage"]},
    "surrogate": {"kind": "surrogate"},
}

_WIRE_FAULTS: dict[str, dict[str, Any]] = {
    "reset": {"kind": "reset"},
    "reset_in_body": {"kind": "reset_in_body"},
    "close": {"kind": "close"},
    "half_json": {"kind": "half_json", "length": "sent"},
    "half_json_wrong_length": {"kind": "half_json", "length": "whole"},
    "half_json_chunked": {"kind": "half_json", "length": "chunked"},
    "hang": {"kind": "hang"},
    "drip": {"kind": "drip"},
    "delay": {"kind": "delay", "seconds": 0.2},
    "forget_adapters": {"kind": "forget_adapters"},
    "echo_authorization": {"kind": "echo_authorization", "status": 401},
    "sse": {"kind": "sse"},
    "sse_keepalive": {
        "kind": "sse",
        "lines": ["data: : keepalive", "", 'data: {"choices":[{"delta":{"content":"ok"}}]}', "", "data: [DONE]"],
    },
    "sse_error": {"kind": "sse", "lines": ['data: {"error":{"message":"quota exceeded"}}', "", "data: [DONE]"]},
    "exit": {"kind": "exit"},
}

PRESETS: dict[str, dict[str, Any]] = {**_STATUS_FAULTS, **_ANSWER_FAULTS, **_WIRE_FAULTS}
