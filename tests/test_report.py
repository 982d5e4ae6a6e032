"""The tables, the warnings and the JSON at the end of a run."""

from __future__ import annotations

import io
import json
import math
import random
import shlex
from dataclasses import replace

import pytest
from rich.console import Console

from sparta_api.secrets import register
from sparta_api.show.progress import MemberTotals, TrainingProgress, Usage
from sparta_api.show.report import (
    IterationReport,
    MemberReport,
    RunReport,
    Sample,
    member_table,
    member_tables,
    render,
)
from sparta_api.show.summary import duel_counts, load_command, separated, serve_commands, warnings

HOSTILE = "[bold]x[/] \x1b[35mred\x1b[0m\u202eevil\ud800"


def member(name: str = "plain", **changes: object) -> MemberReport:
    base = MemberReport(
        name=name,
        roles=("fight", "judge"),
        totals=MemberTotals(
            duels=26, wins=12, losses=7, ties=6, void=1, responses=26, judgments=240, judged=115, abstained=5,
            failed=1, requests=150, usage=Usage(prompt=43_210, cached=100, completion=12_345),
        ),
        reputation_before=100.0,
        reputation_after=112.5,
        deviation=0.3,
        squared_changes=20.0,
        training=TrainingProgress("succeeded", 1.0, 0.6812, 0.0243, 0.61),
        model=f"{name}-1",
        adapter=f"/runs/q/iteration_000/training/{name}",
        base_model="models/smol",
        lora_rank=16,
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def report(*members: MemberReport, **changes: object) -> RunReport:
    history = (IterationReport(0, total=20, judged=19, ties=4, void={"no judge is left": 1}, pairs=15),)
    base = RunReport("quickstart", "runs/q", True, 1, 2, "done", members or (member(),), history)
    return replace(base, **changes)  # type: ignore[arg-type]


def text_of(what: RunReport, width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width)
    render(what, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def row(text: str, name: str) -> list[str]:
    return next(line for line in text.splitlines() if line.split()[:1] == [name]).split()


def test_one_row_holds_all_figures_of_a_member() -> None:
    cells = row(text_of(report()), "plain")
    assert cells == [
        "plain", "26", "12", "7", "6", "1", "100.0", "→", "112.5", "43.2k", "12.3k", "5", "(4%)", "0.681", "0.024",
    ]  # fmt: skip


def test_fighters_are_ranked_by_reputation_and_judges_come_last() -> None:
    members = [
        member("low", reputation_after=90.0),
        member("judge", roles=("judge",), reputation_after=130.0),
        member("high", reputation_after=110.0),
    ]
    console = Console(file=io.StringIO(), width=140)
    console.print(member_table(members, 140))
    assert isinstance(console.file, io.StringIO)
    names = [line.split()[0] for line in console.file.getvalue().splitlines()[2:]]
    assert names == ["high", "low", "judge"]


def test_costs_are_shown_where_something_costs() -> None:
    free, paid, unknown = member("free"), member("paid"), member("unknown")
    paid.totals.cost_usd, unknown.totals.cost_usd = 0.0345, None
    assert "USD" not in text_of(report(free))
    text = text_of(report(free, paid))
    assert "0.0345" in row(text, "paid")
    assert "0.00" in row(text, "free")
    assert report(free, paid).spent_usd == pytest.approx(0.0345)
    assert report(paid, unknown).spent_usd is None
    assert "unknown" in row(text_of(report(unknown)), "unknown")[1:]


def test_a_training_that_failed_shows_its_state_instead_of_a_loss() -> None:
    failed = member("plain", training=TrainingProgress("failed", loss=0.9, message="loss is not ln 2"), adapter=None)
    text = text_of(report(failed))
    assert row(text, "plain")[-1] == "failed"
    assert "the training of 'plain' failed: loss is not ln 2" in text


@pytest.mark.parametrize("width", [80, 100, 140, 200])
def test_ten_members_fit_and_no_figure_is_cut(width: int) -> None:
    members = tuple(member(f"organisation/a-rather-long-model-name-{number}") for number in range(10))
    assert len(member_tables(members, width)) == (2 if width < 110 else 1)
    text = text_of(report(*members), width)
    for figure in ("100.0 → 112.5", "43.2k", "12.3k", "5 (4%)", "0.681", "0.024"):
        assert text.count(figure) == 10
    tables = text[: text.index("Trained adapters")]
    assert all(len(line) <= width for line in tables.splitlines())


def test_a_run_without_training_shows_no_empty_columns() -> None:
    text = text_of(report(member(training=None, adapter=None)))
    for absent in ("loss", "margin", "adapters", "vllm"):
        assert absent not in text


def test_hostile_text_is_shown_literally() -> None:
    hostile = member(
        HOSTILE, model=HOSTILE, adapter=f"/runs/{HOSTILE}", training=TrainingProgress("failed", message=HOSTILE)
    )
    history = (IterationReport(0, total=2, judged=1, ties=0, void={HOSTILE: 1}),)
    samples = (Sample(HOSTILE, HOSTILE, HOSTILE, HOSTILE),)
    text = text_of(report(hostile, run=HOSTILE, history=history, samples=samples, notices=(HOSTILE,), finished=False))
    assert text.count("[bold]x[/] redevil") > 8
    for leaked in ("\x1b", "\u202e", "\ud800"):
        assert leaked not in text
    json.dumps(report(hostile).to_json(), allow_nan=False)


def test_commands_are_whole_and_can_be_parsed_by_a_shell() -> None:
    members = (member("plain"), member("it's = odd, very"), member("big", base_model="models/big", lora_rank=48))
    small, big = (shlex.split(command.replace("\\\n", " ")) for command in serve_commands(members))
    assert small[:3] == ["vllm", "serve", "models/smol"]
    assert small[small.index("--max-lora-rank") + 1] == "16"
    assert small[small.index("--max-loras") + 1] == "2"
    plain, odd = small[small.index("--lora-modules") + 1 :]
    assert plain == "plain-1=/runs/q/iteration_000/training/plain"
    assert json.loads(odd) == {"name": "it's = odd, very-1", "path": "/runs/q/iteration_000/training/it's = odd, very"}
    assert big[big.index("--max-lora-rank") + 1] == "64"

    words = shlex.split(load_command(members[1]))
    assert words[3] == "http://localhost:8000/v1/load_lora_adapter"
    assert json.loads(words[-1])["lora_name"] == "it's = odd, very-1"
    assert load_command(members[0]) in text_of(report(*members), 80)


def test_an_unfinished_run_says_how_to_go_on() -> None:
    stopped = report(finished=False, iteration=0, phase="duels", directory="runs/my run")
    text = text_of(stopped)
    assert "iteration 1 of 2, duels" in text
    assert text.rstrip().endswith("Continue with:\n  sparta-api resume 'runs/my run'")
    assert "Continue with" not in text_of(report())


def test_void_duels_are_counted_with_their_reasons() -> None:
    history = (
        IterationReport(0, total=300, judged=250, ties=9, void={"no judge is left": 50}),
        IterationReport(1, total=200, judged=130, ties=1, void={"no judge is left": 50, "response filtered": 20}),
    )
    counts = duel_counts(history)
    assert (counts["n_total"], counts["n_judged"], counts["n_void"], counts["n_tied"]) == (500, 380, 120, 10)
    assert counts["void_reasons"] == {"no judge is left": 100, "response filtered": 20}
    text = text_of(report(history=history))
    assert "500 duels, 380 judged, 120 void: no judge is left (100), response filtered (20)" in text
    assert "24% of the duels are void" in text


def test_a_few_void_duels_are_no_warning() -> None:
    history = (IterationReport(0, total=20, judged=18, ties=0, void={"filtered": 2}),)
    assert warnings(report(history=history)) == []
    worse = (IterationReport(0, total=20, judged=17, ties=0, void={"filtered": 3}),)
    assert "15% of the duels are void" in warnings(report(history=worse))[0]


def test_abstentions_floor_hits_and_notices_are_told() -> None:
    abstaining = member("silent", floor_hits=3)
    abstaining.totals.judged, abstaining.totals.abstained = 90, 30
    found = warnings(report(abstaining, notices=("two members are the same model", "two members are the same model")))
    assert [sentence.split(";")[0] for sentence in found] == [
        "two members are the same model",
        "judge 'silent' abstained from 25% of its duels",
        "the reputation of 'silent' lay on the floor after 3 duels",
    ]


def tribe_after(changes: dict[str, list[float]]) -> list[MemberReport]:
    return [
        member(
            name,
            reputation_after=100.0 + math.fsum(steps),
            squared_changes=math.fsum(step * step for step in steps),
        )
        for name, steps in changes.items()
    ]


def test_a_cycle_is_not_separated() -> None:
    each = [1.0, -1.0] * 30
    cycle = tribe_after({"a": each, "b": each, "c": each})
    assert separated(cycle) is False
    assert "the ranking is not separated" in text_of(report(*cycle))
    assert report(*cycle).to_json()["separated"] is False


def test_a_clear_order_is_separated() -> None:
    clear = tribe_after({"a": [1.0] * 20, "b": [1.0, -1.0] * 10, "c": [-1.0] * 20})
    assert separated(clear) is True
    assert "not separated" not in text_of(report(*clear))


def test_coin_tosses_count_as_separated_in_about_one_run_of_twenty() -> None:
    rng = random.Random(0)
    for fighters in (2, 3, 10):
        alarms = 0
        for _ in range(400):
            steps: dict[str, list[float]] = {str(fighter): [] for fighter in range(fighters)}
            for _ in range(20 * fighters):
                winner, loser = rng.sample(sorted(steps), 2)
                size = rng.choice([0.5, 1.0, 2.0])
                steps[winner].append(size)
                steps[loser].append(-size)
            alarms += separated(tribe_after(steps)) is True
        assert 8 <= alarms <= 40


def test_without_duels_or_with_frozen_ratings_nothing_is_said_about_the_order() -> None:
    fresh = MemberTotals()
    frozen = MemberTotals(duels=3, wins=2, losses=1)
    still = {"reputation_after": 100.0, "squared_changes": 0.0}
    assert separated([member("a", totals=fresh, **still), member("b", totals=fresh, **still)]) is None
    assert separated([member("a", totals=frozen, **still), member("b", totals=frozen, **still)]) is None
    tied = MemberTotals(duels=3, ties=3)
    assert separated([member("a", totals=tied, **still), member("b", totals=tied, **still)]) is False


def test_samples_are_side_by_side_or_stacked_and_cut_to_a_few_lines() -> None:
    long = "word " * 400
    samples = (
        Sample("Explain rain.", "plain", long, "Water falls."),
        Sample("Explain rain.", "terse", "", "Drops."),
    )
    wide, narrow = (text_of(report(samples=samples), width) for width in (140, 80))
    assert "Water falls." in next(line for line in wide.splitlines() if line.startswith("plain  word"))
    assert next(line for line in narrow.splitlines() if "Water falls." in line).split()[0] == "after"
    for text in (wide, narrow):
        assert text.count("Explain rain.") == 1
        assert "(empty)" in text
        assert 1 < len([line for line in text.splitlines() if "word word" in line]) <= 3
        assert "…" in text


def test_secrets_reach_neither_the_tables_nor_the_json() -> None:
    register("very-secret-value")
    leaking = member(training=TrainingProgress("failed", message="401 for very-secret-value"))
    history = (IterationReport(0, total=1, judged=0, ties=0, void={"refused: very-secret-value": 1}),)
    leak = report(leaking, history=history, notices=("header very-secret-value",))
    assert "very-secret-value" not in text_of(leak) + json.dumps(leak.to_json())


def test_json_has_stable_keys_and_no_nan() -> None:
    odd = member("odd", training=TrainingProgress("running", None, math.nan, math.inf, None))
    data = report(member(), odd, finished=False).to_json()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert list(data) == [
        "run", "directory", "finished", "iteration", "iterations", "phase", "duels", "requests", "usage", "spent_usd",
        "training_costs", "up", "separated", "questions_spared", "members", "verifiers", "history", "heldout",
        "control", "warnings", "next",
    ]  # fmt: skip
    assert data["duels"] == {
        "n_total": 20, "n_judged": 19, "n_void": 1, "n_owed": 0, "n_tied": 4, "void_reasons": {"no judge is left": 1},
    }  # fmt: skip
    assert data["usage"] == {"prompt": 86_420, "cached": 200, "completion": 24_690}
    assert data["next"] == "sparta-api resume runs/q"
    assert list(data["members"][0]) == [
        "name", "roles", "duels", "wins", "losses", "ties", "void", "responses", "judgments", "judged", "abstained",
        "flips", "spared", "failed", "requests", "usage", "cost_usd", "floor_hits", "squared_changes",
        "abstention_share", "reputation_before", "reputation_after", "deviation", "training_costs", "training",
        "model", "adapter", "base_model",
    ]  # fmt: skip
    assert data["members"][1]["training"]["loss"] is None
    assert list(data["history"][0]) == ["iteration", "duels", "pairs", "members", "verifiers"]


def test_a_pipe_gets_no_control_codes_and_a_terminal_gets_colours() -> None:
    assert "\x1b" not in text_of(report())
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="standard", no_color=False)
    render(report(), console)
    assert isinstance(console.file, io.StringIO)
    assert "\x1b[" in console.file.getvalue()
