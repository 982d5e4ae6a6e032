"""The loopback server itself: its answers are reproducible, and every fault really appears on the wire."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.loopback import LoopbackProcess, start_loopback
from tests.loopback.presets import PRESETS

ROOT = Path(__file__).resolve().parents[1]
HTTP = httpx.Client(timeout=10, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))
SCENARIO: dict[str, Any] = {
    "models": {"a": {}, "b": {"skill": 2}, "easy": {"bias": 9}, "harsh": {"bias": -9}, "small": {"max_model_len": 64}},
    "log_bodies": True,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackProcess]:
    with start_loopback(SCENARIO, tmp_path_factory.mktemp("loopback")) as process:
        yield process


@pytest.fixture
def fresh(server: LoopbackProcess) -> LoopbackProcess:
    """The server without rules, limits or adapters, and with its figures at zero."""
    plain: dict[str, Any] = {
        "rules": [],
        "rate_limit": None,
        "capacity": None,
        "api_keys": [],
        "judge": {},
        "tokenize": False,
    }
    server.control(
        json={
            **plain,
            **SCENARIO,
            "flat_errors": False,
            "flavour": "vllm",
            "forget_adapters": True,
            "reset_stats": True,
        }
    )
    return server


def body(model: str = "a", text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **more}


def ask(server: LoopbackProcess, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    return HTTP.post(f"{server.base_url}/chat/completions", json=body(**more), headers=headers)


def text_of(answer: httpx.Response) -> str:
    content = answer.json()["choices"][0]["message"]["content"]
    assert isinstance(content, str)
    return content


def fault(server: LoopbackProcess, fault: Any, times: int | None = None, **match: Any) -> None:
    server.control(json={"rules": [{"match": match, "fault": fault, "times": times}]})


def raw(server: LoopbackProcess, patience_s: float = 10.0, **more: Any) -> tuple[bytes, str]:
    """Everything that the socket gives for one request, and how it ended: closed, reset or silence."""
    payload = json.dumps(body(**more)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(payload)}\r\n\r\n".encode()
    received = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=patience_s) as connection:
        connection.sendall(head + payload)
        while True:
            try:
                data = connection.recv(65536)
            except ConnectionResetError:
                return received, "reset"
            except TimeoutError:
                return received, "silence"
            if not data:
                return received, "closed"
            received += data


def test_answers_depend_on_the_request_alone(fresh: LoopbackProcess) -> None:
    first = [ask(fresh, model=m, text=t).content for m in "ab" for t in ("x", "y")]
    with ThreadPoolExecutor(8) as pool:
        again = list(pool.map(lambda mt: ask(fresh, model=mt[0], text=mt[1]).content, [("b", "y")] * 20))
    assert len(set(first)) == 4
    assert set(again) == {first[3]}
    assert ask(fresh, text="x", seed=1).content != first[0]
    pretty = json.dumps(body(text="x"), indent=2).encode()
    assert HTTP.post(f"{fresh.base_url}/chat/completions", content=pretty).content == first[0]


def test_answers_survive_a_restart_on_the_same_port(tmp_path: Path) -> None:
    with start_loopback(SCENARIO, tmp_path) as process:
        port, before = process.port, ask(process).content
        process.restart()
        assert process.port == port
        assert ask(process).content == before
        process.kill()
        with pytest.raises(httpx.ConnectError):
            ask(process)
        assert len(process.requests()) == 2


def test_usage_and_length_limit(fresh: LoopbackProcess) -> None:
    whole, cut = ask(fresh).json(), ask(fresh, max_tokens=3).json()
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == len(whole["choices"][0]["message"]["content"].split())
    assert cut["choices"][0]["finish_reason"] == "length"
    assert cut["usage"]["completion_tokens"] == 3
    assert whole["choices"][0]["message"]["content"].startswith(cut["choices"][0]["message"]["content"])


def test_judges_score_what_they_read(fresh: LoopbackProcess) -> None:
    def score(model: str, response: str) -> int:
        answer = ask(fresh, model=model, text=f"Give a score as JSON.\n{response}")
        value = json.loads(text_of(answer))["score"]
        assert isinstance(value, int)
        return value

    assert score("easy", "tier-a") == 10
    assert score("harsh", "tier-j") == 1
    assert score("a", "tier-j") > score("a", "tier-a")
    spread = {score("a", f"some text {i}") for i in range(40)}
    assert spread <= set(range(1, 11)) and len(spread) >= 5


def test_judge_pattern_and_reply_template(fresh: LoopbackProcess) -> None:
    fresh.control(json={"judge": {"pattern": "(?i)^which is better", "reply": "A: $first, B: $second"}})
    text = text_of(ask(fresh, model="a", text="Which is better?\ntier-a\ntier-j"))
    first, second = (int(part.split(": ")[1]) for part in text.split(", "))
    assert first < second
    assert "tier-" in text_of(ask(fresh, text="give a score as JSON"))


def test_logprobs_agree_with_the_reply_in_both_shapes(fresh: LoopbackProcess) -> None:
    prompt = "A score as one digit, please. tier-f"
    choice = ask(fresh, text=prompt, max_tokens=1, logprobs=True, top_logprobs=20).json()["choices"][0]
    row = choice["logprobs"]["content"][0]
    labels = {e["token"]: e["logprob"] for e in row["top_logprobs"] if e["token"].isdigit()}
    assert max(labels, key=lambda token: labels[token]) == choice["message"]["content"] == row["token"]
    assert sum(math.exp(value) for value in labels.values()) == pytest.approx(0.95)
    fresh.control(json={"judge": {"logprobs": "legacy"}})
    legacy = ask(fresh, text=prompt, max_tokens=1, logprobs=True, top_logprobs=20).json()["choices"][0]["logprobs"]
    assert legacy["tokens"] == [row["token"]]
    assert legacy["top_logprobs"][0] == {e["token"]: e["logprob"] for e in row["top_logprobs"]}


def test_logprobs_of_chosen_tokens(fresh: LoopbackProcess) -> None:
    fresh.control(json={"tokenize": True})
    ids = HTTP.post(f"{fresh.origin}/tokenize", json={"model": "a", "prompt": "37"}).json()["tokens"]
    answer = ask(fresh, text="A score as one digit", max_tokens=1, logprobs=True, logprob_token_ids=ids)
    top = answer.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert {entry["token"] for entry in top} == {"3", "7"}


def adapter(directory: Path, weights: bytes, rank: int = 8) -> Path:
    directory.mkdir()
    config = {"r": rank, "lora_alpha": 16, "target_modules": ["q", "v"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return directory


def load(server: LoopbackProcess, name: str, path: Path | str) -> httpx.Response:
    return HTTP.post(f"{server.base_url}/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})


def test_adapters_answer_by_their_content(fresh: LoopbackProcess, tmp_path: Path) -> None:
    one, twin, other = (adapter(tmp_path / n, w) for n, w in (("1", b"x"), ("2", b"x"), ("3", b"y")))
    assert ask(fresh, model="m-r1").status_code == 404
    for name, path in (("m-r1", one), ("m-r2", twin), ("m-r3", other)):
        answer = load(fresh, name, path)
        assert (answer.status_code, answer.text) == (200, f"Success: LoRA adapter '{name}' added successfully.")
    texts = [text_of(ask(fresh, model=name)) for name in ("a", "m-r1", "m-r2", "m-r3")]
    assert texts[1] == texts[2] and len(set(texts)) == 3
    cards = {card["id"]: card for card in HTTP.get(f"{fresh.base_url}/models").json()["data"]}
    assert (cards["m-r1"]["root"], cards["m-r1"]["parent"]) == (str(one), "a")
    assert cards["small"]["max_model_len"] == 64
    fresh.control(json={"forget_adapters": True})
    gone = ask(fresh, model="m-r1")
    assert gone.status_code == 404
    assert gone.json()["error"]["message"] == "The model `m-r1` does not exist."
    assert gone.json()["error"]["type"] == "NotFoundError"


def test_adapter_refusals(fresh: LoopbackProcess, tmp_path: Path) -> None:
    path = adapter(tmp_path / "1", b"x")
    assert load(fresh, "m", path).status_code == 200
    assert load(fresh, "m", path).json()["error"]["type"] == "InvalidUserInput"
    assert load(fresh, "a", path).status_code == 400
    assert load(fresh, "n", tmp_path / "nowhere").json()["error"]["message"].startswith("Loading lora n failed")
    wide = load(fresh, "wide", adapter(tmp_path / "2", b"x", rank=64))
    assert (wide.status_code, "max_lora_rank 16" in wide.text) == (500, True)
    unload = f"{fresh.base_url}/unload_lora_adapter"
    assert [HTTP.post(unload, json={"lora_name": "m"}).status_code for _ in range(2)] == [200, 404]
    fresh.control(json={"lora": None})
    assert load(fresh, "z", path).status_code == 404
    fresh.control(json={"lora": {"unknown_path": "accept"}})
    assert load(fresh, "z", tmp_path / "nowhere").status_code == 200


def test_context_window(fresh: LoopbackProcess) -> None:
    too_long = ask(fresh, model="small", text="x" * 400)
    too_many = ask(fresh, model="small", max_tokens=2048)
    assert too_long.status_code == too_many.status_code == 400
    assert "maximum context length is 64 tokens" in too_long.text
    assert "'max_tokens' is too large: 2048" in too_many.text


def test_keys_are_checked_and_hashed(fresh: LoopbackProcess) -> None:
    fresh.control(json={"api_keys": ["right"]})
    assert ask(fresh, headers={"authorization": "Bearer wrong"}).status_code == 401
    assert HTTP.get(f"{fresh.base_url}/models").status_code == 401
    assert HTTP.get(f"{fresh.origin}/health").status_code == 200
    assert ask(fresh, headers={"authorization": "Bearer right"}).status_code == 200
    log = fresh.log_path.read_text()
    assert "Bearer" not in log and '"right"' not in log
    assert len({request["key"] for request in fresh.requests("/chat/completions")[-2:]}) == 2


@pytest.mark.parametrize("name", [n for n, f in PRESETS.items() if f["kind"] == "reply"])
def test_replies_of_presets(fresh: LoopbackProcess, name: str) -> None:
    preset = PRESETS[name]
    fault(fresh, name)
    answer = ask(fresh)
    assert answer.status_code == preset["status"]
    expected = preset["body"]
    assert answer.text == expected if isinstance(expected, str) else answer.json() == expected
    assert answer.headers["content-type"] == preset.get("content_type", "application/json")
    assert preset.get("headers", {}).items() <= dict(answer.headers).items()
    assert fresh.stats()["models"]["a"]["faults"] == {name: 1}


def test_retry_after_forms(fresh: LoopbackProcess) -> None:
    headers = {}
    for name in ("429", "429_seconds", "429_date", "429_ms"):
        fault(fresh, name)
        headers[name] = ask(fresh).headers
    assert not {"retry-after", "retry-after-ms"} & set(headers["429"])
    assert headers["429_seconds"]["retry-after"] == "1"
    assert headers["429_ms"]["retry-after-ms"] == "200"
    assert abs(parsedate_to_datetime(headers["429_date"]["retry-after"]).timestamp() - time.time()) < 60


@pytest.mark.parametrize(
    ("name", "content", "finish"),
    [
        ("content_null", None, "stop"),
        ("content_empty", "", "stop"),
        ("reasoning_only", "", "stop"),
        ("content_filter", None, "content_filter"),
        ("length_without_text", "", "length"),
    ],
)
def test_edited_answers(fresh: LoopbackProcess, name: str, content: str | None, finish: str) -> None:
    fault(fresh, name)
    answer = ask(fresh)
    choice = answer.json()["choices"][0]
    assert (answer.status_code, choice["message"]["content"], choice["finish_reason"]) == (200, content, finish)
    assert ("reasoning" in choice["message"]) == (name in ("content_null", "reasoning_only"))


def test_odd_answers(fresh: LoopbackProcess) -> None:
    answers = {}
    names = ("empty_choices", "choices_null", "no_usage", "surrogate", "length_with_text", "no_score")
    for name in names:
        fault(fresh, name)
        answers[name] = ask(fresh)
    assert answers["empty_choices"].json()["choices"] == []
    assert answers["choices_null"].json()["choices"] is None
    assert answers["choices_null"].json()["error"]["code"] == 429
    assert "usage" not in answers["no_usage"].json()
    assert answers["surrogate"].json()["choices"][0]["message"]["content"] == "bad \udc00 text"
    cut = answers["length_with_text"].json()["choices"][0]
    assert cut["finish_reason"] == "length" and cut["message"]["content"]
    assert not any(c.isdigit() for c in text_of(answers["no_score"]))


def test_custom_edit(fresh: LoopbackProcess) -> None:
    usage = {"prompt_tokens": 3000, "completion_tokens": 100, "prompt_tokens_details": {"cached_tokens": 2000}}
    fault(fresh, {"kind": "edit", "message": {"content": "7"}, "set": {"usage": usage}})
    answer = ask(fresh)
    assert (text_of(answer), answer.json()["usage"]) == ("7", usage)


def test_event_streams(fresh: LoopbackProcess) -> None:
    whole = text_of(ask(fresh))
    streamed = ask(fresh, stream=True)
    assert streamed.headers["content-type"] == "text/event-stream"
    events = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[0])["choices"][0]["delta"]["content"] == whole
    fault(fresh, "sse_error")
    assert 'data: {"error":{"message":"quota exceeded"}}' in ask(fresh).text
    fault(fresh, "sse_keepalive")
    assert ask(fresh).text.startswith("data: : keepalive\n\ndata: {")
    fault(fresh, "sse")
    assert ask(fresh).text == streamed.text


def test_broken_connections(fresh: LoopbackProcess) -> None:
    whole = ask(fresh).content
    half = whole[: len(whole) // 2]
    fault(fresh, "reset")
    assert raw(fresh) == (b"", "reset")
    fault(fresh, "close")
    assert raw(fresh) == (b"", "closed")
    fault(fresh, "reset_in_body")
    received, end = raw(fresh)
    assert received.endswith(half) and f"content-length: {len(whole)}".encode() in received and end == "reset"
    fault(fresh, "half_json_wrong_length")
    received, end = raw(fresh)
    assert received.endswith(half) and f"content-length: {len(whole)}".encode() in received and end == "closed"
    fault(fresh, "half_json_chunked")
    received, end = raw(fresh)
    assert half in received and not received.endswith(b"0\r\n\r\n") and end == "closed"
    fault(fresh, "half_json")
    assert ask(fresh).content == half
    outcomes = fresh.stats()["models"]["a"]
    assert outcomes["statuses"] == {"200": 4, "reset": 1, "closed": 1, "reset_in_body": 1}
    assert outcomes["in_flight"] == 0


def test_silence_and_drips(fresh: LoopbackProcess) -> None:
    whole = ask(fresh).content
    fault(fresh, "hang")
    assert raw(fresh, patience_s=0.2) == (b"", "silence")
    fault(fresh, {"preset": "drip", "chunk": 40, "interval_s": 0.001})
    assert ask(fresh).content == whole
    fault(fresh, {"preset": "delay", "seconds": 0.05})
    assert ask(fresh).content == whole
    fault(fresh, {"preset": "hang", "seconds": 0.05})
    assert raw(fresh) == (b"", "closed")
    last = fresh.requests("/chat/completions")[-5:]
    assert [r["outcome"] for r in last] == ["200", "gone", "200", "200", "gone"]
    assert [r["fault"] for r in last] == [None, "hang", "drip", "delay", "hang"]


def test_a_key_is_echoed(fresh: LoopbackProcess) -> None:
    fault(fresh, "echo_authorization")
    answer = ask(fresh, headers={"authorization": "Bearer sk-secret"})
    assert answer.status_code == 401 and "Bearer sk-secret" in answer.text


def test_adapters_are_forgotten_once(fresh: LoopbackProcess, tmp_path: Path) -> None:
    path = adapter(tmp_path / "1", b"x")
    load(fresh, "m", path)
    fault(fresh, "forget_adapters", times=1, nth=2, model="m")
    statuses = [ask(fresh, model="m").status_code for _ in range(2)]
    load(fresh, "m", path)
    assert [*statuses, ask(fresh, model="m").status_code] == [200, 404, 200]


def test_the_server_dies(tmp_path: Path) -> None:
    rules = [{"fault": {"preset": "exit", "code": 7}, "match": {"nth": 2}}]
    process = start_loopback({**SCENARIO, "rules": rules}, tmp_path)
    assert ask(process).status_code == 200
    with pytest.raises(httpx.TransportError):
        ask(process)
    assert process.wait() == 7
    with process.start():
        assert ask(process).status_code == 200
    assert [r["outcome"] for r in process.requests()] == ["200", "exit", "200"]


def test_rules_count_and_choose(fresh: LoopbackProcess) -> None:
    def statuses(count: int, **more: Any) -> list[int]:
        return [ask(fresh, **more).status_code for _ in range(count)]

    fault(fresh, "500", every=3)
    assert statuses(6) == [200, 200, 500] * 2
    fault(fresh, "500", nth=[1, 4])
    assert statuses(5) == [500, 200, 200, 500, 200]
    fault(fresh, "500", times=2)
    assert statuses(4) == [500, 500, 200, 200]
    fault(fresh, "500", attempts=1)
    assert [*statuses(2, text="p"), *statuses(2, text="q")] == [500, 200, 500, 200]
    fault(fresh, "500", model="b")
    assert [*statuses(1), *statuses(1, model="b")] == [200, 500]
    fault(fresh, "500", contains="needle")
    assert [*statuses(1), *statuses(1, text="a needle here")] == [200, 500]
    fault(fresh, "500", role="judge")
    assert [*statuses(1), *statuses(1, text="score as JSON")] == [200, 500]
    fault(fresh, "400_temperature", has_field="temperature")
    assert [*statuses(1), *statuses(1, temperature=0.2)] == [200, 400]
    fault(fresh, "400_system_role", has_role="system")
    assert statuses(1, messages=[{"role": "system", "content": "s"}]) == [400]


def test_probability_is_drawn_from_content_and_attempt(fresh: LoopbackProcess) -> None:
    def drawn(order: list[int]) -> dict[int, list[int]]:
        fault(fresh, "503", probability=0.3)
        found: dict[int, list[int]] = {}
        for i in order:
            found.setdefault(i, []).append(ask(fresh, text=f"prompt {i}").status_code)
        return found

    numbers = list(range(30)) * 2
    first = drawn(numbers)
    assert first == drawn(sorted(numbers, reverse=True))
    faults = sum(statuses.count(503) for statuses in first.values())
    assert 5 <= faults <= 35
    assert any(len(set(statuses)) == 2 for statuses in first.values())


def test_faults_on_other_paths(fresh: LoopbackProcess) -> None:
    fault(fresh, "500", path="load_lora_adapter$")
    assert load(fresh, "m", "x").status_code == 500
    fault(fresh, "503_loading", path="^/(v1/models|health)$", times=1)
    assert [HTTP.get(f"{fresh.base_url}/models").status_code for _ in range(2)] == [503, 200]


def test_rate_limit_headers_and_refusal(fresh: LoopbackProcess) -> None:
    fresh.control(json={"rate_limit": {"requests": 2, "tokens": 1000, "window_s": 600}})
    answers = [ask(fresh, headers={"authorization": "Bearer one"}) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[0].headers["x-ratelimit-limit-requests"] == "2"
    assert answers[0].headers["x-ratelimit-remaining-requests"] == "1"
    assert answers[0].headers["x-ratelimit-reset-requests"] == "5m0s"
    assert 290 <= int(answers[2].headers["retry-after"]) <= 300
    assert ask(fresh, headers={"authorization": "Bearer two"}).status_code == 200


def test_capacity(fresh: LoopbackProcess) -> None:
    models = {"a": {"latency_s": 0.3}}
    fresh.control(json={"models": models, "capacity": {"concurrent": 2, "queue": 4}})
    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda i: ask(fresh, text=str(i)).status_code, range(8)))
    assert 503 in statuses and statuses.count(200) >= 4
    figures = fresh.stats()["models"]["a"]
    assert figures["max_in_flight"] >= 4
    assert figures["requests"] == 8 and figures["in_flight"] == 0
    assert fresh.stats()["connections"]["peak"] >= 4


def test_exponential_latency_still_answers(fresh: LoopbackProcess) -> None:
    fresh.control(json={"models": {"a": {"latency_s": 0.01, "latency": "exponential"}}})
    assert {ask(fresh, text=str(i)).status_code for i in range(5)} == {200}


def test_error_shapes(fresh: LoopbackProcess) -> None:
    fresh.control(json={"flat_errors": True})
    assert ask(fresh, model="x").json()["message"] == "The model `x` does not exist."
    fresh.control(json={"flavour": "openai"})
    assert ask(fresh, model="x").json()["error"]["code"] == "model_not_found"


def test_log_of_a_killed_server(tmp_path: Path) -> None:
    process = start_loopback({**SCENARIO, "rules": [{"match": {"nth": 2}, "fault": "hang"}]}, tmp_path)
    ask(process, text="first", headers={"authorization": "Bearer k"})
    with socket.create_connection(("127.0.0.1", process.port)) as connection:
        payload = json.dumps(body(text="second")).encode()
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(payload) + payload)
        while len(process.requests()) < 2:
            time.sleep(0.01)
        process.kill()
    first, second = process.requests()
    assert (first["outcome"], first["model"], first["body"]["messages"][0]["content"]) == ("200", "a", "first")
    assert (second["outcome"], second["in_flight"], second["model_in_flight"]) == (None, 1, 1)
    assert first["messages"] != second["messages"] and first["t"] <= first["ended"] <= second["t"]


def test_requests_in_pieces_and_back_to_back(fresh: LoopbackProcess) -> None:
    payload = json.dumps(body()).encode()
    request = b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(payload) + payload
    expected = ask(fresh).content
    with socket.create_connection(("127.0.0.1", fresh.port), timeout=10) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(request), 50):
            connection.sendall(request[start : start + 50])
        connection.sendall(request * 2)
        received = b""
        while received.count(expected) < 3:
            data = connection.recv(65536)
            assert data
            received += data


def test_bad_requests(fresh: LoopbackProcess) -> None:
    assert HTTP.post(f"{fresh.base_url}/chat/completions", content=b"{").status_code == 400
    assert HTTP.get(f"{fresh.base_url}/nothing").status_code == 404
    with socket.create_connection(("127.0.0.1", fresh.port), timeout=10) as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 400")
    with pytest.raises(ValueError, match="no fault is called 'nope'"):
        fault(fresh, "nope")


def test_clients_that_vanish_are_noticed(fresh: LoopbackProcess) -> None:
    fault(fresh, "hang")
    with socket.create_connection(("127.0.0.1", fresh.port)) as connection:
        payload = json.dumps(body(text="vanishing")).encode()
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(payload) + payload)
        while fresh.stats()["in_flight"] == 0:
            time.sleep(0.01)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    while fresh.stats()["in_flight"]:
        time.sleep(0.01)
    assert fresh.stats()["models"]["a"]["statuses"] == {"gone": 1}


def test_process_ends_with_stdin_or_sigterm(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.loopback", "--fast"]
    for end in ("stdin", "sigterm"):
        pipe = subprocess.PIPE
        with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
            assert process.stdin is not None and process.stdout is not None
            port = json.loads(process.stdout.readline())["port"]
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            assert HTTP.post(url, json=body(model="anything")).status_code == 200
            if end == "stdin":
                process.stdin.close()
            else:
                os.kill(process.pid, signal.SIGTERM)
            assert process.wait(20) == 0


def test_wrong_scenario_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="modles"):
        start_loopback({"modles": {}}, tmp_path)
