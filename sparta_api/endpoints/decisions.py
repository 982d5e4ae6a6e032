"""Whether an endpoint offers decisions beside chat completions: one request for the distribution over given levels.

`check` tells it. A run does not ask there: it reads the same probabilities from chat log-probabilities, with its own
prompt and its own frame around the response (docs/judging.md).
"""

from __future__ import annotations

from collections.abc import Mapping

import httpx

ROUTES = ("systemone", "decisions")
"""vLLM and transformers name it first, hosted services both."""
_PATIENCE_S = 10.0
_COMPLAINS = (400, 422)


async def decision_route(base_url: str, model: str, headers: Mapping[str, str], proxies: bool = True) -> str | None:
    """The URL that takes decisions for this model, or None.

    Asks without a question, which nobody answers and nobody bills: an endpoint that offers decisions complains about
    `questions`, any other says that it has no such route (404) or that the model cannot do it (501).
    """
    async with httpx.AsyncClient(headers=dict(headers), timeout=_PATIENCE_S, trust_env=proxies) as http:
        for name in ROUTES:
            url = f"{base_url.rstrip('/')}/{name}"
            try:
                reply = await http.post(url, json={"model": model, "state": "", "input": "", "questions": {}})
            except httpx.HTTPError:
                return None
            if reply.status_code in _COMPLAINS and "questions" in reply.text:
                return url
    return None
