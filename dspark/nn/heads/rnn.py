"""Recurrent head: a gated state carries more than one previous token (paper eq. 6)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dspark.nn.heads.base import SequentialHead


class RnnHead(SequentialHead):
    """With `u_i = [s_{i-1} ; e_i ; h_i]` and one linear layer split into gate, candidate and output:

    s_i = sigmoid(gate) * s_{i-1} + (1 - sigmoid(gate)) * tanh(candidate),  r_i = tanh(output),  s_0 = 0.
    """

    def __init__(self, *, vocab_size: int, draft_vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__(
            vocab_size=vocab_size, draft_vocab_size=draft_vocab_size, hidden_size=hidden_size, rank=rank
        )
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def initial_state(self, hidden: Float[Tensor, "... H"]) -> Float[Tensor, "... R"]:
        return hidden.new_zeros(*hidden.shape[:-1], self.rank)

    def step(
        self, previous: Float[Tensor, "... R"], hidden: Float[Tensor, "... H"], state: Tensor | None
    ) -> tuple[Float[Tensor, "... R"], Float[Tensor, "... R"]]:
        joint = self.joint_proj(
            torch.cat([state.to(hidden.dtype), previous.to(hidden.dtype), hidden], dim=-1)
        )
        gate, candidate, output = joint.chunk(3, dim=-1)
        keep = torch.sigmoid(gate)
        return torch.tanh(output), keep * state + (1.0 - keep) * torch.tanh(candidate)
