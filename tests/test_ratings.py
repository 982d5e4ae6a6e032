"""Reputation models, judges' weights and warm starts."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from bench.tribes import TRIBES, measure
from sparta_api.config.file import dump_tribe, load_tribe
from sparta_api.config.tribe import ReputationConfig
from sparta_api.errors import ConfigError
from sparta_api.ratings.agreement import LEAST, Agreement
from sparta_api.ratings.bradley_terry import Wins, bootstrap, cholesky, count_result, solve
from sparta_api.ratings.glicko2 import Player, rated
from sparta_api.ratings.reputation import Rating, Reputation
from sparta_api.ratings.warm_start import starting_reputations
from sparta_api.runs.outcome import first_reputation
from tests.front_door import tribe
from tests.test_reputation import MEMBERS, Duel, duels, fair, starts

MODELS = ("paper", "bradley_terry", "glicko2", "uniform")
WEIGHTS = ("reputation", "agreement", "uniform")
patient = settings(deadline=None, max_examples=25)
models = st.sampled_from(MODELS)
weights = st.sampled_from(WEIGHTS)


def config(model: str = "paper", weight: str = "reputation", **more: Any) -> ReputationConfig:
    return ReputationConfig.model_validate({"model": model, "judge_weight": weight, **more})


def folded(settings_: ReputationConfig, start: dict[str, Rating], played: list[Duel], **more: Any) -> Reputation:
    reputation = Reputation(settings_, start, **more)
    for fighters, scores in played:
        reputation.update(fighters, scores)
    return reputation


@patient
@given(models, weights, starts(), duels(), st.data())
def test_going_on_from_what_was_stored_changes_no_digit(
    model: str, weight: str, start: dict[str, Rating], played: list[Duel], data: Any
) -> None:
    settings_ = config(model, weight)
    cut = data.draw(st.integers(0, len(played)))
    first = folded(settings_, start, played[:cut])
    resumed = Reputation.from_json(settings_, json.loads(json.dumps(first.to_json())))
    for fighters, scores in played[cut:]:
        assert first.update(fighters, scores) == resumed.update(fighters, scores)
    assert first.to_json() == resumed.to_json()
    assert first.ratings == resumed.ratings
    again = resumed.restored(json.loads(json.dumps(first.to_json())))
    assert again.to_json() == first.to_json()


@patient
@given(models, weights, starts(), duels())
def test_names_and_order_mean_nothing(model: str, weight: str, start: dict[str, Rating], played: list[Duel]) -> None:
    renamed = dict(zip(MEMBERS, ("zed", "yve", "xia", "w/1", "Vé"), strict=True))
    here = folded(config(model, weight), start, played)
    there = folded(
        config(model, weight),
        {renamed[name]: rating for name, rating in reversed(start.items())},
        [
            ((renamed[b], renamed[a]), {renamed[judge]: (y, x) for judge, (x, y) in reversed(scores.items())})
            for (a, b), scores in played
        ],
    )
    for name, rating in here.ratings.items():
        other = there.ratings[renamed[name]]
        assert (other.reputation, other.deviation) == pytest.approx((rating.reputation, rating.deviation), rel=1e-7)


@patient
@given(st.sampled_from(["bradley_terry", "glicko2"]), starts(), duels())
def test_winning_never_costs_and_votes_stay_positive(model: str, start: dict[str, Rating], played: list[Duel]) -> None:
    reputation = Reputation(config(model), start)
    for fighters, scores in played:
        change = reputation.update(fighters, scores)
        if change.winner is not None:
            loser = next(name for name in fighters if name != change.winner)
            assert change.after[change.winner] >= change.before[change.winner] * (1 - 1e-9)
            assert change.after[loser] <= change.before[loser] * (1 + 1e-9)
        assert change.k == reputation.k == 0.0
        assert all(rating.reputation >= 10 and rating.deviation > 0 for rating in reputation.ratings.values())


@pytest.mark.parametrize("model", ["bradley_terry", "glicko2"])
def test_a_losing_streak_ends_at_the_floor(model: str) -> None:
    played: list[Duel] = [(("winner", "loser"), {"judge": (10.0, 1.0)})] * 300
    reputation = folded(config(model, prior_deviation=3.0), fair("winner", "loser", "judge"), played)
    assert reputation.reputations["loser"] == 10.0
    assert 100 < reputation.reputations["winner"] < math.inf
    assert reputation.update(("winner", "judge"), {"loser": (3.0, 9.0)}).scores == (3.0, 9.0)


@pytest.mark.parametrize("model", ["paper", "bradley_terry", "glicko2"])
def test_a_cycle_of_wins_separates_nobody(model: str) -> None:
    cycle: list[Duel] = [(pair, {"judge": (8.0, 6.0)}) for pair in (("a", "b"), ("b", "c"), ("c", "a"))]
    ratings = folded(config(model), fair("a", "b", "c", "judge"), cycle * 30).reputations
    assert max(ratings[name] for name in "abc") / min(ratings[name] for name in "abc") < 1.15


# Bradley-Terry


def results(count: int, seed: int = 0) -> list[Duel]:
    draw = random.Random(seed)
    played: list[Duel] = []
    for _ in range(count):
        a, b = draw.sample(MEMBERS[:4], 2)
        played.append(((a, b), {"eve": (float(draw.randint(1, 9)), float(draw.randint(1, 9)))}))
    return played


def test_bradley_terry_does_not_depend_on_the_order_of_the_duels() -> None:
    played = results(80)
    shuffled = random.Random(1).sample(played, len(played))
    one, other = (folded(config("bradley_terry"), fair(*MEMBERS), each) for each in (played, shuffled))
    for name, rating in one.ratings.items():
        assert other.ratings[name].reputation == pytest.approx(rating.reputation, rel=1e-10)
        assert other.ratings[name].deviation == pytest.approx(rating.deviation, rel=1e-10)


def test_bradley_terry_is_at_the_top_of_the_posterior() -> None:
    played = results(60)
    reputation = folded(config("bradley_terry", prior_deviation=0.7), fair(*MEMBERS), played)
    theta = {name: math.log(value / 100) for name, value in reputation.reputations.items()}

    def posterior(moved: dict[str, float]) -> float:
        total = -sum(value * value for value in moved.values()) / (2 * 0.7**2)
        for (a, b), scores in played:
            x, y = scores["eve"]
            p = 1 / (1 + math.exp(moved[b] - moved[a]))
            share = 0.5 if x == y else float(x > y)
            total += share * math.log(p) + (1 - share) * math.log(1 - p)
        return total

    best = posterior(theta)
    for name in MEMBERS:
        for change in (-1e-3, 1e-3):
            assert posterior({**theta, name: theta[name] + change}) < best
    assert math.prod(reputation.reputations.values()) ** (1 / 5) == pytest.approx(100, rel=1e-9)
    step = 1e-4
    curvature = (posterior({**theta, "ann": theta["ann"] + step}) - 2 * best) + posterior(
        {**theta, "ann": theta["ann"] - step}
    )
    assert reputation.ratings["ann"].deviation >= reputation.reputations["ann"] / math.sqrt(-curvature / step**2) * 0.99


def test_bradley_terry_reputations_are_odds() -> None:
    played: list[Duel] = [(("a", "b"), {"j": (9.0, 1.0)})] * 300 + [(("a", "b"), {"j": (1.0, 9.0)})] * 100
    played += [(("a", "b"), {"j": (5.0, 5.0)})] * 40
    ratings = folded(config("bradley_terry", prior_deviation=50.0), fair("a", "b", "j"), played).reputations
    assert ratings["a"] / (ratings["a"] + ratings["b"]) == pytest.approx(320 / 440, rel=1e-3)
    assert ratings["j"] == 100.0


def test_bradley_terry_starts_from_what_is_known() -> None:
    start = {"a": Rating(150, 0.5), "b": Rating(80, 0.5), "j": Rating(60, 0.5)}
    reputation = Reputation(config("bradley_terry"), start)
    assert reputation.reputations == {"a": 150, "b": 80, "j": 60}
    reputation.update(("a", "b"), {"j": (5.0, 5.0)})
    after = reputation.reputations
    assert 80 < after["b"] < after["a"] < 150 and after["j"] == pytest.approx(60)


def test_the_solver_solves() -> None:
    matrix = [[4.0, 1.0, -0.5], [1.0, 3.0, 0.25], [-0.5, 0.25, 2.0]]
    found = solve(cholesky(matrix), [1.0, -2.0, 0.5])
    assert [sum(a * x for a, x in zip(row, found, strict=True)) for row in matrix] == pytest.approx([1.0, -2.0, 0.5])


def test_bootstrap_intervals_hold_the_estimate_and_narrow_with_duels() -> None:
    def widths(count: int) -> tuple[float, dict[str, tuple[float, float, float]]]:
        wins: Wins = {}
        for (a, b), scores in results(count):
            x, y = scores["eve"]
            count_result(wins, a, b, None if x == y else a if x > y else b)
        found = bootstrap(wins, MEMBERS, 1.0, 100.0, draws=60, seed=3)
        assert found == bootstrap(wins, MEMBERS, 1.0, 100.0, draws=60, seed=3)
        return fmean(math.log(high / low) for name, (_, low, high) in found.items() if name != "eve"), found

    wide, _ = widths(30)
    narrow, found = widths(1200)
    assert narrow < wide / 3
    assert all(low <= fit <= high for fit, low, high in found.values())
    assert found["eve"] == (100.0, 100.0, 100.0)


def test_results_of_a_pair_are_counted_once_whoever_comes_first() -> None:
    wins: Wins = {}
    for a, b, winner in (("x", "y", "x"), ("y", "x", "x"), ("y", "x", None), ("x", "y", "y")):
        count_result(wins, a, b, winner)
    assert wins == {("x", "y"): [2.5, 1.5]}


# Glicko-2


def test_glicko2_reproduces_glickmans_example() -> None:
    scale = 173.7178

    def player(rating: float, deviation: float) -> Player:
        return Player((rating - 1500) / scale, deviation / scale, 0.06)

    opponents = [(player(1400, 30), 1.0), (player(1550, 100), 0.0), (player(1700, 300), 0.0)]
    after = rated(player(1500, 200), opponents)
    assert 1500 + scale * after.mu == pytest.approx(1464.06, abs=0.01)
    assert scale * after.phi == pytest.approx(151.52, abs=0.01)
    assert after.volatility == pytest.approx(0.05999, abs=1e-5)


def test_glicko2_takes_a_great_surprise() -> None:
    after = rated(Player(-3.0, 0.1, 0.06), [(Player(3.0, 0.1, 0.06), 1.0)] * 5)
    assert after.volatility > 0.06 and after.mu > -3.0


# What votes weigh


def test_all_votes_are_alike_where_weights_are_off() -> None:
    ratings = {**fair("a", "b"), "heavy": Rating(300, 0.5), "light": Rating(100, 0.5)}
    scores = {"heavy": (9.0, 4.0), "light": (5.0, 8.0)}
    assert Reputation(config(), ratings).update(("a", "b"), scores).scores == (8.0, 5.0)
    for settings_ in (config(weight="uniform"), config("uniform"), config("glicko2", "uniform")):
        change = Reputation(settings_, ratings).update(("a", "b"), scores)
        assert change.scores == (7.0, 6.0)
    still = Reputation(config("uniform"), ratings)
    still.update(("a", "b"), scores)
    assert still.ratings == ratings and still.updates == 0
    moving = Reputation(config(weight="uniform"), ratings)
    assert moving.update(("a", "b"), scores).after["a"] > 100


def agreeing(count: int) -> list[Duel]:
    """Two judges that agree, one that contradicts them, one that only sees ties."""
    scores = {"one": (8.0, 4.0), "two": (7.0, 6.0), "contrary": (3.0, 6.0), "blind": (5.0, 5.0)}
    return [(("a", "b"), scores)] * count


def test_votes_follow_agreement_with_the_rest_of_the_panel() -> None:
    names = ("a", "b", "one", "two", "contrary", "blind")
    reputation = Reputation(config(weight="agreement"), fair(*names))
    judges = ("one", "two", "contrary", "blind")
    assert reputation.weights(judges) == [1.0, 1.0, 1.0, 1.0]
    for fighters, scores in agreeing(1):
        reputation.update(fighters, scores)
    shrunk = math.log(16 / 5) / math.log(3)
    assert reputation.weights(("two",)) == [pytest.approx(shrunk)]
    for fighters, scores in agreeing(200):
        reputation.update(fighters, scores)
    one, two, contrary, blind = reputation.weights(judges)
    assert two > 3 and contrary == LEAST and blind < 0.2
    assert 2 < one < two
    expected = (one * 8 + two * 7 + contrary * 3 + blind * 5) / (one + two + contrary + blind)
    assert reputation.update(*agreeing(1)[0]).scores[0] == pytest.approx(expected)
    assert reputation.to_json()["members"]["two"]["agreement"] == [202.0, 202]


def test_one_judge_alone_tells_nothing_about_agreement() -> None:
    agreement = Agreement(["j"])
    agreement.record({"j": (9.0, 1.0)}, [1.0])
    assert agreement.weight("j") == 1.0


def test_frozen_ratings_freeze_agreement_too() -> None:
    names = ("a", "b", "one", "two", "contrary", "blind")
    reputation = folded(config(weight="agreement", freeze=True), fair(*names), agreeing(50))
    assert reputation.weights(names) == [1.0] * 6


def test_verifiers_keep_their_weight_whatever_judges_weigh() -> None:
    names = fair("a", "b", "j")
    for weight in WEIGHTS:
        reputation = Reputation(config(weight=weight), names, fixed_weights={"exact": 300.0})
        for _ in range(30):
            change = reputation.update(("a", "b"), {"exact": (10.0, 1.0), "j": (2.0, 5.0)})
        judge, verifier = reputation.weights(("j", "exact"))
        assert verifier == (300.0 if weight == "reputation" else 3.0)
        assert judge == (100.0 if weight == "reputation" else 1.0 if weight == "uniform" else LEAST)
        assert change.winner == "a"
        assert "exact" not in reputation.ratings
        stored = json.loads(json.dumps(reputation.to_json()))
        assert reputation.restored(stored).weights(("exact",)) == [verifier]


def test_verifiers_can_judge_alone() -> None:
    reputation = Reputation(config(), fair("a", "b"), fixed_weights={"exact": 100.0})
    assert reputation.update(("a", "b"), {"exact": (10.0, 1.0)}).winner == "a"
    with pytest.raises(ValueError, match="'stranger' has no rating"):
        reputation.update(("a", "b"), {"stranger": (10.0, 1.0)})
    with pytest.raises(ValueError, match="'exact' has no rating"):
        reputation.update(("a", "exact"), {"exact": (10.0, 1.0)})


@pytest.mark.parametrize(
    ("values", "stays"),
    [
        ({}, False),
        ({"freeze": True}, True),
        ({"model": "uniform"}, True),
        ({"judge_weight": "uniform"}, True),
        ({"model": "uniform", "judge_weight": "agreement"}, False),
        ({"model": "bradley_terry"}, False),
    ],
)
def test_who_has_weights_that_stay(values: dict[str, Any], stays: bool) -> None:
    assert ReputationConfig.model_validate(values).weights_stay == stays


@pytest.mark.parametrize("values", [{"variant": "static"}, {"update": "sequential"}])
def test_the_papers_variants_are_the_papers(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="belongs to model: paper"):
        config("glicko2", **values)


def test_bad_judges_do_less_harm_where_agreement_counts() -> None:
    for one in TRIBES:
        alike, agreed = (measure(one, "uniform", weight, seeds=2, duels=200) for weight in ("uniform", "agreement"))
        assert agreed.accuracy > alike.accuracy + 0.01
        assert agreed.accuracy > 0.75 and agreed.honest > 0.8


# Warm starts


def test_a_warm_start_has_mean_100_and_deviation_20() -> None:
    values = starting_reputations({"a": 0.2, "b": 0.9, "c": 0.4}, floor=10)
    assert fmean(values.values()) == pytest.approx(100)
    assert pstdev(values.values()) == pytest.approx(20)
    assert values["b"] > values["c"] > values["a"]
    assert starting_reputations({"a": 3.0, "b": 3.0}, floor=10) == {"a": 100, "b": 100}


def test_a_warm_start_is_never_negative() -> None:
    scores = {f"m{n}": 1.0 for n in range(60)} | {"worst": -50.0}
    values = starting_reputations(scores, floor=10)
    assert values["worst"] == 10
    assert values["m0"] - 100 == pytest.approx(20 * math.sqrt(60) - 100 + 20 / math.sqrt(60), abs=1e-6)


def warm(directory: Path, name: str, content: str, **more: Any) -> Path:
    path = tribe(directory, "http://127.0.0.1:9/v1", members=3, reputation={"warm_start": name, **more})
    (directory / name).write_text(content, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [("scores.json", '{"m0": 0.5, "m1": 0.7, "m2": 1}'), ("scores.csv", "member,score\nm0,0.5\nm1,0.7\nm2,1\n")],
)
def test_a_warm_start_is_read_beside_the_configuration_and_kept(tmp_path: Path, name: str, content: str) -> None:
    loaded = load_tribe(warm(tmp_path, name, content))
    assert loaded.resolved.reputation.warm_start == {"m0": 0.5, "m1": 0.7, "m2": 1.0}
    expected = starting_reputations({"m0": 0.5, "m1": 0.7, "m2": 1.0}, floor=10)
    assert first_reputation(loaded.resolved).reputations == expected
    kept = tmp_path / "kept" / "tribe.yaml"
    kept.parent.mkdir()
    kept.write_text(dump_tribe(loaded.config), encoding="utf-8")
    (tmp_path / name).unlink()
    assert first_reputation(load_tribe(kept, base_dir=tmp_path).resolved).reputations == expected


def test_a_members_own_start_wins_over_a_warm_one(tmp_path: Path) -> None:
    path = warm(tmp_path, "s.json", '{"m0": 1, "m1": 2}')
    path.write_text(path.read_text().replace("name: m2\n", "name: m2\n  initial_reputation: 77\n"))
    reputations = first_reputation(load_tribe(path).resolved).reputations
    assert reputations == {"m0": 80.0, "m1": 120.0, "m2": 77.0}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("s.json", '{"m0": 1, "m1": 2}', "no score for 'm2'"),
        ("s.json", '{"m0": 1, "m1": 2, "m2": 3, "m9": 4}', "'m9' is no member; there is m0"),
        ("s.json", '{"m0": "much"}', "score of 'm0' is 'much'; it should be a number"),
        ("s.json", "[1, 2]", "one object"),
        ("s.json", "{", "not JSON"),
        ("s.csv", "name,score\nm0,1\n", "s.csv:2: no column 'member'"),
        ("s.csv", "member,score\nm0,1\nm0,2\n", "s.csv:3: 'm0' has a score already"),
        ("s.csv", "member,score\nm0,nan\n", "s.csv:2: the score of 'm0' is 'nan'"),
        ("s.txt", "m0 1", "a .json or .csv file"),
    ],
)
def test_a_wrong_warm_start_is_refused(tmp_path: Path, name: str, content: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_tribe(warm(tmp_path, name, content))


def test_a_missing_warm_start_is_refused(tmp_path: Path) -> None:
    path = warm(tmp_path, "s.json", "{}")
    (tmp_path / "s.json").unlink()
    with pytest.raises(ConfigError, match="no such file"):
        load_tribe(path)
