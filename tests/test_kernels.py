"""Triton kernels against their plain forms: on CUDA where there is one, else in Triton's interpreter (conftest.py)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from dspark.kernels import loss_terms
from dspark.losses import LK_ETA, LossWeights, terms_with_gradient

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, STATES, SCALE = 13, 7, 0.7
TERMS = {
    "ce_tv": {"ce": 0.1, "tv": 0.9},
    "kl": {"kl": 1.0},
    "l1_nla_ce": {"l1": 0.5, "nla": 0.3, "ce": 0.2},
    "lk_hybrid": {"lk_hybrid": 1.0},
}


@pytest.mark.parametrize("width", [300, 5000], ids=["one_block", "two_blocks"])
@pytest.mark.parametrize("target_norm", ["verifier_vocab", "draft_vocab"])
@pytest.mark.parametrize("ce_label", ["text", "target_top1"])
@pytest.mark.parametrize("name", TERMS)
def test_loss_kernel_equals_the_plain_terms_and_their_gradient(name, ce_label, target_norm, width):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(ROWS, width, generator=generator)
    target = 3 * torch.randn(STATES, width, generator=generator)
    source = torch.randint(STATES, (ROWS,), generator=generator)
    lse = (target * SCALE).logsumexp(-1) + 0.1
    labels = torch.randint(-1, width, (ROWS,), generator=generator)
    labels[0] = -1
    row_weights = torch.rand(ROWS, generator=generator)
    weights = LossWeights(
        terms=TERMS[name], confidence=0.0, decay_gamma=None, ce_label=ce_label, target_norm=target_norm
    )
    p = (target * SCALE).softmax(-1)
    if target_norm == "verifier_vocab":
        p = (target * SCALE - lse[:, None]).exp()
    ce_labels = labels if ce_label == "text" else p.argmax(-1)[source]
    wanted, gradient = terms_with_gradient(
        (logits * SCALE).clone(), p[source], labels, ce_labels, weights, row_weights
    )
    given = logits.to(DEVICE)
    stats = loss_terms(
        given,
        target.to(DEVICE),
        source.to(DEVICE),
        lse.to(DEVICE),
        labels.to(DEVICE),
        row_weights.to(DEVICE),
        terms=weights.terms,
        text_label=ce_label == "text",
        renormalise=target_norm == "draft_vocab",
        scale=SCALE,
        lk_eta=LK_ETA,
    ).cpu()
    for got, (field, value) in zip(stats, vars(wanted).items(), strict=True):
        torch.testing.assert_close(got, value, rtol=1e-4, atol=1e-5, msg=lambda text, f=field: f"{f}: {text}")
    torch.testing.assert_close(given.cpu(), gradient * SCALE, rtol=1e-4, atol=1e-6)
