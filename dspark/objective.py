"""From a draft's output to the sums that training divides: one loss numerator, one denominator, and per-position counts.

L = sum w m (terms + confidence) / sum w m     (paper eq. 9-12 with the weighted mean made explicit)

w is the position weight exp(-(i-1)/decay_gamma), m the supervision mask. Numerator and denominator stay apart, so that
micro-batches, accumulation and ranks can be added before the single division.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.blocks import Blocks, DraftBatch, build_blocks, position_weights
from dspark.losses import LossWeights, Part, PartPlan, Rows, confidence_loss, vocabulary_loss
from dspark.nn.draft import Draft, DraftOutput


@dataclass
class LossSums:
    """`numerator` carries the gradient. The rest is detached: per proposal position [N], sums over supervised proposals.

    `alpha`, `greedy_hit` and `label_keep` divided by `count` are the mean overlap, the share of proposals whose draft argmax is
    the text's token, and the mean of min(1, q/p) at it. `confidence` sums the BCE.
    """

    numerator: Float[Tensor, ""]
    denominator: Float[Tensor, ""]
    vocabulary: Float[Tensor, ""]
    confidence: Float[Tensor, ""]
    count: Float[Tensor, " N"]
    alpha: Float[Tensor, " N"]
    greedy_hit: Float[Tensor, " N"]
    label_keep: Float[Tensor, " N"]


Planned = tuple[Blocks, Callable[[], list[Part]]]  # a batch's blocks, and the parts of its loss


def plan_loss(draft: Draft, batch: DraftBatch, chunk_rows: int) -> tuple[Blocks, PartPlan]:
    """The batch's blocks, and which proposals and verifier states its loss will need; `chunk_rows` proposals at once."""
    blocks = build_blocks(batch, draft.config)
    supervised = blocks.supervised.flatten()
    return blocks, PartPlan(supervised, _target_rows(blocks, batch), batch.input_ids.numel(), chunk_rows)


def training_loss(
    draft: Draft,
    batch: DraftBatch,
    weights: LossWeights,
    *,
    confidence_detach_inputs: bool,
    chunk_rows: int,
    planned: Planned | None = None,
) -> LossSums:
    """`draft_loss` of what the draft puts out for the batch.

    Which rows the loss will need is worked out before the draft's forward pass is queued, so that the host, which must know how
    many there are, does not wait for that pass to end. `planned` says it where the caller has worked it out.
    """
    if planned is None:
        blocks, plan = plan_loss(draft, batch, chunk_rows)
        planned = blocks, plan.send().parts
    blocks, parts = planned
    return draft_loss(
        draft,
        draft(batch, blocks=blocks),
        batch,
        weights,
        confidence_detach_inputs=confidence_detach_inputs,
        chunk_rows=chunk_rows,
        parts=parts,
    )


def draft_loss(
    draft: Draft,
    output: DraftOutput,
    batch: DraftBatch,
    weights: LossWeights,
    *,
    confidence_detach_inputs: bool,
    chunk_rows: int,
    parts: Callable[[], list[Part]] | None = None,
) -> LossSums:
    """Loss sums of one batch. `confidence_detach_inputs` keeps the confidence loss out of the backbone and the head.

    `parts`: see `vocabulary_loss`.
    """
    config, blocks = draft.config, output.blocks
    weight = position_weights(config.num_proposals, weights.decay_gamma, blocks.supervised.device)
    row_weights = (blocks.supervised * weight).flatten()
    rows = Rows(
        features=output.hidden.flatten(0, 2),
        bias_features=None if output.features is None else output.features.flatten(0, 2),
        weights=row_weights,
        labels=draft.to_draft_ids(blocks.labels).flatten(),
        target_row=_target_rows(blocks, batch),
        target=batch.last.flatten(0, 1),
        target_lse=batch.lse.flatten(),
    )
    head = draft.markov_head
    vocabulary, stats = vocabulary_loss(
        rows,
        draft.lm_head,
        None if head is None else head.markov_w2.weight,
        weights,
        config.logit_scale,
        chunk_rows,
        joint=draft.joint_head(output.hidden.dtype),
        parts=parts,
    )
    numerator, confidence = vocabulary, vocabulary.new_zeros(())
    if draft.confidence_head is not None and weights.confidence:
        inputs = [output.hidden, output.previous]
        if confidence_detach_inputs:
            inputs = [None if t is None else t.detach() for t in inputs]
        logits = draft.confidence_logits(*inputs)
        confidence = confidence_loss(logits.flatten(), stats.alpha, row_weights)
        numerator = numerator + weights.confidence * confidence
    supervised = blocks.supervised.flatten(0, 1).float()

    def per_position(values: Tensor) -> Tensor:
        return (values.view(-1, config.num_proposals) * supervised).sum(0)

    return LossSums(
        numerator=numerator,
        denominator=row_weights.sum(),
        vocabulary=vocabulary.detach(),
        confidence=confidence.detach(),
        count=supervised.sum(0),
        alpha=per_position(stats.alpha),
        greedy_hit=per_position(stats.greedy_hit),
        label_keep=per_position(stats.label_keep),
    )


def _target_rows(blocks: Blocks, batch: DraftBatch) -> Int[Tensor, " M"]:
    """Of every proposal, the position of its verifier state among all `B * S` of the batch."""
    count, length = batch.input_ids.shape
    row = torch.arange(count, device=blocks.target_index.device).view(-1, 1, 1)
    return (blocks.target_index + row * length).flatten()
