"""A tiny verifier trained for seconds on templated text, its cache, and drafts trained on it: what end-to-end tests share."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dspark.config import DraftConfig
from dspark.data.batches import PackedRows
from dspark.data.capture import capture_documents
from dspark.data.features import FeatureCache, FeatureWriter, Manifest
from dspark.data.prompts import Prompt
from dspark.data.responses import answer_prompts
from dspark.data.synthetic import tiny_model, tiny_tokenizer
from dspark.losses import LossWeights
from dspark.nn.draft import Draft
from dspark.objective import draft_loss
from dspark.runs import Run, RunManifest, save_draft
from dspark.verifier import Verifier
from dspark.vocab import VocabMap

AUX = (1, 2, 3)
MASK = 6
WORDS = ["sun", "moon", "star", "rain", "wind", "leaf", "tree", "bird", "fish", "stone"]
KINDS = ("math", "code", "chat")


def sentence(rng: random.Random, kind: str) -> tuple[str, str]:
    """A question and its answer; the answers are regular enough to be learnt by a few thousand weights."""
    a, b = rng.randrange(10), rng.randrange(10)
    word, other = rng.choice(WORDS), rng.choice(WORDS)
    if kind == "math":
        return f"{a}+{b}?", f"{a}+{b}={a + b}. {b}+{a}={a + b}. so {a + b}."
    if kind == "code":
        return f"print {word}", f"def f():\n  print('{word}')\nf()\n"
    return f"say {word}", f"the {word} and the {other} and the {word}."


def trained_verifier(*, steps: int = 160, seed: int = 0) -> Verifier:
    """Four layers of width 48 that have seen the templates: greedy answers are mostly right, samples vary."""
    torch.manual_seed(seed)
    rng, tokenizer = random.Random(seed), tiny_tokenizer()
    model = tiny_model(hidden_size=48, num_layers=4, seed=seed, initializer_range=0.08)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps)
    for _ in range(steps):
        rows = []
        for _ in range(12):
            question, answer = sentence(rng, rng.choice(KINDS))
            text = f"<|bos|><|user|>{question}<|end|><|assistant|>{answer}<|end|>"
            rows.append(tokenizer.encode(text, add_special_tokens=False)[:72])
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        loss = model(input_ids=ids, labels=ids.masked_fill(ids == 0, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return Verifier.from_model(model, tokenizer, name="tiny-trained")


def template_prompts(count: int, *, seed: int, split: str, turns: int = 1) -> list[Prompt]:
    rng = random.Random(seed)
    prompts, seen = [], set()
    while len(prompts) < count:
        kind = KINDS[len(prompts) % len(KINDS)]
        questions = tuple(f"{sentence(rng, kind)[0]}{rng.randrange(1000)}" for _ in range(turns))
        if questions not in seen:
            seen.add(questions)
            prompts.append(Prompt.from_turns(questions, domain=kind, split=split))
    return prompts


def build_cache(
    path: Path,
    verifier: Verifier,
    prompts: list[Prompt],
    *,
    temperature: float,
    max_new_tokens: int = 28,
) -> FeatureCache:
    documents, _ = answer_prompts(
        verifier,
        prompts,
        temperature=temperature,
        seed=0,
        max_new_tokens=max_new_tokens,
        max_length=400,
        batch_size=64,
        mask_token_id=MASK,
        template_options={},
        progress=lambda tokens: None,
    )
    manifest = Manifest(
        verifier=verifier.info,
        aux_layer_ids=AUX,
        mask_token_id=MASK,
        last="post_norm",
        dataset="templates",
        responses_by=verifier.info.name,
        generation={"temperature": temperature},
        capture={},
        command="tests",
    )
    with FeatureWriter(path, manifest, shard_bytes=1 << 28) as writer:
        writer.write_verifier(verifier)
        for document in capture_documents(
            verifier, documents, aux_layer_ids=AUX, tokens_per_batch=2048, seed=0
        ):
            writer.add(document)
    return FeatureCache.open(path)


def new_draft(cache: FeatureCache, *, kept: int = 150, seed: int = 0, **changes: Any) -> Draft:
    """An untrained draft for a cache of `trained_verifier`; `changes` reach its configuration."""
    info = cache.manifest.verifier
    values: dict[str, Any] = {
        "hidden_size": info.hidden_size,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 12,
        "rms_norm_eps": info.rms_norm_eps,
        "rope_theta": info.rope_theta,
        "max_position_embeddings": info.max_position_embeddings,
        "vocab_size": info.vocab_size,
        "draft_vocab_size": kept,
        "block_size": 5,
        "sample_from_anchor": False,
        "mask_token_id": MASK,
        "aux_layer_ids": AUX,
        "num_verifier_layers": info.num_layers,
        "layer_types": ("full_attention", "full_attention"),
        "sliding_window": None,
        "head": "vanilla",
        "markov_rank": 16,
        "confidence": True,
        "confidence_uses_prev_embedding": True,
        "logit_scale": info.logit_scale,
    }
    config = DraftConfig(**{**values, **changes})
    torch.manual_seed(seed)
    draft = Draft(config, attention_backend="grouped")
    counts = torch.zeros(info.vocab_size, dtype=torch.int64)
    for ids, mask in (cache.tokens(d) for d in range(len(cache))):
        counts += torch.bincount(ids[mask], minlength=len(counts))
    weights = cache.verifier_weights()
    draft.set_frozen(
        weights["embed_tokens.weight"],
        weights["lm_head.weight"],
        VocabMap.most_frequent(counts, config.draft_vocab_size),
        torch.float32,
    )
    return draft


def train_draft(
    draft: Draft,
    cache: FeatureCache,
    documents: list[int],
    *,
    steps: int,
    lr: float = 4e-3,
    anchors: int = 96,
) -> Draft:
    rows = PackedRows(cache, documents, seq_length=384, anchors=anchors, seed=0, dtype=torch.bfloat16)
    weights = LossWeights(
        terms={"ce": 0.1, "tv": 0.9},
        confidence=1.0 if draft.confidence_head is not None else 0.0,
        decay_gamma=None,
        ce_label="target_top1",
        target_norm="verifier_vocab",
    )
    optimizer = torch.optim.AdamW(draft.parameters(), lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        batch = rows[step]
        sums = draft_loss(
            draft, draft(batch), batch, weights, confidence_detach_inputs=False, chunk_rows=1024
        )
        optimizer.zero_grad()
        (sums.numerator / sums.denominator.clamp(min=1e-6)).backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return draft.eval()


@dataclass
class Trained:
    """What the `tiny` fixture holds. Tests must leave it as it is."""

    verifier: Verifier
    greedy: FeatureCache
    sampled: FeatureCache
    draft: Draft
    run: Run


def trained_pair(root: Path) -> Trained:
    verifier = trained_verifier()
    prompts = template_prompts(80, seed=1, split="train") + template_prompts(
        24, seed=2, split="test", turns=2
    )
    greedy = build_cache(root / "greedy", verifier, prompts, temperature=0.0)
    prompts = template_prompts(150, seed=3, split="test")
    sampled = build_cache(root / "sampled", verifier, prompts, temperature=1.0)
    draft = train_draft(new_draft(greedy), greedy, greedy.select(split="train"), steps=110)
    return Trained(verifier, greedy, sampled, draft, save_run(root / "runs", draft, greedy))


def save_run(
    root: Path, draft: Draft, cache: FeatureCache, *, run_id: str = "20260101-000000-tiny-s0"
) -> Run:
    """A run folder as training leaves it."""
    manifest = RunManifest(
        run_id=run_id,
        command="tests",
        overrides=[],
        config_sha="0",
        seed=0,
        verifier={"name": cache.manifest.verifier.name},
        data={"cache": str(cache.path)},
        parent=None,
        status="complete",
    )
    run = Run.create(root, manifest, "seed: 0\n")
    facts = {k: v for k, v in vars(draft.contract).items() if v is not None}
    save_draft(draft, run.checkpoints / "best", cache.contract().merged(**facts), {})
    return run
