"""Layers computed again in the backward pass: the same step, with less kept for it."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from dspark.losses import LossWeights
from dspark.objective import draft_loss
from tests.builders import random_batch, random_draft

LOSS = LossWeights(
    terms={"ce": 0.1, "tv": 0.9},
    confidence=1.0,
    decay_gamma=4.0,
    ce_label="text",
    target_norm="verifier_vocab",
)
SLIDING = {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 5}
VARIANTS = {"fill_in": {}, "anchor_first": {"sample_from_anchor": True}, "sliding": SLIDING}


def step(draft, batch, precision=torch.float32):
    """Loss, gradients by name, and the bytes of storage that autograd kept between forward and backward."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    autocast = torch.autocast("cpu", precision, enabled=precision != torch.float32)
    with saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
        sums = draft_loss(draft, draft(batch), batch, LOSS, confidence_detach_inputs=False, chunk_rows=32)
        loss = sums.numerator / sums.denominator
    loss.backward()
    frozen = {draft.lm_head.data_ptr(), *(p.data_ptr() for p in draft.parameters())}
    gradients = {name: p.grad for name, p in draft.named_parameters()}
    return loss.detach(), gradients, sum(size for at, size in kept.items() if at not in frozen)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("backend", ["grouped", "dense"])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_recomputing_layers_changes_nothing_but_the_memory(backend, changes, precision):
    plain, recomputing = (random_draft(backend=backend, **changes) for _ in range(2))
    recomputing.checkpoint_layers = True
    batch = random_batch(plain.config, anchors=20, rows=((60, 20), (81,)))
    loss, gradients, kept = step(plain, batch, precision)
    loss_again, gradients_again, kept_again = step(recomputing, batch, precision)
    assert torch.equal(loss, loss_again)
    assert len(gradients) > 25
    for name, expected in gradients.items():
        assert expected.abs().max() > 0, name
        torch.testing.assert_close(gradients_again[name], expected, rtol=1e-6, atol=1e-7, msg=name)
    assert kept_again < 0.5 * kept


def test_without_gradients_nothing_is_recomputed():
    draft = random_draft()
    batch = random_batch(draft.config)
    with torch.no_grad():
        expected = draft(batch).hidden
        draft.checkpoint_layers = True
        assert torch.equal(draft(batch).hidden, expected)
