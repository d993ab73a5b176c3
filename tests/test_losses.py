"""Loss terms: values by hand, gradients against autograd and float64, chunking, masks, precision."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dspark.losses import (
    TERMS,
    LossWeights,
    PartPlan,
    Rows,
    confidence_loss,
    plain_terms,
    target_probabilities,
    vocabulary_loss,
)
from dspark.objective import draft_loss, plan_loss, training_loss
from tests.builders import random_batch, random_draft

ALONE = [{name: 1.0} for name in TERMS]
MIXED = [{"ce": 0.1, "tv": 0.9}, dict.fromkeys(TERMS, 0.3)]


def loss_weights(terms, **changes):
    values = {
        "terms": terms,
        "confidence": 1.0,
        "decay_gamma": 4.0,
        "ce_label": "text",
        "target_norm": "verifier_vocab",
        **changes,
    }
    return LossWeights(**values)


def random_rows(*, seed=0, m=23, h=16, r=5, v=19, w=30, positions=9, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    head = torch.randn(w, h, generator=g, dtype=dtype)
    target = torch.randn(positions, h, generator=g, dtype=dtype)
    rows = Rows(
        features=torch.randn(m, h, generator=g, dtype=dtype).requires_grad_(),
        bias_features=torch.randn(m, r, generator=g, dtype=dtype).requires_grad_(),
        weights=torch.rand(m, generator=g) * (torch.rand(m, generator=g) > 0.3),
        labels=torch.randint(-1, v, (m,), generator=g),
        target_row=torch.randint(0, positions, (m,), generator=g).sort().values,
        target=target,
        target_lse=(target @ head.T).logsumexp(-1).float(),
    )
    bias = torch.randn(v, r, generator=g, dtype=dtype).requires_grad_()
    return rows, head[:v], bias


def plain_sum(rows, head, bias, weights, scale=1.0):
    logits = (rows.features @ head.T + rows.bias_features @ bias.T) * scale
    p = target_probabilities(rows.target, rows.target_lse, head, scale, weights.target_norm)[rows.target_row]
    return (plain_terms(logits, p, rows.labels, weights) * rows.weights).sum()


@pytest.mark.parametrize("ce_label", ["text", "target_top1"])
@pytest.mark.parametrize("target_norm", ["verifier_vocab", "draft_vocab"])
@pytest.mark.parametrize("terms", ALONE + MIXED, ids=lambda t: "+".join(t))
def test_chunked_value_and_gradients_equal_the_plain_form(terms, target_norm, ce_label):
    weights = loss_weights(terms, target_norm=target_norm, ce_label=ce_label)
    rows, head, bias = random_rows()
    expected = plain_sum(rows, head, bias, weights)
    wanted = torch.autograd.grad(expected, [rows.features, rows.bias_features, bias])
    for chunk, step in ((1, None), (4, None), (8, None), (1000, None), (4, 16), (1000, 16)):
        plan = PartPlan(rows.weights != 0, rows.target_row, len(rows.target), chunk)
        sizes = plan.sizes() if step is None else plan.sizes().grown(plan.sizes(), step)  # with idle rows
        parts = plan.parts(sizes)
        value, _ = vocabulary_loss(rows, head, bias, weights, 1.0, chunk, parts=lambda parts=parts: parts)
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
        got = torch.autograd.grad(value, [rows.features, rows.bias_features, bias])
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [8, 2])  # few parts, which add up in bf16, and many, which do not
def test_gradient_of_a_bf16_bias_matrix_stays_within_its_rounding(chunk):
    weights = loss_weights({"ce": 0.1, "tv": 0.9})
    rows, head, bias = random_rows(dtype=torch.bfloat16, m=48, h=32, v=64, w=90)
    value, _ = vocabulary_loss(rows, head, bias, weights, 1.0, 48)
    whole = torch.autograd.grad(value, bias)[0].float()
    value, _ = vocabulary_loss(rows, head, bias, weights, 1.0, chunk)
    got = torch.autograd.grad(value, bias)[0]
    assert got.dtype == torch.bfloat16
    assert 0 < (got.float() - whole).norm() < 4e-3 * whole.norm()


def test_logit_scale_reaches_value_and_gradient():
    weights = loss_weights({"ce": 0.5, "kl": 0.5})
    rows, head, bias = random_rows(seed=3)
    rows.target_lse = (rows.target @ head.T * 0.25).logsumexp(-1)
    expected = plain_sum(rows, head, bias, weights, scale=0.25)
    value, _ = vocabulary_loss(rows, head, bias, weights, 0.25, 7)
    torch.testing.assert_close(value, expected)
    wanted = torch.autograd.grad(expected, rows.features)[0]
    torch.testing.assert_close(torch.autograd.grad(value, rows.features)[0], wanted, rtol=1e-4, atol=1e-6)


def test_terms_of_two_tokens_by_hand():
    """q = (3/4, 1/4), p = (1/2, 1/2): alpha = 3/4, tv = 1/4."""
    logits = torch.tensor([[3.0, 1.0]]).log()
    p = torch.tensor([[0.5, 0.5]])
    label = torch.tensor([1])
    expected = {
        "ce": 4.0,
        "tv": torch.e**0.25,
        "l1": torch.e**0.5,
        "kl": (0.5 / 0.75) ** 0.5 * (0.5 / 0.25) ** 0.5,
        "rkl": (0.75 / 0.5) ** 0.75 * (0.25 / 0.5) ** 0.25,
        "nla": 4 / 3,
    }
    for name, exponential in expected.items():
        value = plain_terms(logits, p, label, loss_weights({name: 1.0}))
        torch.testing.assert_close(value.exp(), torch.tensor([float(exponential)]), rtol=1e-5, atol=1e-6)


def test_l1_is_twice_tv_even_when_mass_was_pruned():
    rows, head, bias = random_rows(seed=1)
    tv, stats = vocabulary_loss(rows, head, bias, loss_weights({"tv": 1.0}), 1.0, 5)
    l1, _ = vocabulary_loss(rows, head, bias, loss_weights({"l1": 1.0}), 1.0, 5)
    torch.testing.assert_close(l1, 2 * tv)
    active = rows.weights > 0
    torch.testing.assert_close(tv, ((1 - stats.alpha) * rows.weights)[active].sum())


def test_pruned_target_keeps_its_true_mass_and_renormalising_inflates_alpha():
    rows, head, bias = random_rows(seed=2)
    exact = target_probabilities(rows.target, rows.target_lse, head, 1.0, "verifier_vocab")
    peers = target_probabilities(rows.target, rows.target_lse, head, 1.0, "draft_vocab")
    assert (exact.sum(-1) < 1).all()
    torch.testing.assert_close(peers.sum(-1), torch.ones(len(peers)))
    _, stats = vocabulary_loss(rows, head, bias, loss_weights({"tv": 1.0}), 1.0, 5)
    _, inflated = vocabulary_loss(
        rows, head, bias, loss_weights({"tv": 1.0}, target_norm="draft_vocab"), 1.0, 5
    )
    active = rows.weights > 0
    assert (inflated.alpha[active] >= stats.alpha[active] - 1e-6).all()


@pytest.mark.parametrize("terms", [{"tv": 1.0}, {"kl": 1.0}, {"nla": 1.0}])
def test_divergence_gradient_holds_at_high_acceptance(terms):
    """With draft and verifier almost equal, fp32 arithmetic on bf16 logits keeps the gradient within 1 % of float64."""
    rows, head, _ = random_rows(seed=4, h=16)
    noise = 0.02 * torch.randn(len(rows.weights), 16, generator=torch.Generator().manual_seed(0))
    states = (rows.target[rows.target_row] + noise).bfloat16()
    quiet = dataclasses.replace(rows, features=states.float().requires_grad_(), bias_features=None)
    value, stats = vocabulary_loss(quiet, head.bfloat16().float(), None, loss_weights(terms), 1.0, 7)
    gradient = torch.autograd.grad(value, quiet.features)[0].double()
    precise = states.double().requires_grad_()
    wide = head.bfloat16().double()
    p = (rows.target.double() @ wide.T - rows.target_lse.double().unsqueeze(1)).exp()[rows.target_row]
    reference = (plain_terms(precise @ wide.T, p, rows.labels, loss_weights(terms)) * rows.weights).sum()
    expected = torch.autograd.grad(reference, precise)[0]
    assert stats.alpha[rows.weights > 0].mean() > 0.5
    assert (gradient - expected).norm() / expected.norm() < 0.01


def test_garbage_in_padding_changes_no_bit_of_loss_gradient_or_metric():
    draft = random_draft()
    weights = loss_weights({"ce": 0.1, "tv": 0.9})
    batch = random_batch(draft.config, anchors=20, rows=((23, 17), (12,)))
    assert not batch.anchor_valid.all()

    def run(b):
        draft.zero_grad()
        sums = draft_loss(draft, draft(b), b, weights, confidence_detach_inputs=False, chunk_rows=16)
        sums.numerator.backward()
        return sums, [p.grad.clone() for p in draft.parameters()]

    sums, grads = run(batch)
    dirty = dataclasses.replace(
        batch, **{name: getattr(batch, name).clone() for name in ("aux", "last", "lse", "input_ids")}
    )
    padding = (
        (batch.doc_start == torch.arange(batch.input_ids.shape[1]))
        & ~batch.loss_mask
        & (batch.positions == 0)
    )
    padding[:, 0] = False
    padding[0, 23] = False
    assert padding.any()
    dirty.aux[padding], dirty.last[padding], dirty.lse[padding], dirty.input_ids[padding] = 1e3, -1e3, 0.0, 5
    again, other = run(dirty)
    for name in ("numerator", "denominator", "count", "alpha", "greedy_hit", "label_keep"):
        assert torch.equal(getattr(sums, name), getattr(again, name)), name
    assert all(torch.equal(a, b) for a, b in zip(grads, other, strict=True))


def test_parts_planned_before_the_forward_pass_give_the_same_bits():
    draft = random_draft()
    batch = random_batch(draft.config, anchors=20, rows=((23, 17), (12,)))
    settings = {"confidence_detach_inputs": False, "chunk_rows": 16}
    weights = loss_weights({"ce": 0.1, "tv": 0.9})

    def run(sums):
        draft.zero_grad()
        sums.numerator.backward()
        return sums, [p.grad.clone() for p in draft.parameters()]

    late, wanted = run(draft_loss(draft, draft(batch), batch, weights, **settings))
    blocks, plan = plan_loss(draft, batch, chunk_rows=16)
    parts = plan.parts()
    for planned in (None, (blocks, lambda: parts)):
        early, got = run(training_loss(draft, batch, weights, **settings, planned=planned))
        assert early.count.sum() > 32  # several parts
        for name, value in vars(late).items():
            assert torch.equal(getattr(early, name), value), name
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_detached_confidence_leaves_the_backbone_alone_and_attached_reaches_it():
    weights = loss_weights({"tv": 1.0})
    draft = random_draft()
    batch = random_batch(draft.config)
    only = dataclasses.replace(weights, terms={"tv": 1e-30})
    for detach in (True, False):
        draft.zero_grad()
        sums = draft_loss(draft, draft(batch), batch, only, confidence_detach_inputs=detach, chunk_rows=64)
        sums.numerator.backward()
        assert draft.confidence_head.proj.weight.grad.abs().max() > 1e-4
        reached = max(
            float(draft.fc.weight.grad.abs().max()),
            float(draft.markov_head.markov_w1.weight.grad.abs().max()),
        )
        assert (reached < 1e-20) == detach


def test_confidence_loss_by_hand():
    value = confidence_loss(torch.tensor([0.0, 2.0]), torch.tensor([0.5, 1.0]), torch.tensor([1.0, 0.5]))
    torch.testing.assert_close(value, torch.tensor(0.6931472 + 0.5 * 0.1269280))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"terms": {"tvd": 1.0}}, "unknown names"),
        ({"terms": {"tv": 0.0}}, "nothing to train"),
        ({"decay_gamma": 0.0}, "positive number of slots"),
        ({"ce_label": "argmax"}, "expected one of"),
        ({"target_norm": "kept"}, "expected one of"),
    ],
)
def test_wrong_loss_settings_say_what_is_expected(changes, message):
    with pytest.raises(ValueError, match=message):
        loss_weights(**{"terms": {"tv": 1.0}, **changes})


def test_rows_without_any_weight_lose_nothing_and_have_zero_gradients():
    rows, head, bias = random_rows(seed=5)
    rows.weights.zero_()
    value, stats = vocabulary_loss(rows, head, bias, loss_weights({"ce": 0.1, "tv": 0.9}), 1.0, 7)
    gradients = torch.autograd.grad(value, [rows.features, rows.bias_features, bias])
    assert float(value.detach()) == 0.0
    assert not any(g.any() for g in gradients)
    assert not stats.alpha.any()
