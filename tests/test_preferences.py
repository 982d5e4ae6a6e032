from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta_api.config.tribe import ReputationConfig
from sparta_api.duels.preferences import (
    PairCounts,
    Preference,
    build,
    export_openai,
    export_trl,
    pair_problem,
    validate_pairs,
    with_system,
)
from sparta_api.errors import ConfigError
from sparta_api.ratings.reputation import Rating, Reputation, panel_scores

Row = dict[str, Any]


def prompts(instruction: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"About {instruction}?"}]


def duel(number: int, winner: str | None = "a", margin: float | None = 2.0, void: str | None = None) -> Row:
    return {
        "duel": number,
        "instruction": f"q{number}",
        "fighters": ["a", "b"],
        "winner": winner,
        "margin": margin,
        "void": void,
    }


def response(number: int, fighter: str, content: str | None = None) -> Row:
    return {"duel": number, "fighter": fighter, "content": f"{fighter}{number}" if content is None else content}


def both(*numbers: int) -> list[Row]:
    return [response(number, fighter) for number in numbers for fighter in "ab"]


def pair(**changed: Any) -> Row:
    return {
        "prompt": [{"role": "user", "content": "Q"}],
        "chosen": [{"role": "assistant", "content": "A"}],
        "rejected": [{"role": "assistant", "content": "B"}],
        **changed,
    }


def said(content: Any, role: str | None = "assistant") -> list[Row]:
    return [{"content": content} if role is None else {"role": role, "content": content}]


def full(**changed: Any) -> Preference:
    row: Any = {**pair(**changed), "duel": 4, "chosen_member": "a", "rejected_member": "b", "margin": 1.5}
    return row  # type: ignore[no-any-return]


def test_a_winner_makes_a_row() -> None:
    counts = PairCounts()
    rows = list(build([duel(0), duel(1, winner="b", margin=0.5)], both(0, 1), prompts, counts=counts))
    assert rows == [
        {
            "prompt": [{"role": "user", "content": "About q0?"}],
            "chosen": [{"role": "assistant", "content": "a0"}],
            "rejected": [{"role": "assistant", "content": "b0"}],
            "duel": 0,
            "chosen_member": "a",
            "rejected_member": "b",
            "margin": 2.0,
        },
        {
            "prompt": [{"role": "user", "content": "About q1?"}],
            "chosen": [{"role": "assistant", "content": "b1"}],
            "rejected": [{"role": "assistant", "content": "a1"}],
            "duel": 1,
            "chosen_member": "b",
            "rejected_member": "a",
            "margin": 0.5,
        },
    ]
    assert counts == PairCounts(pairs=2)
    assert [pair_problem(row) for row in rows] == [None, None]


def test_ties_void_duels_and_identical_texts_make_no_row() -> None:
    duels = [
        duel(0, winner=None, margin=0.0),
        duel(1, winner=None, margin=None, void="filtered"),
        duel(2),
        duel(3),
        duel(4, margin=0.25),
        duel(5),
    ]
    answers = [*both(0), *both(2), response(3, "a", "same\n"), response(3, "b", "  same"), *both(4, 5)]
    counts = PairCounts()
    rows = list(build(duels, answers, prompts, min_margin=0.25, counts=counts))
    assert [row["duel"] for row in rows] == [2, 5]
    assert counts == PairCounts(pairs=2, ties=2, void=1, identical=1)


def test_equal_weighted_scores_leave_no_pair() -> None:
    ratings = {name: Rating(100, 0.5) for name in ("a", "b", "j")}
    change = Reputation(ReputationConfig(), ratings).update(("a", "b"), {"j": (7.0, 7.0)})
    counts = PairCounts()
    assert list(build([duel(0, change.winner, change.margin)], both(0), prompts, counts=counts)) == []
    assert counts == PairCounts(ties=1)


def test_a_round_without_a_score_leaves_the_pair() -> None:
    ratings = {name: Rating(100, 0.5) for name in ("a", "b", "j")}
    scores = panel_scores({"j": ([7.0, None, 8.0], [5.0, 5.0, 5.0])})
    change = Reputation(ReputationConfig(), ratings).update(("a", "b"), scores)
    [row] = build([duel(0, change.winner, change.margin)], both(0), prompts)
    assert (row["chosen_member"], row["margin"]) == ("a", 2.5)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_the_order_of_responses_changes_nothing(data: st.DataObject) -> None:
    winners = data.draw(st.lists(st.sampled_from(["a", "b", None]), min_size=1, max_size=12))
    duels = [duel(number, winner, 0.0 if winner is None else 1.0) for number, winner in enumerate(winners)]
    ordered = both(*range(len(duels)))
    shuffled = data.draw(st.permutations(ordered))
    assert list(build(duels, shuffled, prompts)) == list(build(duels, ordered, prompts))


def test_responses_are_read_no_further_than_needed() -> None:
    read = 0

    def stream() -> Iterator[Row]:
        nonlocal read
        for row in both(*range(10_000)):
            read += 1
            yield row

    rows = build((duel(number) for number in range(10_000)), stream(), prompts)
    for number in range(50):
        assert next(rows)["duel"] == number
        assert read == 2 * (number + 1)


def test_failed_attempts_before_an_answer_are_passed_over() -> None:
    answers = [{"duel": 0, "fighter": "a", "error": "timeout"}, *both(0)]
    assert next(build([duel(0)], answers, prompts))["chosen"][0]["content"] == "a0"


def test_a_lost_response_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match=r"duel 1 .* no response of 'b'"):
        list(build([duel(0), duel(1)], [*both(0), response(1, "a")], prompts))


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (pair(rejected=said("B", "user")), "rejected[0].role is 'user', but must be assistant"),
        (pair(chosen=said("A", None)), "chosen[0].role is missing, but must be assistant"),
        (pair(chosen=said("Same text"), rejected=said("Same text")), "chosen and rejected are identical"),
        (pair(chosen=said("Same text"), rejected=said("Same text\n")), "chosen and rejected are identical"),
        (pair(chosen=said("")), "chosen[0].content is empty"),
        (pair(chosen=said(" \n")), "chosen[0].content is empty"),
        (pair(rejected=said(None)), "rejected[0].content must be a string"),
        (pair(rejected=[]), "rejected must be a list of exactly one message"),
        (pair(rejected=said("B") * 2), "rejected must be a list of exactly one message"),
        (pair(rejected="B"), "rejected must be a list of exactly one message"),
        (pair(prompt=[]), "prompt must be a list of messages that is not empty"),
        (pair(prompt="Q"), "prompt must be a list of messages that is not empty"),
        (pair(prompt=["Q"]), "prompt[0] must be a message with role and content"),
        (pair(prompt=said("Q", "narrator")), "prompt[0].role is 'narrator', but must be system or user"),
        (
            pair(prompt=said("Q", "user") + said("A")),
            "prompt[1].role is 'assistant', but the prompt must end with a user or tool message",
        ),
        (pair(prompt=said("S", "system")), "prompt[0].role is 'system', but the prompt must end with"),
        (
            pair(prompt=said("Q", "user") + said("S", "system") + said("Q", "user")),
            "prompt[1].role is 'system', which only the first message may be",
        ),
        ({"chosen": said("A"), "rejected": said("B")}, "prompt must be a list of messages"),
    ],
)
def test_unsound_rows_are_named(row: Row, problem: str) -> None:
    assert (pair_problem(row) or "").startswith(problem)
    with pytest.raises(ConfigError) as caught:
        list(validate_pairs([pair(), row], source="pairs.jsonl"))
    assert str(caught.value).startswith(f"pairs.jsonl, row 2: {problem}")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "prompt",
    [
        said("S", "system") + said("Q", "user"),
        said("Q", "user") + said("A") + said("Q", "user"),
        said("Q", "user") + said("A") + said("4", "tool"),
    ],
)
def test_sound_rows_pass_unchanged(prompt: list[Row]) -> None:
    rows = [pair(prompt=prompt), pair(chosen=said("A and more"), rejected=said("A"))]
    assert list(validate_pairs(rows)) == rows


def test_sound_rows_before_an_unsound_one_are_handed_on() -> None:
    rows = validate_pairs([pair(), pair(chosen=said(""))])
    assert next(rows) == pair()
    with pytest.raises(ConfigError, match="row 2"):
        next(rows)


def test_the_trl_form_is_fixed_to_the_byte() -> None:
    row = full(rejected=said('é "\n\u2028😀'))
    expected = (
        '{"prompt":[{"role":"user","content":"Q"}],"chosen":[{"role":"assistant","content":"A"}],'
        '"rejected":[{"role":"assistant","content":"é \\"\\n\u2028😀"}],"duel":4,"chosen_member":"a",'
        '"rejected_member":"b","margin":1.5}\n'
    )
    backwards: Any = dict(reversed(row.items()))
    assert list(export_trl([row, backwards])) == [expected.encode()] * 2


def test_the_openai_form_is_fixed_to_the_byte_and_has_no_other_keys() -> None:
    expected = (
        b'{"input":{"messages":[{"role":"user","content":"Q"}]},'
        b'"preferred_output":[{"role":"assistant","content":"A"}],'
        b'"non_preferred_output":[{"role":"assistant","content":"B"}]}\n'
    )
    assert list(export_openai([full()])) == [expected]


def test_the_members_system_prompt_comes_first() -> None:
    own = said("Be kind.", "system") + said("Q", "user")
    plain, joined = (json.loads(line) for line in export_openai([full(), full(prompt=own)], "Be brief."))
    assert plain["input"]["messages"] == said("Be brief.", "system") + said("Q", "user")
    assert joined["input"]["messages"] == said("Be brief.\n\nBe kind.", "system") + said("Q", "user")
    assert own == said("Be kind.", "system") + said("Q", "user")
    assert with_system(own, None) is own


@pytest.mark.parametrize("export", [export_trl, export_openai])
def test_half_a_character_does_not_stop_an_export(export: Any) -> None:
    [line] = export([full(chosen=said("cut \ud83d"), prompt=said("\udc00?", "user"))])
    assert line.endswith(b"\n")
    text = line.decode()
    assert "cut \ufffd" in text
    assert "\ufffd?" in text


@settings(deadline=None, max_examples=60)
@given(st.text(), st.text(), st.text())
def test_exports_are_one_object_a_line_that_reads_back(prompt: str, chosen: str, rejected: str) -> None:
    row = full(prompt=said(prompt, "user"), chosen=said(chosen), rejected=said(rejected))
    [trl], [openai] = list(export_trl([row])), list(export_openai([row]))
    for line in (trl, openai):
        assert line.count(b"\n") == 1
        assert b"\r" not in line
        assert not line.startswith(b"\xef\xbb\xbf")
    assert json.loads(trl) == row
    assert json.loads(openai)["non_preferred_output"] == said(rejected)
