"""The data types that the loop uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class TensorData:
    data: list[Any]


@dataclass
class ModelInput:
    tokens: list[int]

    @classmethod
    def from_ints(cls, tokens: list[int]) -> ModelInput:
        return cls(tokens)


class Datum:
    def __init__(self, model_input: ModelInput, loss_fn_inputs: dict[str, list[Any]]) -> None:
        self.model_input = model_input
        self.loss_fn_inputs = {key: TensorData(value) for key, value in loss_fn_inputs.items()}
        for value in self.loss_fn_inputs.values():
            assert len(value.data) == len(model_input.tokens)


@dataclass
class AdamParams:
    learning_rate: float
