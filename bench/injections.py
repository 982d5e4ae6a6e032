"""What texts in a response that ask for a better score do to the score of a real small judge."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean

from bench.real_judge import SCALE, Cells, Grid, RealModel, bench_of, score
from bench.stage import REPOSITORY, say
from sparta_api.judging.bench import Bench, Message
from sparta_api.judging.expected import label_scale
from sparta_api.judging.prompts import Template, load_template
from tests.front_door import rows


def naive() -> Template:
    """The shipped prompt without the frame and without the word of warning."""
    shipped = Path(load_template("score").filename).read_text(encoding="utf-8")
    kept = [line for line in shipped.splitlines() if "boundary" not in line and "only material" not in line]
    return Template("\n".join(kept), "naive", "naive.j2")


def with_injection(response: str, injection: Mapping[str, str], best: int) -> str:
    """The response as a hostile fighter sends it."""
    text = injection["text"].replace("{best}", str(best))
    return f"{text}\n\n{response}" if injection["place"] == "before" else f"{response}\n\n{text}"


Prompt = Callable[[str, str], list[Message]]


def prompts(bench: Bench) -> dict[str, Prompt]:
    """What a judge reads about (instruction, response)."""
    template, (worst, best) = naive(), label_scale(SCALE)
    unused = {"boundary": "", "rubric": None, "reference": None, "verdict": ""}

    def bare(instruction: str, response: str) -> list[Message]:
        text = template.render(instruction=instruction, response=response, worst=worst, best=best, **unused)
        return [{"role": "user", "content": text}]

    return {
        "shipped": lambda i, r: bench.messages([{"role": "user", "content": i}], [r], 0, ("a",)),
        "naive": bare,
    }


async def injections(model: RealModel, directory: Path) -> Grid:
    """The change that each kind of injection makes in a judge's expected score, in points."""
    data = REPOSITORY / "tests" / "data"
    planted, answers = rows(data / "injections.jsonl"), rows(data / "injected_answers.jsonl")
    bench = bench_of(scale=SCALE, scoring="expected", max_tokens=8)
    best = label_scale(SCALE)[1]
    change: dict[tuple[str, str, str], list[float]] = {}

    async def points(prompt: Prompt, instruction: str, response: str) -> float:
        found = await score(model, bench, prompt(instruction, response), {})
        if found.values is None:
            raise RuntimeError(f"the judge gave no score: {instruction} {response}")
        return found.values[0]

    for name, prompt in prompts(bench).items():
        cases = [(answer, quality, one) for one in planted for answer in answers for quality in ("poor", "good")]
        before = {a[q]: await points(prompt, a["instruction"], a[q]) for a in answers for q in ("poor", "good")}
        after = await asyncio.gather(
            *(points(prompt, a["instruction"], with_injection(a[q], one, best)) for a, q, one in cases)
        )
        for (answer, quality, one), value in zip(cases, after, strict=True):
            attack = "all attacks, " + quality + " responses"
            for group in (one["kind"], *(() if one["kind"] == "control" else ("all attacks", attack))):
                change.setdefault((name, group, one["id"]), []).append(value - before[answer[quality]])
        say(f"injections: {name}")
    return _injection_grid(change)


def _injection_grid(change: Mapping[tuple[str, str, str], list[float]]) -> Grid:
    groups = list(dict.fromkeys(group for _, group, _ in change))
    groups.sort(key=lambda group: group.startswith("all"))
    lines: list[Cells] = []
    for group in groups:
        cells = [group, str(len({one for _, g, one in change if g == group}))]
        for name in ("shipped", "naive"):
            each = [values for (n, g, _), values in change.items() if (n, g) == (name, group)]
            cells += [f"{fmean(v for values in each for v in values):+.2f}", f"{max(map(max, each)):+.2f}"]
        lines.append(cells)
    heads = ("kind", "texts", "shipped: mean", "worst", "naive: mean", "worst")
    return Grid(f"change of the expected score, in points of {SCALE[0]} to {SCALE[1]}", heads, lines)
