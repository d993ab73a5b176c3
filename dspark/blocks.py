"""Anchors, blocks and supervision: the only file that knows which slot holds which proposal.

Shapes, here and everywhere: `B` packed rows, `S` tokens of a row, `A` anchors, `Q` slots of a block (`block_size`),
`N` proposals, `V` draft vocabulary, `W` verifier vocabulary, `H` hidden, `L` aux layers, `R` head rank.

An anchor at row index `a` is the newest known token; its own hidden state is not known yet. Proposal `i = 1..N` is the token
at `a+i`; the verifier's distribution for it comes from position `a+i-1`, and its previous token stands at `a+i-1` too. Both
layouts feed `[anchor, mask x (Q-1)]` at positions `a .. a+Q-1`; anchor-first reads proposal i from slot i-1, fill-in from
slot i (its slot 0 only conditions). Context is `document start .. a-1`, strictly before the anchor.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dspark.config import DraftConfig


@dataclass
class DraftBatch:
    """Packed documents and the anchors drawn in them.

    `doc_start[b, s]` is the row index at which the document of token s begins; padding tokens are documents of their own
    with no loss. `anchors` are row indices, ascending; where `anchor_valid` is false they are padding and count for nothing.
    `last` is the verifier's final hidden state after its final norm; `lse` the log-sum-exp of its logits over all W tokens.
    """

    input_ids: Int[Tensor, "B S"]
    positions: Int[Tensor, "B S"]
    doc_start: Int[Tensor, "B S"]
    loss_mask: Bool[Tensor, "B S"]
    aux: Float[Tensor, "B S L H"]
    last: Float[Tensor, "B S H"]
    lse: Float[Tensor, "B S"]
    anchors: Int[Tensor, "B A"]
    anchor_valid: Bool[Tensor, "B A"]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> DraftBatch:
        return replace(
            self,
            **{f.name: getattr(self, f.name).to(device, non_blocking=non_blocking) for f in fields(self)},
        )

    def pin_memory(self) -> DraftBatch:
        return replace(self, **{f.name: getattr(self, f.name).pin_memory() for f in fields(self)})


@dataclass
class Blocks:
    """Everything about a batch's blocks, in slot space `Q` for the backbone and proposal space `N` for the rest.

    `target_index` is the row index whose verifier distribution is p_i. `supervised` is true while every token up to the
    proposal lies in the anchor's document and in an unbroken run of loss-mask ones that begins right after the anchor.
    """

    slot_ids: Int[Tensor, "B A Q"]
    slot_positions: Int[Tensor, "B A Q"]
    prev_ids: Int[Tensor, "B A N"]
    labels: Int[Tensor, "B A N"]
    target_index: Int[Tensor, "B A N"]
    supervised: Bool[Tensor, "B A N"]


def anchor_candidates(loss_mask: Bool[Tensor, "B S"], doc_start: Int[Tensor, "B S"]) -> Bool[Tensor, "B S"]:
    """Where a block may start: the next token is supervised and in the same document, and some context precedes.

    The anchor itself may be the last prompt token, or the first answer token could never be trained.
    """
    candidate = torch.zeros_like(loss_mask)
    same_document = doc_start[:, 1:] == doc_start[:, :-1]
    index = torch.arange(loss_mask.shape[1] - 1, device=loss_mask.device)
    candidate[:, :-1] = loss_mask[:, 1:] & same_document & (index > doc_start[:, :-1])
    return candidate


def sample_anchors(
    loss_mask: Bool[Tensor, "B S"],
    doc_start: Int[Tensor, "B S"],
    num_anchors: int,
    generator: torch.Generator,
) -> tuple[Int[Tensor, "B A"], Bool[Tensor, "B A"]]:
    """`num_anchors` candidates a row, uniformly without replacement, ascending; padded where a row has fewer.

    Padding repeats the row's last drawn anchor (0 without any) so that sorted order, which attention relies on, holds.
    """
    candidate = anchor_candidates(loss_mask, doc_start).cpu().numpy()
    anchors = np.zeros((len(candidate), num_anchors), dtype=np.int64)
    valid = np.zeros((len(candidate), num_anchors), dtype=bool)
    for b in range(len(candidate)):
        valid[b, : draw_anchors(np.flatnonzero(candidate[b]), anchors[b], generator)] = True
    return torch.from_numpy(anchors).to(loss_mask.device), torch.from_numpy(valid).to(loss_mask.device)


def draw_anchors(places: np.ndarray, out: np.ndarray, generator: torch.Generator) -> int:
    """Fill `out` int64 [A] from one row's candidates `places` as `sample_anchors` says; returns how many are not padding."""
    if len(places) > len(out):
        drawn = np.zeros(len(places), dtype=bool)
        drawn[torch.randperm(len(places), generator=generator)[: len(out)].numpy()] = True
        places = places[drawn]
    count = len(places)
    out[:count] = places
    out[count:] = places[-1] if count else 0
    return count


def build_blocks(batch: DraftBatch, config: DraftConfig) -> Blocks:
    """Slots, previous tokens, labels and supervision of every anchor in the batch."""
    length = batch.input_ids.shape[1]
    anchors, count, width = batch.anchors, config.num_proposals, config.block_size
    device = anchors.device

    slot_ids = torch.full(
        (*anchors.shape, width), config.mask_token_id, dtype=batch.input_ids.dtype, device=device
    )
    slot_ids[..., 0] = batch.input_ids.gather(1, anchors)
    slot_positions = batch.positions.gather(1, anchors).unsqueeze(-1) + torch.arange(width, device=device)

    steps = torch.arange(count, device=device)
    target_index = (anchors.unsqueeze(-1) + steps).clamp(max=length - 1)  # [B, A, N]
    label_index = anchors.unsqueeze(-1) + steps + 1
    inside = label_index < length
    label_index = label_index.clamp(max=length - 1)
    start = batch.doc_start.gather(1, anchors).unsqueeze(-1)
    trained = _take(batch.loss_mask, label_index) & inside & (_take(batch.doc_start, label_index) == start)
    supervised = (trained & batch.anchor_valid.unsqueeze(-1)).cumprod(-1).bool()
    return Blocks(
        slot_ids=slot_ids,
        slot_positions=slot_positions,
        prev_ids=_take(batch.input_ids, target_index),
        labels=_take(batch.input_ids, label_index),
        target_index=target_index,
        supervised=supervised,
    )


def _take(values: Tensor, index: Int[Tensor, "B A N"]) -> Tensor:
    return values.gather(1, index.flatten(1)).view(index.shape)


def position_weights(
    num_proposals: int, decay_gamma: float | None, device: torch.device | str
) -> Float[Tensor, " N"]:
    """Weight of proposal i: exp(-(i-1) / decay_gamma), one everywhere when `decay_gamma` is None     (paper 3.1).

    `decay_gamma` is in slots: the weight falls by a factor e over that many proposals.
    """
    steps = torch.arange(num_proposals, dtype=torch.float32, device=device)
    if decay_gamma is None:
        return torch.ones_like(steps)
    return torch.exp(-steps / decay_gamma)


def visible(
    anchor: Int[Tensor, ...],
    slot: Int[Tensor, ...],
    start: Int[Tensor, ...],
    key: Int[Tensor, ...],
    window: int | None,
) -> Bool[Tensor, ...]:
    """Whether context token `key` (row index) is seen by slot `slot` of the block at row index `anchor`.

    Context runs from the document's start to the token before the anchor. With a window the query at position p = anchor +
    slot sees keys p-window+1 .. p only, as sliding layers do in serving.
    """
    seen = (key >= start) & (key < anchor)
    return seen if window is None else seen & (key > anchor + slot - window)


def visible_in_block(
    query_slot: Int[Tensor, ...], key_slot: Int[Tensor, ...], window: int | None
) -> Bool[Tensor, ...]:
    """Whether a block's slot sees another: all do on full layers; sliding layers are causal and windowed, as in serving."""
    if window is None:
        return torch.ones_like(query_slot - key_slot, dtype=torch.bool)
    return (key_slot <= query_slot) & (key_slot > query_slot - window)
