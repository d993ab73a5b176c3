"""Store a run's draft in few bits: `python -m experiments.pack run=runs/<id> out=packed/<name>`.

Writes `<out>.safetensors` and `<out>.json`, the form of the draft inside the package (`dspark.pretrained`). The last line gives
bytes, and tau by replay before and after.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch
from omegaconf import DictConfig
from rich.console import Console

from dspark.blocks import DraftBatch, anchor_candidates, sample_anchors
from dspark.data.batches import collate_documents, pack_rows
from dspark.data.features import Features
from dspark.evaluation import ROW_TOKENS, replay_tables, summarise
from dspark.nn.draft import Draft
from dspark.pretrained import pack, read_packed, record, rounded_codes
from dspark.runs import Run, load_draft
from experiments.cli import command
from experiments.evaluate import draft_for_cache, spread
from experiments.export import open_cache, origin_of

console = Console()


@command("pack")
def main(cfg: DictConfig) -> None:
    pack_run(cfg)


def pack_run(cfg: DictConfig) -> int:
    """The whole command; returns the bytes of both files."""
    run, stem = Run.open(cfg.run), Path(cfg.out)
    taken = [p for p in (stem.with_suffix(".safetensors"), stem.with_suffix(".json")) if p.exists()]
    if taken:
        raise ValueError(f"{taken[0]} exists; name other files with out=, or remove it first.")
    cache = open_cache(cfg, run)
    if cache is None:
        raise ValueError(
            f"run {run.path.name} was trained on no cache that is still there; name one of its verifier with cache=<folder>."
        )
    origin = origin_of(run, cache, load_draft(run.checkpoint("best"), attention_backend="grouped")[2])
    draft, features = draft_for_cache(run, cache, "cpu")
    batches = sample_batches(cfg, features) if cfg.documents else []
    measured = {"before": measure(cfg, run, draft, features)} if cfg.test else {}
    codes = None
    if batches:
        blocks = sum(batch.anchors.numel() for batch in batches)
        console.print(f"rounding along {blocks} blocks of {cfg.documents} texts", highlight=False)
        codes = rounded_codes(draft, batches)
    stem.parent.mkdir(parents=True, exist_ok=True)
    size = pack(run.path, stem, origin=asdict(origin), measured=measured, codes=codes)
    taus = ""
    if cfg.test:
        draft.load_state_dict(read_packed(stem)[1], strict=False)
        measured["after"] = measure(cfg, run, draft, features)
        size = record(stem, measured)
        taus = f"; tau {measured['before']['tau']:.3f} before, {measured['after']['tau']:.3f} after"
    line = f"[bold]{size:,} bytes[/bold] in {stem}.safetensors and {stem}.json{taus}"
    console.print(line, highlight=False, soft_wrap=True)
    return size


def sample_batches(cfg: DictConfig, features: Features) -> list[DraftBatch]:
    """Packed rows of the split's texts, each with some of its possible anchors."""
    documents = features.select(split=cfg.split)
    if not documents:
        raise ValueError(
            f"{features.path} has no documents of split {cfg.split!r}; it has {features.manifest.splits}."
        )
    documents = spread(documents, int(cfg.documents))
    generator = torch.Generator().manual_seed(int(cfg.seed))
    lengths = {d: features.info(d).tokens for d in documents}
    batches = []
    for row in pack_rows(lengths, documents, max(ROW_TOKENS, *lengths.values())):
        tensors = collate_documents([features[d] for d in row], sum(lengths[d] for d in row), torch.bfloat16)
        mask, starts = tensors["loss_mask"], tensors["doc_start"]
        possible = int(anchor_candidates(mask, starts).sum())
        if possible:
            wanted = min(int(cfg.anchors) * len(row), possible)
            anchors, valid = sample_anchors(mask, starts, wanted, generator)
            batches.append(DraftBatch(**tensors, anchors=anchors, anchor_valid=valid))
    return batches


def measure(cfg: DictConfig, run: Run, draft: Draft, features: Features) -> dict[str, object]:
    """Replay of the test split's greedy answers with the draft as it is."""
    documents = spread(features.greedy_first(cfg.test), cfg.test_documents)
    if not documents:
        raise ValueError(
            f"{features.path} has no documents of split {cfg.test!r}; set test=null, or name another split."
        )
    slots, rounds = replay_tables(
        draft,
        features,
        documents,
        run_id=run.path.name,
        dataset=str(cfg.test),
        draft_sampling="greedy",
        num_proposals=draft.config.num_proposals,
        confidence_threshold=None,
    )
    found = summarise(slots, rounds)
    return {"split": str(cfg.test), **{name: found[name] for name in ("tau", "prompts", "documents")}}


if __name__ == "__main__":
    main()
