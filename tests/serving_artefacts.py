"""A tiny verifier's cache and a run whose draft belongs to it, for tests of what leaves and enters the repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml

from dspark.config import Contract
from dspark.data.features import Document, DocumentInfo, FeatureCache, FeatureWriter, Manifest, document_id
from dspark.data.synthetic import tiny_verifier
from dspark.nn.draft import Draft
from dspark.runs import Run, RunManifest, save_draft
from dspark.verifier import Verifier
from dspark.vocab import VocabMap
from tests.builders import draft_config

TAPS = (1, 3, 4)
MASK = 6


def verifier_of_tests(**changes: Any) -> Verifier:
    return tiny_verifier(**{"num_layers": 6, "rope_theta": 10_000.0, **changes})


def write_cache(path: Path, verifier: Verifier, *, documents: int = 2, tokens: int = 40) -> FeatureCache:
    manifest = Manifest(
        verifier=verifier.info,
        aux_layer_ids=TAPS,
        mask_token_id=MASK,
        last="post_norm",
        dataset="tiny",
        responses_by=verifier.info.name,
        generation={},
        capture={},
        command="test",
    )
    writer = FeatureWriter(path, manifest, shard_bytes=1 << 30)
    writer.write_verifier(verifier)
    generator = torch.Generator().manual_seed(0)
    for d in range(documents):
        ids = torch.randint(8, verifier.info.tokenizer_size, (1, tokens), generator=generator)
        mask = torch.arange(tokens) >= 6
        states = verifier.capture(ids, aux_layer_ids=TAPS)
        info = DocumentInfo(
            doc_id=document_id(ids[0], mask, temperature=1.0),
            prompt_id=f"p{d}",
            domain="tiny",
            split="test",
            temperature=1.0,
            finish_reason="length",
            prompt_tokens=6,
            response_tokens=tokens - 6,
            tokens=tokens,
        )
        writer.add(Document(ids[0], mask, states.aux[0], states.last[0], states.lse[0], info))
    writer.close()
    return FeatureCache.open(path)


def draft_for(
    cache: FeatureCache, *, draft_vocab_size: int | None = 100, seed: int = 0, **changes: Any
) -> Draft:
    """A random draft over the cache's frozen tensors; its weights are bf16 values, as an export holds them."""
    verifier = cache.manifest.verifier
    vocab_size = verifier.vocab_size
    config = draft_config(
        **{
            "hidden_size": verifier.hidden_size,
            "vocab_size": vocab_size,
            "draft_vocab_size": draft_vocab_size or vocab_size,
            "mask_token_id": MASK,
            "aux_layer_ids": TAPS,
            "num_verifier_layers": verifier.num_layers,
            "rope_theta": verifier.rope_theta,
            "max_position_embeddings": verifier.max_position_embeddings,
            "layer_types": ("full_attention",) * changes.get("num_layers", 2),
            **changes,
        }
    )
    torch.manual_seed(seed)
    draft = Draft(config, attention_backend="grouped")
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, mean=0.0 if parameter.ndim > 1 else 1.0, std=0.2)
        parameter.data = parameter.data.to(torch.bfloat16).float()
    kept = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))[
        : config.draft_vocab_size
    ]
    weights = cache.verifier_weights()
    draft.set_frozen(
        weights["embed_tokens.weight"],
        weights["lm_head.weight"],
        VocabMap(kept.sort().values, vocab_size),
        torch.bfloat16,
    )
    return draft.eval()


def write_run(root: Path, cache: FeatureCache, draft: Draft, *, run_id: str = "tiny-run") -> Run:
    """A finished run folder with `draft` as its best checkpoint."""
    config = {
        "loss": {"terms": {"ce": 0.1, "tv": 0.9}, "confidence": 1.0, "decay_gamma": 4.0},
        "trainer": {"max_steps": 7, "seq_length": 512, "anchors": 24},
        "optimizer": {"lr": 0.001},
    }
    verifier = cache.manifest.verifier
    manifest = RunManifest(
        run_id=run_id,
        command="python -m experiments.train",
        overrides=[],
        config_sha="0",
        seed=0,
        verifier={"name": verifier.name, "weights_sha": verifier.weights_sha, "revision": verifier.revision},
        data={"cache": str(cache.path), "documents": len(cache), "responses_by": verifier.name},
        parent=None,
    )
    run = Run.create(root, manifest, yaml.safe_dump(config))
    own = {k: v for k, v in vars(draft.contract).items() if v is not None}
    contract: Contract = cache.contract().merged(**own)
    save_draft(draft, run.checkpoints / "best", contract, {"step": 7})
    run.finish("complete", {"steps": 7})
    return run
