"""A real model as a judge for benches: one vLLM on this machine, and what a run would ask and read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from sparta_api.config.tribe import TribeConfig
from sparta_api.endpoints.wire import Answer, read
from sparta_api.judging.bench import Bench, Message, Score
from sparta_api.judging.expected import labels
from sparta_api.serving.servers import ServerManager

NAME = "judge"
IN_FLIGHT = 16
PATIENCE_S = 600.0
SCALE = (1, 10)
STYLES = (
    None,
    "Answer as briefly as you can, in one or two sentences.",
    "You are a patient teacher. Explain with a simple example.",
    "Think about what was asked, then answer exactly that and nothing else.",
)
"""System prompts of members that are one model."""

Cells = Sequence[str]


@dataclass(frozen=True)
class Grid:
    """A table."""

    title: str
    heads: Cells
    lines: list[Cells]

    def show(self, markdown: bool) -> None:
        """Prints it."""
        if markdown:
            lines = [self.heads, ("---",) * len(self.heads), *self.lines]
            print(f"\n{self.title}\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines))
            return
        table = Table(*self.heads, title=self.title)
        for line in self.lines:
            table.add_row(*line)
        Console().print(table)


class RealModel:
    """A model behind a server that speaks the chat protocol."""

    def __init__(self, base_url: str, http: httpx.AsyncClient) -> None:
        self.base_url = base_url
        self._http = http
        self._free = asyncio.Semaphore(IN_FLIGHT)

    async def chat(self, messages: Sequence[Message], fields: Mapping[str, Any]) -> Answer:
        """One chat completion. Raises Fault where there is none."""
        async with self._free:
            body = {"model": NAME, "messages": messages, **fields}
            reply = await self._http.post(f"{self.base_url}/chat/completions", json=body)
        return read(reply.status_code, reply.headers, reply.content)

    async def label_tokens(self, scale: tuple[int, int]) -> list[int]:
        """The vocabulary's number of each label of the scale, by vLLM's own /tokenize."""
        found = []
        for label in labels(scale):
            body = {"model": NAME, "prompt": label, "add_special_tokens": False}
            reply = await self._http.post(f"{self.base_url.removesuffix('/v1')}/tokenize", json=body)
            (token,) = reply.raise_for_status().json()["tokens"]
            found.append(token)
        return found


@asynccontextmanager
async def served(model: Path, directory: Path) -> AsyncIterator[RealModel]:
    """The model on a vLLM that is stopped at the end; float32, so that a reply does not depend on its batch."""
    config = TribeConfig.model_validate(
        {
            "instructions": {"path": "none"},
            "servers": {
                "local": {"model": str(model), "args": ["--dtype", "float32"], "startup_timeout_s": PATIENCE_S}
            },
            "members": [{"name": f"m{n}", "server": "local", "model": NAME} for n in range(2)],
            "judging": {"verifiers": {"any": {"kind": "regex", "pattern": "."}}},
        }
    )
    manager = ServerManager(config, directory)
    manager.preflight()
    try:
        server = await manager.start("local")
        async with httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as http:
            yield RealModel(server.base_url, http)
    finally:
        await manager.stop_all()


def bench_of(**judging: Any) -> Bench:
    """A run's judging under these settings."""
    members = [{"name": f"m{n}", "base_url": "http://127.0.0.1:1/v1", "model": NAME} for n in range(3)]
    config = {"instructions": {"path": "none"}, "members": members, "judging": judging}
    return Bench(TribeConfig.model_validate(config), 0)


async def score(
    model: RealModel, bench: Bench, messages: list[Message], extra: Mapping[str, Any], attempts: int = 3
) -> Score:
    """A judge's score: asked again, as a run does, until its reply holds one; `extra` fields go along."""
    found = Score(None)
    for attempt in range(1, attempts + 1):
        found = bench.score(await model.chat(messages, {**bench.fields(attempt), **extra}))
        if found.values is not None:
            break
    return found
