"""Functions that test tribes name as verifiers."""

from __future__ import annotations

import os
import time
from typing import Any

ANSWER = "tier-"


def quality(response: str, instruction: dict[str, Any]) -> float:
    """The loopback fighter's own quality, on a scale of 1 to 10."""
    print("a verifier may print")
    return 1.0 + ord(response.partition(ANSWER)[2][0]) - ord("a")


def moody(response: str, instruction: dict[str, Any]) -> float | bool | str | None:
    """Everything that can go wrong, by instruction."""
    number = int(instruction["id"].removeprefix("q"))
    if number == 0:
        raise ValueError("sk-abcdefghijklmnop is not a key")
    if number == 1:
        os._exit(3)
    if number == 2:
        time.sleep(60)
    return {3: None, 4: "eight", 5: 11.0, 6: True}.get(number, 4.0)
