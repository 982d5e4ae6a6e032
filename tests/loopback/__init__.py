"""A real OpenAI-compatible HTTP server on 127.0.0.1 with deterministic answers and injected faults.

    python -m tests.loopback --scenario scenario.json --log requests.jsonl     prints {"port": N}

Reading order: `scenario` (what may be configured), `presets` (faults by name), `answers`, `adapters`, `faults`, `pace`,
`wire`, `delivery`, `server`, `process` (what tests use).
"""

from tests.loopback.process import LoopbackProcess, start_loopback

__all__ = ["LoopbackProcess", "start_loopback"]
