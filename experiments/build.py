"""From a composed configuration and a set of features to the objects that train: the only place that reads both."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from omegaconf import DictConfig, OmegaConf

from dspark.config import DraftConfig
from dspark.data.features import Features, Manifest
from dspark.losses import LossWeights
from dspark.nn.draft import Draft
from dspark.training import OptimizerConfig
from dspark.vocab import VocabMap
from experiments.collect import ensure_cache, online_features

TRAIN_GROUPS = {
    "draft": (
        "num_layers intermediate_size num_heads num_kv_heads head_dim rms_norm_eps rope_theta max_position_embeddings "
        "vocab_size block_size sample_from_anchor layer_types sliding_window taps attention_backend init"
    ),
    "head": "kind rank init backbone_scale",
    "confidence": "enabled use_prev_embedding detach_inputs",
    "loss": "terms confidence decay_gamma ce_label target_norm",
    "optimizer": "lr head_lr warmup_steps min_lr_ratio weight_decay betas",
    "trainer": (
        "max_steps max_minutes max_tokens seq_length anchors rows_per_batch accumulate precision clip val_every val_documents log_every "
        "num_workers resident graph compile checkpoint_layers float8 chunk_rows accelerator devices num_nodes strategy max_bad_fraction progress"
    ),
}


def check_keys(cfg: DictConfig) -> None:
    """Refuse keys that nothing reads: a `+` override or an ablation file can add them without a complaint from Hydra.

    Raises ValueError with the key and the keys that exist.
    """
    for group, names in TRAIN_GROUPS.items():
        known = set(names.split())
        unknown, missing = sorted(set(cfg[group]) - known), sorted(known - set(cfg[group]))
        if unknown:
            raise ValueError(
                f"{group}.{unknown[0]} is not a setting; {group} has: {', '.join(sorted(known))}."
            )
        if missing:
            raise ValueError(f"{group}.{missing[0]} has no value; set it in configs/{group}/.")


def open_features(cfg: DictConfig) -> Features:
    """The documents that `data` and `verifier` name, from a cache or captured on demand as `data.source` says.

    Raises ValueError for another source, and where worker processes would each need a verifier.
    """
    match cfg.data.source:
        case "cache":
            return ensure_cache(cfg)
        case "online":
            if cfg.trainer.num_workers:
                raise ValueError(
                    "data.source=online captures hidden states in the training process; trainer.num_workers is "
                    f"{cfg.trainer.num_workers}, set it to 0."
                )
            return online_features(cfg)
        case other:
            raise ValueError(f"data.source is {other!r}; expected cache or online.")


def tapped_layers(cfg: DictConfig, manifest: Manifest) -> list[int]:
    """The captured layers that the draft reads: `draft.taps`, where negative numbers count from the deepest, or all of them.

    Raises ValueError for a number that counts further than there are layers.
    """
    stored = list(manifest.aux_layer_ids)
    if cfg.draft.taps is None:
        return stored
    asked = [int(i) for i in cfg.draft.taps]
    if any(i < -len(stored) for i in asked):
        raise ValueError(f"draft.taps is {asked}, but the cache holds {len(stored)} layers: {stored}.")
    return [stored[i] if i < 0 else i for i in asked]


def response_counts(features: Features, documents: Sequence[int]) -> torch.Tensor:
    """How often each verifier token occurs among the supervised tokens of `documents`, int64 [W]."""
    supervised = [ids[mask] for ids, mask in map(features.tokens, documents)]
    return torch.bincount(torch.cat(supervised), minlength=features.manifest.verifier.vocab_size)


def build_vocab(cfg: DictConfig, manifest: Manifest, counts: torch.Tensor) -> VocabMap:
    """The draft vocabulary: the most frequent response tokens of the training split, or all of the verifier's."""
    size = cfg.draft.vocab_size
    whole = manifest.verifier.vocab_size
    return (
        VocabMap.full(whole) if size is None or size == whole else VocabMap.most_frequent(counts, int(size))
    )


def build_draft_config(cfg: DictConfig, manifest: Manifest, draft_vocab_size: int) -> DraftConfig:
    """The draft's geometry: what the configuration says, and the verifier's own numbers where it says null."""
    verifier, draft = manifest.verifier, cfg.draft

    def or_verifier(name: str, own: str | None = None) -> object:
        value = draft[name]
        return getattr(verifier, own or name) if value is None else value

    layers = int(draft.num_layers)
    return DraftConfig(
        hidden_size=verifier.hidden_size,
        intermediate_size=or_verifier("intermediate_size"),
        num_layers=layers,
        num_heads=or_verifier("num_heads"),
        num_kv_heads=or_verifier("num_kv_heads"),
        head_dim=or_verifier("head_dim"),
        rms_norm_eps=or_verifier("rms_norm_eps"),
        rope_theta=float(or_verifier("rope_theta")),
        max_position_embeddings=or_verifier("max_position_embeddings"),
        vocab_size=verifier.vocab_size,
        draft_vocab_size=draft_vocab_size,
        block_size=int(draft.block_size),
        sample_from_anchor=bool(draft.sample_from_anchor),
        mask_token_id=manifest.mask_token_id,
        aux_layer_ids=manifest.aux_layer_ids,
        num_verifier_layers=verifier.num_layers,
        layer_types=tuple(draft.layer_types or ("full_attention",) * layers),
        sliding_window=draft.sliding_window,
        head=str(cfg.head.kind),
        markov_rank=int(cfg.head.rank),
        confidence=bool(cfg.confidence.enabled),
        confidence_uses_prev_embedding=bool(cfg.confidence.enabled and cfg.confidence.use_prev_embedding),
        logit_scale=float(verifier.logit_scale),
    )


def build_loss(cfg: DictConfig) -> LossWeights:
    """Loss weights; the confidence weight is zero for a draft without that head."""
    values = OmegaConf.to_container(cfg.loss, resolve=True)
    values["confidence"] = float(values["confidence"]) if cfg.confidence.enabled else 0.0
    return LossWeights(**values)


def build_optimizer(cfg: DictConfig) -> OptimizerConfig:
    minutes = cfg.trainer.max_minutes
    return OptimizerConfig(
        **OmegaConf.to_container(cfg.optimizer, resolve=True),
        budget_seconds=60.0 * minutes if minutes else None,
    )


def build_draft(
    cfg: DictConfig, config: DraftConfig, features: Features, vocab: VocabMap, dtype: torch.dtype
) -> Draft:
    """A draft with random trainable weights over the verifier's frozen tensors."""
    draft = Draft(config, attention_backend=str(cfg.draft.attention_backend))
    weights = features.verifier_weights()
    draft.set_frozen(weights["embed_tokens.weight"], weights["lm_head.weight"], vocab, dtype)
    return draft
