"""Whom a judge may favour without meaning to: models of its own family, and responses like its own."""

from __future__ import annotations

import re
from itertools import pairwise
from zlib import crc32

SKETCH = 64
"""How many hashes stand for a text."""

Sketch = tuple[int, ...]

_LETTERS = re.compile(r"[a-z]+")


def family(model: str) -> str:
    """The family that a model's name tells: the first letters of its last part, in lower case.

    "Qwen/Qwen2.5-7B-Instruct" and "qwen3-4b" are both "qwen". A name without letters is a family of its own.
    """
    name = model.rsplit("/", 1)[-1].lower()
    found = _LETTERS.search(name)
    return found[0] if found else name


def sketch(text: str) -> Sketch:
    """The smallest hashes of the pairs of neighbouring words: a sample of them that is the same for every text.

    A text of one word is that word. Source: bottom-k sketches (Broder 1997; Cohen and Kaplan 2007).
    """
    words = text.lower().split()
    pairs = [f"{one} {other}" for one, other in pairwise(words)] or words
    return tuple(sorted({crc32(pair.encode("utf-8", "replace")) for pair in pairs})[:SKETCH])


def similarity(one: Sketch, other: Sketch) -> float:
    """The estimated share of word pairs that two texts have in common (Jaccard), 0..1; exact for short texts."""
    sample = sorted({*one, *other})[:SKETCH]
    both = set(one) & set(other)
    return sum(value in both for value in sample) / len(sample) if sample else 1.0
