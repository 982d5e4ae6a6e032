from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from statistics import NormalDist, pstdev
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta_api.config.tribe import ReputationConfig
from sparta_api.ratings.reputation import Change, Rating, Reputation, gap_factor, panel_scores, variant_multipliers

HERE = Path(__file__).parent
VECTORS: list[dict[str, Any]] = json.loads((HERE / "data" / "reputation_vectors.json").read_text())
ORIGINALS = HERE.parent.parent / "shared" / "vectors" / "reputation.json"

Scores = dict[str, tuple[float, float]]
Duel = tuple[tuple[str, str], Scores]

MEMBERS = ("ann", "bo", "cy", "di", "eve")
points = st.floats(1, 10)
patient = settings(deadline=None, max_examples=60)


def rated(values: dict[str, Any]) -> dict[str, Rating]:
    return {name: Rating(*pair) for name, pair in values.items()}


def fair(*names: str) -> dict[str, Rating]:
    return {name: Rating(100.0, 0.5) for name in names}


def close(actual: dict[str, Rating], expected: dict[str, Any]) -> bool:
    return actual.keys() == expected.keys() and all(
        (rating.reputation, rating.deviation) == pytest.approx(expected[name], abs=1e-9)
        for name, rating in actual.items()
    )


@st.composite
def duels(draw: st.DrawFn) -> list[Duel]:
    played: list[Duel] = []
    for _ in range(draw(st.integers(1, 25))):
        a, b, *others = draw(st.permutations(MEMBERS))
        panel = others[: draw(st.integers(1, len(others)))]
        played.append(((a, b), {judge: (draw(points), draw(points)) for judge in panel}))
    return played


@st.composite
def starts(draw: st.DrawFn) -> dict[str, Rating]:
    return {name: Rating(draw(st.floats(10, 300)), draw(st.floats(0.1, 20))) for name in MEMBERS}


modes = st.sampled_from(["simultaneous", "sequential"])


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_sequential_updates_reproduce_the_papers_code(vector: dict[str, Any]) -> None:
    config = ReputationConfig(**vector["config"])
    multipliers = variant_multipliers(config.variant, vector["history"])
    for name, expected in (vector["multipliers"] or {}).items():
        assert multipliers.get(name, 1.0) == pytest.approx(expected, abs=1e-9)
    reputation = Reputation(config, rated(vector["ratings"]), vector["deltas"], multipliers=multipliers)
    assert close(reputation.ratings, vector["start"])
    for number, duel in enumerate(vector["duels"], 1):
        change = reputation.update(tuple(duel["fighters"]), duel["scores"])
        assert change.k == reputation.k == pytest.approx(duel["k"], abs=1e-9)
        assert reputation.updates == number
        now = {name: Rating(change.after[name], change.deviation[name]) for name in duel["fighters"]}
        assert close(now, duel["after"])
    assert close(reputation.ratings, vector["final_ratings"])
    for name, deltas in vector["final_deltas"].items():
        assert reputation.deltas[name] == pytest.approx(deltas, abs=1e-9)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_verdicts_are_those_of_the_papers_code(vector: dict[str, Any]) -> None:
    config = ReputationConfig(**{**vector["config"], "freeze": True})
    reputation = Reputation(config, rated(vector["final_ratings"]))
    for duel, (winner, distance, weighted) in zip(vector["duels"], vector["verdicts_by_final_ratings"], strict=True):
        change = reputation.update(tuple(duel["fighters"]), duel["scores"])
        assert change.winner == (winner if distance else None)
        assert change.margin == pytest.approx(abs(distance), abs=1e-9)
        assert sorted(change.scores) == pytest.approx(sorted(weighted), abs=1e-9)


@pytest.mark.skipif(not ORIGINALS.exists(), reason="the recorded outputs of the paper's code are not here")
def test_the_vectors_are_a_faithful_copy() -> None:
    originals = json.loads(ORIGINALS.read_text())["vectors"]
    assert len(originals) == len(VECTORS)
    for original, vector in zip(originals, VECTORS, strict=True):
        steps = original["output"]["steps"]
        assert vector["final_deltas"] == steps[-1]["delta_history"]
        assert [duel["k"] for duel in vector["duels"]] == [step["K"] for step in steps]
        final = {name: [r["score"], r["deviation"]] for name, r in original["output"]["final_ratings"].items()}
        assert vector["final_ratings"] == final


class Reference:
    """Rules 3 and 4 written down once more, with the normal distribution and the deviation of `statistics`."""

    def __init__(self, config: ReputationConfig, ratings: dict[str, Rating]) -> None:
        self.config = config
        self.r = {name: rating.reputation for name, rating in ratings.items()}
        self.s = {name: rating.deviation for name, rating in ratings.items()}
        self.history: dict[str, list[float]] = {name: [] for name in ratings}
        self.n = 0

    def update(self, fighters: tuple[str, str], scores: Scores) -> None:
        config, (a, b) = self.config, fighters
        total = sum(self.r[judge] for judge in scores)
        mean_a, mean_b = (sum(self.r[j] * pair[side] for j, pair in scores.items()) / total for side in (0, 1))
        self.n += 1
        k = max(config.min_k, config.initial_k * config.decay_rate ** (self.n / config.decay_steps))
        before, sigma = dict(self.r), dict(self.s)
        for own, other, difference in ((a, b, mean_a - mean_b), (b, a, mean_b - mean_a)):
            seen = self.r if config.update == "sequential" else before
            z = (seen[own] - seen[other]) / math.sqrt(sigma[own] ** 2 + sigma[other] ** 2)
            gap = max(abs(NormalDist().cdf(z) - NormalDist().cdf(-z)), config.epsilon)
            moved = before[own] + k / config.scaling_factor * difference * math.tanh(sigma[own]) * gap
            self.r[own] = max(config.floor, moved)
            self.history[own].append(self.r[own] - before[own])
            last = self.history[own][-config.window :]
            if len(last) >= 2:
                self.s[own] = max(pstdev(last), config.min_deviation)


@patient
@given(starts(), duels(), modes)
def test_updates_follow_the_rule(start: dict[str, Rating], played: list[Duel], mode: Any) -> None:
    config = ReputationConfig(update=mode, window=4, decay_steps=3)
    reputation, reference = Reputation(config, start), Reference(config, start)
    for fighters, scores in played:
        reputation.update(fighters, scores)
        reference.update(fighters, scores)
    for name, rating in reputation.ratings.items():
        assert rating.reputation == pytest.approx(reference.r[name], abs=1e-7)
        assert rating.deviation == pytest.approx(reference.s[name], abs=1e-6)


@patient
@given(starts(), duels(), modes)
def test_members_names_mean_nothing(start: dict[str, Rating], played: list[Duel], mode: Any) -> None:
    renamed = dict(zip(MEMBERS, ("zed", "yve", "xia", "w/1", "Vé"), strict=True))
    config = ReputationConfig(update=mode)
    here = Reputation(config, start)
    there = Reputation(config, {renamed[name]: rating for name, rating in reversed(start.items())})
    for (a, b), scores in played:
        one = here.update((a, b), scores)
        two = there.update((renamed[a], renamed[b]), {renamed[judge]: pair for judge, pair in scores.items()})
        assert two.scores == one.scores
    assert there.ratings == {renamed[name]: rating for name, rating in here.ratings.items()}


@patient
@given(starts(), duels())
def test_listing_order_changes_no_digit(start: dict[str, Rating], played: list[Duel]) -> None:
    here, there = Reputation(ReputationConfig(), start), Reputation(ReputationConfig(), start)
    for (a, b), scores in played:
        one = here.update((a, b), scores)
        two = there.update((b, a), {judge: (y, x) for judge, (x, y) in reversed(scores.items())})
        assert (one.winner, one.margin, one.after) == (two.winner, two.margin, two.after)
    assert here.ratings == there.ratings


@patient
@given(starts(), duels(), modes)
def test_winning_never_costs_and_losing_never_pays(start: dict[str, Rating], played: list[Duel], mode: Any) -> None:
    reputation = Reputation(ReputationConfig(update=mode, initial_k=1000), start)
    for fighters, scores in played:
        change = reputation.update(fighters, scores)
        if change.winner is not None:
            loser = next(name for name in fighters if name != change.winner)
            assert change.after[change.winner] >= change.before[change.winner]
            assert change.after[loser] <= change.before[loser]
        assert all(value >= 10 for value in change.after.values())
        assert change.margin == abs(change.scores[0] - change.scores[1])


def test_the_weaker_winner_gains_even_from_far_behind() -> None:
    ratings = {"a": Rating(900, 0.5), "b": Rating(1100, 0.5), "j": Rating(1000, 0.5)}
    change = Reputation(ReputationConfig(), ratings).update(("a", "b"), {"j": (8.0, 5.0)})
    assert change.winner == "a"
    assert change.after["a"] > 900
    assert change.after["b"] < 1100


def test_a_losing_streak_ends_at_the_floor_and_keeps_its_vote() -> None:
    reputation = Reputation(ReputationConfig(), fair("winner", "loser", "judge"))
    for _ in range(500):
        change = reputation.update(("winner", "loser"), {"judge": (10.0, 1.0)})
        assert change.after["loser"] >= 10.0
    assert reputation.ratings["loser"].reputation == 10.0
    assert reputation.deltas["loser"] == [0.0] * 10
    vote = reputation.update(("winner", "judge"), {"loser": (3.0, 9.0)})
    assert vote.scores == (3.0, 9.0)


def test_a_cycle_of_wins_separates_nobody() -> None:
    reputation = Reputation(ReputationConfig(), fair("a", "b", "c", "judge"))
    for _ in range(30):
        for fighters in (("a", "b"), ("b", "c"), ("c", "a")):
            assert reputation.update(fighters, {"judge": (8.0, 6.0)}).winner == fighters[0]
    ratings = [reputation.ratings[name].reputation for name in "abc"]
    assert max(ratings) - min(ratings) < 5


def test_judges_weigh_as_much_as_their_reputation() -> None:
    ratings = {**fair("a", "b"), "heavy": Rating(300, 0.5), "light": Rating(100, 0.5)}
    change = Reputation(ReputationConfig(), ratings).update(("a", "b"), {"heavy": (9, 4), "light": (5, 8)})
    assert change.scores == (8.0, 5.0)
    assert (change.winner, change.margin) == ("a", 3.0)
    assert change.before == {"a": 100.0, "b": 100.0}


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ({"j": ([7, None, 8], [5, 5, 5])}, {"j": (7.5, 5.0)}),
        ({"j": ([8], [6]), "failed": ([None], [None])}, {"j": (8.0, 6.0)}),
        ({"half": ([9, 9], [None, None])}, {}),
        ({"none": ([], [])}, {}),
    ],
)
def test_rounds_without_a_score_are_left_out(rounds: Any, expected: Scores) -> None:
    assert panel_scores(rounds) == expected


def test_a_judge_that_failed_does_not_dilute_the_difference() -> None:
    ratings = {**fair("a", "b"), "j": Rating(1200, 0.5), "failed": Rating(800, 0.5)}
    scores = panel_scores({"j": ([9.0], [7.0]), "failed": ([None], [None])})
    change = Reputation(ReputationConfig(), ratings).update(("a", "b"), scores)
    assert change.scores == (9.0, 7.0)
    assert change.margin == 2.0


def test_equal_scores_are_a_tie_that_moves_nobody() -> None:
    reputation = Reputation(ReputationConfig(), fair("a", "b", "j", "k"))
    change = reputation.update(("a", "b"), {"j": (8.0, 6.0), "k": (6.0, 8.0)})
    assert (change.scores, change.winner, change.margin) == ((7.0, 7.0), None, 0.0)
    assert change.after == change.before
    assert reputation.updates == 1


@pytest.mark.parametrize(("tie_margin", "winner"), [(0.0, "a"), (0.49, "a"), (0.5, None), (1.0, None)])
def test_margins_up_to_the_least_are_ties(tie_margin: float, winner: str | None) -> None:
    reputation = Reputation(ReputationConfig(), fair("a", "b", "j"), tie_margin=tie_margin)
    change = reputation.update(("a", "b"), {"j": (6.5, 6.0)})
    assert change.winner == winner
    assert change.after["a"] > 100.0


def test_rounding_noise_is_a_tie_at_any_setting() -> None:
    reputation = Reputation(ReputationConfig(), fair("a", "b", "j"), tie_margin=0.0)
    assert reputation.update(("a", "b"), {"j": (6.0 + 1e-12, 6.0)}).winner is None


def rows(changes: list[tuple[Duel, Change]]) -> list[dict[str, Any]]:
    return [
        {"fighters": fighters, "judges": scores, "after": change.after, "before": change.before}
        for (fighters, scores), change in changes
    ]


@patient
@given(starts(), duels(), st.data())
def test_the_log_replays_to_the_stored_ratings_exactly(start: dict[str, Rating], played: list[Duel], data: Any) -> None:
    whole = Reputation(ReputationConfig(), start)
    log = json.loads(json.dumps(rows([(duel, whole.update(*duel)) for duel in played])))
    cut = data.draw(st.integers(0, len(played)))
    interrupted = Reputation(ReputationConfig(), start)
    for fighters, scores in played[:cut]:
        interrupted.update(fighters, scores)
    resumed = Reputation.from_json(ReputationConfig(), json.loads(json.dumps(interrupted.to_json())))
    for row in log[cut:]:
        change = resumed.update(tuple(row["fighters"]), {judge: tuple(pair) for judge, pair in row["judges"].items()})
        assert (change.before, change.after) == (row["before"], row["after"])
    assert resumed.to_json() == whole.to_json()


@patient
@given(starts(), duels())
def test_deltas_are_what_was_applied(start: dict[str, Rating], played: list[Duel]) -> None:
    reputation = Reputation(ReputationConfig(window=3), start)
    applied: dict[str, list[float]] = {name: [] for name in MEMBERS}
    for fighters, scores in played:
        change = reputation.update(fighters, scores)
        for name in fighters:
            applied[name].append(change.after[name] - change.before[name])
    assert reputation.deltas == {name: values[-3:] for name, values in applied.items()}


def test_k_falls_with_all_duels_of_the_run_and_stays_at_its_least() -> None:
    def k(updates: int) -> float:
        return Reputation(ReputationConfig(), fair("a"), updates=updates).k

    assert (k(0), k(10), k(65) > 5, k(66), k(10_000_000)) == (10.0, 9.0, True, 5.0, 5.0)


def test_frozen_ratings_still_give_verdicts() -> None:
    reputation = Reputation(ReputationConfig(freeze=True), fair("a", "b", "j"))
    change = reputation.update(("a", "b"), {"j": (9.0, 2.0)})
    assert (change.winner, change.margin, change.k) == ("a", 7.0, 10.0)
    assert change.after == change.before == {"a": 100.0, "b": 100.0}
    assert reputation.to_json() == Reputation(ReputationConfig(), fair("a", "b", "j")).to_json()


def test_multipliers_move_ratings_and_leave_the_verdict_alone() -> None:
    config = ReputationConfig(variant="static")
    reputation = Reputation(config, fair("a", "b", "j"), multipliers={"a": 0.0})
    change = reputation.update(("a", "b"), {"j": (9.0, 2.0)})
    assert (change.scores, change.winner) == ((9.0, 2.0), "a")
    assert change.after["a"] < 100.0 < change.after["b"]


def test_variants_take_the_constants_of_the_papers_code() -> None:
    def after(variant: Any, **changed: float) -> dict[str, float]:
        config = ReputationConfig(variant=variant, **changed)
        return Reputation(config, fair("a", "b", "j")).update(("a", "b"), {"j": (9.0, 2.0)}).after

    assert after("static", scaling_factor=7, decay_rate=0.5, decay_steps=3) == after("normal")
    assert after("dynamic")["a"] - 100.0 == pytest.approx(2 * (after("normal")["a"] - 100.0), rel=1e-9)


HISTORY = [
    {"a": 100.0, "b": 100.0, "c": 100.0, "d": 100.0},
    {"a": 90.0, "b": 95.0, "c": 110.0, "d": 120.0},
    {"a": 80.0, "b": 99.0, "c": 70.0, "d": 120.0},
    {"a": 130.0, "b": 60.0, "c": 70.0, "d": 120.0},
]


@pytest.mark.parametrize(
    ("variant", "iteration", "expected"),
    [
        ("normal", 4, {}),
        ("dynamic", 0, {}),
        ("dynamic", 1, {}),
        ("dynamic", 2, {"a": 0.0}),
        ("dynamic", 3, {"c": 0.0, "a": 0.1}),
        ("dynamic", 4, {"b": 0.0, "c": 0.1, "d": 0.2}),
        ("static", 1, {}),
        ("static", 2, {"a": 0.0}),
        ("static", 3, {"a": 0.0, "c": 0.1}),
        ("static", 4, {"a": 0.0, "c": 0.1, "b": 0.2}),
    ],
)
def test_variant_multipliers(variant: str, iteration: int, expected: dict[str, float]) -> None:
    assert variant_multipliers(variant, HISTORY[:iteration]) == pytest.approx(expected)


@pytest.mark.parametrize("variant", ["dynamic", "static"])
def test_variant_multipliers_stay_after_iteration_seven(variant: str) -> None:
    names = "abcdefghij"
    history = [{name: float((place * 7 + 3 * t) % 11) for place, name in enumerate(names)} for t in range(12)]
    seventh = variant_multipliers(variant, history[:7])
    assert len(seventh) == 6
    assert all(variant_multipliers(variant, history[:t]) == seventh for t in (8, 9, 12))


def test_the_gap_factor_has_a_limit_without_deviation() -> None:
    assert gap_factor(0.5, 0.0, 0.0, 0.01) == 1.0
    assert gap_factor(0.0, 0.0, 0.0, 0.01) == 0.01
    assert gap_factor(-2.0, 1.0, 1.5, 0.01) == gap_factor(2.0, 1.5, 1.0, 0.01)


@pytest.mark.parametrize(
    ("fighters", "scores", "words"),
    [
        (("a", "b"), {}, "no judge"),
        (("a", "b"), {"a": (5.0, 5.0)}, "judge their own"),
        (("a", "a"), {"j": (5.0, 5.0)}, "fight themselves"),
        (("a", "b"), {"stranger": (5.0, 5.0)}, "'stranger' has no rating"),
        (("a", "stranger"), {"j": (5.0, 5.0)}, "'stranger' has no rating"),
        (("a", "b"), {"j": (5.0, 5.0), "k": (math.nan, 5.0)}, "not finite"),
    ],
)
def test_impossible_duels_are_refused_and_change_nothing(fighters: Any, scores: Scores, words: str) -> None:
    reputation = Reputation(ReputationConfig(), fair("a", "b", "j", "k"))
    before = reputation.to_json()
    with pytest.raises(ValueError, match=words):
        reputation.update(fighters, scores)
    assert reputation.to_json() == before


@pytest.mark.parametrize("rating", [Rating(0, 0.5), Rating(math.nan, 0.5), Rating(100, -1), Rating(100, math.inf)])
def test_impossible_ratings_are_refused(rating: Rating) -> None:
    with pytest.raises(ValueError, match="of 'a' must be"):
        Reputation(ReputationConfig(), {"a": rating})


def test_deltas_of_strangers_are_refused() -> None:
    with pytest.raises(ValueError, match="without a rating: x"):
        Reputation(ReputationConfig(), fair("a"), deltas={"x": [0.1]})


def test_what_is_handed_out_is_a_copy() -> None:
    reputation = Reputation(ReputationConfig(), fair("a", "b", "j"))
    reputation.update(("a", "b"), {"j": (9.0, 2.0)})
    stored = json.dumps(reputation.to_json())
    reputation.deltas["a"].append(5.0)
    reputation.ratings.clear()
    reputation.reputations.clear()
    assert json.dumps(reputation.to_json()) == stored


def test_arrival_order_does_not_matter_once_folded_in_duel_order() -> None:
    pairs = list(itertools.permutations("abcd", 2))
    played = {
        number: (pair, {judge: (1.0 + number % 9, 1.0 + (number * 7) % 10) for judge in "abcd" if judge not in pair})
        for number, pair in enumerate(pairs * 17)
    }
    finals = []
    for arrival in (list(played), sorted(played, key=lambda number: (number * 37) % 101)):
        reputation = Reputation(ReputationConfig(), fair(*"abcd"))
        arrived = {number: played[number] for number in arrival}
        for number in sorted(arrived):
            reputation.update(*arrived[number])
        finals.append(reputation.to_json())
    assert finals[0] == finals[1]
