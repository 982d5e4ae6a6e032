"""What the user allows and what servers allow: limits, rates, pauses."""

from __future__ import annotations

import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.front_door import Ended, results, rows, sparta, started, tribe
from tests.loopback import LoopbackProcess, start_loopback

PRICE = {"input": 100.0, "output": 200.0}
"""USD per million tokens."""


def spent(server: LoopbackProcess, run: Path) -> dict[str, float]:
    """Requests as the server saw them; tokens and cost as it counted them for the answers it gave."""
    journaled = [row for name in ("responses", "judgments") for row in rows(run / "iteration_000" / f"{name}.jsonl")]
    usages = [row["usage"] for row in journaled]
    prompt, completion = (sum(usage[f"{kind}_tokens"] for usage in usages) for kind in ("prompt", "completion"))
    return {
        "max_requests": len(server.requests("/chat/completions")),
        "max_tokens": prompt + completion,
        "max_cost_usd": (prompt * PRICE["input"] + completion * PRICE["output"]) / 1e6,
    }


@pytest.mark.parametrize(
    ("limit", "value", "close"), [("max_requests", 41, 41), ("max_tokens", 6000, 4500), ("max_cost_usd", 0.7, 0.55)]
)
def test_a_limit_stops_the_run_before_it_is_passed(tmp_path: Path, limit: str, value: float, close: float) -> None:
    """With 16 requests in flight and a fault in ten; a higher limit goes on, to the same results."""
    scenario = {
        "any_model": True,
        "default_model": {"latency_s": 0.01, "latency": "exponential"},
        "rules": [{"match": {"every": 10}, "fault": "502"}],
    }
    with start_loopback(scenario, tmp_path) as server:
        defaults = {"concurrency": 16, "price": PRICE}
        file = tribe(tmp_path, server.base_url, members=3, instructions=24, defaults=defaults)
        run = tmp_path / "run"
        ended = sparta("run", "--tribe", file, "--run-dir", run, "--set", f"limits.{limit}={value}")
        assert ended.code == 4, ended.err
        assert f"limits.{limit}" in ended.err.splitlines()[-1]
        assert "--set" in ended.err.splitlines()[-1]
        found = spent(server, run)[limit]
        assert close <= found <= value
        again = sparta("resume", run)
        assert again.code == 4
        assert spent(server, run)[limit] <= value
        raised = sparta("resume", run, "--set", f"limits.{limit}={value * 100:g}")
        assert raised.code == 0, raised.err
        answered = Counter((r["model"], r["messages"]) for r in server.requests() if r["outcome"] == "200")
        assert set(answered.values()) == {1}
        assert sparta("run", "--tribe", file, "--run-dir", tmp_path / "whole").code == 0
    assert results(run) == results(tmp_path / "whole")


def test_interrupted_requests_count_towards_the_limit(tmp_path: Path) -> None:
    """They reached the server, so a resumed run has so many less."""
    with start_loopback({"any_model": True, "rules": [{"fault": "hang"}]}, tmp_path) as server:
        file = tribe(tmp_path, server.base_url, members=3, instructions=24, limits={"max_requests": 20})
        process = started("run", "--tribe", file, "--run-dir", tmp_path / "run")
        while len(server.requests()) < 8:
            time.sleep(0.01)
        process.terminate()
        process.communicate(timeout=30)
        server.control(json={"rules": []})
        ended = sparta("resume", tmp_path / "run")
        assert ended.code == 4, ended.err
        assert len(server.requests()) == 20


def test_cost_counts_cached_input_and_reasoning_at_their_prices(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 3000, "completion_tokens": 100, "prompt_tokens_details": {"cached_tokens": 2000}}
    rules = [{"fault": {"kind": "edit", "set": {"usage": usage}}}]
    price = {"input": 1.0, "cached_input": 0.1, "output": 2.0}
    with start_loopback({"any_model": True, "rules": rules}, tmp_path) as server:
        file = tribe(tmp_path, server.base_url, members=3, instructions=2, defaults={"price": price})
        ended = sparta("run", "--tribe", file, "--run-dir", tmp_path / "run")
    assert ended.code == 0, ended.err
    status = json.loads(sparta("status", tmp_path / "run", "--json").out)
    assert status["usage"] == {"prompt": 24000, "cached": 16000, "completion": 800}
    assert status["spent_usd"] == pytest.approx(8 * 0.0014)


@pytest.mark.parametrize("rate", [{"requests_per_minute": 600}, {"tokens_per_minute": 60_000}])
def test_the_rates_of_an_account_are_kept(tmp_path: Path, rate: dict[str, int]) -> None:
    """By all its members together: no stretch of the server's log holds more than its share and one second's burst."""
    with start_loopback({"any_model": True, "log_bodies": True}, tmp_path) as server:
        file = tribe(tmp_path, server.base_url, members=3, instructions=8, defaults={"concurrency": 32, **rate})
        ended = sparta("run", "--tribe", file, "--run-dir", tmp_path / "run")
        requests = server.requests("/chat/completions")
    assert ended.code == 0, ended.err
    assert len(requests) == 32
    times = sorted(r["t"] for r in requests)
    if "requests_per_minute" in rate:
        for number, start in enumerate(times):
            for count, end in enumerate(times[number:], 1):
                assert count <= 10 + 10 * (end - start) + 1
    else:
        tokens = spent(server, tmp_path / "run")["max_tokens"]
        assert times[-1] - times[0] >= tokens / 1000 - 3


def test_a_pause_holds_the_whole_account_and_no_other(tmp_path: Path) -> None:
    """After one 429 with Retry-After: 2 nothing of that account is sent for 2 s; the other account goes on."""
    rules = [{"match": {"nth": [5]}, "fault": {"preset": "429", "retry_after_s": 2}}]
    slow = {"any_model": True, "default_model": {"latency_s": 0.05}}
    with (
        start_loopback({**slow, "rules": rules}, tmp_path / "a") as limited,
        start_loopback(slow, tmp_path / "b") as free,
    ):
        members = [{"name": f"m{n}", "model": f"m{n}", "base_url": limited.base_url} for n in range(2)]
        members += [{"name": f"n{n}", "model": f"n{n}", "base_url": free.base_url} for n in range(3)]
        file = tribe(tmp_path, limited.base_url, members, instructions=20, defaults={"concurrency": 2})
        ended = sparta("run", "--tribe", file, "--run-dir", tmp_path / "run")
        assert ended.code == 0, ended.err
        (refused,) = [r["ended"] for r in limited.requests() if r["fault"]]
        held = [r["t"] - refused for r in limited.requests() if r["t"] > refused]
        others = [r["t"] - refused for r in free.requests()]
    assert sum(moment < 0.1 for moment in held) <= 1, "one may have been on its way"
    assert min(moment for moment in held if moment > 0.1) >= 1.9
    assert any(0.1 < moment < 1.9 for moment in others)


def test_two_runs_side_by_side_share_an_account_by_its_headers(tmp_path: Path) -> None:
    """The account allows 40 requests in 2 s; both runs see that in its headers."""
    scenario = {"any_model": True, "rate_limit": {"requests": 40, "window_s": 2}}
    with start_loopback(scenario, tmp_path) as server:
        files = [tribe(tmp_path / name, server.base_url, members=3, instructions=20) for name in "ab"]

        def play(file: Path) -> Ended:
            return sparta("run", "--tribe", file, "--run-dir", file.parent / "run")

        with ThreadPoolExecutor(2) as pool:
            ended = list(pool.map(play, files))
        requests = server.requests("/chat/completions")
    assert [one.code for one in ended] == [0, 0], ended[0].err + ended[1].err
    refused = sum(r["outcome"] == "429" for r in requests)
    assert len(requests) - refused == 160
    assert refused <= 4 * 16, "at most those in flight, each of the four times that nothing is left"
    assert results(files[0].parent / "run") == results(files[1].parent / "run")


def test_limits_within_an_account_hold_for_all_its_members(tmp_path: Path) -> None:
    with start_loopback({"any_model": True, "default_model": {"latency_s": 0.02}}, tmp_path) as server:
        file = tribe(tmp_path, server.base_url, members=4, instructions=12, defaults={"concurrency": 3})
        ended = sparta("run", "--tribe", file, "--run-dir", tmp_path / "run")
        stats: dict[str, Any] = server.stats()
    assert ended.code == 0, ended.err
    assert stats["max_in_flight"] == 3


def test_a_run_without_a_limit_does_not_end_as_if_it_had_one(tmp_path: Path) -> None:
    """A limit that is just enough lets the run end with exit 0."""
    with start_loopback({"any_model": True}, tmp_path) as server:
        file = tribe(tmp_path, server.base_url, members=3, instructions=6, limits={"max_requests": 24})
        ended = sparta("run", "--tribe", file, "--run-dir", tmp_path / "run")
    assert ended.code == 0, ended.err
