"""Members that fail, replicas, and endpoints that want their requests written differently."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.front_door import results, rows, sparta, started, tribe
from tests.loopback import LoopbackProcess, start_loopback


def chats(server: LoopbackProcess) -> list[dict[str, Any]]:
    return server.requests("/chat/completions")


# Members that fail for good

DEAD = {"match": {"model": "model-3"}, "fault": "500"}
"""One of four members never answers."""


def test_a_member_that_fails_for_good_stops_the_run(tmp_path: Path) -> None:
    with start_loopback({"any_model": True, "rules": [DEAD]}, tmp_path) as server:
        file = tribe(tmp_path, server.base_url, instructions=24, defaults={"max_attempts": 2})
        ended = sparta("run", "--tribe", file, "--run-dir", tmp_path / "run")
        first = chats(server)
        server.control(json={"rules": []})
        resumed = sparta("resume", tmp_path / "run")
        requests = chats(server)
        assert sparta("run", "--tribe", file, "--run-dir", tmp_path / "whole").code == 0
    assert ended.code == 3
    sentence = ended.err.splitlines()[-1]
    assert "member 'm3'" in sentence
    assert server.base_url in sentence
    assert "Internal server error (HTTP 500)" in sentence
    assert max(Counter((r["model"], r["messages"]) for r in first).values()) == 2
    assert resumed.code == 0, resumed.err
    answered = Counter((r["model"], r["messages"]) for r in requests if r["outcome"] == "200")
    assert set(answered.values()) == {1}
    assert results(tmp_path / "run") == results(tmp_path / "whole")


def test_a_benched_member_comes_back_in_the_next_iteration(tmp_path: Path) -> None:
    """Its duels are void, the others are judged without it; then its endpoint is repaired."""
    scenario = {"any_model": True, "default_model": {"latency_s": 0.01}, "rules": [DEAD]}
    with start_loopback(scenario, tmp_path) as server:
        defaults = {"max_attempts": 2}
        file = tribe(tmp_path, server.base_url, instructions=24, on_member_failure="bench", defaults=defaults)
        first = sparta("run", "--tribe", file, "--run-dir", tmp_path / "run")
        server.control(json={"rules": []})
        second = sparta("resume", tmp_path / "run", "--set", "iterations=2")
    assert [first.code, second.code] == [0, 0], first.err + second.err
    assert "m3" in first.out
    assert "benched" in first.out
    benched, again = (rows(tmp_path / "run" / f"iteration_00{n}" / "duels.jsonl") for n in range(2))
    for row in benched:
        assert row["void"] == ("benched: m3" if "m3" in row["fighters"] else None)
        assert "m3" not in row["judges"]
    assert all(row["void"] is None for row in again)
    assert any("m3" in row["fighters"] for row in again)
    (note,) = rows(tmp_path / "run" / "iteration_000" / "benched.jsonl")
    assert "Internal server error" in note["reason"]


def test_a_server_that_dies_in_mid_run(tmp_path: Path) -> None:
    """The run ends with exit 3 and goes on when the server is back; a server that comes back in time is waited for."""
    server = start_loopback({"any_model": True, "default_model": {"latency_s": 0.02}}, tmp_path)
    file = tribe(tmp_path, server.base_url, members=3, instructions=24, defaults={"max_attempts": 3})
    process = started("run", "--tribe", file, "--run-dir", tmp_path / "run")
    while len(chats(server)) < 30:
        time.sleep(0.01)
    server.kill()
    err = process.communicate(timeout=60)[1]
    assert process.returncode == 3
    assert "Connection refused" in err.splitlines()[-1] or "connection broke" in err.splitlines()[-1]
    with server.start():
        process = started("resume", tmp_path / "run", "--set", "members.m0.max_attempts=8")
        before = len(chats(server))
        while len(chats(server)) < before + 10:
            time.sleep(0.01)
        server.kill()
        server.start()
        assert process.wait(60) == 0
        process.communicate()
        assert sparta("run", "--tribe", file, "--run-dir", tmp_path / "whole").code == 0
    assert results(tmp_path / "run") == results(tmp_path / "whole")


# Replicas


def test_the_least_busy_replica_is_asked(tmp_path: Path) -> None:
    """One that is ten times as slow gets a tenth of the work, or little more."""
    quick = {"any_model": True, "default_model": {"latency_s": 0.01}}
    slow = {"any_model": True, "default_model": {"latency_s": 0.2}}
    with start_loopback(quick, tmp_path / "a") as one, start_loopback(slow, tmp_path / "b") as two:
        urls = [one.base_url, two.base_url]
        members = [{"name": f"m{n}", "model": f"m{n}", "base_url": urls} for n in range(3)]
        file = tribe(tmp_path, one.base_url, members, instructions=48, defaults={"concurrency": 4})
        ended = sparta("run", "--tribe", file, "--run-dir", tmp_path / "run")
        counts, peaks = [len(chats(s)) for s in (one, two)], [s.stats()["max_in_flight"] for s in (one, two)]
    assert ended.code == 0, ended.err
    assert sum(counts) == 4 * 48
    assert counts[0] > 2 * counts[1] > 0
    assert max(peaks) <= 8


@pytest.mark.parametrize("fault", ["dead", "500", "503", "429", "hang"])
def test_a_broken_replica_costs_nothing_but_speed(tmp_path: Path, fault: str) -> None:
    """No attempt of a question is lost to it; a refused connection is not even a request."""
    rules = [] if fault == "dead" else [{"fault": fault}]
    with (
        start_loopback({"any_model": True}, tmp_path / "a") as good,
        start_loopback({"any_model": True, "rules": rules}, tmp_path / "b") as bad,
    ):
        if fault == "dead":
            bad.stop()
        members = [{"name": f"m{n}", "model": f"m{n}", "base_url": [bad.base_url, good.base_url]} for n in range(3)]
        defaults = {"max_attempts": 3, "concurrency": 4, "timeout_s": 1.5}
        file = tribe(tmp_path, good.base_url, members, instructions=12, defaults=defaults)
        ended = sparta("run", "--tribe", file, "--run-dir", tmp_path / "run")
        answered = [r for r in chats(good) if r["outcome"] == "200"]
    assert ended.code == 0, ended.err
    assert len(answered) == 4 * 12
    assert len(rows(tmp_path / "run" / "iteration_000" / "duels.jsonl")) == 12


def test_all_replicas_dead_is_an_endpoint_down(tmp_path: Path) -> None:
    with (
        start_loopback({"any_model": True}, tmp_path / "a") as one,
        start_loopback({"any_model": True}, tmp_path / "b") as two,
    ):
        urls = [one.base_url, two.base_url]
    members = [{"name": f"m{n}", "model": f"m{n}", "base_url": urls} for n in range(3)]
    file = tribe(tmp_path, urls[0], members, instructions=3, defaults={"max_attempts": 2})
    ended = sparta("run", "--tribe", file, "--run-dir", tmp_path / "run")
    assert ended.code == 3
    assert all(url in ended.err.splitlines()[-1] for url in urls)


# Endpoints that want their requests written differently


def adapted(tmp_path: Path, rules: list[dict[str, Any]], **changes: Any) -> tuple[str, list[dict[str, Any]]]:
    """A run of 12 duels with a system prompt for each member: what it printed, and the requests."""
    with start_loopback({"any_model": True, "log_bodies": True, "rules": rules}, tmp_path) as server:
        members = [{"name": f"m{n}", "model": f"m{n}", "system_prompt": "Be brief."} for n in range(3)]
        file = tribe(tmp_path, server.base_url, members, instructions=12, **changes)
        ended = sparta("run", "--tribe", file, "--run-dir", tmp_path / "run")
        requests = chats(server)
    assert ended.code == 0, ended.err
    assert len(rows(tmp_path / "run" / "iteration_000" / "preferences.jsonl")) > 0
    return ended.err, requests


@pytest.mark.parametrize(
    ("field", "fault"),
    [
        ("temperature", "400_temperature"),
        ("temperature", "400_temperature_parameter"),
        ("max_tokens", "400_max_tokens"),
        ("response_format", {"kind": "reply", "status": 400, "body": {"error": {
            "message": "Invalid parameter: 'response_format' of type 'json_schema' is not supported with this model.",
            "type": "invalid_request_error", "param": "response_format", "code": None}}}),
    ],
)  # fmt: skip
def test_a_field_that_is_not_taken_is_left_out(tmp_path: Path, field: str, fault: Any) -> None:
    """Each member finds out by the requests in flight, is warned about once, and never asks so again."""
    printed, requests = adapted(tmp_path, [{"match": {"has_field": field}, "fault": fault}])
    refused = [r for r in requests if r["outcome"] == "400"]
    answered = [r for r in requests if r["outcome"] == "200"]
    assert 3 <= len(refused) <= 8 + 3
    assert len(answered) == 4 * 12
    assert max(Counter((r["model"], r["messages"], field in r["body"]) for r in requests).values()) == 1
    assert all(field not in r["body"] for r in answered)
    assert all(("max_completion_tokens" in r["body"]) == (field == "max_tokens") for r in answered)
    assert printed.count(f"does not take {field}") == 3


@pytest.mark.parametrize("how", ["found out", "configured"])
def test_a_template_without_a_system_role_gets_the_text_in_the_first_user_message(tmp_path: Path, how: str) -> None:
    rules = [{"match": {"has_role": "system"}, "fault": "400_system_role"}]
    defaults = {"system_role": "fold"} if how == "configured" else {}
    _, requests = adapted(tmp_path, rules, defaults=defaults)
    refused = [r for r in requests if r["outcome"] == "400"]
    answered = [r for r in requests if r["outcome"] == "200"]
    assert (len(refused) == 0) == (how == "configured")
    assert len(refused) <= 8 + 3
    assert len(answered) == 4 * 12
    for request in answered:
        assert [message["role"] for message in request["body"]["messages"]] == ["user"]
        folded = request["body"]["messages"][0]["content"].startswith("Be brief.\n\nExplain thing number")
        assert folded == (request["role"] == "fight")


def test_a_500_that_may_be_the_system_role_says_so(tmp_path: Path) -> None:
    rules = [{"match": {"has_role": "system"}, "fault": "500_text"}]
    with start_loopback({"any_model": True, "rules": rules}, tmp_path) as server:
        members = [{"name": f"m{n}", "model": f"m{n}", "system_prompt": "Be brief."} for n in range(3)]
        file = tribe(tmp_path, server.base_url, members, instructions=6, defaults={"max_attempts": 2})
        ended = sparta("run", "--tribe", file, "--run-dir", tmp_path / "run")
        assert max(Counter((r["model"], r["messages"]) for r in chats(server)).values()) <= 2
    assert ended.code == 3
    assert "system_role: fold" in ended.err.splitlines()[-1]


def test_json_that_is_asked_for_and_not_enforced_is_read_as_text(tmp_path: Path) -> None:
    """One warning for each member; the scores count."""
    with start_loopback(
        {"any_model": True, "judge": {"reply": "Sure! I would give it a $score out of 10."}}, tmp_path
    ) as server:
        file = tribe(tmp_path, server.base_url, members=3, instructions=12)
        ended = sparta("run", "--tribe", file, "--run-dir", tmp_path / "run")
    assert ended.code == 0, ended.err
    judgments = rows(tmp_path / "run" / "iteration_000" / "judgments.jsonl")
    for row in judgments:
        assert f"a {row['score']:.0f} out of 10" in row["raw"]
    assert ended.err.count("does not enforce JSON") == 3


# Context windows


def test_max_tokens_are_lowered_to_what_the_servers_window_leaves(tmp_path: Path) -> None:
    """The server tells its window; where the prompt alone does not fit, the duel is void."""
    scenario = {"any_model": True, "log_bodies": True, "default_model": {"max_model_len": 600}}
    with start_loopback(scenario, tmp_path) as server:
        defaults = {"sampling": {"max_tokens": 590}}
        file = tribe(tmp_path, server.base_url, members=3, instructions=6, defaults=defaults)
        source = file.parent / "instructions.jsonl"
        with source.open("a") as lines:
            lines.write(json.dumps({"id": "long", "prompt": "so " * 1000}) + "\n")
        ended = sparta("run", "--tribe", file, "--run-dir", tmp_path / "run")
        requests = chats(server)
    assert ended.code == 0, ended.err
    duels = {row["instruction"]: row for row in rows(tmp_path / "run" / "iteration_000" / "duels.jsonl")}
    assert [name for name, row in duels.items() if row["void"]] == ["long"]
    assert duels["long"]["void"] == f"context_overflow: {duels['long']['fighters'][0]}"
    fights = [r for r in requests if r["role"] == "fight" and len(r["body"]["messages"][-1]["content"]) < 999]
    assert sorted({r["outcome"] for r in fights}) == ["200", "400"]
    assert set(Counter((r["model"], r["messages"]) for r in fights).values()) == {2}
    assert all(r["body"]["max_tokens"] < 590 for r in fights if r["outcome"] == "200")


def test_a_prompt_beyond_the_configured_window_is_never_sent(tmp_path: Path) -> None:
    with start_loopback({"any_model": True, "log_bodies": True}, tmp_path) as server:
        file = tribe(tmp_path, server.base_url, members=3, instructions=3, defaults={"context_window": 1000})
        with (file.parent / "instructions.jsonl").open("a") as lines:
            lines.write(json.dumps({"id": "long", "prompt": "so " * 1700}) + "\n")
        ended = sparta("run", "--tribe", file, "--run-dir", tmp_path / "run")
        assert not [r for r in chats(server) if "so so" in r["body"]["messages"][-1]["content"]]
    assert ended.code == 0, ended.err
    responses = rows(tmp_path / "run" / "iteration_000" / "responses.jsonl")
    lost = [row for row in responses if "error" in row]
    assert [row["error"] for row in lost] == ["context_overflow"] * 2
    assert all("1276 tokens" in row["detail"] and "1000" in row["detail"] for row in lost)
    assert all(row["attempts"] == 0 for row in lost)
