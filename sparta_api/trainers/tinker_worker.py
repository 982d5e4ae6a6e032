"""The DPO loop over Tinker's client, in a process of its own.

    python -m sparta_api.trainers.tinker_worker JOB_FILE

The reference log-probabilities are those of the model before its first step (the parent, or the base model), by
one forward pass over all pairs; they are kept in the output directory for a loop that has to go on. The loss
is DPO's (Rafailov et al. 2023, equation 7), averaged over the batch, plus `sft_weight` times the mean negative
log-likelihood of a chosen answer's tokens. The last line printed is the result, as JSON.
"""

from __future__ import annotations

import json
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import tinker
import torch
from tinker import types

from sparta_api.data.journal import Journal, read_lines, write_atomic
from sparta_api.trainers.config import TinkerTrainer as Settings

STATE_FILE, REFERENCE_FILE, METRICS_FILE = "state.json", "reference.json", "metrics.jsonl"


@dataclass(frozen=True)
class Side:
    """One answer under its prompt: all tokens, and how many of them are the prompt's."""

    tokens: list[int]
    prompt: int

    def datum(self) -> types.Datum:
        """Inputs, and as targets each next token; `weights` is 1 where a target belongs to the answer."""
        weights = [0.0] * (self.prompt - 1) + [1.0] * (len(self.tokens) - self.prompt)
        inputs = types.ModelInput.from_ints(self.tokens[:-1])
        return types.Datum(inputs, {"target_tokens": self.tokens[1:], "weights": weights})


class Loop:
    """One job's loop. Its state at the service and its figures are in `output`."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.settings = Settings.model_validate(job["settings"])
        self.output = Path(job["output"])
        self._job = job
        self._saved = self._read(STATE_FILE) or {"step": 0, "path": None}
        service = tinker.ServiceClient(
            user_metadata={"sparta_key": job["key"]},
            base_url=self.settings.base_url,
            api_key=os.environ[self.settings.api_key_env],
        )
        self.client = self._open(service)
        tokenizer = self.client.get_tokenizer()
        rows = [row for row, _, _ in read_lines(Path(job["preferences"]))]
        self.pairs = [
            tuple(encode(tokenizer, row["prompt"], row[side]) for side in ("chosen", "rejected")) for row in rows
        ]

    def run(self) -> dict[str, str]:
        """Trains to the end and saves; returns the handles."""
        reference = self._reference()
        order = self._order()
        steps = len(order)
        with Journal(self.output / METRICS_FILE) as metrics:
            for step in range(self._saved["step"], steps):
                figures = self._step([self.pairs[i] for i in order[step]], [reference[i] for i in order[step]])
                metrics.append({"step": step + 1, "steps": steps, **figures})
                if (step + 1) % self.settings.checkpoint_every == 0 and step + 1 < steps:
                    path = self.client.save_state(f"step-{step + 1}", overwrite=True).result().path
                    self._write(STATE_FILE, {"step": step + 1, "path": path})
        train = self.client.save_state("final", overwrite=True).result().path
        serve = self.client.save_weights_for_sampler("final").result().path
        return {"kind": "tinker", "train": train, "serve": serve}

    def _open(self, service: Any) -> Any:
        """A training client: the interrupted loop's, the parent's, or a fresh adapter's."""
        if self._saved["path"]:
            return service.create_training_client_from_state_with_optimizer(self._saved["path"]).result()
        if self._job["parent"]:
            return service.create_training_client_from_state(self._job["parent"]).result()
        return service.create_lora_training_client(
            self._job["base_model"], rank=self.settings.rank, seed=self._job["seed"]
        ).result()

    def _order(self) -> list[list[int]]:
        """The pairs of every step, shuffled anew in each epoch."""
        shuffler = random.Random(self._job["seed"])
        batches = []
        for _ in range(self.settings.epochs):
            order = list(range(len(self.pairs)))
            shuffler.shuffle(order)
            size = self.settings.batch_size
            batches += [order[start : start + size] for start in range(0, len(order), size)]
        return batches

    def _reference(self) -> list[list[float]]:
        """Summed log-probabilities of both answers of every pair, by the model before its first step."""
        known: list[list[float]] | None = self._read(REFERENCE_FILE)
        if known is not None:
            return known
        data = [side.datum() for pair in self.pairs for side in pair]
        outputs = self.client.forward(data, "cross_entropy").result().loss_fn_outputs
        sums = [
            _answer_sum(datum, _tensor(output["logprobs"])).item() for datum, output in zip(data, outputs, strict=True)
        ]
        reference = [sums[start : start + 2] for start in range(0, len(sums), 2)]
        self._write(REFERENCE_FILE, reference)
        return reference

    def _step(self, pairs: list[tuple[Side, ...]], reference: list[list[float]]) -> dict[str, float]:
        def loss(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
            return dpo_loss(data, logprobs, torch.tensor(reference), self.settings.beta, self.settings.sft_weight)

        data = [side.datum() for pair in pairs for side in pair]
        passed = self.client.forward_backward_custom(data, loss)
        stepped = self.client.optim_step(types.AdamParams(learning_rate=self.settings.learning_rate))
        figures: dict[str, float] = dict(passed.result().metrics)
        stepped.result()
        return figures

    def _read(self, name: str) -> Any:
        path = self.output / name
        return orjson.loads(path.read_bytes()) if path.exists() else None

    def _write(self, name: str, value: Any) -> None:
        write_atomic(self.output / name, orjson.dumps(value))


def dpo_loss(
    data: list[types.Datum], logprobs: list[torch.Tensor], reference: torch.Tensor, beta: float, sft_weight: float
) -> tuple[torch.Tensor, dict[str, float]]:
    """Loss and figures of a batch.

    `data` and `logprobs` alternate chosen and rejected; `reference` is (pairs, 2), summed log-probabilities.
    """
    sums = torch.stack([_answer_sum(datum, each) for datum, each in zip(data, logprobs, strict=True)]).reshape(-1, 2)
    rewards = beta * (sums - reference)
    margins = rewards[:, 0] - rewards[:, 1]
    loss = -torch.nn.functional.logsigmoid(margins).mean()
    if sft_weight:
        lengths = torch.tensor([_weights(datum).sum() for datum in data[::2]])
        loss = loss - sft_weight * (sums[:, 0] / lengths).mean()
    accuracy = (margins > 0).float().mean()
    return loss, {
        "loss": loss.item(),
        "rewards/margins": margins.mean().item(),
        "rewards/accuracies": accuracy.item(),
    }


def _weights(datum: types.Datum) -> torch.Tensor:
    return _tensor(datum.loss_fn_inputs["weights"])


def _answer_sum(datum: types.Datum, logprobs: torch.Tensor) -> torch.Tensor:
    return (logprobs * _weights(datum)).sum()


def _tensor(data: Any) -> torch.Tensor:
    return torch.tensor(list(data.data), dtype=torch.float32)


def encode(tokenizer: Any, prompt: list[dict[str, Any]], answer: list[dict[str, Any]]) -> Side:
    """Tokens of a prompt in the model's chat format and of the answer behind it, to its end-of-turn token."""
    opening = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*prompt, *answer], tokenize=False)
    closing = whole[len(opening) :] if whole.startswith(opening) else answer[0]["content"] + tokenizer.eos_token
    before = tokenizer(opening, add_special_tokens=False)["input_ids"]
    return Side([*before, *tokenizer(closing, add_special_tokens=False)["input_ids"]], len(before))


if __name__ == "__main__":
    print(json.dumps(Loop(orjson.loads(Path(sys.argv[1]).read_bytes())).run()))
