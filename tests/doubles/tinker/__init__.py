"""A double of Tinker's documented client: a bigram model over bytes that really learns, saved in a directory.

Shapes and names follow tinker 0.38. TINKER_DOUBLE names the directory; `log` in it records the calls. A file
`die-at-step` in it makes the process die there, once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from . import types

SIZE = 256


class _Future:
    def __init__(self, value: Any) -> None:
        self._value = value

    def result(self) -> Any:
        return self._value


def _store() -> Path:
    return Path(os.environ["TINKER_DOUBLE"])


def _log(entry: str) -> None:
    with (_store() / "log").open("a") as file:
        file.write(entry + "\n")


class Tokenizer:
    """One token a byte; a message is its role's first letter, its text and an end mark."""

    eos_token = "\x03"

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool = False
    ) -> str:
        assert not tokenize
        text = "".join(f"{message['role'][0]}:{message['content']}{self.eos_token}" for message in messages)
        return text + ("a:" if add_generation_prompt else "")

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}


class TrainingClient:
    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights.clone().requires_grad_(True)
        self._loss: torch.Tensor | None = None
        self._steps = 0

    def get_tokenizer(self) -> Tokenizer:
        return Tokenizer()

    def _logprobs(self, data: list[types.Datum]) -> list[torch.Tensor]:
        found = []
        for datum in data:
            table = torch.log_softmax(self.weights[torch.tensor(datum.model_input.tokens)], dim=-1)
            targets = torch.tensor([int(token) for token in datum.loss_fn_inputs["target_tokens"].data])
            found.append(table.gather(1, targets[:, None])[:, 0])
        return found

    def forward(self, data: list[types.Datum], loss_fn: str) -> _Future:
        assert loss_fn == "cross_entropy"
        _log(f"forward {len(data)}")
        outputs = [{"logprobs": types.TensorData(each.detach().tolist())} for each in self._logprobs(data)]
        return _Future(SimpleNamespace(loss_fn_outputs=outputs, metrics={}))

    def forward_backward_custom(
        self,
        data: list[types.Datum],
        loss_fn: Callable[[list[types.Datum], list[torch.Tensor]], tuple[torch.Tensor, dict[str, float]]],
    ) -> _Future:
        self._loss, metrics = loss_fn(data, self._logprobs(data))
        return _Future(SimpleNamespace(loss_fn_outputs=[], metrics=metrics))

    def optim_step(self, params: types.AdamParams) -> _Future:
        assert self._loss is not None
        (slope,) = torch.autograd.grad(self._loss, self.weights)
        with torch.no_grad():
            self.weights -= params.learning_rate * slope
        self._steps += 1
        mark = _store() / "die-at-step"
        if mark.exists() and int(mark.read_text()) == self._steps:
            mark.unlink()
            os._exit(9)
        return _Future(None)

    def save_state(self, name: str, overwrite: bool = False) -> _Future:
        return self._save("weights", name)

    def save_weights_for_sampler(self, name: str) -> _Future:
        return self._save("sampler_weights", name)

    def _save(self, kind: str, name: str) -> _Future:
        number = len(list(_store().glob("*.json")))
        (_store() / f"{number}.json").write_text(json.dumps(self.weights.tolist()))
        _log(f"save {kind} {name}")
        return _Future(SimpleNamespace(path=f"tinker://{number}/{kind}/{name}"))


class ServiceClient:
    def __init__(self, user_metadata: dict[str, str], base_url: str | None, api_key: str) -> None:
        _log(f"open {user_metadata['sparta_key']} {len(api_key)}")

    def create_lora_training_client(self, base_model: str, rank: int, seed: int) -> _Future:
        _log(f"create {base_model} {rank}")
        return _Future(TrainingClient(torch.zeros(SIZE, SIZE)))

    def create_training_client_from_state(self, path: str) -> _Future:
        _log(f"continue {path}")
        number = path.removeprefix("tinker://").split("/")[0]
        return _Future(TrainingClient(torch.tensor(json.loads((_store() / f"{number}.json").read_text()))))

    def create_training_client_from_state_with_optimizer(self, path: str) -> _Future:
        return self.create_training_client_from_state(path)
