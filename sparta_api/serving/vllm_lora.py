"""LoRA on vLLM's CPU back end as two dense products instead of one gathered copy of the weights per token.

vLLM's own CPU path copies both LoRA matrices for every token, which makes prefill some forty times slower
than it need be, and it reads slot -1 of rows without an adapter as the last slot, so that a base model that
shares a batch with enough adapters answers with one of them. Here the slots that a batch uses are laid side
by side, every row is multiplied with all of them, and what is not its own is zeroed in between.

vLLM imports this module in its worker; see `vllm_plugin`.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

Selection = tuple[list[int], torch.Tensor]
"""The slots that some rows use, and a (rows, slots) matrix of ones and zeros: whose row is whose."""


class DenseLora(PunicaWrapperCPU):  # type: ignore[misc]
    """Replaces the linear and logits products of vLLM's wrapper; rows of slot -1 stay as they are."""

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Remembers, once per step, which slots the tokens and the sampled rows use."""
        super().update_metadata(*args, **kwargs)
        self._tokens = select(self.token_lora_indices)
        self._sampled = select(self.sampler_indices)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: Any,
    ) -> None:
        """y[:, slice] += x A^T B^T * scale, with A and B of each row's own slot.

        Shapes: y (tokens, sum of slices), x (tokens, in), A (slots, 1, rank, in), B (slots, 1, slice, rank).
        """
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        start = 0
        for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            add_products(y[:, start : start + size], x, a, b, scale, self._tokens)
            start += size

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        **kwargs: Any,
    ) -> None:
        """The same for the rows whose next token is sampled: y (rows, vocabulary), x (rows, in)."""
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        add_products(y[:, : lora_b_stacked.shape[-2]], x, lora_a_stacked, lora_b_stacked, scale, self._sampled)


def select(indices: torch.Tensor) -> Selection:
    """The slots in `indices` (one per row, -1 for none) and the matrix that tells whose row is whose."""
    slots = sorted({int(slot) for slot in indices.tolist() if slot >= 0})
    return slots, indices.unsqueeze(1) == torch.tensor(slots, dtype=indices.dtype)


def add_products(
    y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, selection: Selection
) -> None:
    """y += (x A^T * scale, zeroed outside each row's own slot) B^T, in place; y (rows, out), x (rows, in)."""
    slots, own = selection
    if not slots:
        return
    rows = own.shape[0]
    a_used = a.squeeze(1)[slots].flatten(0, 1)
    b_used = b.squeeze(1)[slots].transpose(1, 2).flatten(0, 1)
    hidden = (x[:rows] @ a_used.T).view(rows, len(slots), -1) * (own.to(x.dtype) * scale).unsqueeze(2)
    y[:rows].addmm_(hidden.flatten(1), b_used[:, : y.shape[1]])
