"""The sequential head: what the previous token of a block says about the next one.

Every head is a rank-R vector times one matrix: `bias_i = markov_w2 @ r_i`, with `r_i` computed from `markov_w1[x_{i-1}]`
(paper eq. 4-6). Heads take the embedding of the previous token (a verifier id; the confidence head reads the same one) and return
`r_i`, so that base logits and bias are one product `[z ; r] @ [W_head ; markov_w2].T` wherever logits are needed, and no
[.., V] bias exists on its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor, nn


class SequentialHead(nn.Module, ABC):
    """Subclasses define `step`; `block` follows by scanning it, and may be overridden with a faster equal form."""

    def __init__(self, *, vocab_size: int, draft_vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.hidden_size = hidden_size
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)  # the bias starts at zero: training begins as plain DFlash

    def initial_state(self, hidden: Float[Tensor, "... H"]) -> Tensor | None:
        """State before proposal 1; None for heads that keep none."""
        return None

    @abstractmethod
    def step(
        self, previous: Float[Tensor, "... R"], hidden: Float[Tensor, "... H"], state: Tensor | None
    ) -> tuple[Float[Tensor, "... R"], Tensor | None]:
        """`r_i` and the next state, from `e_i = markov_w1[x_{i-1}]`, the slot's hidden state and the state."""

    def block(
        self, previous: Float[Tensor, "*batch N R"], hidden: Float[Tensor, "*batch N H"]
    ) -> Float[Tensor, "*batch N R"]:
        """Teacher-forced `r_1..r_N`: `step` scanned over the proposals."""
        state = self.initial_state(hidden[..., 0, :])
        outputs = []
        for i in range(previous.shape[-2]):
            features, state = self.step(previous[..., i, :], hidden[..., i, :], state)
            outputs.append(features)
        return torch.stack(outputs, dim=-2)
