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

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dspark.acceptance import replay_visits
from dspark.blocks import DraftBatch
from dspark.losses import TINY, target_probabilities
from dspark.nn.draft import Draft

DRAFT_SAMPLINGS = ("greedy", "sampled")

# fp32 draft logits that exist at once; a few passes over them should stay in a CPU's outer cache.
LOGIT_BYTES = {"cpu": 8 << 20, "cuda": 512 << 20}


@dataclass
class Replay:
    """One document's replay. Arrays are [A, N] over anchors (token indices in the document, ascending) and proposals.

    `keep` is r_i, 0 where proposal i lies beyond the text (not `inside`) or was not proposed (`proposed`); `visit` [A] is the
    expected number of rounds that start at each anchor, `left` [A] how many tokens of the response follow it. `alpha` is
    the overlap of p and q at the text's temperature (at 1 for greedy text); `confidence` is `p_accept_given_prefix`, nan
    without a head.
    """

    anchors: np.ndarray
    visit: np.ndarray
    left: np.ndarray
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

    @property
    def finished(self) -> np.ndarray:
        """Chance that a round at the anchor keeps every token that is left, so that it emits no bonus token; [A]."""
        alive = np.cumprod(self.keep, axis=1)
        ends = self.left <= self.keep.shape[1]
        return np.where(ends, alive[np.arange(len(alive)), np.minimum(self.left, alive.shape[1]) - 1], 0.0)


def replay_document(
    draft: Draft,
    batch: DraftBatch,
    *,
    temperature: float,
    draft_sampling: str,
    num_proposals: int,
    confidence_threshold: float | None,
    lse_at_temperature: Tensor | None = None,
    chunk_anchors: int = 256,
) -> Replay:
    """Replay the one document of a batch; arguments and errors of `replay_documents`."""
    return replay_documents(
        draft,
        batch,
        [int(batch.doc_start[0, 0])],
        temperature=temperature,
        draft_sampling=draft_sampling,
        num_proposals=num_proposals,
        confidence_threshold=confidence_threshold,
        lse_at_temperature=lse_at_temperature,
        chunk_anchors=chunk_anchors,
    )[0]


@torch.no_grad()
def replay_documents(
    draft: Draft,
    batch: DraftBatch,
    starts: Sequence[int],
    *,
    temperature: float,
    draft_sampling: str,
    num_proposals: int,
    confidence_threshold: float | None,
    lse_at_temperature: Tensor | None = None,
    chunk_anchors: int = 256,
) -> list[Replay]:
    """Replay documents packed into one row whose anchors are all their response tokens but the last; one `Replay` each.

    `starts` are the documents' first row indices. `temperature` is the one the texts were drawn at; 0 means the verifier's
    greedy text. `lse_at_temperature` [1, S] is needed for temperatures other than 0 and 1 (the cached `lse` is at 1).
    `confidence_threshold` cuts a block at the first proposal whose confidence is below it. Blocks always have the trained
    width; `num_proposals` uses the first of their proposals. Memory is bounded by `chunk_anchors`, the blocks of one forward.

    Raises ValueError, before any work, for a sampled draft at temperature 0, more proposals than trained, a threshold without a
    head, or a temperature that lacks its `lse_at_temperature`.
    """
    check_proposals(draft, draft_sampling, temperature, num_proposals, confidence_threshold)
    softness = temperature or 1.0  # greedy text is compared with distributions at 1
    lse = batch.lse if softness == 1.0 else lse_at_temperature
    if lse is None:
        raise ValueError(f"temperature {temperature} needs the verifier's log-sum-exp at that temperature.")
    # A prompt's last token is an anchor in training; in decoding the verifier's prefill emits the token after it.
    anchors = batch.anchors[0]
    anchors = anchors[batch.loss_mask[0, anchors]]
    columns: dict[str, list[Tensor]] = {name: [] for name in _PROPOSAL_COLUMNS}
    for at in range(0, len(anchors), chunk_anchors):  # never, for a text of one token
        part = anchors[at : at + chunk_anchors]
        blocks = replace(batch, anchors=part.unsqueeze(0), anchor_valid=part.unsqueeze(0) >= 0)
        found = _proposals(draft, blocks, draft_sampling, lse[0], softness)
        for name, values in found.items():
            columns[name].append(values[:, :num_proposals].double())
    count = len(anchors)
    # One transfer for all: each waits for the device, and on a busy one for other processes' work too.
    empty = anchors.new_zeros((0, num_proposals), dtype=torch.float64)
    joined = torch.stack([torch.cat([empty, *parts]) for parts in columns.values()])
    table = dict(zip(columns, joined.cpu().numpy(), strict=True))
    proposed = np.ones((count, num_proposals), dtype=bool)
    if confidence_threshold is not None:
        proposed = np.cumprod(table["confidence"] >= confidence_threshold, axis=1).astype(bool)
    inside = table.pop("inside").astype(bool)
    keep = table.pop("keep") * inside * proposed
    places = anchors.cpu().numpy()
    # Anchors of one response are consecutive; between two responses, or documents, there is always a gap.
    first = np.concatenate([[0], np.flatnonzero(np.diff(places) > 1) + 1, [count]]) if count else np.zeros(1)
    visit, left = np.zeros(count), np.zeros(count, dtype=np.int64)
    for begin, end in zip(first[:-1].astype(int), first[1:].astype(int), strict=True):
        visit[begin:end] = replay_visits(keep[begin:end])
        left[begin:end] = np.arange(end - begin, 0, -1)
    owner = batch.doc_start[0, anchors].cpu().numpy()
    replays = []
    for start in starts:
        mine = owner == start
        replays.append(
            Replay(
                anchors=places[mine] - start,
                visit=visit[mine],
                left=left[mine],
                keep=keep[mine],
                inside=inside[mine],
                proposed=proposed[mine],
                **{name: values[mine] for name, values in table.items()},
            )
        )
    return replays


def check_proposals(
    draft: Draft,
    draft_sampling: str,
    temperature: float,
    num_proposals: int,
    confidence_threshold: float | None,
) -> None:
    """Raise ValueError for a way of drafting that this draft, or this temperature, does not allow."""
    if draft_sampling not in DRAFT_SAMPLINGS:
        raise ValueError(f"draft_sampling is {draft_sampling!r}; expected one of {DRAFT_SAMPLINGS}.")
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}; expected 0 (greedy) or a positive number.")
    if temperature == 0 and draft_sampling == "sampled":
        raise ValueError(
            "draft_sampling=sampled needs temperature > 0; greedy text is matched by greedy drafts."
        )
    if not 1 <= num_proposals <= draft.config.num_proposals:
        raise ValueError(
            f"num_proposals is {num_proposals}; this draft was trained for 1 to {draft.config.num_proposals}."
        )
    if confidence_threshold is not None and draft.confidence_head is None:
        raise ValueError("confidence_threshold was given, but this draft has no confidence head.")


_PROPOSAL_COLUMNS = ("keep", "inside", "alpha", "confidence", "entropy", "max_prob", "margin")


def _proposals(
    draft: Draft,
    batch: DraftBatch,
    draft_sampling: str,
    lse: Tensor,
    softness: float,
) -> dict[str, Tensor]:
    """Per-proposal quantities [A, N] of one row's anchors; `lse` [S] is the verifier's at temperature `softness` > 0."""
    # Every document has its own shape, and FlexAttention would compile for each.
    output = draft(batch, attention_backend="grouped")
    blocks = output.blocks
    labels = draft.to_draft_ids(blocks.labels)[0]  # [A, N]; -1 cannot be proposed
    anchors, width = labels.shape
    budget = LOGIT_BYTES.get(labels.device.type, LOGIT_BYTES["cuda"])
    step = max(1, budget // (4 * width * draft.config.draft_vocab_size))
    parts: list[dict[str, Tensor]] = []
    for at in range(0, anchors, step):
        span = slice(at, at + step)
        features = None if output.features is None else output.features[0, span]
        logits = draft.logits(output.hidden[0, span], features)  # [a, N, V]
        positions, inverse = torch.unique(blocks.target_index[0, span], return_inverse=True)
        states = batch.last[0, positions].to(output.hidden.dtype)
        scale = draft.config.logit_scale / softness
        target = target_probabilities(states, lse[positions], draft.lm_head, scale, "verifier_vocab")
        parts.append(
            _compare(logits / softness if softness != 1.0 else logits, target, inverse, labels[span])
        )
    columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    certain = columns.pop("top") == labels
    certain &= labels >= 0
    ratio = columns.pop("ratio")
    columns["keep"] = certain if draft_sampling == "greedy" else ratio
    columns["inside"] = blocks.supervised[0]
    columns["confidence"] = torch.full_like(ratio, float("nan"))
    if draft.confidence_head is not None:
        columns["confidence"] = draft.confidence_logits(output.hidden, output.previous).sigmoid()[0]
    return columns


def _compare(logits: Tensor, target: Tensor, row: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Draft logits [a, N, V] against target probabilities [P, V], proposal (a, i) against `target[row[a, i]]`."""
    top = logits.topk(min(2, logits.shape[-1]), dim=-1)
    norm = logits.logsumexp(-1)
    q = (logits - norm.unsqueeze(-1)).exp_()
    best, second = (top.values[..., i] - norm for i in (0, -1))
    p = target[row]
    known = labels >= 0
    index = labels.clamp(min=0).unsqueeze(-1)
    ratio = q.gather(-1, index).squeeze(-1) / p.gather(-1, index).squeeze(-1).clamp(min=TINY)
    entropy = norm - logits.mul_(q).sum(-1)
    return {
        "top": top.indices[..., 0],
        "ratio": torch.where(known, ratio.clamp(max=1.0), 0.0),
        "alpha": torch.minimum(q, p, out=p).sum(-1).clamp_(max=1.0),
        "entropy": entropy,
        "max_prob": best.exp(),
        "margin": best.exp() - second.exp(),
    }
