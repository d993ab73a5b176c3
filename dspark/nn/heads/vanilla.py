"""Markov head: a low-rank bigram correction of the logits (paper eq. 5), the only head that vLLM serves."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from dspark.nn.heads.base import SequentialHead


class VanillaHead(SequentialHead):
    """`r_i = markov_w1[x_{i-1}]`."""

    def step(
        self, previous: Float[Tensor, "... R"], hidden: Float[Tensor, "... H"], state: Tensor | None
    ) -> tuple[Float[Tensor, "... R"], None]:
        return previous, None

    def block(
        self, previous: Float[Tensor, "*batch N R"], hidden: Float[Tensor, "*batch N H"]
    ) -> Float[Tensor, "*batch N R"]:
        return previous
