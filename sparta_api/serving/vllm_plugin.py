"""What vLLM loads at its start (entry point group `vllm.general_plugins`): the faster LoRA for CPUs.

It acts only in servers that the run starts itself, which set `SPARTA_DENSE_LORA=1`, and only where vLLM's
CPU platform is as expected; any other vLLM in the same environment is left as it is.
"""

from __future__ import annotations

import os

WRAPPER = "sparta_api.serving.vllm_lora.DenseLora"


def register() -> None:
    """Makes vLLM's CPU platform name `DenseLora` as its LoRA implementation."""
    if os.environ.get("SPARTA_DENSE_LORA") != "1":
        return
    from vllm.platforms.cpu import CpuPlatform

    if hasattr(CpuPlatform, "get_punica_wrapper"):
        CpuPlatform.get_punica_wrapper = classmethod(lambda cls: WRAPPER)
