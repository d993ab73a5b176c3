"""Measure acceptance: `python -m experiments.evaluate run=runs/<id> ...`."""

from __future__ import annotations

import json

import torch

from dspark.data.features import FeatureCache
from dspark.evaluation import replay_tables, summarise
from dspark.nn.draft import Draft
from dspark.runs import Run, load_draft, write_table, write_text


def replay_split(run: Run, cache: FeatureCache, *, split: str) -> dict[str, object]:
    """Replay one split of a cache with a run's best draft: greedy drafts, every trained proposal.

    Writes `<run>/eval/<verifier>-<split>/` and returns the summary. Raises ValueError for a cache of another verifier, or a
    split without documents.
    """
    draft = load_for_replay(run, cache)
    documents = cache.select(split=split)
    if not documents:
        raise ValueError(f"{cache.path} has no documents of split {split!r}; it has {cache.manifest.splits}.")
    dataset = f"{cache.manifest.verifier.name}-{split}"
    slots, rounds = replay_tables(
        draft,
        cache,
        documents,
        run_id=run.path.name,
        dataset=dataset,
        draft_sampling="greedy",
        num_proposals=draft.config.num_proposals,
        confidence_threshold=None,
    )
    summary = summarise(slots, rounds)
    folder = run.eval_folder(dataset)
    write_table(slots, folder / "slots.parquet")
    write_table(rounds, folder / "rounds.parquet")
    write_text(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary


def load_for_replay(run: Run, cache: FeatureCache) -> Draft:
    """A run's best draft in fp32 with the cache's embeddings, after checking that the two belong together."""
    draft, contract, _ = load_draft(run.checkpoint("best"), attention_backend="auto")
    contract.check(cache.contract(), mine=f"run {run.path.name}", theirs=f"cache {cache.path}")
    draft.set_embedding(cache.verifier_weights()["embed_tokens.weight"], torch.float32)
    return draft.eval()
