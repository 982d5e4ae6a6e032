"""The server: routes, and the way of one chat completion through rules, limits, pace and faults."""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import Any

import orjson
from pydantic import ValidationError

from tests.loopback import delivery
from tests.loopback.adapters import Registry, error_body
from tests.loopback.answers import Ask, canonical, completion, prompt_tokens, role_of, text_of
from tests.loopback.batch import Batch
from tests.loopback.delivery import Exchange
from tests.loopback.faults import Facts, Rules, headers_of
from tests.loopback.pace import Account, latency_s
from tests.loopback.record import RequestLog, Stats
from tests.loopback.scenario import Fault, Scenario
from tests.loopback.wire import Connection, Head, response

CHAT = "/v1/chat/completions"


class Server:
    """Answers the requests of all connections; see `Scenario` for what it can be."""

    def __init__(self, scenario: Scenario, log: RequestLog) -> None:
        self.scenario = scenario
        self.log = log
        self.stats = Stats()
        self.registry = Registry(scenario)
        self.connections: set[Connection] = set()
        self._rules = Rules(scenario)
        self._batch = _batch(scenario)
        self._accounts: dict[str, Account] = {}
        self._next_id = 0

    def opened(self, connection: Connection) -> None:
        self.connections.add(connection)

    def closed(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if connection.counted:
            self.stats.connections -= 1
        if isinstance(connection.exchange, Exchange):
            connection.exchange.end("gone")

    def handle(self, connection: Connection, head: Head, body: bytes) -> None:
        """Answers one request, now or later."""
        if head.path == CHAT and head.method == "POST":
            self._chat(connection, head, body)
        elif head.path == "/control":
            connection.send(_json(*self._control(head, body)))
        else:
            self._side_route(connection, head, body)

    def _side_route(self, connection: Connection, head: Head, raw: bytes) -> None:
        exchange = self._begin(connection, head, "", None)
        body = _mapping(raw) if raw else {}
        if body is None:
            exchange.reply(*self._error(400, "The body is no JSON object."))
            return
        name = str(body.get("lora_name") or body.get("model") or "")
        self._log_request(exchange, head, name, body, b"", "")
        fault = self._pick(Facts(head.path, name, "", "", body, raw or head.path.encode()), exchange)
        if fault is not None and delivery.before_answer(exchange, fault, head):
            return
        status, answer = self._side_answer(head, body)
        payload = answer.encode() if isinstance(answer, str) else orjson.dumps(answer)
        kind = "text/plain" if isinstance(answer, str) else "application/json"
        if fault is None or fault.kind == "edit":
            exchange.reply(status, payload, kind)
        else:
            delivery.spoiled(exchange, fault, payload)

    def _side_answer(self, head: Head, body: dict[str, Any]) -> tuple[int, Any]:
        scenario, route = self.scenario, (head.method, head.path)
        if head.path == "/health":
            return 200, ""
        if not self._admits(head):
            return 401, error_body(scenario, 401, "Unauthorized", "AuthenticationError")
        if route == ("GET", "/v1/models"):
            return 200, self.registry.listing()
        if route == ("POST", "/v1/load_lora_adapter") and scenario.lora is not None:
            return self.registry.load(scenario.lora, body)
        if route == ("POST", "/v1/unload_lora_adapter") and scenario.lora is not None:
            return self.registry.unload(body)
        if head.path in ("/tokenize", "/v1/tokenize") and scenario.tokenize:
            text = str(body.get("prompt", ""))
            return 200, {"count": len(text), "max_model_len": 4096, "tokens": list(map(ord, text))}
        return 404, {"detail": "Not Found"}

    def _chat(self, connection: Connection, head: Head, raw: bytes) -> None:
        body = _mapping(raw)
        model = str(body.get("model", "")) if body is not None else ""
        exchange = self._begin(connection, head, model, self.stats)
        if body is None:
            exchange.reply(*self._error(400, "The body is no JSON object."))
            return
        messages, text = canonical(body.get("messages")), text_of(body.get("messages"))
        known = self.registry.resolve(model)
        identity, settings = known or (model, self.scenario.default_model)
        role = role_of(text, settings, self.scenario.judge)
        self._log_request(exchange, head, model, body, messages, role)
        fault = self._pick(Facts(head.path, model, role, text, body, model.encode() + messages), exchange)
        if fault is not None and delivery.before_answer(exchange, fault, head):
            return
        if fault is not None and fault.kind == "forget_adapters":
            self.registry.adapters.clear()
            known = self.registry.resolve(model)
        ask = Ask(identity, model, settings, body, text, messages, role)
        refusal = self._refusal(head, ask, exchange, known is not None)
        if refusal is not None:
            exchange.reply(*refusal)
            return
        self._answer(exchange, ask, fault)

    def _answer(self, exchange: Exchange, ask: Ask, fault: Fault | None) -> None:
        delay = latency_s(ask, self.stats.in_flight, self.scenario.capacity)
        if fault is not None and fault.kind == "delay":
            delay += fault.seconds
        answer = completion(ask, self.scenario.judge)
        if fault is not None and fault.kind not in ("delay", "forget_adapters"):
            exchange.later(delay, lambda: delivery.with_fault(exchange, fault, answer))
        elif ask.body.get("stream"):
            exchange.later(delay, lambda: delivery.streamed(exchange, answer))
        elif self._batch is not None:
            self._batch.add(delay, lambda: exchange.reply(200, orjson.dumps(answer)))
        elif delay:
            exchange.later(delay, lambda: exchange.reply(200, orjson.dumps(answer)))
        else:
            exchange.reply(200, orjson.dumps(answer))

    def _refusal(self, head: Head, ask: Ask, exchange: Exchange, known: bool) -> tuple[int, bytes] | None:
        """The answer to a request that the server does not take."""
        scenario = self.scenario
        if scenario.api_keys and not self._admits(head):
            return self._error(401, "Incorrect API key provided.", "invalid_request_error")
        if scenario.rate_limit is not None:
            limit = self._accounts.setdefault(head.key, Account(scenario.rate_limit, time.monotonic()))
            tokens = prompt_tokens(ask) + (ask.body.get("max_tokens") or 0)
            admitted, headers = limit.admit(tokens, time.monotonic())
            exchange.headers = headers | exchange.headers
            if not admitted:
                return self._error(429, "Rate limit reached, slow down.", "rate_limit_error")
        if not known:
            status, body = self.registry.unknown(ask.model)
            return status, orjson.dumps(body)
        capacity = scenario.capacity
        if capacity is not None and capacity.queue is not None and self.stats.in_flight > capacity.queue:
            return self._error(capacity.status, "The server is overloaded.", "ServiceUnavailableError")
        return self._overflow(ask)

    def _overflow(self, ask: Ask) -> tuple[int, bytes] | None:
        window = ask.settings.max_model_len
        if window is None:
            return None
        prompt, asked = prompt_tokens(ask), ask.body.get("max_tokens") or 0
        start = f"This model's maximum context length is {window} tokens"
        if prompt >= window:
            message = (
                f"{start}. However, your prompt contains {prompt} input tokens, which exceeds this limit even without "
                "any output tokens. Please reduce the length of the input prompt."
            )
            return self._error(400, message, "BadRequestError")
        if prompt + asked > window:
            message = f"'max_tokens' is too large: {asked}. {start} and your request has {prompt} input tokens"
            return self._error(400, message, "BadRequestError")
        return None

    def _admits(self, head: Head) -> bool:
        return not self.scenario.api_keys or head.key in self.scenario.api_keys

    def _error(self, status: int, message: str, kind: str = "BadRequestError") -> tuple[int, bytes]:
        return status, orjson.dumps(error_body(self.scenario, status, message, kind))

    def _pick(self, facts: Facts, exchange: Exchange) -> Fault | None:
        fault = self._rules.pick(facts) if self._rules.active else None
        if fault is not None:
            exchange.fault, exchange.headers = fault.name, headers_of(fault)
        return fault

    def _begin(self, connection: Connection, head: Head, model: str, stats: Stats | None) -> Exchange:
        self._next_id += 1
        if not connection.counted:
            connection.counted = True
            self.stats.connected()
        exchange = Exchange(connection, self._next_id, self.log, stats, stats.model(model) if stats else None)
        connection.exchange = exchange
        return exchange

    def _log_request(
        self, exchange: Exchange, head: Head, model: str, body: dict[str, Any], messages: bytes, role: str
    ) -> None:
        if not self.log.on:
            return
        event: dict[str, Any] = {
            "event": "request",
            "id": exchange.id,
            "method": head.method,
            "path": head.path,
            "model": model,
            "role": role,
            "messages": hashlib.sha256(messages).hexdigest(),
            "key": hashlib.sha256(head.key.encode()).hexdigest()[:12] if head.key else None,
            "in_flight": self.stats.in_flight,
            "model_in_flight": self.stats.model(model).in_flight if exchange.stats else 0,
            "connections": self.stats.connections,
        }
        self.log.write(**event, **({"body": body} if self.scenario.log_bodies else {}))

    def _control(self, head: Head, raw: bytes) -> tuple[int, Any]:
        """GET: the figures. POST: scenario keys to replace, and "forget_adapters" or "reset_stats": true."""
        if head.method == "POST":
            changes = _mapping(raw)
            if changes is None:
                return 400, {"error": "the body is no JSON object"}
            if changes.pop("forget_adapters", False):
                self.registry.adapters.clear()
            if changes.pop("reset_stats", False):
                self.stats.reset()
            try:
                self._become(changes)
            except ValidationError as error:
                return 400, {"error": str(error)}
        return 200, {**self.stats.to_json(), "adapters": {a.name: a.path for a in self.registry.adapters.values()}}

    def _become(self, changes: dict[str, Any]) -> None:
        if not changes:
            return
        kept = {name: getattr(self.scenario, name) for name in self.scenario.model_fields_set}
        self.scenario = self.registry.scenario = Scenario.model_validate({**kept, **changes})
        if "rules" in changes or "seed" in changes:
            self._rules = Rules(self.scenario)
        if "rate_limit" in changes:
            self._accounts.clear()
        if "capacity" in changes:
            self._batch = _batch(self.scenario)


def _batch(scenario: Scenario) -> Batch | None:
    capacity = scenario.capacity
    return Batch(capacity.concurrent, capacity.saturation) if capacity and capacity.saturation else None


def _mapping(raw: bytes) -> dict[str, Any] | None:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    return body if isinstance(body, dict) else None


def _json(status: int, body: Any) -> bytes:
    return response(status, orjson.dumps(body))


async def listen(server: Server, port: int) -> asyncio.Server:
    """Binds 127.0.0.1 (0: any free port) and starts answering."""
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: Connection(server), "127.0.0.1", port, backlog=4096)
