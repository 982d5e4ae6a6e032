from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta_api.config.tribe import Matchmaking
from sparta_api.duels.matchmaking import Matchup, instruction_walk, plan

patient = settings(deadline=None, max_examples=60)

MEMBERS = ("a", "b", "c", "d", "e", "f")
FAIR = dict.fromkeys(MEMBERS, 100.0)
STEPS = {name: 100.0 + 10 * place for place, name in enumerate(MEMBERS)}


def planned(
    duels: int = 60,
    ratings: dict[str, float] = FAIR,
    seed: int = 0,
    iteration: int = 0,
    **changed: Any,
) -> list[Matchup]:
    arguments: dict[str, Any] = {
        "instruction_ids": [f"q{number}" for number in range(duels)],
        "fighters": list(ratings),
        "judges": list(ratings),
        "config": Matchmaking(),
        **changed,
    }
    return list(plan(seed, iteration, ratings, **arguments))


def test_a_plan_never_changes() -> None:
    rows = [row.to_json() for row in planned(40, STEPS, seed=7, iteration=3, per_iteration=13, judges_per_duel=2)]
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    assert digest == "07cf390d83fdd99804c256ff9210bac22c883b62ea8302cdbbded903dbec5a18"


def test_rows_have_the_form_of_matchups_jsonl() -> None:
    row = next(plan(0, 0, FAIR, ["q"], MEMBERS, MEMBERS, Matchmaking())).to_json()
    assert list(row) == ["duel", "instruction", "fighters", "judges"]
    assert (row["duel"], row["instruction"]) == (0, "q")
    assert sorted(row["fighters"] + row["judges"]) == list(MEMBERS)


def test_the_order_in_which_members_are_listed_is_nothing() -> None:
    backwards = dict(reversed(STEPS.items()))
    assert planned(ratings=STEPS, judges_per_duel=2) == planned(ratings=backwards, judges_per_duel=2)


def test_seed_and_iteration_change_the_plan_and_judges_do_not() -> None:
    base = planned()
    assert planned(seed=1) != base
    assert planned(iteration=1) != base
    fewer = planned(judges_per_duel=1)
    assert [(row.instruction, row.fighters) for row in fewer] == [(row.instruction, row.fighters) for row in base]


@patient
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 60), st.integers(0, 5))
def test_no_instruction_repeats_before_all_were_used(count: int, size: int, iterations: int, seed: int) -> None:
    size = min(size, count)
    walk: list[int] = []
    for iteration in range(iterations):
        played = instruction_walk(seed, iteration, count, size)
        assert len(set(played)) == size
        walk += played
    for start in range(0, len(walk) - count + 1, count):
        assert sorted(walk[start : start + count]) == list(range(count))
    assert len(set(walk)) == min(len(walk), count)


def test_a_new_round_through_the_instructions_is_a_new_shuffle() -> None:
    rounds = [tuple(instruction_walk(0, iteration, 30, None)) for iteration in range(5)]
    assert len(set(rounds)) == 5
    assert all(sorted(played) == list(range(30)) for played in rounds)
    assert instruction_walk(0, 2, 30, 30) == list(rounds[2])


def test_far_iterations_are_reached_directly() -> None:
    assert sorted(instruction_walk(0, 10**9, 20, 20)) == list(range(20))


@patient
@given(st.integers(2, 6), st.integers(1, 50), st.integers(0, 3))
def test_each_fighter_goes_first_once_in_each_block(size: int, duels: int, seed: int) -> None:
    fighters = MEMBERS[:size]
    rows = planned(duels, dict.fromkeys(fighters, 100.0), seed=seed)
    assert [row.duel for row in rows] == list(range(duels))
    for start in range(0, duels, size):
        first = [row.fighters[0] for row in rows[start : start + size]]
        assert len(set(first)) == len(first)
    assert all(row.fighters[0] != row.fighters[1] for row in rows)


def test_blocks_are_shuffled() -> None:
    rows = planned(120)
    assert len({tuple(row.fighters[0] for row in rows[start : start + 6]) for start in range(0, 120, 6)}) > 10


def test_nobody_meets_always_the_same_and_everybody_takes_part() -> None:
    rows = planned(60, dict.fromkeys("abcd", 100.0), judges=["j"])
    pairs = Counter(frozenset(row.fighters) for row in rows)
    assert set().union(*pairs) == set("abcd")
    assert max(pairs.values()) <= 30


@pytest.mark.parametrize(("closest", "expected"), [(1, {"b"}), (2, {"b", "c"}), (99, set("bcdef"))])
def test_opponents_are_the_closest_in_reputation(closest: int, expected: set[str]) -> None:
    rows = planned(600, STEPS, config=Matchmaking(random_match_prob=0, num_opponents=closest))
    assert {row.fighters[1] for row in rows if row.fighters[0] == "a"} == expected


def test_of_equal_distances_each_is_as_likely() -> None:
    ratings = {"a": 100.0, "b": 101.0, "c": 110.0, "d": 90.0, "e": 110.0, "f": 500.0}
    rows = planned(6 * 3000, ratings, config=Matchmaking(random_match_prob=0, num_opponents=2))
    met = Counter(row.fighters[1] for row in rows if row.fighters[0] == "a")
    assert set(met) == {"b", "c", "d", "e"}
    assert met["b"] == pytest.approx(1500, abs=120)
    assert all(met[name] == pytest.approx(500, abs=100) for name in "cde")


@pytest.mark.parametrize(("prob", "share"), [(1.0, 0.2), (0.5, 0.1), (0.0, 0.0)])
def test_random_matches_are_as_frequent_as_asked(prob: float, share: float) -> None:
    rows = planned(6 * 3000, STEPS, config=Matchmaking(random_match_prob=prob, num_opponents=2))
    met = Counter(row.fighters[1] for row in rows if row.fighters[0] == "a")
    assert met["f"] / 3000 == pytest.approx(share, abs=0.02)


def test_all_judges_but_the_fighters_judge() -> None:
    for row in planned(judges=["a", "b", "outside"]):
        assert row.judges == tuple(name for name in ("a", "b", "outside") if name not in row.fighters)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_drawn_judges_carry_equal_loads(size: int) -> None:
    outside = ["v", "w", "x", "y", "z"]
    rows = planned(77, judges=outside, judges_per_duel=size)
    load = Counter(judge for row in rows for judge in row.judges)
    assert all(len(set(row.judges)) == size for row in rows)
    assert max(load.values()) - min(load.values()) <= 1
    assert len({row.judges for row in rows}) > 3


def test_fighting_judges_carry_nearly_equal_loads() -> None:
    rows = planned(500, judges_per_duel=2)
    load = Counter(judge for row in rows for judge in row.judges)
    assert all(not set(row.judges) & set(row.fighters) for row in rows)
    assert max(load.values()) - min(load.values()) <= 2


def test_more_judges_than_there_are_means_all() -> None:
    assert all(len(row.judges) == 4 for row in planned(judges_per_duel=9))


def test_benched_members_neither_fight_nor_judge() -> None:
    rows = planned(benched={"c"})
    assert all("c" not in (*row.fighters, *row.judges) for row in rows)
    assert {name for row in rows for name in row.fighters} == set(MEMBERS) - {"c"}


def test_a_plan_is_made_while_it_is_read() -> None:
    rows = plan(0, 0, FAIR, [str(number) for number in range(50_000)], MEMBERS, MEMBERS, Matchmaking())
    one, two = next(rows), next(rows)
    assert (one.duel, two.duel) == (0, 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"fighters": ["a"]}, "two fighters"),
        ({"benched": MEMBERS[1:]}, "two fighters"),
        ({"instruction_ids": []}, "no instructions"),
        ({"per_iteration": 61}, "61 instructions per iteration are asked for, there are 60"),
    ],
)
def test_impossible_plans_are_refused_at_once(arguments: dict[str, Any], words: str) -> None:
    given_ids = {"instruction_ids": [str(number) for number in range(60)], "fighters": MEMBERS, **arguments}
    with pytest.raises(ValueError, match=words):
        plan(0, 0, FAIR, judges=MEMBERS, config=Matchmaking(), **given_ids)
