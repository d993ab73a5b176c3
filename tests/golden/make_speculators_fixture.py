"""Write the committed fixture with the real `speculators` package: checkpoints, and what its model computes from them.

    python tests/golden/make_speculators_fixture.py          in an environment with speculators==0.9.0 and torch

Two tiny DSpark checkpoints saved by its own `save_pretrained` (bf16): `anchor_first`, its default, and `fill_in` with one
sliding layer. Beside each, `<name>.forward.safetensors` holds inputs and fp32 outputs of its forward pass on the saved weights,
and `<name>.verifier.safetensors` the frozen verifier tensors that 0.9.0 leaves out of checkpoints.
"""

from __future__ import annotations

import copy
import os
from importlib.metadata import version
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # its constructor looks the verifier up otherwise

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.models.dspark import core as dspark_core
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

HERE = Path(__file__).resolve().parent
HIDDEN, VOCAB, KEPT, TOKENS, ANCHORS, BLOCK = 32, 128, 48, 44, 7, 4
TAPS = [1, 3, 5]
VARIANTS = {
    "anchor_first": {
        "sample_from_anchor": True,
        "layer_types": ["full_attention", "full_attention"],
        "window": None,
    },
    "fill_in": {
        "sample_from_anchor": False,
        "layer_types": ["sliding_attention", "full_attention"],
        "window": 64,
    },
}


def build(sample_from_anchor: bool, layer_types: list[str], window: int | None) -> DSparkDraftModel:
    decoder = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
        layer_types=layer_types,
        sliding_window=window,
        use_sliding_window=window is not None,
        tie_word_embeddings=False,
    )
    decoder._attn_implementation = "eager"
    config = DSparkSpeculatorConfig(
        transformer_layer_config=decoder,
        draft_vocab_size=KEPT,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=TAPS,
        mask_token_id=VOCAB - 1,
        sample_from_anchor=sample_from_anchor,
        markov_rank=8,
        speculators_config=SpeculatorsConfig(
            algorithm="dspark",
            proposal_methods=[
                GreedyTokenProposalConfig(speculative_tokens=BLOCK if sample_from_anchor else BLOCK - 1)
            ],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="tiny-verifier", architectures=["LlamaForCausalLM"]),
        ),
    )
    model = DSparkDraftModel(config)
    generator = torch.Generator().manual_seed(7)
    kept = torch.randperm(VOCAB - 1, generator=generator)[:KEPT].sort().values
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[kept] = True
    model.load_vocab_mappings(t2d, kept - torch.arange(KEPT))
    head = torch.randn(VOCAB, HIDDEN, generator=generator) * 0.4
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.2 if parameter.ndim > 1 else 0.3
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.copy_(noise if parameter.ndim > 1 else 1.0 + noise)
        model.embed_tokens.weight.copy_(torch.randn(VOCAB, HIDDEN, generator=generator))
        model.lm_head.weight.copy_(head[kept])
        model.verifier_lm_head.weight.copy_(head[kept])
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return model, head.to(torch.bfloat16)


def main() -> None:
    for name, variant in VARIANTS.items():
        folder = HERE / f"speculators-{version('speculators')}" / name
        model, head = build(**variant)
        # A copy is saved: casting the module would round its rotary frequencies as well.
        copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
        (folder / "config.py").unlink()  # a copy of its source, for trust_remote_code
        model = model.eval()
        save_file(
            {
                "embed_tokens.weight": model.embed_tokens.weight.detach().to(torch.bfloat16).contiguous(),
                "norm.weight": model.verifier_norm.weight.detach().to(torch.bfloat16).contiguous(),
                "lm_head.weight": head.contiguous(),
            },
            folder.with_suffix(".verifier.safetensors"),
        )
        generator = torch.Generator().manual_seed(3)
        ids = torch.randint(0, VOCAB - 1, (1, TOKENS), generator=generator)
        mask = torch.zeros(1, TOKENS, dtype=torch.long)
        mask[:, 6:] = 1
        taps = torch.randn(1, TOKENS, len(TAPS) * HIDDEN, generator=generator).to(torch.bfloat16).float()
        last = torch.randn(1, TOKENS, HIDDEN, generator=generator).to(torch.bfloat16).float()
        documents = torch.zeros(1, TOKENS, dtype=torch.long)

        seen: dict[str, torch.Tensor] = {}
        backbone = model._backbone_forward

        def record_backbone(*args, backbone=backbone, seen=seen, **kwargs):
            result = backbone(*args, **kwargs)
            seen["hidden"], seen["base_logits"], seen["targets"], seen["loss_mask_slots"], seen["indices"] = (
                result
            )
            return result

        metrics = dspark_core.compute_metrics

        def record_metrics(
            logits, targets, confidence, loss_mask, *args, metrics=metrics, seen=seen, **kwargs
        ):
            seen["logits"], seen["confidence_logits"] = logits, confidence
            return metrics(logits, targets, confidence, loss_mask, *args, **kwargs)

        model._backbone_forward = record_backbone
        dspark_core.compute_metrics = record_metrics
        losses = resolve_loss_config('{"ce": 0.1, "tv": 0.9}', "eager")
        torch.manual_seed(11)  # its anchors come from the global generator
        with torch.no_grad():
            _, loss, _ = model(
                hidden_states=taps,
                input_ids=ids,
                loss_mask=mask,
                verifier_last_hidden_states=last,
                document_ids=documents,
                loss_config=losses,
                tv_loss_fn=resolve_loss_config("tv", "eager")["tv"][0],
                gamma=4.0,
                max_anchors=ANCHORS,
                confidence_head_alpha=1.0,
            )
        dspark_core.compute_metrics = metrics
        blocks = (1, ANCHORS, BLOCK)
        recorded = {
            "input_ids": ids.int(),
            "loss_mask": mask.bool(),
            "aux": taps.view(1, TOKENS, len(TAPS), HIDDEN).to(torch.bfloat16),
            "last_pre_norm": last.to(torch.bfloat16),
            "anchors": seen["indices"].view(ANCHORS, BLOCK)[:, 0].unsqueeze(0).int(),
            "hidden": seen["hidden"].view(*blocks, -1),
            "base_logits": seen["base_logits"].view(*blocks, -1),
            "logits": seen["logits"].view(*blocks, -1),
            "confidence_logits": seen["confidence_logits"].view(blocks),
            "targets": seen["targets"].view(*blocks, -1),
            "loss_mask_slots": seen["loss_mask_slots"].view(blocks).bool(),
            "loss": loss.reshape(1),
        }
        save_file(
            {k: v.detach().contiguous() for k, v in recorded.items()},
            folder.with_suffix(".forward.safetensors"),
        )
        size = sum(f.stat().st_size for f in folder.parent.rglob(f"{name}*") if f.is_file())
        print(f"{folder}: {size} bytes, loss {float(loss):.6f}")


if __name__ == "__main__":
    main()
