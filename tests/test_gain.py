"""Held-out figures: shares with intervals, guards, the likelihood under the initial model, controls, and the stop."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparta_api.config.verifiers import WordLimit
from sparta_api.duels.preferences import Preference, shuffled
from sparta_api.judging.verifier_rules import WordLimitRule
from sparta_api.runs.guards import Guards, broken, figures, wilson
from tests.front_door import Ended, rows, sparta, tribe
from tests.loopback.process import LoopbackProcess

MEMBERS = ("m0", "m1", "m2")
HELDOUT = (
    {"id": "tea", "prompt": "Explain tea in at most 90 words."},
    {"id": "salt", "prompt": "Explain salt in at most 8 words."},
    {"id": "free", "prompt": "Explain anything you like."},
)


# Figures


@pytest.mark.parametrize(
    ("met", "trials", "low", "high"),
    [(0, 48, 0.0, 0.0741), (9, 100, 0.0481, 0.1623), (48, 48, 0.9259, 1.0), (1, 2, 0.0945, 0.9055), (0, 0, 0.0, 1.0)],
)
def test_wilson_intervals(met: int, trials: int, low: float, high: float) -> None:
    assert wilson(met, trials) == pytest.approx((low, high), abs=1e-4)


def test_figures_of_answers() -> None:
    found = figures(["A cat. A cat. A cat.", "The dog's tail"], [(-6.0, 4), (-2.0, 4)])
    assert found.answers == 2
    assert found.words == 4.5
    assert found.repetition == pytest.approx(2 / 5)
    assert found.distinct_1 == pytest.approx(5 / 9)
    assert found.distinct_2 == pytest.approx(4 / 7)
    assert found.logprob == -1.0
    assert figures(["", "..."]).words == 0
    assert figures([""]).logprob is None


HEALTHY = ["Bees collect nectar and turn it into honey.", "Wind pushes the sails, so the boat moves."] * 6


@pytest.mark.parametrize(
    ("answers", "logprob", "clause"),
    [
        (["It is so."] * 12, -1.0, "words on average"),
        (["the sail the sail the sail the sail the sail"] * 12, -1.0, "trigrams are repetitions"),
        (["Bees collect nectar and turn it into honey."] * 12, -1.0, "of their words are different"),
        (HEALTHY, -2.6, "log-likelihood"),
    ],
)
def test_each_guard_breaks_on_its_own_kind_of_collapse(answers: list[str], logprob: float, clause: str) -> None:
    before = figures([f"{answer} Number {n} differs." for n, answer in enumerate(HEALTHY)], [(-10.0, 10)])
    clauses = broken(before, figures(answers, [(10 * logprob, 10)]), Guards())
    assert any(clause in text for text in clauses), clauses


def test_shorter_answers_that_still_answer_break_no_guard() -> None:
    before = figures([f"{answer} It also does many other things, {n} of them." for n, answer in enumerate(HEALTHY)])
    now = figures([f"{answer} Twice {n}." for n, answer in enumerate(HEALTHY)], [(-20.0, 10)])
    assert broken(before, now, Guards()) == []


def test_what_was_so_before_is_no_collapse() -> None:
    always = figures(["Yes yes yes yes yes yes."] * 4, [(-40.0, 10)])
    assert broken(always, always, Guards()) == []


# A word limit that can't be met by saying nothing

STRICT = {"kind": "word_limit", "min_new_words": 3, "on_topic": True, "sentence": True}


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("Rust forms when water and air meet iron.", 1.0),
        ("Rusting needs oxygen, water and bare metal.", 1.0),
        ("Iron rusts because of rust.", 0.0),
        ("Explain why iron rusts in at most 12 words.", 0.0),
        ("I will now answer within these twelve words.", 0.0),
        ("To solve this, consider about 12 words.", 0.0),
        ("Rust forms when water and air meet iron and then", 0.0),
        ("Iron.", 0.0),
        ("Iron it is, it is so.", 0.0),
        ("Rust forms when water and air meet iron for a long time outside somewhere.", 10 / 12),
    ],
)
def test_a_strict_word_limit_asks_for_a_sentence_on_the_topic(response: str, expected: float) -> None:
    row = {"id": "rust", "prompt": [{"role": "user", "content": "Explain why iron rusts in at most 12 words."}]}
    rule = WordLimitRule(WordLimit.model_validate(STRICT))
    assert rule.share(response, row) == pytest.approx(expected)


# Controls


def test_a_shuffled_control_keeps_the_pairs_and_forgets_the_verdicts() -> None:
    pairs = [_pair(number) for number in range(400)]
    once, again, other = (list(shuffled(pairs, seed, 0)) for seed in (1, 1, 2))
    assert once == again != other
    assert [{a["chosen_member"], a["rejected_member"]} for a in once] == [{"won", "lost"}] * 400
    assert all(pair["chosen"][0]["content"] == pair["chosen_member"] for pair in once)
    assert 150 < sum(pair["chosen_member"] == "won" for pair in once) < 250


def _pair(number: int) -> Preference:
    return {
        "prompt": [{"role": "user", "content": "?"}],
        "chosen": [{"role": "assistant", "content": "won"}],
        "rejected": [{"role": "assistant", "content": "lost"}],
        "duel": number,
        "chosen_member": "won",
        "rejected_member": "lost",
        "margin": 1.0,
    }


# A run: the command trainer's models answer as the loopback server's rules say


TRAIN = """
import json, pathlib, sys
pathlib.Path(sys.argv[2], "adapter_config.json").write_text("{}")
print(json.dumps({"kind": "adapter"}))
"""
SERVE = """
import json, sys
print(json.dumps({"base_url": sys.argv[1], "model": "tuned-" + sys.argv[2]}))
"""
TUNED = [f"tuned-{name}" for name in MEMBERS]
INITIAL = [f"model-{n}" for n in range(len(MEMBERS))]
TELLS = {
    "match": {"has_field": "prompt_logprobs", "model": INITIAL},
    "fault": {"kind": "edit", "set": {"prompt_logprobs": [None] + [{"7": {"logprob": -0.5, "rank": 3}}] * 99}},
}
SAYS_NOTHING = {
    "match": {"contains": "Explain salt", "model": TUNED},
    "fault": {"kind": "edit", "message": {"content": "It is. It is. It is."}},
}


def _story(directory: Path, base_url: str, instructions: int = 3, **changes: Any) -> Path:
    for name, text in (("train.py", TRAIN), ("serve.py", SERVE)):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text, encoding="utf-8")
    (directory / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in HELDOUT), encoding="utf-8")
    train = [sys.executable, "train.py", "{preferences}", "{output}"]
    serve = {"command": [sys.executable, "serve.py", base_url, "{member}"]}
    path = tribe(
        directory,
        base_url,
        members=len(MEMBERS),
        **{
            "iterations": 2,
            "heldout": {"path": "heldout.jsonl"},
            "judging": {"verifiers": {"limit": {"kind": "word_limit", "min_words": 2}}},
            "trainers": {"own": {"backend": "command", "command": train, "serve": serve}},
            "training": {"trainer": "own"},
            **changes,
        },
    )
    asked = [{"id": f"q{n}", "prompt": f"Explain thing {n} in at most 12 words."} for n in range(instructions)]
    (directory / "instructions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked), encoding="utf-8")
    return path


def _served(directory: Path, rules: list[dict[str, Any]]) -> LoopbackProcess:
    scenario = {"any_model": True, "default_model": {"words": [6, 24]}, "rules": rules, "log_bodies": True}
    return LoopbackProcess(scenario, directory / "server")


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ended, Path]]:
    """A finished run of two iterations on a server that tells likelihoods."""
    directory = tmp_path_factory.mktemp("healthy")
    with _served(directory, [TELLS]) as server:
        path = _story(directory, server.base_url, training={"trainer": "own", "stop_on_collapse": True})
        yield sparta("run", "--tribe", path, "--run-dir", directory / "run"), directory / "run"


def test_held_out_shares_stand_in_the_report_and_in_status(healthy: tuple[Ended, Path]) -> None:
    ended, run = healthy
    assert ended.code == 0, ended.err
    for title in ("Held-out answers that meet the verifiers", "before", "after iteration 2", "the tribe"):
        assert title in ended.out
    stages = json.loads(sparta("status", run, "--json").out)["heldout"]["stages"]
    assert [stage["trained"] for stage in stages] == [0, 1, 2]
    for stage in stages:
        assert stage["tribe"]["scored"] == 2 * len(MEMBERS), "the instruction without a limit is scored by nobody"
        assert stage["tribe"]["met"] == sum(stage["members"][name]["met"] for name in MEMBERS)
        assert stage["tribe"]["interval"] == pytest.approx(wilson(stage["tribe"]["met"], stage["tribe"]["scored"]))
        assert stage["tribe"]["answers"] == 3 * len(MEMBERS)
        assert stage["collapsed"] == {}


def test_the_initial_model_is_asked_how_likely_each_answer_is(healthy: tuple[Ended, Path]) -> None:
    _, run = healthy
    found = rows(run / "heldout_scores.jsonl")
    assert {(row["trained"], row["instruction"], row["member"]) for row in found} == {
        (trained, item["id"], name) for trained in range(3) for item in HELDOUT for name in MEMBERS
    }
    prompts = {
        (r["trained"], r["instruction"], r["member"]): r["usage"]["prompt_tokens"] for r in rows(run / "heldout.jsonl")
    }
    for row in found:
        tokens = 100 - prompts[row["trained"], row["instruction"], row["member"]]
        assert (row["logprob"], row["tokens"]) == (-0.5 * tokens, tokens)
    log = rows(run.parent / "server" / "loopback-0.jsonl")
    asked = [row["body"] for row in log if "prompt_logprobs" in (row.get("body") or {})]
    assert len(asked) == len(found)
    assert {body["model"] for body in asked} == set(INITIAL)
    answers = {row["content"] for row in rows(run / "heldout.jsonl")}
    assert all(
        body["messages"][-1] == {"role": "assistant", "content": body["messages"][-1]["content"]} for body in asked
    )
    assert {body["messages"][-1]["content"] for body in asked} == answers


def test_a_resumed_run_scores_only_what_is_missing(healthy: tuple[Ended, Path]) -> None:
    _, run = healthy
    before = (run / "heldout_scores.jsonl").read_bytes()
    state = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(state | {"completed": 1, "state": "stopped"}))
    lines = before.splitlines(keepends=True)
    (run / "heldout_scores.jsonl").write_bytes(b"".join(lines[:-2]) + lines[-1][:20])
    ended = sparta("resume", run)
    assert ended.code == 0, ended.err
    assert sorted((run / "heldout_scores.jsonl").read_bytes().splitlines()) == sorted(before.splitlines())


def test_a_collapse_stops_the_run_before_the_next_iteration(tmp_path: Path) -> None:
    with _served(tmp_path, [SAYS_NOTHING]) as server:
        guards = {"max_repetition": 0.0, "min_distinct": 0.0}
        path = _story(
            tmp_path, server.base_url, training={"trainer": "own", "stop_on_collapse": True, "guards": guards}
        )
        ended = sparta("run", "--tribe", path, "--run-dir", tmp_path / "run")
        assert ended.code == 3
        assert "the held-out answers of 'm0' have collapsed after iteration 1" in ended.err
        assert "trigrams are repetitions" in ended.err
        assert "training.stop_on_collapse=false" in ended.err
        assert not (tmp_path / "run" / "iteration_001" / "matchups.jsonl").exists()
        assert sparta("resume", tmp_path / "run").code == 3
        ended = sparta("resume", tmp_path / "run", "--set", "training.stop_on_collapse=false")
        assert ended.code == 0, ended.err
        assert "have collapsed after iteration 2" in " ".join(ended.out.split())


def test_an_endpoint_that_tells_no_likelihood_is_asked_once_a_member(tmp_path: Path) -> None:
    refuses = {
        "match": {"has_field": "prompt_logprobs"},
        "fault": {
            "kind": "reply",
            "status": 400,
            "body": {"error": {"message": "Unknown parameter: 'prompt_logprobs'"}},
        },
    }
    with _served(tmp_path, [refuses]) as server:
        path = _story(tmp_path, server.base_url, iterations=1)
        ended = sparta("run", "--tribe", path, "--run-dir", tmp_path / "run")
        assert ended.code == 0, ended.err
        asked = [r for r in server.requests() if "prompt_logprobs" in (r.get("body") or {})]
    assert len(asked) == 2 * len(MEMBERS)
    assert "no likelihood of the held-out answers under the initial model" in " ".join(ended.out.split())
    assert all(row["logprob"] is None for row in rows(tmp_path / "run" / "heldout_scores.jsonl"))


def test_a_control_run_says_what_it_is(tmp_path: Path) -> None:
    with _served(tmp_path, []) as server:
        path = _story(tmp_path, server.base_url, instructions=24, iterations=1)
        runs = [tmp_path / name for name in ("plain", "control")]
        assert sparta("run", "--tribe", path, "--run-dir", runs[0]).code == 0
        ended = sparta("run", "--tribe", path, "--run-dir", runs[1], "--set", "preferences.control=shuffled")
    assert ended.code == 0, ended.err
    assert "a control run" in " ".join(ended.out.split())
    assert json.loads((runs[1] / "run.json").read_text())["control"] == "shuffled"
    assert json.loads(sparta("status", runs[1], "--json").out)["control"] == "shuffled"
    plain, control = (rows(run / "iteration_000" / "preferences.jsonl") for run in runs)
    turned = sum(a["chosen"] == b["rejected"] for a, b in zip(plain, control, strict=True))
    assert sum(a["chosen"] == b["chosen"] for a, b in zip(plain, control, strict=True)) + turned == len(plain)
    assert 0 < turned < len(plain)


def test_a_stop_needs_held_out_answers(tmp_path: Path) -> None:
    path = tribe(tmp_path, "http://127.0.0.1:9/v1", training={"stop_on_collapse": True})
    ended = sparta("run", "--tribe", path, "--run-dir", tmp_path / "run")
    assert ended.code == 2
    assert "training.stop_on_collapse looks at held-out answers" in ended.err
