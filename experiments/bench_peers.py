"""Other trainers behind the benchmark's `Contender` interface. Needs `speculators==0.9.0`, which this package does not depend on.

How the losses correspond. For the same weights, batch and anchors, with w the position weight, m the supervision mask, t the
weighted loss terms of a proposal and c its confidence loss:

    speculators   sum(w m t) / (sum(m) + 1e-5) + sum(w m c) / (sum(m) + 1e-8)
    dspark        sum(w m (t + c)) / sum(w m)

so its loss times sum(m) / sum(w m) is ours, up to 1e-5 / sum(m). Its cross-entropy label is the verifier's argmax (`ce_label:
target_top1`), its verifier probabilities are renormalised over the draft vocabulary (`target_norm: draft_vocab`), and it applies
the verifier's final norm itself: features here are already normed, and its norm has unit weight, so that changes nothing.
"""

from __future__ import annotations

import json
from importlib import metadata
from typing import Any
from unittest import mock

import torch
from torch import Tensor

try:
    import speculators.models.dflash.core as dflash_core
    from speculators.losses import resolve_loss_config
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config
except ImportError as error:
    raise ValueError(
        f"peers=[speculators] needs the package: pip install speculators==0.9.0 ({error}); or leave peers empty."
    ) from error

from dspark.blocks import position_weights
from experiments.bench_step import LOSS, Mark, Problem


class Speculators:
    """`DSparkDraftModel` with its eager losses: sdpa attention on a CPU, its compiled flex attention on CUDA."""

    name = "speculators"

    def __init__(self, problem: Problem) -> None:
        self.version = metadata.version("speculators")
        self.problem = problem
        config, batch = problem.config, problem.batch
        layer_config = Qwen3Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            attention_bias=False,
        )
        layer_config._attn_implementation = (
            "simple_flex_attention" if problem.device.type == "cuda" else "sdpa"
        )
        peer_config = DSparkSpeculatorConfig(
            transformer_layer_config=layer_config,
            draft_vocab_size=config.draft_vocab_size,
            block_size=config.block_size,
            aux_hidden_state_layer_ids=list(config.aux_layer_ids),
            mask_token_id=config.mask_token_id,
            sample_from_anchor=config.sample_from_anchor,
            markov_rank=config.markov_rank,
            markov_head_type="vanilla",
            enable_confidence_head=config.confidence,
            confidence_head_with_markov=config.confidence_uses_prev_embedding,
        )
        with torch.device(problem.device):
            self.model = DSparkDraftModel(peer_config)
        self.model.load_state_dict(self._state(), strict=True)
        self.model.train()
        loss = resolve_loss_config(json.dumps(dict(LOSS.terms)), "eager")
        _, documents = batch.doc_start.unique(return_inverse=True)
        self.inputs: dict[str, Any] = {
            "hidden_states": batch.aux.flatten(2),
            "input_ids": batch.input_ids,
            "loss_mask": batch.loss_mask.long(),
            "verifier_last_hidden_states": batch.last,
            "document_ids": documents,
            "position_ids": batch.positions,
            "loss_config": loss,
            "tv_loss_fn": self._tv,
            "gamma": LOSS.decay_gamma,
            "max_anchors": problem.geometry.anchors,
            "confidence_head_alpha": LOSS.confidence,
        }
        self._tv_loss = loss["tv"][0]
        self._overlap: Tensor | None = None
        weight = position_weights(config.num_proposals, LOSS.decay_gamma, problem.device)
        self.to_our_mean = float(config.num_proposals / weight.sum())

    def _state(self) -> dict[str, Tensor]:
        """Our names are theirs, but for the frozen tensors."""
        problem = self.problem
        head = problem.head[problem.vocab.kept.to(problem.device)].float()
        state = {
            **problem.weights,
            "embed_tokens.weight": problem.embedding.float(),
            "lm_head.weight": head,
            "verifier_lm_head.weight": head,
            "verifier_norm.weight": torch.ones(problem.config.hidden_size, device=problem.device),
        }
        if problem.config.pruned:
            kept = problem.vocab.kept
            state["t2d"] = torch.zeros(problem.config.vocab_size, dtype=torch.bool).scatter_(0, kept, True)
            state["d2t"] = kept - torch.arange(len(kept))
        return state

    def _tv(self, logits: Tensor, targets: Tensor) -> Tensor:
        values = self._tv_loss(logits, targets)
        self._overlap = 1.0 - values
        return values

    def _our_anchors(self, *_: Any) -> tuple[Tensor, Tensor]:
        return self.problem.batch.anchors[0], self.problem.batch.anchor_valid[0]

    def step(self, mark: Mark) -> Tensor:
        self.model.zero_grad(set_to_none=True)
        # It draws anchors inside its forward; everything else is its own code.
        with mock.patch.object(dflash_core, "select_anchors", self._our_anchors), self.problem.autocast():
            _, loss, _ = self.model(**self.inputs)
        mark("forward")
        loss.backward()
        mark("backward")
        return loss.detach() * self.to_our_mean

    def row_overlap(self) -> Tensor:
        """alpha of every proposal in the last step, [A, N]."""
        return self._overlap.view(-1, self.problem.config.block_size)[:, self.problem.config.first_slot :]

    def overlap(self) -> Tensor:
        return self.row_overlap().mean(0)
