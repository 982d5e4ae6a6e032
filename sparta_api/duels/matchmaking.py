"""Who meets whom on which instruction: rule 1 of docs/algorithm.md, a pure function.

Randomness comes from `random.Random.random()` alone, seeded with SHA-256 of the seed, the iteration and the
purpose, so that plans depend neither on the process nor on the order in which members are listed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from sparta_api.config.tribe import Matchmaking


@dataclass(frozen=True, slots=True)
class Matchup:
    """A planned duel. `duel` counts from 0 in each iteration, `instruction` is an id, the rest are names."""

    duel: int
    instruction: str
    fighters: tuple[str, str]
    judges: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """A row of matchups.jsonl."""
        return {
            "duel": self.duel,
            "instruction": self.instruction,
            "fighters": list(self.fighters),
            "judges": list(self.judges),
        }


def plan(
    seed: int,
    iteration: int,
    ratings: Mapping[str, float],
    instruction_ids: Sequence[str],
    fighters: Sequence[str],
    judges: Sequence[str],
    config: Matchmaking,
    per_iteration: int | None = None,
    judges_per_duel: int | Literal["all"] = "all",
    benched: Collection[str] = (),
) -> Iterator[Matchup]:
    """The duels of one iteration in duel order, made as they are asked for.

    `ratings` are the fighters' reputations at the start of the iteration; `benched` members are left out. A
    duel gets all judges outside it, or `judges_per_duel` of them (fewer where there are not as many), drawn
    so that all judges carry the same load as far as the pairings let them.

    Raises ValueError at once for fewer than two fighters, no instructions, or more per iteration than there are.
    """
    standing = sorted(set(fighters) - set(benched))
    if len(standing) < 2:
        raise ValueError(f"a duel needs two fighters, there is {len(standing)}")
    indices = instruction_walk(seed, iteration, len(instruction_ids), per_iteration)
    panel = sorted(set(judges) - set(benched))
    pairs = _pairs(_stream(seed, iteration, "matchups"), ratings, standing, config, len(indices))
    panels = _Panels(_stream(seed, iteration, "judges"), panel, judges_per_duel)
    return (
        Matchup(duel, instruction_ids[index], pair, panels.draw(pair))
        for duel, (index, pair) in enumerate(zip(indices, pairs, strict=True))
    )


def instruction_walk(seed: int, iteration: int, count: int, per_iteration: int | None) -> list[int]:
    """The positions (0..count-1) of the instructions that an iteration plays, in duel order.

    Iterations walk through one endless row of shuffles of all instructions. Where an iteration crosses from one
    shuffle into the next, what it has already played moves behind what it still takes, so none comes twice.
    Raises ValueError when there are no instructions, or fewer than `per_iteration`.
    """
    size = count if per_iteration is None else per_iteration
    if count < 1:
        raise ValueError("there are no instructions")
    if not 1 <= size <= count:
        raise ValueError(f"{size} instructions per iteration are asked for, there are {count}")
    start = iteration * size
    first, last = start // count, (start + size - 1) // count
    shuffle = first
    while shuffle * count % size:
        shuffle -= 1
    order = _shuffled(_stream(seed, shuffle, "instructions"), count)
    while shuffle < first:
        shuffle += 1
        order = _continued(order, _shuffled(_stream(seed, shuffle, "instructions"), count), shuffle * count, size)
    begin = start - first * count
    played = order[begin : begin + size]
    if last > first:
        following = _shuffled(_stream(seed, last, "instructions"), count)
        played += _continued(order, following, last * count, size)[: size - len(played)]
    return played


def _continued(previous: list[int], order: list[int], boundary: int, size: int) -> list[int]:
    """The next shuffle, arranged so that the iteration across `boundary` repeats nothing of `previous`."""
    tail = boundary % size
    if tail == 0:
        return order
    played = set(previous[-tail:])
    head = [index for index in order if index not in played][: size - tail]
    taken = set(head)
    return head + [index for index in order if index not in taken]


def _pairs(
    random: Random, ratings: Mapping[str, float], fighters: list[str], config: Matchmaking, count: int
) -> Iterator[tuple[str, str]]:
    """`count` pairs: in blocks as long as there are fighters, each of them goes first once."""
    draws = [_Opponents(ratings, fighters, name, config.num_opponents) for name in fighters]
    pairs = {(a, b): (a, b) for a in fighters for b in fighters}
    left = count
    while left > 0:
        for place in _shuffled(random, len(fighters))[:left]:
            opponent = draws[place].draw(random, config.random_match_prob)
            yield pairs[fighters[place], opponent]
        left -= len(fighters)


class _Opponents:
    """The draw of an opponent for one fighter: from all others, or from the closest in reputation.

    Of the members that share the distance of the last place among the closest, each is as likely as the
    others; drawing from them all does the same as putting them in a random order for every duel.
    """

    def __init__(self, ratings: Mapping[str, float], fighters: list[str], name: str, closest: int) -> None:
        distance = {other: abs(ratings[other] - ratings[name]) for other in fighters if other != name}
        self._others = list(distance)
        self._places = min(closest, len(self._others))
        limit = sorted(distance.values())[self._places - 1]
        self._nearer = [other for other in self._others if distance[other] < limit]
        self._at_limit = [other for other in self._others if distance[other] == limit]

    def draw(self, random: Random, random_match_prob: float) -> str:
        if random.random() < random_match_prob:
            return _choice(random, self._others)
        place = int(random.random() * self._places)
        return self._nearer[place] if place < len(self._nearer) else _choice(random, self._at_limit)


class _Panels:
    """The judges of one duel after another; a fighter never judges its own."""

    def __init__(self, random: Random, judges: list[str], size: int | Literal["all"]) -> None:
        self._random = random
        self._judges = judges
        self._size = len(judges) if size == "all" else size
        self._load = dict.fromkeys(judges, 0)
        self._outside: dict[tuple[str, str], tuple[str, ...]] = {}
        self._shared: dict[tuple[str, ...], tuple[str, ...]] = {}

    def draw(self, fighters: tuple[str, str]) -> tuple[str, ...]:
        eligible = self._outside.get(fighters)
        if eligible is None:
            eligible = tuple(judge for judge in self._judges if judge not in fighters)
            self._outside[fighters] = eligible
        if len(eligible) <= self._size:
            chosen = eligible
        else:
            random, load = self._random.random, self._load
            ranked = sorted([(load[judge], random(), judge) for judge in eligible])
            drawn = tuple(sorted([judge for _, _, judge in ranked[: self._size]]))
            chosen = self._shared.setdefault(drawn, drawn)
        for judge in chosen:
            self._load[judge] += 1
        return chosen


def _stream(seed: int, number: int, purpose: str) -> Random:
    digest = hashlib.sha256(f"sparta {seed} {number} {purpose}".encode()).digest()
    return Random(int.from_bytes(digest, "big"))


def _shuffled(random: Random, count: int) -> list[int]:
    keys = [random.random() for _ in range(count)]
    return sorted(range(count), key=keys.__getitem__)


def _choice(random: Random, options: Sequence[str]) -> str:
    return options[int(random.random() * len(options))]
