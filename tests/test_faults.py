"""Faults by the front door: a server injects them, a whole run has to come out right.

Every fault has an instruction of its own, so that one run meets them all at once. An undisturbed duel makes 4
requests: 2 answers and 2 judgments by the third member.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from tests.front_door import Ended, results, rows, sparta, tribe
from tests.loopback import start_loopback

DUEL = 4

PASSING: dict[str, Any] = {
    **{
        name: name
        for name in (
            "408", "409", "425", "429", "429_seconds", "429_date", "429_ms", "429_reset_headers", "500", "500_text",
            "502", "502_html", "503", "503_loading", "504", "529", "reset", "reset_in_body", "close", "half_json",
            "half_json_wrong_length", "half_json_chunked", "200_html", "200_error_object", "choices_null",
            "empty_choices", "sse_error", "hang",
        )
    },
    "drip_too_slow": {"preset": "drip", "interval_s": 0.5},
}  # fmt: skip
"""Each hits the first attempt of every request of its instruction."""
HARMLESS: dict[str, Any] = {
    "no_usage": "no_usage",
    "drip": {"preset": "drip", "chunk": 40, "interval_s": 0.01},
    "delay": "delay",
    "sse": "sse",
    "length_with_text": "length_with_text",
}
TEXTLESS = ("content_null", "content_empty", "reasoning_only", "length_without_text")

VOID = {
    "content_filter": "content_filter",
    "400_content_filter": "content_filter",
    "400_context_overflow": "context_overflow",
    "content_null": "empty",
    "length_without_text": "empty",
}
ABSTAINED = {"content_filter": ("content_filter", 1), "no_score": ("no_score", 3), "reasoning_only": ("empty", 3)}
"""The reason that is recorded, and how often the judge is asked."""
OWED = {
    "500_text": "Internal Server Error (HTTP 500)",
    "502_html": "an HTML page (HTTP 502)",
    "empty_choices": "no choices",
    "reset": "the connection broke",
    "half_json": "a truncated or malformed body",
    "429": "Rate limit reached, slow down. (HTTP 429)",
    "hang": "no answer within timeout_s (2 s)",
}
OWED_JUDGMENT = "504"
FINAL = {
    "quota": "billing/quota",
    "401": "the key is refused",
    "402": "billing/quota",
    "403": "the key is refused",
    "404_model": "does not exist",
    "400": "Invalid request",
    "400_provider_error": "at most 8 stop words (provider acme)",
}


@dataclass(frozen=True)
class Played:
    """What a run and its server left."""

    ended: Ended
    run: Path
    requests: list[dict[str, Any]]

    def __post_init__(self) -> None:
        assert "Traceback" not in self.ended.err
        assert "<html" not in self.ended.err.lower()

    def about(self, number: int, role: str | None = None) -> list[dict[str, Any]]:
        """The requests about one instruction."""
        return [r for r in self.requests if instruction_of(r) == number and role in (None, r["role"])]

    def journal(self, name: str) -> list[dict[str, Any]]:
        return rows(self.run / "iteration_000" / f"{name}.jsonl")

    @cached_property
    def duels(self) -> dict[int, dict[str, Any]]:
        """The verdicts by the number of their instruction."""
        return {int(row["instruction"][1:]): row for row in self.journal("duels")}

    def rows_of(self, name: str, number: int) -> list[dict[str, Any]]:
        duels = {row["duel"]: int(row["instruction"][1:]) for row in self.journal("matchups")}
        return [row for row in self.journal(name) if duels[row["duel"]] == number]


def instruction_of(request: dict[str, Any]) -> int:
    text = " ".join(str(message["content"]) for message in request["body"]["messages"])
    (number,) = set(re.findall(r"thing number (\d+) in", text))
    return int(number)


def rule(number: int, fault: Any, **match: Any) -> dict[str, Any]:
    return {"match": {"contains": f"thing number {number} in", **match}, "fault": fault}


def play(directory: Path, rules: Iterable[dict[str, Any]], instructions: int, **defaults: Any) -> Played:
    scenario = {"any_model": True, "log_bodies": True, "rules": list(rules)}
    with start_loopback(scenario, directory) as server:
        file = tribe(
            directory, server.base_url, members=3, instructions=instructions, defaults={"concurrency": 64, **defaults}
        )
        ended = sparta("run", "--tribe", file, "--run-dir", directory / "run")
        return Played(ended, directory / "run", server.requests("/chat/completions"))


# Faults that pass

PASSED = [*PASSING, *HARMLESS, *TEXTLESS]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Played:
    return play(tmp_path_factory.mktemp("undisturbed"), [], len(PASSED))


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> Played:
    found = [rule(PASSED.index(name), fault, attempts=1) for name, fault in PASSING.items()]
    found += [rule(PASSED.index(name), fault) for name, fault in HARMLESS.items()]
    found += [rule(PASSED.index(name), name, attempts=1, role="fight") for name in TEXTLESS]
    return play(tmp_path_factory.mktemp("passed"), found, len(PASSED), timeout_s=3)


def test_faults_that_pass_change_no_result(undisturbed: Played, passed: Played) -> None:
    assert undisturbed.ended.code == 0, undisturbed.ended.err
    assert len(undisturbed.requests) == DUEL * len(PASSED)
    assert passed.ended.code == 0, passed.ended.err
    assert results(passed.run) == results(undisturbed.run)
    journaled = sum(row["attempts"] for row in passed.journal("responses") + passed.journal("judgments"))
    assert journaled == len(passed.requests)


@pytest.mark.parametrize("name", PASSING)
def test_a_passing_fault_costs_one_more_request(passed: Played, name: str) -> None:
    found = passed.about(PASSED.index(name))
    assert len(found) == 2 * DUEL
    assert Counter(r["fault"] is not None for r in found) == {True: DUEL, False: DUEL}
    assert set(Counter((r["model"], r["messages"]) for r in found).values()) == {2}
    assert passed.duels[PASSED.index(name)]["void"] is None


@pytest.mark.parametrize("name", HARMLESS)
def test_an_odd_answer_is_an_answer(passed: Played, name: str) -> None:
    number = PASSED.index(name)
    assert len(passed.about(number)) == DUEL
    estimated = [row["usage"].get("estimated", False) for row in passed.rows_of("responses", number)]
    assert estimated == [name == "no_usage"] * 2
    assert all(row["usage"]["completion_tokens"] > 0 for row in passed.rows_of("judgments", number))


@pytest.mark.parametrize("name", TEXTLESS)
def test_an_answer_without_text_is_asked_again(passed: Played, name: str) -> None:
    number = PASSED.index(name)
    assert (len(passed.about(number, "fight")), len(passed.about(number, "judge"))) == (4, 2)
    assert all(row["content"] not in ("", "None") for row in passed.rows_of("responses", number))


# Faults that stay

STAYED = [
    *(f"void {name}" for name in VOID),
    *(f"abstained {name}" for name in ABSTAINED),
    *(f"owed {name}" for name in OWED),
    "owed judgment",
    "surrogate",
    "sse_keepalive",
    "fine",
]
LASTING = [
    *(rule(STAYED.index(f"void {name}"), name, role="fight") for name in VOID),
    *(rule(STAYED.index(f"abstained {name}"), name, role="judge") for name in ABSTAINED),
    rule(STAYED.index("surrogate"), "surrogate", role="fight"),
    rule(STAYED.index("sse_keepalive"), "sse_keepalive", role="fight"),
]
HEALED = [
    *(rule(STAYED.index(f"owed {name}"), name, role="fight") for name in OWED),
    rule(STAYED.index("owed judgment"), OWED_JUDGMENT, role="judge"),
]


@dataclass(frozen=True)
class Resumed:
    """A run that ended with owed duels, and its second process at a server that has been repaired."""

    first: Played
    second: Played
    reference: Played
    """A run that only met what cannot be repaired."""


@pytest.fixture(scope="module")
def stayed(tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    directory = tmp_path_factory.mktemp("stayed")
    scenario = {"any_model": True, "log_bodies": True, "rules": [*LASTING, *HEALED]}
    defaults = {"concurrency": 64, "max_attempts": 2, "timeout_s": 2}
    with start_loopback(scenario, directory) as server:
        file = tribe(directory, server.base_url, members=3, instructions=len(STAYED), defaults=defaults)
        ended = sparta("run", "--tribe", file, "--run-dir", directory / "run")
        requests = server.requests("/chat/completions")
        first = Played(ended, directory / "run", requests)
        server.control(json={"rules": LASTING})
        ended = sparta("resume", directory / "run")
        second = Played(ended, directory / "run", server.requests("/chat/completions")[len(requests) :])
    return Resumed(first, second, play(tmp_path_factory.mktemp("lasting"), LASTING, len(STAYED), max_attempts=2))


def one_sentence(ended: Ended, code: int, *parts: str) -> None:
    """The run stopped with one clear sentence, after the command that continues it."""
    assert ended.code == code, ended.err
    *_, hint, sentence = ended.err.splitlines()
    assert hint.startswith("sparta-api: to go on: sparta-api resume ")
    assert sentence.startswith("sparta-api: ")
    assert [part for part in parts if part not in sentence] == []


def test_a_run_ends_with_what_is_owed_and_resume_asks_nothing_else(stayed: Resumed) -> None:
    owed = len(OWED) + 1
    one_sentence(stayed.first.ended, 3, f"{owed} duels are owed", "(duel ", "member 'm", "127.0.0.1", "(model 'model-")
    assert stayed.second.ended.code == 0, stayed.second.ended.err
    assert {instruction_of(r) for r in stayed.second.requests} == {STAYED.index(n) for n in STAYED if "owed" in n}
    assert results(stayed.second.run) == results(stayed.reference.run)


@pytest.mark.parametrize("name", OWED)
def test_a_request_that_keeps_failing_is_owed(stayed: Resumed, name: str) -> None:
    number = STAYED.index(f"owed {name}")
    assert Counter(r["role"] for r in stayed.first.about(number)) == {"fight": 4}
    assert Counter(r["role"] for r in stayed.second.about(number)) == {"fight": 2, "judge": 2}
    given_up = [row for row in stayed.first.rows_of("responses", number) if row.get("owed")]
    assert len(given_up) == 2
    for row in given_up:
        assert OWED[name] in row["error"]
        assert f"member '{row['fighter']}': http://127.0.0.1:" in row["error"]
        assert row["error"].endswith("after 2 attempts")
        assert "\n" not in row["error"]


def test_an_owed_judgment_is_asked_alone(stayed: Resumed) -> None:
    number = STAYED.index("owed judgment")
    assert Counter(r["role"] for r in stayed.first.about(number)) == {"fight": 2, "judge": 4}
    assert Counter(r["role"] for r in stayed.second.about(number)) == {"judge": 2}
    assert stayed.second.duels[number]["void"] is None


@pytest.mark.parametrize("name", VOID)
def test_a_response_that_cannot_be_had_makes_its_duel_void(stayed: Resumed, name: str) -> None:
    """No judge is asked about it, no rating moves, no pair is made."""
    number, reason = STAYED.index(f"void {name}"), VOID[name]
    asked = 4 if reason == "empty" else 2
    assert Counter(r["role"] for r in stayed.first.about(number)) == {"fight": asked}
    row = stayed.second.duels[number]
    assert row["void"] == f"{reason}: {row['fighters'][0]}"
    assert (row["scores"], row["winner"], row["margin"], row["k"], row["judges"]) == (None, None, None, None, {})
    assert row["before"] == row["after"]
    assert stayed.second.rows_of("preferences", number) == []
    lost = stayed.second.rows_of("responses", number)
    assert [row["error"] for row in lost] == [reason] * 2
    assert all(row["usage"]["completion_tokens"] > 0 for row in lost) == (not name.startswith("400"))


@pytest.mark.parametrize("name", ABSTAINED)
def test_a_judge_without_a_score_abstains(stayed: Resumed, name: str) -> None:
    """It is asked `judging.max_attempts` times where that may help; no score is made up."""
    number, (reason, asked) = STAYED.index(f"abstained {name}"), ABSTAINED[name]
    assert Counter(r["role"] for r in stayed.first.about(number)) == {"fight": 2, "judge": 2 * asked}
    lost = stayed.second.rows_of("judgments", number)
    assert [(row["score"], row["reason"], row["attempts"]) for row in lost] == [(None, reason, asked)] * 2
    row = stayed.second.duels[number]
    assert (row["void"], len(row["abstained"])) == ("no judge left", 1)
    temperatures = {r["body"]["temperature"] for r in stayed.first.about(number, "judge")}
    assert temperatures == ({0.0} if asked == 1 else {0.0, 0.5})


def test_the_report_counts_what_was_void_and_who_abstained(stayed: Resumed) -> None:
    status = json.loads(sparta("status", stayed.second.run, "--json").out)
    void = {"content_filter": 2, "context_overflow": 1, "empty": 2, "no judge left": len(ABSTAINED)}
    assert status["duels"]["void_reasons"] == void
    assert status["duels"]["n_total"] == len(STAYED)
    assert status["duels"]["n_void"] == sum(void.values())
    assert status["duels"]["n_judged"] == len(STAYED) - sum(void.values())
    assert sum(member["abstained"] for member in status["members"]) == len(ABSTAINED)
    assert status["requests"] == len(stayed.first.requests) + len(stayed.second.requests)


def test_odd_texts_are_stored_as_they_can_be(stayed: Resumed) -> None:
    surrogate, keepalive = STAYED.index("surrogate"), STAYED.index("sse_keepalive")
    assert [row["content"] for row in stayed.second.rows_of("responses", surrogate)] == ["bad \ufffd text"] * 2
    assert [row["content"] for row in stayed.second.rows_of("responses", keepalive)] == ["ok"] * 2


# Faults that end a member, or the run


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """One run with a member for every final refusal, beside three that work."""
    directory = tmp_path_factory.mktemp("refused")
    rules = [{"match": {"model": name}, "fault": name} for name in FINAL]
    with start_loopback({"any_model": True, "log_bodies": True, "rules": rules}, directory) as server:
        members = [{"name": name, "model": name} for name in [*FINAL, "x", "y", "z"]]
        file = tribe(directory, server.base_url, instructions=60, members=members, on_member_failure="bench")
        ended = sparta("run", "--tribe", file, "--run-dir", directory / "run")
        return Played(ended, directory / "run", server.requests("/chat/completions"))


@pytest.mark.parametrize("name", FINAL)
def test_a_final_refusal_is_never_repeated(refused: Played, name: str) -> None:
    assert refused.ended.code == 0, refused.ended.err
    asked = Counter((r["body"]["model"], r["messages"]) for r in refused.requests if r["model"] == name)
    assert set(asked.values()) == {1}
    assert len(asked) <= 8
    (benched,) = [row for row in refused.journal("benched") if row["member"] == name]
    assert FINAL[name] in benched["reason"]
    assert "127.0.0.1" in benched["reason"]


def test_a_benched_member_takes_no_further_part(refused: Played) -> None:
    """Its duels are void and shown; the others are all judged."""
    for row in refused.duels.values():
        broken = [name for name in row["fighters"] if name in FINAL]
        assert (row["void"] is None) == (not broken)
        assert not broken or row["void"] == f"benched: {broken[0]}"
    status = json.loads(sparta("status", refused.run, "--json").out)
    assert status["duels"]["void_reasons"] == {
        "benched": sum(row["void"] is not None for row in refused.duels.values())
    }
    assert status["duels"]["n_judged"] > 0
    assert all(name in refused.ended.out for name in FINAL)


@pytest.mark.parametrize(
    ("fault", "parts"),
    [
        ("quota", ["billing/quota", "repair it and resume"]),
        ({"preset": "429", "retry_after_s": 4000}, ["4000 s", "max_wait_s (300 s)"]),
        ("503_loading", ["Loading model (HTTP 503)"]),
    ],
)
def test_a_fault_that_stops_the_run_leaves_it_resumable(tmp_path: Path, fault: Any, parts: list[str]) -> None:
    """The third answer and all that follow fail; what was there before stays."""
    rules = [{"match": {"nth": list(range(9, 200))}, "fault": fault}]
    with start_loopback({"any_model": True, "rules": rules}, tmp_path) as server:
        defaults = {"startup_timeout_s": 1, "concurrency": 2}
        file = tribe(tmp_path, server.base_url, members=3, instructions=6, defaults=defaults)
        ended = sparta("run", "--tribe", file, "--run-dir", tmp_path / "run")
        first = server.requests("/chat/completions")
        server.control(json={"rules": []})
        resumed = sparta("resume", tmp_path / "run")
        second = server.requests("/chat/completions")[len(first) :]
    one_sentence(ended, 3, "member 'm", "127.0.0.1", *parts)
    answered = {(r["model"], r["messages"]) for r in first if r["fault"] is None}
    assert resumed.code == 0, resumed.err
    assert len(answered) == 8
    assert not answered & {(r["model"], r["messages"]) for r in second}
    assert len(second) == 6 * DUEL - 8


def test_the_clock_of_a_request_starts_when_it_is_sent(tmp_path: Path) -> None:
    """48 requests of 0.2 s, 2 at a time, wait longer in line than a request may take."""
    with start_loopback({"any_model": True, "default_model": {"latency_s": 0.2}}, tmp_path) as server:
        defaults = {"concurrency": 2, "timeout_s": 2, "max_attempts": 1}
        file = tribe(tmp_path, server.base_url, members=3, instructions=12, defaults=defaults)
        ended = sparta("run", "--tribe", file, "--run-dir", tmp_path / "run")
        stats = server.stats()
    assert ended.code == 0, ended.err
    assert stats["requests"] == 48
    assert stats["max_in_flight"] == 2
    assert stats["connections"]["peak"] <= 2
