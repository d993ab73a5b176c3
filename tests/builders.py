"""Small drafts and batches for tests; every number is random but seeded."""

from __future__ import annotations

from typing import Any

import torch

from dspark.blocks import DraftBatch, sample_anchors
from dspark.config import DraftConfig
from dspark.nn.draft import Draft
from dspark.vocab import VocabMap

DEFAULTS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 512,
    "vocab_size": 97,
    "draft_vocab_size": 41,
    "block_size": 4,
    "sample_from_anchor": False,
    "mask_token_id": 96,
    "aux_layer_ids": (1, 2, 4),
    "num_verifier_layers": 6,
    "layer_types": ("full_attention", "full_attention"),
    "sliding_window": None,
    "head": "vanilla",
    "markov_rank": 8,
    "confidence": True,
    "confidence_uses_prev_embedding": True,
    "logit_scale": 1.0,
}


def draft_config(**changes: Any) -> DraftConfig:
    return DraftConfig(**{**DEFAULTS, **changes})


def random_draft(*, backend: str = "grouped", seed: int = 0, **changes: Any) -> Draft:
    """A draft with random weights everywhere, heads included, so that no term is trivially zero."""
    torch.manual_seed(seed)
    config = draft_config(**changes)
    draft = Draft(config, attention_backend=backend)
    kept = torch.randperm(config.vocab_size - 1)[: config.draft_vocab_size].sort().values
    if not config.pruned:
        kept = torch.arange(config.vocab_size)
    embedding = torch.randn(config.vocab_size, config.hidden_size)
    head = torch.randn(config.vocab_size, config.hidden_size) * 0.3
    draft.set_frozen(embedding, head, VocabMap(kept, config.vocab_size), torch.float32)
    for parameter in draft.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.2)
        else:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return draft


def random_batch(
    config: DraftConfig,
    *,
    rows: tuple[tuple[int, ...], ...] = ((23, 17), (31, 9)),
    anchors: int = 10,
    prompt: int = 4,
    seed: int = 0,
    head: torch.Tensor | None = None,
) -> DraftBatch:
    """Packed rows of documents with the given lengths; the first `prompt` tokens of each carry no loss.

    `head` [W, H] makes `lse` consistent with `last`; without it lse is a plausible constant.
    """
    generator = torch.Generator().manual_seed(seed)
    length = max(sum(row) for row in rows) + 3
    count = len(rows)
    ids = torch.randint(0, config.vocab_size - 1, (count, length), generator=generator)
    positions = torch.zeros(count, length, dtype=torch.int64)
    start = torch.arange(length).repeat(count, 1)
    mask = torch.zeros(count, length, dtype=torch.bool)
    for b, row in enumerate(rows):
        at = 0
        for size in row:
            positions[b, at : at + size] = torch.arange(size)
            start[b, at : at + size] = at
            mask[b, at + prompt : at + size] = True
            at += size
    last = torch.randn(count, length, config.hidden_size, generator=generator)
    lse = (
        torch.full((count, length), 6.0)
        if head is None
        else (last @ head.T * config.logit_scale).logsumexp(-1)
    )
    places, valid = sample_anchors(mask, start, anchors, generator)
    return DraftBatch(
        input_ids=ids,
        positions=positions,
        doc_start=start,
        loss_mask=mask,
        aux=torch.randn(count, length, len(config.aux_layer_ids), config.hidden_size, generator=generator),
        last=last,
        lse=lse,
        anchors=places,
        anchor_valid=valid,
    )
