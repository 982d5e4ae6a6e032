"""One inference server's calls for LoRA adapters: vLLM's, and SGLang's where that answers.

    vLLM     POST /v1/load_lora_adapter, /v1/unload_lora_adapter; the adapter's name is the model's name
    SGLang   POST /load_lora_adapter, /unload_lora_adapter; the model's name is BASE:ADAPTER

SGLang's side follows its documentation and source, and has not been tried on a live server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx
import orjson
from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_exponential

from sparta_api.endpoints.faults import one_line
from sparta_api.errors import EndpointError
from sparta_api.secrets import scrub

LIST_S = 30.0
LOAD_S = 300.0
"""A hub adapter is downloaded within the call."""
UNLOAD_S = 30.0
REPLY_S = 120.0
ATTEMPTS = 4
BACKOFF_S = 0.5
TRANSIENT = frozenset({408, 425, 429, 502, 503, 504, 529})
NO_SLOTS = "no free lora slots"


@dataclass(frozen=True)
class Dialect:
    """How a kind of server loads adapters. `prefix` is that of the base URL's path that its routes have."""

    server: str
    versioned: bool
    joined: bool
    """Whether requests name the adapter behind its base model and a colon."""


VLLM = Dialect("vLLM", versioned=True, joined=False)
SGLANG = Dialect("SGLang", versioned=False, joined=True)


@dataclass(frozen=True)
class Response:
    """A server's answer: its status and its own words on one line, without secrets."""

    status: int
    message: str
    data: Any = None

    @property
    def ok(self) -> bool:
        """Whether the server did what it was asked."""
        refused = isinstance(self.data, dict) and (self.data.get("success") is False or "error" in self.data)
        return self.status == 200 and not refused

    @property
    def no_such_route(self) -> bool:
        """Whether nothing is there, rather than something that refuses."""
        return self.status in (404, 405, 501)


class _Again(Exception):
    def __init__(self, response: Response) -> None:
        super().__init__(response.message)
        self.response = response


class LoraHost:
    """One base URL. Methods raise EndpointError when the server cannot be reached; refusals are returned."""

    def __init__(self, http: httpx.AsyncClient, member: str, base_url: str) -> None:
        self._http = http
        self._member = member
        self.base_url = base_url.rstrip("/")
        self.shown = scrub(self.base_url)

    async def dialect(self) -> Dialect:
        """Whose calls the server knows, by asking it to load nothing. EndpointError when it knows neither."""
        for dialect in (VLLM, SGLANG):
            answer = await self._send("POST", self._route(dialect, "load"), LIST_S, {})
            if answer.status in (401, 403):
                raise EndpointError(
                    f"member '{self._member}': {self.shown} refuses the key for loading adapters ({answer.status}: "
                    f"{answer.message}); check api_key_env"
                )
            if not answer.no_such_route:
                return dialect
        raise EndpointError(
            f"member '{self._member}': {self.shown} loads no adapters while it runs ({VLLM.server} does with "
            "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, or let the run start it under `servers`); else "
            "set `serve` in the member's trainer, or its trainer to none"
        )

    async def models(self) -> dict[str, str | None]:
        """The models that the server lists, each with the path or name that it was loaded from."""
        answer = await self._send("GET", self.base_url + "/models", LIST_S)
        rows = answer.data.get("data") if isinstance(answer.data, dict) else None
        if not answer.ok or not isinstance(rows, list):
            raise EndpointError(
                f"member '{self._member}': {self.shown}/models does not list models ({answer.status}: "
                f"{answer.message}), so what it serves cannot be checked"
            )
        return {str(row["id"]): row.get("root") for row in rows if isinstance(row, dict) and "id" in row}

    async def load(self, dialect: Dialect, name: str, path: str) -> Response:
        """Asks the server to load the adapter at `path`, as the server sees it."""
        return await self._send("POST", self._route(dialect, "load"), LOAD_S, {"lora_name": name, "lora_path": path})

    async def unload(self, dialect: Dialect, name: str) -> Response:
        """Asks the server to forget an adapter; never waits longer than UNLOAD_S."""
        return await self._send("POST", self._route(dialect, "unload"), UNLOAD_S, {"lora_name": name}, attempts=1)

    async def reply(self, model: str, prompt: str, tokens: int) -> Response:
        """The model's greedy reply to a prompt; the text is in `message`."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "temperature": 0,
        }
        answer = await self._send("POST", self.base_url + "/chat/completions", REPLY_S, body)
        if not answer.ok:
            return answer
        try:
            text = answer.data["choices"][0]["message"]["content"]
        except (LookupError, TypeError):
            return Response(502, "a 200 without a choice")
        return Response(200, str(text or ""), answer.data)

    def _route(self, dialect: Dialect, verb: str) -> str:
        root = self.base_url if dialect.versioned else self.base_url.removesuffix("/v1")
        return f"{root}/{verb}_lora_adapter"

    async def _send(
        self, method: str, url: str, seconds: float, body: Any = None, attempts: int = ATTEMPTS
    ) -> Response:
        """One call; connections that fail, overload and missing LoRA slots are tried again."""
        retrying = AsyncRetrying(
            stop=stop_after_attempt(attempts),
            wait=wait_exponential(multiplier=BACKOFF_S),
            retry=retry_if_exception(lambda error: isinstance(error, (httpx.TransportError, _Again))),
            reraise=True,
        )
        try:
            return await retrying(self._once, method, url, seconds, body)
        except _Again as spent:
            return spent.response
        except httpx.HTTPError as error:
            raise EndpointError(
                f"member '{self._member}': {scrub(url)} cannot be reached ({type(error).__name__}: "
                f"{one_line(str(error))}); check that the server runs and the URL, then resume"
            ) from error

    async def _once(self, method: str, url: str, seconds: float, body: Any) -> Response:
        got = await self._http.request(method, url, json=body, timeout=seconds)
        try:
            data = orjson.loads(got.content)
        except orjson.JSONDecodeError:
            data = None
        answer = Response(got.status_code, _words(data, got.text), data)
        if answer.status in TRANSIENT or (not answer.ok and NO_SLOTS in answer.message.lower()):
            raise _Again(answer)
        return answer


def _words(data: Any, text: str) -> str:
    """What a server says about a failure, wherever it puts it."""
    if isinstance(data, dict):
        error = data.get("error") or data.get("error_message") or data.get("message") or data.get("detail") or text
        text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    return one_line(text) or "an empty body"
