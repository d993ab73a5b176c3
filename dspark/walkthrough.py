"""One block taken apart, and what the sequential head contributes: records with readable tokens, for notebooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from dspark.blocks import DraftBatch, build_blocks
from dspark.losses import target_probabilities
from dspark.nn.draft import ContextCache, Draft

Decode = Callable[[int], str]


@torch.no_grad()
def walk_block(
    draft: Draft, batch: DraftBatch, anchor: int, decode: Decode, *, top: int, context: int
) -> dict[str, Any]:
    """One greedy round of a single-document batch from `anchor`, step by step.

    Proposals are drafted one after another, each on the draft's own choices, beside what the same slots say without the head.
    The verifier's probabilities are those of the cached text, so they are known up to the first rejected proposal.
    """
    config, ids = draft.config, batch.input_ids[0]
    cache = ContextCache(config.num_layers)
    draft.extend(cache, batch.aux[:, :anchor], torch.arange(anchor).unsqueeze(0), torch.tensor([anchor]))
    hidden = draft.draft_block(cache, ids[anchor : anchor + 1], config.block_size)[0]  # [N, H]
    head, previous_id = draft.markov_head, ids[anchor]
    state = None if head is None else head.initial_state(hidden[0])
    proposals: list[dict[str, Any]] = []
    alive, after_anchor = True, len(ids) - 1 - anchor
    for i in range(min(config.num_proposals, after_anchor)):
        previous = draft.previous_embedding(previous_id)
        base = final = draft.logits(hidden[i], None)
        if head is not None:
            features, state = head.step(previous, hidden[i], state)
            final = base + draft.bias(features, hidden.dtype)
        chosen = int(final.argmax())
        token, text = int(draft.kept_ids[chosen]), int(ids[anchor + i + 1])
        row: dict[str, Any] = {
            "position": i + 1,
            "slot": i + config.first_slot,
            "previous": decode(int(previous_id)),
            "base": _top(base.softmax(-1), draft.kept_ids, decode, top),
            "final": _top(final.softmax(-1), draft.kept_ids, decode, top),
            "draft": decode(token),
            "base_draft": decode(int(draft.kept_ids[int(base.argmax())])),
            "reached": alive,
        }
        if draft.confidence_head is not None:
            row["confidence"] = float(draft.confidence_logits(hidden[i], previous).sigmoid())
        if alive:
            at = anchor + i
            p = target_probabilities(
                batch.last[0, at : at + 1].to(hidden.dtype),
                batch.lse[0, at : at + 1],
                draft.lm_head,
                config.logit_scale,
                "verifier_vocab",
            )[0]
            row["verifier"] = _top(p, draft.kept_ids, decode, top)
            row["text"], row["kept"] = decode(text), token == text
            row["alpha"] = float(torch.minimum(p, final.softmax(-1)).sum())
            alive = token == text
        proposals.append(row)
        previous_id = draft.kept_ids[chosen]
    kept = sum(bool(row.get("kept")) for row in proposals)
    end = anchor + kept + 1
    return {
        "anchor": anchor,
        "anchor_token": decode(int(ids[anchor])),
        "context": [decode(int(t)) for t in ids[max(0, anchor - context) : anchor]],
        "context_tokens": anchor,
        "layout": "anchor-first" if config.sample_from_anchor else "fill-in",
        "slots": [
            {
                "slot": k,
                "position": anchor + k,
                "input": decode(int(ids[anchor]) if k == 0 else config.mask_token_id),
            }
            for k in range(config.block_size)
        ],
        "proposals": proposals,
        "kept": kept,
        "bonus": decode(int(ids[end])) if end < len(ids) else None,
    }


def walk_table(walk: dict[str, Any], kind: str) -> pd.DataFrame:
    """Candidates of one `kind` (base, final or verifier) as rows: position, rank, token, probability, chosen, kept.

    `chosen` marks what the draft would propose, or for the verifier the text's token; `kept` whether that is the text's token,
    None behind the first rejection.
    """
    choices = {"base": "base_draft", "final": "draft", "verifier": "text"}
    rows = []
    for proposal in walk["proposals"]:
        choice, text = proposal.get(choices[kind]), proposal.get("text")
        kept = None if text is None else choice == text
        for rank, (token, probability) in enumerate(proposal.get(kind, []), start=1):
            rows.append((proposal["position"], rank, token, probability, token == choice, kept))
    return pd.DataFrame(rows, columns=["position", "rank", "token", "probability", "chosen", "kept"])


@torch.no_grad()
def head_changes(draft: Draft, batches: Sequence[DraftBatch], decode: Decode) -> pd.DataFrame:
    """Where the sequential head turned a slot's arg max, teacher-forced over all anchors, counted.

    `kind` is `repaired` (the base choice was wrong, the final one is the text's token) or `broken` (the reverse). Columns:
    kind, position, previous, base, final, count. Raises ValueError for a draft without a head.
    """
    if draft.markov_head is None:
        raise ValueError("this draft has no sequential head, so there is nothing it could have changed.")
    rows = []
    for batch in batches:
        for part in batch.anchors[0].split(256):
            chunk = DraftBatch(**{**vars(batch), "anchors": part[None], "anchor_valid": part[None] >= 0})
            output = draft(chunk)
            blocks = build_blocks(chunk, draft.config)
            base_logits = draft.logits(output.hidden[0], None)
            base = draft.kept_ids[base_logits.argmax(-1)]
            bias = draft.bias(output.features[0], output.hidden.dtype)
            final = draft.kept_ids[base_logits.add_(bias).argmax(-1)]
            text, valid = blocks.labels[0], blocks.supervised[0]
            for kind, hit in (
                ("repaired", (base != text) & (final == text)),
                ("broken", (base == text) & (final != text)),
            ):
                for a, i in (hit & valid).nonzero().tolist():
                    rows.append(
                        (kind, i + 1, int(blocks.prev_ids[0, a, i]), int(base[a, i]), int(final[a, i]))
                    )
    frame = pd.DataFrame(rows, columns=["kind", "position", "previous", "base", "final"])
    counts = frame.value_counts().rename("count").reset_index()
    names = {
        token: decode(token) for token in pd.unique(counts[["previous", "base", "final"]].to_numpy().ravel())
    }
    return counts.assign(**{c: counts[c].map(names) for c in ("previous", "base", "final")})


@torch.no_grad()
def transitions(draft: Draft, previous: Sequence[int], decode: Decode, *, top: int) -> pd.DataFrame:
    """What a Markov head adds after each previous token beyond what it adds on average, at the tokens it favours most.

    Softmax ignores what a row shares, and a column's mean is no transition, so both are taken off: the bias less its mean over
    the draft vocabulary, less the mean of that over `previous`. Columns: previous, next, bias (logits).

    Raises ValueError for heads whose bias depends on more than the previous token.
    """
    if draft.config.head != "vanilla":
        raise ValueError(f"head {draft.config.head!r} has no fixed transition table; only `vanilla` has one.")
    ids = torch.tensor(list(previous), device=draft.kept_ids.device)
    bias = draft.bias(draft.markov_head.markov_w1(ids), torch.float32)  # [P, V]
    bias = bias - bias.mean(1, keepdim=True)
    bias = bias - bias.mean(0, keepdim=True)
    favoured = list(dict.fromkeys(bias.topk(top, dim=-1).indices.flatten().tolist()))
    return pd.DataFrame(
        [
            (decode(int(p)), decode(int(draft.kept_ids[v])), float(bias[row, v]))
            for row, p in enumerate(previous)
            for v in favoured
        ],
        columns=["previous", "next", "bias"],
    )


def _top(p: Tensor, kept_ids: Tensor, decode: Decode, count: int) -> list[tuple[str, float]]:
    values, index = p.topk(min(count, len(p)))
    return [
        (decode(int(kept_ids[i])), round(float(v), 4)) for v, i in zip(values, index.tolist(), strict=True)
    ]
