"""The draft vocabulary: which verifier tokens a draft may propose, and the two id spaces.

Stored as vLLM reads it: `d2t` int64 [V] holds *offsets*, `target_id = draft_id + d2t[draft_id]`; `t2d` bool [W] marks the
kept verifier ids. Kept ids are sorted, so row j of a draft's head is the verifier's row of the j-th kept id.
"""

from __future__ import annotations

import hashlib

import torch
from jaxtyping import Bool, Int
from torch import Tensor


class VocabMap:
    """A sorted subset of the verifier's vocabulary, with conversions both ways."""

    def __init__(self, kept: Int[Tensor, " V"], vocab_size: int) -> None:
        kept = kept.to(torch.int64).cpu()
        if kept.numel() == 0 or kept.min() < 0 or kept.max() >= vocab_size or bool((kept.diff() <= 0).any()):
            raise ValueError(
                f"draft vocabulary: expected strictly increasing ids in 0..{vocab_size - 1}, "
                f"got {kept.numel()} ids from {kept[:3].tolist()} to {kept[-3:].tolist()}."
            )
        self.kept = kept
        self.vocab_size = vocab_size
        self._to_draft = torch.full((vocab_size,), -1, dtype=torch.int64)
        self._to_draft[kept] = torch.arange(kept.numel())

    @classmethod
    def full(cls, vocab_size: int) -> VocabMap:
        """Every verifier token is kept: draft ids are verifier ids."""
        return cls(torch.arange(vocab_size), vocab_size)

    @classmethod
    def most_frequent(cls, counts: Int[Tensor, " W"], size: int) -> VocabMap:
        """The `size` most frequent ids; ties and unused places go to the lower id."""
        if not 1 <= size <= counts.numel():
            raise ValueError(
                f"draft.vocab_size is {size}; expected 1 to {counts.numel()}, the verifier's vocabulary."
            )
        order = torch.argsort(counts.to(torch.int64), descending=True, stable=True)
        return cls(order[:size].sort().values, counts.numel())

    @classmethod
    def from_d2t(cls, d2t: Int[Tensor, " V"], vocab_size: int) -> VocabMap:
        """Rebuild from the offsets of a checkpoint."""
        return cls(d2t.cpu().to(torch.int64) + torch.arange(d2t.numel()), vocab_size)

    def __len__(self) -> int:
        return self.kept.numel()

    @property
    def d2t(self) -> Int[Tensor, " V"]:
        return self.kept - torch.arange(len(self))

    @property
    def t2d(self) -> Bool[Tensor, " W"]:
        return self._to_draft >= 0

    @property
    def sha(self) -> str:
        """Content hash of the kept ids."""
        return hashlib.sha256(self.kept.numpy().tobytes() + str(self.vocab_size).encode()).hexdigest()[:16]

    def draft_to_target(self, ids: Int[Tensor, ...]) -> Int[Tensor, ...]:
        return self.kept.to(ids.device)[ids]

    def target_to_draft(self, ids: Int[Tensor, ...]) -> Int[Tensor, ...]:
        """Draft id of a verifier id; -1 where the draft cannot propose it."""
        return self._to_draft.to(ids.device)[ids]
