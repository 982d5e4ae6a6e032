"""Expected scoring where endpoints do not tell what it needs: scores come from the text, and that is said."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sparta_api.endpoints.decisions import decision_route
from tests.front_door import rows, sparta, tribe
from tests.loopback.process import LoopbackProcess

EXPECTED: dict[str, Any] = {"judging": {"scoring": "expected"}}


def play(server: LoopbackProcess, directory: Path, *arguments: str, **changes: Any) -> list[dict[str, Any]]:
    """The judges of a run, as `sparta-api judges` shows them."""
    path, run = tribe(directory, server.base_url, **EXPECTED, **changes), directory / "run"
    ended = sparta("run", "--tribe", path, "--run-dir", run, "--yes", *arguments)
    assert ended.code == 0, ended.err
    judges: list[dict[str, Any]] = json.loads(sparta("judges", run, "--json").out)["judges"]
    return judges


@pytest.mark.parametrize(
    ("judge", "why"),
    [
        ({"logprobs": "none"}, "the endpoint returns no log-probabilities"),
        ({"label_mass": 0.3}, "30.0% of the probability lies on score labels, min_label_mass is 50%"),
    ],
)
def test_scores_from_the_text_are_counted_and_check_says_why(tmp_path: Path, judge: dict[str, Any], why: str) -> None:
    with LoopbackProcess({"any_model": True, "judge": judge}, tmp_path / "server") as server:
        found = sparta("check", "--tribe", tribe(tmp_path / "check", server.base_url, **EXPECTED))
        judges = play(server, tmp_path)
    assert found.code == 0, found.err
    told = [line for line in found.out.splitlines() if "judging.scoring: expected has no effect" in line]
    assert len(told) == 4 and all(why in line for line in told)
    judgments = rows(tmp_path / "run" / "iteration_000" / "judgments.jsonl")
    assert all(row["score"] == int(row["score"]) for row in judgments)
    assert sum(one["read_from_text"] for one in judges) == len(judgments) == sum(one["judgments"] for one in judges)


def test_probabilities_are_used_where_there_are_some(tmp_path: Path) -> None:
    with LoopbackProcess({"any_model": True}, tmp_path / "server") as server:
        found = sparta("check", "--tribe", tribe(tmp_path / "check", server.base_url, **EXPECTED))
        judges = play(server, tmp_path)
    assert "has no effect" not in found.out + found.err
    assert found.out.count("95%") == 4
    assert [one["read_from_text"] for one in judges] == [0, 0, 0, 0]
    judgments = rows(tmp_path / "run" / "iteration_000" / "judgments.jsonl")
    assert any(row["score"] != int(row["score"]) for row in judgments)


def test_a_judge_may_ask_for_fewer_alternatives(tmp_path: Path) -> None:
    fighters = [{"name": f"m{n}", "model": f"model-{n}", "roles": ["fight"]} for n in range(2)]
    judge = {"name": "judge", "model": "judge", "roles": ["judge"], "extra_body": {"top_logprobs": 3}}
    scenario = {"any_model": True, "judge": {"sharpness": 3.0, "label_mass": 1.0}}
    with LoopbackProcess(scenario, tmp_path / "server") as server:
        (found,) = play(server, tmp_path, members=[*fighters, judge])
    assert 0 < found["label_mass"] < 0.8


@contextmanager
def answering(answers: dict[str, tuple[int, str]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that answers every path with a status and a text, 404 elsewhere; its address and what it was sent."""
    seen: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append({"path": self.path, "key": self.headers["Authorization"], **body})
            status, text = answers.get(self.path, (404, "Not Found"))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    ("answers", "route"),
    [
        ({"/v1/systemone": (400, '{"error": "questions: needs at least one question"}')}, "/systemone"),
        ({"/v1/decisions": (422, "questions: at least 1 item")}, "/decisions"),
        ({"/v1/systemone": (501, "The model does not support the structured decision API")}, None),
        ({"/v1/systemone": (400, "bad request"), "/v1/decisions": (200, "{}")}, None),
        ({}, None),
    ],
)
def test_decisions_are_found_without_a_question(answers: dict[str, tuple[int, str]], route: str | None) -> None:
    with answering(answers) as (url, seen):
        found = asyncio.run(decision_route(url, "m", {"Authorization": "Bearer k"}, proxies=False))
    assert found == (None if route is None else url + route)
    assert all(one["questions"] == {} and one["model"] == "m" and one["key"] == "Bearer k" for one in seen)
    assert seen


def test_an_endpoint_that_is_gone_offers_nothing() -> None:
    with answering({}) as (url, _):
        pass
    assert asyncio.run(decision_route(url, "m", {}, proxies=False)) is None
