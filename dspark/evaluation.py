"""Result tables: what replay and decoding measured, one row a slot and one row a round, and their summaries.

slots   one row for each proposal of each round: `reached` (expected rounds that reach it) and `accepted` (that keep it); decoding
        writes 0 or 1, replay visit-weighted probabilities. `r` is the conditional keep probability.
rounds  one row for each anchor: `visit` (expected rounds that start there), `proposed`, `accepted`, `emitted`, times in ms.
        Decoding also writes one row a response with `visit` 0 and `accepted` 0: the prefill, whose time is in `verify_ms`.

`anchor` is a token index in the document. Behind a round's first rejection the draft's own block and the text part ways: there
replay's values are conditioned on the text, decoding's on the block, and neither weighs anything (`reached` is 0 in that round).
`temperature`, `top_k` and `top_p` are the verifier's; 0 and 1 mean no cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.acceptance import tau_from_counts
from dspark.blocks import DraftBatch
from dspark.data.batches import all_anchors, collate_documents, pack_rows
from dspark.data.features import DocumentInfo, Features, target_lse
from dspark.decode import DecodeSettings, Round
from dspark.nn.draft import Draft
from dspark.replay import Replay, check_proposals, replay_documents

_ORIGIN = ["run_id", "dataset", "domain", "prompt_id", "doc_id"]
_SETTINGS = ["temperature", "top_k", "top_p", "draft_sampling", "mode"]
_MEASURED = ["position", "reached", "accepted", "r", "alpha", "confidence", "p_prefix_survives"]
SLOT_COLUMNS = [*_ORIGIN, "anchor", *_MEASURED, "entropy", "max_prob", "margin", *_SETTINGS]
ROUND_COLUMNS = [
    *_ORIGIN,
    *["anchor", "visit", "proposed", "accepted", "emitted", "draft_ms", "verify_ms"],
    *_SETTINGS,
]
ROW_TOKENS = 2048  # documents packed into one replay forward


class CachedTargets:
    """What replay needs of a cache beside its documents: the final norm, and log-sum-exps at other temperatures."""

    def __init__(self, cache: Features) -> None:
        self.manifest = cache.manifest
        self.weights = cache.verifier_weights()

    def normed(self, batch: DraftBatch) -> DraftBatch:
        """The batch with `last` after the verifier's final norm, whichever form the cache holds."""
        if self.manifest.last == "post_norm":
            return batch
        last, weight = batch.last.float(), self.weights["norm.weight"].float()
        last = F.rms_norm(last, last.shape[-1:], weight.to(last.device), self.manifest.verifier.rms_norm_eps)
        return replace(batch, last=last.to(batch.last.dtype))

    def lse(self, batch: DraftBatch, temperature: float) -> Tensor | None:
        """Log-sum-exp over the whole verifier vocabulary of logits / temperature, fp32 [B, S], at the response tokens.

        `batch.last` is post-norm. None where the cached values serve (temperature 0 and 1); elsewhere in the row they are
        the cached ones, which no proposal inside a text reads.
        """
        if temperature in (0.0, 1.0):
            return None
        verifier = replace(
            self.manifest.verifier, logit_scale=self.manifest.verifier.logit_scale / temperature
        )
        manifest = replace(self.manifest, last="post_norm", verifier=verifier)
        lse, where = batch.lse.clone(), batch.loss_mask
        lse[where] = target_lse(batch.last[where].cpu(), self.weights, manifest).to(lse.device)
        return lse


def replay_tables(
    draft: Draft,
    cache: Features,
    documents: Sequence[int],
    *,
    run_id: str,
    dataset: str,
    draft_sampling: str,
    num_proposals: int,
    confidence_threshold: float | None,
    progress: Callable[[int], None] = lambda documents: None,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Replay `documents` of a cache at the temperatures they were drawn at; (slots, rounds).

    Documents of one temperature are packed into rows, which costs less than one forward each. `progress` receives how many
    documents each row finished. Raises ValueError as `replay_documents` does, before any work.
    """
    temperatures = sorted({cache.info(d).temperature for d in documents})
    for temperature in temperatures:
        check_proposals(draft, draft_sampling, temperature, num_proposals, confidence_threshold)
    targets, device = CachedTargets(cache), draft.kept_ids.device
    lengths = {d: cache.info(d).tokens for d in documents}
    rows: list[tuple[float, list[int]]] = []
    for temperature in temperatures:
        chosen = [d for d in documents if cache.info(d).temperature == temperature]
        room = max(ROW_TOKENS, max(lengths[d] for d in chosen))
        rows += [(temperature, row) for row in pack_rows(lengths, chosen, room)]

    def replay_row(temperature: float, row: Sequence[int], batch: DraftBatch) -> list[Replay]:
        return replay_documents(
            draft,
            batch,
            np.cumsum([0, *(lengths[d] for d in row[:-1])]).tolist(),
            temperature=temperature,
            draft_sampling=draft_sampling,
            num_proposals=num_proposals,
            confidence_threshold=confidence_threshold,
            lse_at_temperature=targets.lse(batch, temperature),
        )

    slots, rounds = [], []

    def take(row: Sequence[int], replays: Sequence[Replay]) -> None:
        for d, replay in zip(row, replays, strict=True):
            names = {
                "run_id": run_id,
                "dataset": dataset,
                "mode": "replay",
                "top_k": 0,
                "top_p": 1.0,
                "draft_sampling": draft_sampling,
                **document_columns(cache.info(d)),
            }
            slots.append(_slot_rows(replay) | names)
            rounds.append(_round_rows(replay) | names)
        progress(len(row))

    with row_workers(len(rows), device) as (pool, ahead):
        waiting: deque = deque()
        for temperature, row in rows:
            tensors = collate_documents([cache[d] for d in row], sum(lengths[d] for d in row), torch.bfloat16)
            anchors, valid = all_anchors(tensors)
            batch = targets.normed(DraftBatch(**tensors, anchors=anchors, anchor_valid=valid).to(device))
            waiting.append((row, pool.submit(replay_row, temperature, row, batch)))
            if len(waiting) > ahead:
                done, future = waiting.popleft()
                take(done, future.result())
        for done, future in waiting:
            take(done, future.result())
    if not slots:
        raise ValueError(f"no documents to replay in {cache.path}.")
    return _stacked(slots, SLOT_COLUMNS), _stacked(rounds, ROUND_COLUMNS)


@contextmanager
def row_workers(rows: int, device: torch.device) -> Iterator[tuple[ThreadPoolExecutor, int]]:
    """A pool for the replay of so many rows, and how many may wait in it.

    On a CPU its threads share torch's between them, for most sets one each: a row's operations are short, and between two of them
    torch's threads wait for each other without sleeping. Beside another such process, all would wait for threads that do not run.
    """
    whole = torch.get_num_threads()
    count = max(1, min(whole, rows)) if device.type == "cpu" else 1
    share = whole // count
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(share,)) as pool:
            yield pool, count
    finally:
        torch.set_num_threads(whole)  # threads to come take the last number set, whoever set it


def _stacked(parts: Sequence[Mapping[str, object]], columns: Sequence[str]) -> pd.DataFrame:
    """One frame from documents' columns; values that are one for the whole document are repeated."""
    sizes = [len(part["anchor"]) for part in parts]
    frame = {}
    for name in columns:
        if isinstance(parts[0][name], np.ndarray):
            frame[name] = np.concatenate([part[name] for part in parts])
        else:
            frame[name] = np.repeat([part[name] for part in parts], sizes)
    return pd.DataFrame(frame)


def decode_tables(
    rounds: Iterable[Round],
    origins: Mapping[int, Mapping[str, object]],
    *,
    run_id: str,
    dataset: str,
    settings: DecodeSettings,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The same two tables from decoding. `origins[request]` holds domain, prompt_id, doc_id and temperature of a request.

    Raises ValueError if no round was decoded.
    """
    slots: dict[str, list[object]] = {name: [] for name in SLOT_COLUMNS}
    table: dict[str, list[object]] = {name: [] for name in ROUND_COLUMNS}
    for step in rounds:
        origin = origins[step.request]
        names = {
            "run_id": run_id,
            "dataset": dataset,
            "mode": "decode",
            "top_k": settings.top_k,
            "top_p": settings.top_p,
            "draft_sampling": settings.draft_sampling if origin["temperature"] else "greedy",
            **origin,
        }
        row = {
            "anchor": step.anchor,
            "visit": 0.0 if step.prefill else 1.0,
            "proposed": step.proposed,
            "accepted": float(step.accepted),
            "emitted": float(len(step.tokens)),
            "draft_ms": step.draft_ms,
            "verify_ms": step.verify_ms,
        }
        for name, column in table.items():
            column.append(row[name] if name in row else names[name])
        if step.slots:
            values = {"anchor": [step.anchor] * len(step.slots["position"]), **step.slots}
            for name, column in slots.items():
                column.extend(values[name] if name in values else [names[name]] * len(values["anchor"]))
    if not any(table["visit"]):
        raise ValueError("nothing was decoded: no request needed a verification round.")
    rounds_table = pd.DataFrame(table)
    return (pd.DataFrame(slots) if slots["position"] else counted_slots(rounds_table)), rounds_table


def counted_slots(rounds: pd.DataFrame) -> pd.DataFrame:
    """Slot rows of rounds decoded without diagnostics: which proposals were reached and kept, and nothing about the draft.

    A round reaches its first rejected proposal, or its last, or stops where the text ends.
    """
    walked = rounds[(rounds["visit"] > 0) & (rounds["proposed"] > 0)]
    kept = walked["accepted"].astype(int)
    reached = np.minimum(walked["proposed"], kept + (walked["emitted"] > kept))
    frame = walked.loc[walked.index.repeat(reached)].copy()
    frame["position"] = frame.groupby(level=0).cumcount() + 1
    frame["reached"] = 1.0
    frame["accepted"] = (frame["position"] <= kept.repeat(reached).to_numpy()).astype(float)
    return frame.reset_index(drop=True).reindex(columns=list(SLOT_COLUMNS))


def document_columns(info: DocumentInfo) -> dict[str, object]:
    return {
        "domain": info.domain,
        "prompt_id": info.prompt_id,
        "doc_id": info.doc_id,
        "temperature": info.temperature,
    }


def _slot_rows(replay: Replay) -> dict[str, np.ndarray]:
    """Proposals that some round could reach, inside the text."""
    anchors, width = replay.keep.shape
    columns = {
        "anchor": np.repeat(replay.anchors, width),
        "position": np.tile(np.arange(1, width + 1), anchors),
        "reached": replay.reached.ravel(),
        "accepted": replay.accepted.ravel(),
        "r": replay.keep.ravel(),
        "alpha": replay.alpha.ravel(),
        "confidence": replay.confidence.ravel(),
        "p_prefix_survives": np.cumprod(replay.confidence, axis=1).ravel(),
        "entropy": replay.entropy.ravel(),
        "max_prob": replay.max_prob.ravel(),
        "margin": replay.margin.ravel(),
    }
    shown = (replay.inside & replay.proposed).ravel()
    return {name: values[shown] for name, values in columns.items()}


def _round_rows(replay: Replay) -> dict[str, np.ndarray]:
    kept = np.cumprod(replay.keep, axis=1).sum(1)
    return {
        "anchor": replay.anchors,
        "visit": replay.visit,
        "proposed": replay.proposed.sum(1),
        "accepted": kept,
        # A round that keeps all that is left of the text emits no bonus token.
        "emitted": kept + 1.0 - replay.finished,
        "draft_ms": np.full(len(kept), np.nan),
        "verify_ms": np.full(len(kept), np.nan),
    }


def summarise(slots: pd.DataFrame, rounds: pd.DataFrame) -> dict[str, object]:
    """tau (bonus included), mean accepted, and per position conditional acceptance, survival and mean alpha.

    A position that no round reached has nan. Raises ValueError without a single round.
    """
    weight = float(rounds["visit"].sum())
    accepted = float((rounds["visit"] * rounds["accepted"]).sum())
    by_position = slots.groupby("position")[["reached", "accepted"]].sum()
    overlap = (slots["alpha"] * slots["reached"]).groupby(slots["position"]).sum() / by_position["reached"]
    return {
        "tau": tau_from_counts(accepted, weight),
        "accepted": accepted / weight,
        "rounds": weight,
        "documents": int(rounds["doc_id"].nunique()),
        "prompts": int(rounds["prompt_id"].nunique()),
        "includes_bonus_token": True,
        "conditional_acceptance": (by_position["accepted"] / by_position["reached"]).tolist(),
        "survival": (by_position["accepted"] / weight).tolist(),
        "alpha": overlap.tolist(),
    }
