"""Result tables: what replay and decoding measured, one row a slot and one row a round, and their summaries.

slots   one row for each proposal of each round: `reached` (expected rounds that reach it) and `accepted` (that keep it); decoding
        writes 0 or 1, replay visit-weighted probabilities. `r` is the conditional keep probability.
rounds  one row for each anchor: `visit` (expected rounds that start there), `proposed`, `accepted`, `emitted`, times in ms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

from dspark.acceptance import tau_from_counts
from dspark.blocks import DraftBatch
from dspark.data.batches import HeldOutDocuments
from dspark.data.features import DocumentInfo, FeatureCache
from dspark.nn.draft import Draft
from dspark.replay import Replay, replay_document

SLOT_COLUMNS = ["run_id", "dataset", "domain", "prompt_id", "doc_id", "anchor", "position", "reached", "accepted", "r", "alpha", "confidence", "p_prefix_survives", "entropy", "max_prob", "margin", "temperature", "draft_sampling", "mode"]
ROUND_COLUMNS = ["run_id", "dataset", "domain", "prompt_id", "doc_id", "anchor", "visit", "proposed", "accepted", "emitted", "draft_ms", "verify_ms", "temperature", "mode"]


def with_final_norm(batch: DraftBatch, *, weight: torch.Tensor, eps: float) -> DraftBatch:
    """The batch with `last` after the verifier's final norm, for caches that hold the state before it."""
    last = F.rms_norm(batch.last.float(), batch.last.shape[-1:], weight.float().to(batch.last.device), eps)
    return replace(batch, last=last.to(batch.last.dtype))


def replay_tables(
    draft: Draft,
    cache: FeatureCache,
    documents: Sequence[int],
    *,
    run_id: str,
    dataset: str,
    draft_sampling: str,
    num_proposals: int,
    confidence_threshold: float | None,
    normed: Callable[[DraftBatch], DraftBatch] = lambda batch: batch,
    lse_at_temperature: Callable[[DraftBatch, float], torch.Tensor | None] = lambda batch, temperature: None,
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Replay `documents` of a cache at the temperatures they were drawn at; (slots, rounds).

    `normed` applies the verifier's final norm where the cache holds un-normed states. Text drawn at temperature 0 can only
    be matched by greedy drafts; `draft_sampling="sampled"` therefore needs documents drawn at a positive temperature.
    """
    held_out = HeldOutDocuments(cache, documents, dtype=torch.bfloat16)
    slots, rounds = [], []
    for place in range(len(held_out)):
        batch, number = held_out[place]
        info = cache.info(number)
        batch = normed(batch)
        replay = replay_document(
            draft,
            batch,
            temperature=info.temperature,
            draft_sampling=draft_sampling,
            num_proposals=num_proposals,
            confidence_threshold=confidence_threshold,
            lse_at_temperature=lse_at_temperature(batch, info.temperature),
        )
        names = {"run_id": run_id, "dataset": dataset, "mode": "replay", **_document_columns(info)}
        slots.append(_slot_rows(replay, batch).assign(draft_sampling=draft_sampling, **names))
        rounds.append(_round_rows(replay, batch).assign(**names))
        progress(place + 1)
    return pd.concat(slots, ignore_index=True)[SLOT_COLUMNS], pd.concat(rounds, ignore_index=True)[
        ROUND_COLUMNS
    ]


def _document_columns(info: DocumentInfo) -> dict[str, object]:
    return {
        "domain": info.domain,
        "prompt_id": info.prompt_id,
        "doc_id": info.doc_id,
        "temperature": info.temperature,
    }


def _slot_rows(replay: Replay, batch: DraftBatch) -> pd.DataFrame:
    """Proposals that some round can reach, inside the text."""
    anchors, width = replay.keep.shape
    reached = replay.reached
    frame = pd.DataFrame(
        {
            "anchor": np.repeat(replay.anchors, width),
            "position": np.tile(np.arange(1, width + 1), anchors),
            "reached": reached.ravel(),
            "accepted": replay.accepted.ravel(),
            "r": replay.keep.ravel(),
            "alpha": replay.alpha.ravel(),
            "confidence": replay.confidence.ravel(),
            "p_prefix_survives": np.cumprod(replay.confidence, axis=1).ravel(),
            "entropy": replay.entropy.ravel(),
            "max_prob": replay.max_prob.ravel(),
            "margin": replay.margin.ravel(),
        }
    )
    return frame[(replay.inside & replay.proposed).ravel()]


def _round_rows(replay: Replay, batch: DraftBatch) -> pd.DataFrame:
    kept = np.cumprod(replay.keep, axis=1).sum(1)
    left = replay.inside.sum(1)
    full = np.cumprod(replay.keep, axis=1)[np.arange(len(left)), np.maximum(left - 1, 0)] * (
        left < replay.keep.shape[1]
    )
    return pd.DataFrame(
        {
            "anchor": replay.anchors,
            "visit": replay.visit,
            "proposed": replay.proposed.sum(1),
            "accepted": kept,
            "emitted": kept
            + 1.0
            - full,  # a round that keeps all that is left of the text emits no bonus token
            "draft_ms": np.nan,
            "verify_ms": np.nan,
        }
    )


def summarise(slots: pd.DataFrame, rounds: pd.DataFrame) -> dict[str, object]:
    """tau (bonus included), mean accepted, and per position conditional acceptance, survival and mean alpha."""
    weight = float(rounds["visit"].sum())
    accepted = float((rounds["visit"] * rounds["accepted"]).sum())
    by_position = slots.groupby("position")[["reached", "accepted"]].sum()
    overlap = (slots["alpha"] * slots["reached"]).groupby(slots["position"]).sum() / by_position["reached"]
    return {
        "tau": tau_from_counts(accepted, weight),
        "accepted": accepted / weight,
        "rounds": weight,
        "documents": int(rounds["doc_id"].nunique()),
        "conditional_acceptance": (by_position["accepted"] / by_position["reached"]).tolist(),
        "survival": (by_position["accepted"] / weight).tolist(),
        "alpha": overlap.tolist(),
    }
