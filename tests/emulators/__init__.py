"""Loopback emulators of hosted fine-tuning services, spoken to by the providers' own SDKs.

    python -m tests.emulators.together --port 0          prints {"port": N, "base_url": ...}
    python -m tests.emulators.openai_tuning --port 0

Reading order: `base` (faults, control, chat), `together_v2`, `together`, `openai_tuning`, `process` (what tests use).
"""
