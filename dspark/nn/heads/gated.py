"""Gated head: the previous-token embedding times a gate that reads the slot (used by public trainers; not in the paper)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dspark.nn.heads.base import SequentialHead


class GatedHead(SequentialHead):
    """`r_i = sigmoid(W_gate [h_i ; e_i] + b) * e_i` with `e_i = markov_w1[x_{i-1}]`."""

    def __init__(self, *, vocab_size: int, draft_vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__(
            vocab_size=vocab_size, draft_vocab_size=draft_vocab_size, hidden_size=hidden_size, rank=rank
        )
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def step(
        self, previous: Float[Tensor, "... R"], hidden: Float[Tensor, "... H"], state: Tensor | None
    ) -> tuple[Float[Tensor, "... R"], None]:
        gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, previous.to(hidden.dtype)], dim=-1)))
        return gate * previous, None

    def block(
        self, previous: Float[Tensor, "*batch N R"], hidden: Float[Tensor, "*batch N H"]
    ) -> Float[Tensor, "*batch N R"]:
        return self.step(previous, hidden, None)[0]
