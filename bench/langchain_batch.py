"""LangChain's `abatch` with 64 in flight: python langchain_batch.py BASE_URL BODIES REQUESTS.

Runs in the peer tool's own environment and prints the seconds of wall clock and CPU as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import cycle, islice
from pathlib import Path

import uvloop
from langchain_openai import ChatOpenAI  # type: ignore[import-not-found, unused-ignore]

IN_FLIGHT = 64


async def main() -> None:
    """Sends the messages of the bodies; their other fields are those of the first body."""
    base_url, bodies, requests = sys.argv[1:]
    rows = [json.loads(line) for line in Path(bodies).read_text(encoding="utf-8").splitlines()]
    model = ChatOpenAI(
        base_url=base_url, api_key="none", model=rows[0]["model"], max_retries=0, max_tokens=rows[0]["max_tokens"]
    )
    prompts = [[(message["role"], message["content"]) for message in row["messages"]] for row in rows]
    await model.ainvoke(prompts[0])
    wall, cpu = time.perf_counter(), time.process_time()
    await model.abatch(list(islice(cycle(prompts), int(requests))), config={"max_concurrency": IN_FLIGHT})
    print(json.dumps({"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}))


if __name__ == "__main__":
    uvloop.run(main())
