"""Confidence head: the chance that proposal i survives, given that every proposal before it did (paper eq. 7)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn


class ConfidenceHead(nn.Module):
    """`c_i = sigmoid(w . [z_i ; markov_w1[x_{i-1}]] + b)`; returns the logit. The input order is the serving contract's."""

    def __init__(self, *, hidden_size: int, prev_embedding_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden_size + prev_embedding_size, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(
        self, hidden: Float[Tensor, "*batch H"], prev_embedding: Float[Tensor, "*batch R"] | None
    ) -> Float[Tensor, "*batch"]:
        inputs = (
            hidden if prev_embedding is None else torch.cat([hidden, prev_embedding.to(hidden.dtype)], dim=-1)
        )
        return self.proj(inputs).squeeze(-1).float()
