"""Triton kernels against their plain forms: on CUDA where there is one, else in Triton's interpreter (conftest.py)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from dspark.blocks import sample_anchors
from dspark.kernels import block_attention as block_attention_module
from dspark.kernels.block_attention import block_attention, key_ranges
from dspark.kernels.loss import loss_terms
from dspark.losses import LK_ETA, LossWeights, terms_with_gradient
from dspark.nn.attention import DensePlan

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


def test_loss_kernel_on_bf16_logits_with_ties_impossible_tokens_and_an_odd_width():
    """bf16 logits tie often; the first of equal ones is the argmax. -1e30 and minus infinity have no mass."""
    generator = torch.Generator().manual_seed(0)
    width = 5003
    logits, target = (
        (3 * torch.randn(rows, width, generator=generator)).bfloat16() for rows in (ROWS, STATES)
    )
    logits[0, :4200], target[0, 9:] = -1e30, -1e30
    logits[1, 1:], target[1, : width - 1] = -torch.inf, -torch.inf
    logits[2, 7::500] = target[2, 3::1000] = 20.0
    source = torch.arange(ROWS) % STATES
    labels = torch.randint(-1, width, (ROWS,), generator=generator)
    labels[1:3] = torch.tensor([0, 7])
    row_weights = torch.rand(ROWS, generator=generator)
    weights = LossWeights(
        terms={"ce": 0.1, "tv": 0.9},
        confidence=0.0,
        decay_gamma=None,
        ce_label="target_top1",
        target_norm="draft_vocab",
    )
    p = target.float().softmax(-1)[source]
    wanted, gradient = terms_with_gradient(
        logits.float(), p, labels, p.argmax(-1), weights, row_weights
    )  # fmt: skip
    given = logits.to(DEVICE)
    stats = loss_terms(
        given,
        target.to(DEVICE),
        source.to(DEVICE),
        torch.zeros(STATES, device=DEVICE),
        labels.to(DEVICE),
        row_weights.to(DEVICE),
        terms=weights.terms,
        text_label=False,
        renormalise=True,
        scale=1.0,
        lk_eta=LK_ETA,
    ).cpu()
    assert wanted.greedy_hit[1:3].all()
    for got, (field, value) in zip(stats, vars(wanted).items(), strict=True):
        torch.testing.assert_close(got, value, rtol=1e-4, atol=1e-5, msg=lambda text, f=field: f"{f}: {text}")
    torch.testing.assert_close(given.cpu().float(), gradient, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "length", "anchors", "width", "slots", "heads", "kv_heads", "dim", "window"),
    [
        (1, 100, 12, 4, 4, 4, 2, 16, None),  # one tile
        (2, 200, 40, 4, 3, 4, 2, 16, None),  # the last layer of a fill-in draft
        (1, 300, 50, 8, 7, 6, 2, 24, None),  # ragged tiles, a head dimension that is no power of two
        (1, 200, 40, 8, 8, 2, 1, 16, 20),  # a window wider than a block
        (1, 150, 40, 8, 7, 2, 2, 16, 5),  # and a narrower one
        (1, 60, 90, 8, 7, 2, 2, 16, None),  # padding anchors
    ],
)
def test_attention_kernels_equal_dense_attention(
    rows, length, anchors, width, slots, heads, kv_heads, dim, window
):
    compare(rows, length, anchors, width, slots, heads, kv_heads, dim, window)


def test_attention_kernels_equal_it_where_no_card_copies_tiles(monkeypatch):
    shape = block_attention_module._shape
    monkeypatch.setattr(block_attention_module, "_shape", lambda *given: shape(*given) | {"COPIED": False})
    compare(2, 100, 20, 4, 3, 4, 2, 16, None)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter multiplies no bf16")
@pytest.mark.parametrize("dim", [64, 128])
def test_attention_kernels_in_bf16_equal_dense_attention(dim):
    compare(2, 200, 40, 8, 7, 4, 2, dim, None, dtype=torch.bfloat16)


def test_a_part_of_a_tensor_may_begin_anywhere():
    x = torch.randn(1 + 2 * 8 * 2 * 16)[1:].view(1, 2, 8, 2, 16)
    assert x.data_ptr() % 16
    view = block_attention_module._views(True)(x, 4)
    assert tuple(view.shape) == (16, 32)
    assert torch.equal(view.base.flatten(), x.flatten())


def compare(rows, length, anchors, width, slots, heads, kv_heads, dim, window, dtype=torch.float32):
    """Kernels against dense attention in fp32 on the same numbers, values and all gradients.

    In bf16 by vectors: dense attention in bf16 errs by up to 1.2 % of one's length plus a tenth of the usual length.
    """
    generator = torch.Generator().manual_seed(0)
    doc_start = torch.zeros(rows, length, dtype=torch.int64)
    for b in range(rows):
        for start in torch.randperm(length - 2, generator=generator)[:3].sort().values + 1:
            doc_start[b, start:] = start
    mask = torch.rand(rows, length, generator=generator) > 0.2
    places, _ = sample_anchors(mask, doc_start, anchors, generator)
    starts = doc_start.gather(1, places)
    shapes = [(rows, anchors, slots, heads), *[(rows, length, kv_heads)] * 2]
    shapes += [(rows, anchors, width, kv_heads)] * 2
    inputs = [
        torch.randn(*shape, dim, generator=generator).to(dtype).float().requires_grad_() for shape in shapes
    ]
    wanted = DensePlan.build(places, starts, length, width, window).attend(*inputs)
    upstream = torch.randn(wanted.shape, generator=generator).to(dtype).float()
    gradients = torch.autograd.grad(wanted, inputs, upstream)

    given = [t.detach().to(DEVICE, dtype).requires_grad_() for t in inputs]
    places, starts = places.to(DEVICE), starts.to(DEVICE)
    ranges = key_ranges(places, starts, length=length, slots=slots, width=width, window=window)
    out = block_attention(*given, places, starts, ranges, window)
    got = torch.autograd.grad(out, given, upstream.to(DEVICE, dtype))
    for a, b in zip((out, *got), (wanted, *gradients), strict=True):
        if dtype == torch.float32:
            torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-5)
        else:
            error, size = (a.cpu().float() - b).norm(dim=-1), b.norm(dim=-1)
            assert (error / (size + 0.1 * size.mean())).max() < 0.02
