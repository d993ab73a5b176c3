"""Exact acceptance along cached text, without running the verifier again.

The cached response is a sample from the verifier, so a round that starts at an anchor keeps proposal i, given that it kept those
before, with probability

    r_i = min(1, q_i(x_i) / p_i(x_i))       draft sampled from q (temperature > 0)
    r_i = 1[x_i = argmax q_i]               greedy draft (any temperature; the only form at temperature 0)

where x_i is the text's token and q_i is conditioned on x_1 .. x_{i-1}: the only state in which slot i matters, because a round
reaches it only if its drafts so far equal the text. All anchors run in parallel in the training forward; `replay_visits`
weighs them by how often decoding would start a round there.

The first response token is the verifier's own (prefill emits it), so the first anchor is that token, and anchors run to the
last token but one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspark.acceptance import replay_visits
from dspark.blocks import DraftBatch
from dspark.losses import TINY, target_probabilities
from dspark.nn.draft import Draft

DRAFT_SAMPLINGS = ("greedy", "sampled")


@dataclass
class Replay:
    """One document's replay. Arrays are [A, N] over anchors (ascending row indices) and proposals, float64 or bool.

    `keep` is r_i, 0 where proposal i lies beyond the text (not `inside`) or was not proposed (`proposed`); `visit` is the
    expected number of rounds that start at each anchor, [A]. `confidence` is `p_accept_given_prefix`, nan without a head.
    """

    anchors: np.ndarray
    visit: np.ndarray
    keep: np.ndarray
    inside: np.ndarray
    proposed: np.ndarray
    alpha: np.ndarray
    confidence: np.ndarray
    entropy: np.ndarray
    max_prob: np.ndarray
    margin: np.ndarray

    @property
    def reached(self) -> np.ndarray:
        """Expected rounds that reach proposal i inside the text: visit * prod_{j<i} r_j, where i was proposed."""
        alive = np.cumprod(self.keep, axis=1)
        before = np.concatenate([np.ones_like(alive[:, :1]), alive[:, :-1]], axis=1)
        return self.visit[:, None] * before * (self.inside & self.proposed)

    @property
    def accepted(self) -> np.ndarray:
        """Expected rounds that keep proposal i."""
        return self.reached * self.keep

    @property
    def rounds(self) -> float:
        return float(self.visit.sum())


@torch.no_grad()
def replay_document(
    draft: Draft,
    batch: DraftBatch,
    *,
    temperature: float,
    draft_sampling: str,
    num_proposals: int,
    confidence_threshold: float | None,
    lse_at_temperature: Tensor | None = None,
    chunk_anchors: int = 64,
) -> Replay:
    """Replay one document, given as a batch of one row whose anchors are all its response tokens but the last.

    `temperature` is the one the text was drawn at; 0 means the text is the verifier's greedy text. `lse_at_temperature` [1, S]
    is needed for temperatures other than 0 and 1 (the cached `lse` is at 1). `confidence_threshold` cuts a block at the
    first proposal whose confidence is below it. Memory is bounded by `chunk_anchors`.

    Raises ValueError for a sampled draft at temperature 0, more proposals than trained, or a threshold without a head.
    """
    config = draft.config
    if draft_sampling not in DRAFT_SAMPLINGS:
        raise ValueError(f"draft_sampling is {draft_sampling!r}; expected one of {DRAFT_SAMPLINGS}.")
    if temperature == 0 and draft_sampling == "sampled":
        raise ValueError(
            "draft_sampling=sampled needs temperature > 0; greedy text is matched by greedy drafts."
        )
    if not 1 <= num_proposals <= config.num_proposals:
        raise ValueError(
            f"num_proposals is {num_proposals}; this draft was trained for 1 to {config.num_proposals}."
        )
    if confidence_threshold is not None and draft.confidence_head is None:
        raise ValueError("confidence_threshold was given, but this draft has no confidence head.")
    # A prompt's last token is an anchor in training; in decoding the verifier's prefill emits the token after it.
    anchors = batch.anchors[0]
    anchors = anchors[batch.loss_mask[0, anchors]]
    columns: dict[str, list[Tensor]] = {name: [] for name in _PROPOSAL_COLUMNS}
    for part in anchors.split(chunk_anchors):
        sub = DraftBatch(
            **{**vars(batch), "anchors": part.unsqueeze(0), "anchor_valid": part.unsqueeze(0) >= 0}
        )
        for name, values in _proposals(draft, sub, temperature, draft_sampling, lse_at_temperature).items():
            columns[name].append(values[:, :num_proposals].double().cpu())
    count = len(anchors)
    table = {
        name: (torch.cat(parts).numpy() if parts else np.zeros((0, num_proposals)))
        for name, parts in columns.items()
    }
    proposed = np.ones((count, num_proposals), dtype=bool)
    if confidence_threshold is not None:
        proposed = np.cumprod(table["confidence"] >= confidence_threshold, axis=1).astype(bool)
    inside = table.pop("inside").astype(bool)
    keep = table.pop("keep") * inside * proposed
    places = anchors.cpu().numpy()
    turns = np.split(
        np.arange(count), np.flatnonzero(np.diff(places) > 1) + 1
    )  # each response of a conversation
    visit = np.concatenate([replay_visits(keep[turn]) for turn in turns]) if count else np.zeros(0)
    return Replay(anchors=places, visit=visit, keep=keep, inside=inside, proposed=proposed, **table)


_PROPOSAL_COLUMNS = ("keep", "inside", "alpha", "confidence", "entropy", "max_prob", "margin")


def _proposals(
    draft: Draft,
    batch: DraftBatch,
    temperature: float,
    draft_sampling: str,
    lse_at_temperature: Tensor | None,
) -> dict[str, Tensor]:
    """Per-proposal quantities [A, N] of one row's anchors."""
    output = draft(batch)
    blocks = output.blocks
    labels = draft.vocab.target_to_draft(blocks.labels)[0]  # [A, N]; -1 cannot be proposed
    logits = draft.logits(output.hidden, output.features)[0]  # [A, N, V]
    scale = draft.config.logit_scale
    if temperature in (0.0, 1.0):
        lse = batch.lse[0]
    elif lse_at_temperature is None:
        raise ValueError(f"temperature {temperature} needs the verifier's log-sum-exp at that temperature.")
    else:
        lse, scale, logits = lse_at_temperature[0], scale / temperature, logits / temperature
    positions, inverse = torch.unique(blocks.target_index[0], return_inverse=True)
    states = batch.last[0, positions].to(output.hidden.dtype)
    target = target_probabilities(states, lse[positions], draft.lm_head, scale, "verifier_vocab")[
        inverse
    ]  # [A, N, V]

    q = logits.softmax(-1)
    alpha = torch.minimum(q, target).sum(-1).clamp_(max=1.0)
    top = q.topk(min(2, q.shape[-1]), dim=-1)
    known = labels >= 0
    safe = labels.clamp(min=0).unsqueeze(-1)
    if draft_sampling == "greedy":
        keep = known & (top.indices[..., 0] == labels)
    else:
        p_label = target.gather(-1, safe).squeeze(-1).clamp(min=TINY)
        keep = torch.where(known, (q.gather(-1, safe).squeeze(-1) / p_label).clamp(max=1.0), 0.0)
    confidence = torch.full_like(alpha, float("nan"))
    if draft.confidence_head is not None:
        confidence = draft.confidence_logits(output.hidden, output.previous).sigmoid()[0]
    return {
        "keep": keep,
        "inside": blocks.supervised[0],
        "alpha": alpha,
        "confidence": confidence,
        "entropy": -torch.xlogy(q, q).sum(-1),
        "max_prob": top.values[..., 0],
        "margin": top.values[..., 0] - top.values[..., -1],
    }
