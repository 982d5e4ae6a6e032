"""Merges a LoRA adapter into its base model: a full model directory for servers that load no adapters.

    python -m sparta_api.trainers.merge BASE_MODEL ADAPTER OUTPUT

The output appears as a whole; one that is already there is left alone. The last line printed is JSON:
{"merged": OUTPUT}. Needs the `local` extra.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path


def merge(base_model: str, adapter: Path, output: Path) -> None:
    """Writes weights, tokenizer and chat template of base model plus adapter to `output`."""
    if output.exists():
        return
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.float32 if _small(base_model) else "auto")
    model = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload(safe_merge=True)
    has_tokenizer = (adapter / "tokenizer_config.json").is_file()
    tokenizer = AutoTokenizer.from_pretrained(str(adapter) if has_tokenizer else base_model)
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(output)


def _small(base_model: str) -> bool:
    """Whether the base model is a directory of less than a gigabyte, where full precision costs nothing."""
    directory = Path(base_model)
    return directory.is_dir() and sum(file.stat().st_size for file in directory.glob("*.safetensors")) < 1 << 30


def main() -> None:
    """The command line."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    base_model, adapter, output = sys.argv[1:]
    merge(base_model, Path(adapter), Path(output))
    print(json.dumps({"merged": output}))


if __name__ == "__main__":
    main()
