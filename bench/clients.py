"""The clients that the engine is compared with: python -m bench.clients CLIENT BASE_URL BODIES REQUESTS.

Each sends the request bodies of a JSON-lines file over and over, 64 at a time, on uvloop, and prints the seconds of
wall clock and CPU that its loop took as JSON; interpreter start and imports are not counted.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import aiohttp
import openai
import orjson
import uvloop
from yarl import URL

IN_FLIGHT = 64
Send = Callable[[bytes], Awaitable[None]]


@asynccontextmanager
async def bare(base_url: str) -> AsyncIterator[Send]:
    """aiohttp alone: sends bytes and reads bytes, without looking at them."""
    url = URL(f"{base_url}/chat/completions")
    headers = {"Content-Type": "application/json"}
    timeout = aiohttp.ClientTimeout(total=120)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, cookie_jar=aiohttp.DummyCookieJar(), timeout=timeout
    ) as session:

        async def send(body: bytes) -> None:
            async with session.post(url, data=body, headers=headers) as response:
                await response.read()
                response.raise_for_status()

        yield send


@asynccontextmanager
async def sdk(base_url: str) -> AsyncIterator[Send]:
    """The openai SDK as its users call it."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:

        async def send(body: bytes) -> None:
            request: dict[str, Any] = orjson.loads(body)
            await client.chat.completions.create(**request)

        yield send


CLIENTS = {"bare": bare, "openai": sdk}


async def _worker(send: Send, bodies: Iterator[bytes]) -> None:
    for body in bodies:
        await send(body)


async def _drive(client: str, base_url: str, bodies: list[bytes], requests: int) -> dict[str, float]:
    async with CLIENTS[client](base_url) as send:
        await send(bodies[0])
        todo = islice(cycle(bodies), requests)
        wall, cpu = time.perf_counter(), time.process_time()
        async with asyncio.TaskGroup() as group:
            for _ in range(IN_FLIGHT):
                group.create_task(_worker(send, todo))
        return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


def main() -> None:
    """Reads the arguments, sends, prints."""
    client, base_url, bodies, requests = sys.argv[1:]
    lines = Path(bodies).read_bytes().splitlines()
    print(json.dumps(uvloop.run(_drive(client, base_url, lines, int(requests)))))


if __name__ == "__main__":
    main()
