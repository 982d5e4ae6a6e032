"""A complete chat model of a few hundred kilobytes: random weights, a small trained tokenizer, a chat template.

    python tests/tiny_model.py DIRECTORY

It needs tokenizers, safetensors and numpy, no torch, no download, and well under a second.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

VOCABULARY = 384
HIDDEN, LAYERS, HEADS, KEY_HEADS, INNER = 64, 2, 2, 1, 128
START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
TEXTS = (
    "Explain in one sentence why the sky is blue.",
    "You are a helpful assistant. Answer as briefly as you can, and be exact.",
    "The answer is short, and the question was long; nobody knows what the other one would say.",
    "system user assistant Water boils at 100 degrees, ice melts at 0 degrees. Yes. No. Good. Bad.",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tiny_model(
    directory: Path, *, seed: int = 0, pad_is_eos: bool = False, chat_template: str | None = CHAT_TEMPLATE
) -> Path:
    """Writes a Llama of some 100,000 parameters (float32) and returns its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(directory, pad_is_eos, chat_template)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1 if pad_is_eos else 2,
        "dtype": "float32",
    }
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=1))
    _write_weights(directory / "model.safetensors", seed)
    return directory


def _write_weights(file: Path, seed: int) -> None:
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)
    key_size = HIDDEN // HEADS * KEY_HEADS
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        block = f"model.layers.{layer}"
        shapes |= {
            f"{block}.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{block}.self_attn.k_proj.weight": (key_size, HIDDEN),
            f"{block}.self_attn.v_proj.weight": (key_size, HIDDEN),
            f"{block}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{block}.mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{block}.mlp.up_proj.weight": (INNER, HIDDEN),
            f"{block}.mlp.down_proj.weight": (HIDDEN, INNER),
        }
    weights = {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}
    norms = ["model.norm", *(f"model.layers.{i}.{name}_layernorm" for i in range(LAYERS)
                             for name in ("input", "post_attention"))]  # fmt: skip
    weights |= {f"{name}.weight": np.ones(HIDDEN, dtype=np.float32) for name in norms}
    save_file(weights, file, metadata={"format": "pt"})
    file.chmod(0o644)


def _write_tokenizer(directory: Path, pad_is_eos: bool, chat_template: str | None) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[START, END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": START,
        "eos_token": END,
        "pad_token": END if pad_is_eos else PAD,
        "model_max_length": 1024,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    if chat_template is not None:
        (directory / "chat_template.jinja").write_text(chat_template)


if __name__ == "__main__":
    make_tiny_model(Path(sys.argv[1]))
