"""`sparta-api judges`: every figure by hand on a small run, and by the front door on biased judges."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from sparta_api.config.file import load_tribe
from sparta_api.data.journal import write_lines
from sparta_api.data.rundir import RunDirectory
from sparta_api.diagnosis.figures import Association, Average, Concordance
from sparta_api.diagnosis.judges import Diagnosis, diagnose
from sparta_api.diagnosis.likeness import family, similarity, sketch
from sparta_api.diagnosis.truth import is_right
from sparta_api.duels.matchmaking import Matchup
from sparta_api.duels.rows import Outcome, verdict_row
from sparta_api.runs.outcome import first_reputation
from sparta_api.runs.session import create
from tests.front_door import Ended, sparta, tribe
from tests.loopback import start_loopback

Scores = dict[str, tuple[float, float]]
KEYS = {
    "name", "kind", "family", "weight", "duels", "abstained", "abstention_share", "tau", "pairwise_accuracy",
    "mean_score", "offset", "spread", "length_correlation", "length_excess", "flip_rate", "first_place_points",
    "family_favour", "family_favour_error", "family_duels", "own_likeness", "own_likeness_duels", "label_mass",
    "read_from_text", "judgments", "tokens_per_judgment", "cost_usd", "cost_per_judgment_usd", "decisive", "reversing",
    "alone",
    "truth_accuracy", "truth_duels",
}  # fmt: skip


class Written:
    """A run whose journals a test writes by hand: member q fights member r, j, k and l judge."""

    def __init__(self, directory: Path, questions: list[dict[str, str]] | None = None, **changes: Any) -> None:
        path = tribe(directory, "http://127.0.0.1:9/v1", instructions=1, **changes)
        if questions is not None:
            (directory / "instructions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
        loaded = load_tribe(path)
        self.config = loaded.resolved
        create(directory / "run", loaded)
        self.run = RunDirectory(directory / "run")

    def write(self, number: int, played: list[dict[str, Any]]) -> None:
        """An iteration; a duel has `fighters`, `scores`, and where it matters `texts`, `instruction`, `abstained`."""
        files = self.run.iteration(number)
        reputation = first_reputation(self.config)
        planned, responses, judgments, duels = [], [], [], []
        for duel, one in enumerate(played):
            a, b = one["fighters"]
            scores: Scores = one["scores"]
            abstained = one.get("abstained", [])
            matchup = Matchup(duel, one.get("instruction", "q0"), (a, b), (*scores, *abstained))
            planned.append(matchup.to_json())
            texts = one.get("texts", ("same", "same"))
            responses += [
                {"duel": duel, "fighter": name, "content": text} for name, text in zip((a, b), texts, strict=True)
            ]
            usage = {"prompt_tokens": 90, "cached_tokens": 0, "completion_tokens": 10}
            judgments += [
                {"duel": duel, "judge": judge, "fighter": name, "round": 0, "score": score, "usage": usage}
                for judge, pair in scores.items()
                for name, score in zip((a, b), pair, strict=True)
            ]
            duels.append(verdict_row(reputation, Outcome(matchup, scores, abstained, None)))
        for path, rows in (
            (files.matchups, planned),
            (files.responses, responses),
            (files.judgments, judgments),
            (files.duels, duels),
        ):
            write_lines(path, rows)


def judged(found: Diagnosis, name: str) -> dict[str, Any]:
    return next(row for row in found.to_json()["judges"] if row["name"] == name)


def members(models: dict[str, str], price: dict[str, float] | None = None) -> list[dict[str, Any]]:
    return [{"name": name, "model": model, **({"price": price} if price else {})} for name, model in models.items()]


NAMES = {"q": "alpha-1", "r": "beta-1", "j": "alpha-2", "k": "gamma-1", "l": "gamma-1"}
FREEZE: dict[str, Any] = {"reputation": {"freeze": True}}


def test_figures_of_three_judges_by_hand(tmp_path: Path) -> None:
    written = Written(tmp_path, members=members(NAMES, {"input": 1.0, "output": 10.0}), **FREEZE)
    pair = ("q", "r")
    written.write(
        0,
        [
            {"fighters": pair, "scores": {"j": (9.0, 2.0), "k": (6.0, 5.0), "l": (4.0, 5.0)}},
            {"fighters": pair, "scores": {"j": (8.0, 1.0), "k": (4.0, 6.0), "l": (4.0, 8.0)}},
            {"fighters": pair, "scores": {"j": (5.0, 5.0), "k": (7.0, 6.0)}, "abstained": ["l"]},
            {"fighters": ("r", "q"), "scores": {"j": (2.0, 8.0)}, "abstained": ["k", "l"]},
        ],
    )
    found = diagnose(written.run)
    assert (found.duels, found.void) == (4, 0)
    j, k, m = (judged(found, name) for name in "jkl")
    assert (j["duels"], j["abstained"], j["alone"]) == (4, 0, 1)
    assert (m["duels"], m["abstained"], m["abstention_share"]) == (2, 2, 0.5)
    # rest of j: (5, 5), (4, 7), (7, 6); rest of k: (6.5, 3.5), (6, 4.5), (5, 5); rest of l: (7.5, 3.5), (6, 3.5)
    assert j["tau"] == pytest.approx(-1 / math.sqrt(2 * 2))
    assert j["pairwise_accuracy"] == 0.0
    assert k["tau"] == pytest.approx(0.0) and k["pairwise_accuracy"] == pytest.approx(1 / 3)
    assert m["tau"] == -1.0 and m["pairwise_accuracy"] == 0.0
    assert j["offset"] == pytest.approx((4 - 3 + 4 - 6 - 2 - 1) / 6)
    assert j["mean_score"] == pytest.approx(40 / 8)
    assert j["spread"] == pytest.approx(math.sqrt(sum((s - 5) ** 2 for s in (9, 2, 8, 1, 5, 5, 2, 8)) / 8))
    # without j: a tie, r, q; without k: q, q, tie; without l: q, q
    assert (j["decisive"], j["reversing"]) == (2, 1)
    assert (k["decisive"], k["reversing"]) == (1, 0)
    assert (m["decisive"], m["reversing"]) == (0, 0)
    # j is of q's family: 7 - 0, 7 - -3, 0 - 1
    assert j["family"] == "alpha" and j["family_duels"] == 3
    assert j["family_favour"] == pytest.approx(16 / 3)
    assert j["family_favour_error"] == pytest.approx(math.sqrt(((49 + 100 + 1) / 3 - (16 / 3) ** 2) / 2))
    assert k["family_favour"] is None and k["family_duels"] == 0
    assert j["judgments"] == 8 and j["tokens_per_judgment"] == 100
    assert j["cost_per_judgment_usd"] == pytest.approx(190e-6)
    assert set(j) == KEYS


def test_weights_of_the_turn_decide_who_is_decisive(tmp_path: Path) -> None:
    rated = members(NAMES)
    rated[2]["initial_reputation"] = 900
    written = Written(tmp_path, members=rated, **FREEZE)
    written.write(0, [{"fighters": ("q", "r"), "scores": {"j": (6.0, 5.0), "k": (1.0, 3.0), "l": (2.0, 3.0)}}])
    found = diagnose(written.run)
    assert [(judged(found, name)["decisive"], judged(found, name)["reversing"]) for name in "jkl"] == [
        (1, 1), (0, 0), (0, 0),
    ]  # fmt: skip
    assert judged(found, "j")["weight"] == 900
    assert judged(found, "j")["cost_usd"] is None


def test_length_counts_alike_whoever_comes_first(tmp_path: Path) -> None:
    written = Written(tmp_path, members=members(NAMES), **FREEZE)
    long, short = "many words " * 20, "few"
    written.write(
        0,
        [
            {"fighters": ("q", "r"), "texts": (long, short), "scores": {"j": (9.0, 3.0), "k": (5.0, 5.0)}},
            {"fighters": ("q", "r"), "texts": (short, long), "scores": {"j": (3.0, 9.0), "k": (4.0, 6.0)}},
        ],
    )
    j, k = (judged(diagnose(written.run), name) for name in "jk")
    assert j["length_correlation"] == pytest.approx(1.0)
    assert k["length_correlation"] == pytest.approx(1 / math.sqrt(2))
    assert j["length_excess"] == pytest.approx(10 / math.sqrt(2 * (36 + 16)))
    assert k["length_excess"] == pytest.approx(-j["length_excess"])


QUESTIONS = [
    {"id": "n", "prompt": "2 + 2?", "answer": "4"},
    {"id": "c", "prompt": "A or B?", "answer": "B"},
    {"id": "t", "prompt": "The capital?", "answer": "Paris"},
    {"id": "open", "prompt": "Say something."},
]


def test_judges_are_held_to_the_truth_where_there_is_one(tmp_path: Path) -> None:
    written = Written(tmp_path, members=members(NAMES), questions=QUESTIONS, **FREEZE)
    pair = ("q", "r")
    written.write(
        0,
        [
            {
                "fighters": pair,
                "instruction": "n",
                "texts": ("It is 4.", "5"),
                "scores": {"j": (9.0, 2.0), "k": (4.0, 6.0)},
            },
            {
                "fighters": pair,
                "instruction": "c",
                "texts": ("A", "The answer is B"),
                "scores": {"j": (5.0, 5.0), "k": (4.0, 6.0)},
            },
            {
                "fighters": pair,
                "instruction": "t",
                "texts": (" paris", "Paris"),
                "scores": {"j": (1.0, 2.0), "k": (4.0, 6.0)},
            },
            {
                "fighters": pair,
                "instruction": "open",
                "texts": ("4", "5"),
                "scores": {"j": (1.0, 2.0), "k": (4.0, 6.0)},
            },
        ],
    )
    found = diagnose(written.run)
    j, k = judged(found, "j"), judged(found, "k")
    assert (j["truth_accuracy"], j["truth_duels"]) == (0.75, 2)
    assert (k["truth_accuracy"], k["truth_duels"]) == (0.5, 2)
    assert (found.truth.mean, found.truth.n) == (1.0, 2)
    assert "truth" not in found.skipped


@pytest.mark.parametrize(
    ("answer", "response", "right"),
    [
        ("4", "Two and two make 4.", True),
        ("4", "44", False),
        ("1,200", "about 1200", True),
        ("so 3 * 4 = 12\n#### 12", "It is 12 apples", True),
        ("B", "The answer is (B).", True),
        ("B", "A and B", False),
        ("(C) the third", "C", True),
        ("Paris", "  paris\n", True),
        ("Paris", "It is Paris", False),
        ("A cat", "a cat", True),
    ],
)
def test_what_counts_as_right(answer: str, response: str, right: bool) -> None:
    assert is_right(response, {"answer": answer}) is right


def test_likeness_needs_an_own_answer_to_the_same_instruction(tmp_path: Path) -> None:
    written = Written(tmp_path, members=members(NAMES), questions=QUESTIONS, iterations=2, **FREEZE)
    mine, other = "a cat sat on the mat all day", "completely different words stand here instead"
    written.write(
        0, [{"fighters": ("j", "k"), "instruction": "open", "texts": (mine, other), "scores": {"l": (5.0, 4.0)}}]
    )
    assert "own_likeness" in diagnose(written.run).skipped
    scores = {"j": (9.0, 3.0), "l": (5.0, 5.0)}
    texts = (mine + " and night", other)
    written.write(1, [{"fighters": ("q", "r"), "instruction": "open", "texts": texts, "scores": scores}])
    found = diagnose(written.run)
    assert "own_likeness" not in found.skipped
    assert (judged(found, "j")["own_likeness"], judged(found, "j")["own_likeness_duels"]) == (1.0, 1)
    assert judged(found, "l")["own_likeness_duels"] == 0


def test_families_and_similarity() -> None:
    assert family("Qwen/Qwen2.5-7B-Instruct") == family("qwen3-4b") == "qwen"
    assert family("gpt-4o") == "gpt" and family("1234") == "1234"
    one = sketch("the quick brown fox")
    assert similarity(one, sketch("The quick  brown fox")) == 1.0
    assert similarity(one, sketch("the quick brown dog")) == pytest.approx(2 / 4)
    assert similarity(one, sketch("other words entirely")) == 0.0
    assert similarity(sketch(""), sketch("")) == 1.0
    words = [f"w{n}" for n in range(2000)]
    half = sketch(" ".join(words[:1000] + [f"x{n}" for n in range(1000)]))
    assert similarity(sketch(" ".join(words)), half) == pytest.approx(1 / 3, abs=0.15)


def test_sums_that_grow_are_the_textbook_ones() -> None:
    draw = random.Random(2)
    values = [draw.gauss(3, 2) for _ in range(50)]
    average = Average()
    assert (average.mean, average.deviation, average.error) == (None, None, None)
    for value in values:
        average.add(value)
    mean = sum(values) / 50
    assert average.mean == pytest.approx(mean)
    assert average.deviation == pytest.approx(math.sqrt(sum((v - mean) ** 2 for v in values) / 50))
    assert Association().correlation is None and Concordance().tau is None and Concordance().accuracy is None
    concordance = Concordance()
    for own, rest in [(1, 1), (2, 1), (-1, -3), (1, -1), (0, 1), (1, 0), (0, 0)]:
        concordance.add(own, rest)
    assert concordance.tau == pytest.approx((3 - 1) / math.sqrt(5 * 5))
    assert concordance.accuracy == pytest.approx(4 / 7)


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """A pairwise run with one judge that likes the first place and one that gives too much."""
    directory = tmp_path_factory.mktemp("biased")
    models = {
        "model-0": {"skill": 3.0},
        "model-1": {"position_bias": 6.0},
        "model-2": {"bias": 2.0},
        "model-3": {"skill": -3.0},
    }
    with start_loopback({"models": models}, directory / "server") as server:
        path = tribe(directory, server.base_url, members=4, instructions=40, judging={"mode": "pairwise"})
        ended = sparta("run", "--tribe", path, "--run-dir", directory / "run", "--yes")
    assert ended.code == 0, ended.err
    return directory / "run", sparta("judges", directory / "run", "--json")


def test_biases_show_by_the_front_door(biased: tuple[Path, Ended]) -> None:
    run, told = biased
    assert told.code == 0, told.err
    figures = json.loads(told.out)
    one = {row["name"]: row for row in figures["judges"]}
    assert set(figures) == {"run", "duels", "panel", "judges", "ratings", "skipped"}
    assert all(set(row) == KEYS for row in one.values())
    assert one["m1"]["flip_rate"] > 0.3 > one["m0"]["flip_rate"]
    assert one["m1"]["first_place_points"] > 3 and abs(one["m0"]["first_place_points"]) < 1
    assert one["m2"]["offset"] > 1 > one["m0"]["offset"]
    assert set(figures["skipped"]) == {"truth", "label_mass", "family", "own_likeness"}
    ratings = {row["member"]: row for row in figures["ratings"]}
    assert ratings["m0"]["low"] > ratings["m3"]["high"]
    assert all(row["low"] <= row["bradley_terry"] <= row["high"] for row in ratings.values())
    shown = sparta("judges", run)
    assert shown.code == 0 and "flips" in shown.out and "m3" in shown.out and "not measured" in shown.out


def test_a_run_without_duels_has_no_figures(tmp_path: Path) -> None:
    found = diagnose(Written(tmp_path, members=members(NAMES)).run)
    assert found.duels == 0 and judged(found, "j")["tau"] is None
    json.dumps(found.to_json(), allow_nan=False)


def test_void_duels_and_failed_requests_cost_and_tell_nothing_else(tmp_path: Path) -> None:
    written = Written(tmp_path, members=members(NAMES, {"input": 1.0, "output": 1.0}), **FREEZE)
    written.write(0, [{"fighters": ("q", "r"), "scores": {"j": (6.0, 5.0)}}])
    files = written.run.iteration(0)
    failed = {"duel": 1, "judge": "j", "fighter": "q", "round": 0, "score": None, "owed": True}
    void = {
        "duel": 1,
        "instruction": "q0",
        "fighters": ["q", "r"],
        "judges": {},
        "abstained": ["j"],
        "void": "no judge left",
    }
    usage = {"usage": {"prompt_tokens": 50, "completion_tokens": 0}}
    for path, row in (
        (files.judgments, failed | usage),
        (files.judgments, failed | usage | {"owed": False}),
        (files.judgments, failed | usage | {"owed": False, "fighter": "r"}),
        (files.matchups, Matchup(1, "q0", ("q", "r"), ("j",)).to_json()),
        (files.duels, void),
    ):
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
    found = diagnose(written.run)
    j = judged(found, "j")
    assert (found.duels, found.void, j["duels"], j["abstained"], j["judgments"]) == (1, 1, 1, 1, 4)
    assert j["cost_usd"] == pytest.approx(350e-6)
