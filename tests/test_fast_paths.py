"""Hand-written forward and backward passes against plain autograd, in fp32 and under bf16 autocast."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dspark.losses import ROW_STEP, PartPlan, PartSizes, Rows, maximum_and_index
from dspark.nn.attention import GROUP, KEY_STEP, _padded
from dspark.nn.backbone import Layer, RMSNorm, Rotary
from tests.builders import random_batch, random_draft

SLIDING = {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 5}


def gradients(draft, batch, precision):
    weight = torch.randn(1, 1, 1, draft.config.hidden_size, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        hidden = draft(batch).hidden
    (hidden.float() * weight).sum().backward()
    return {name: p.grad for name, p in draft.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "changes", [{}, {"sample_from_anchor": True}, SLIDING], ids=["fill_in", "anchor_first", "sliding"]
)
def test_gradients_through_grouped_attention_equal_those_of_the_dense_form(changes):
    grouped = random_draft(**changes)
    batch = random_batch(grouped.config, anchors=2 * GROUP + 3, rows=((60, 20), (81,)))
    got = gradients(grouped, batch, torch.float32)
    wanted = gradients(random_draft(backend="dense", **changes), batch, torch.float32)
    assert len(wanted) > 20
    for name, expected in wanted.items():
        torch.testing.assert_close(
            got[name], expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()), msg=name
        )


def test_bf16_gradients_stay_within_rounding_of_fp32():
    draft = random_draft()
    batch = random_batch(draft.config, anchors=2 * GROUP, rows=((60, 20), (81,)))
    exact = gradients(draft, batch, torch.float32)
    draft.zero_grad()
    for name, rounded in gradients(draft, batch, torch.bfloat16).items():
        assert (rounded - exact[name]).norm() / exact[name].norm() < 0.03, name


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"sample_from_anchor": True}, {"num_layers": 1, "layer_types": ("full_attention",)}, SLIDING],
    ids=["fill_in", "anchor_first", "one_layer", "sliding"],
)
def test_projecting_the_mask_once_equals_projecting_it_in_every_slot(changes, precision, monkeypatch):
    shared = random_draft(**changes)
    batch = random_batch(shared.config, rows=((60, 20), (81,)))
    calls = []

    def in_every_slot(layer, x, cos, sin, first_query, alike, plain=Layer.before_attention):
        calls.append(alike)
        if alike:
            assert (x[:, :, 1:] == x[0, 0, 1]).all()
        return plain(layer, x, cos, sin, first_query, False)

    got, hidden = gradients(shared, batch, precision), shared(batch).hidden
    monkeypatch.setattr(Layer, "before_attention", in_every_slot)
    apart = random_draft(**changes)
    wanted = gradients(apart, batch, precision)
    torch.testing.assert_close(hidden, apart(batch).hidden, rtol=1e-5, atol=1e-5)
    assert calls == [i == 0 for i in range(shared.config.num_layers)] * 2
    assert wanted.keys() == got.keys()
    tolerance = 1e-5 if precision == torch.float32 else 0.03
    for name, expected in wanted.items():
        assert (got[name] - expected).norm() <= tolerance * expected.norm(), name


def test_grouped_calls_come_in_few_shapes():
    """Spans are widened to whole steps where the row has room, and never reach beyond it."""
    for lo, hi, own, length in [(0, 5, 128, 1024), (700, 1020, 128, 1024), (3, 60, 40, 64), (0, 64, 64, 64)]:
        wider_lo, wider_hi = _padded(lo, hi, own, length)
        assert 0 <= wider_lo <= lo
        assert hi <= wider_hi <= length
        whole = (wider_hi - wider_lo + own) % KEY_STEP == 0
        assert whole or (wider_lo, wider_hi) == (0, length)
    assert _padded(0, 5, 128, 1024) == (0, 64)
    assert _padded(700, 1020, 100, 1024) == (676, 1024)


def rows_of(weights, target_row, positions):
    count = len(weights)
    return Rows(
        features=torch.zeros(count, 4),
        bias_features=None,
        weights=weights,
        labels=torch.zeros(count, dtype=torch.int64),
        target_row=target_row,
        target=torch.zeros(positions, 4),
        target_lse=torch.zeros(positions),
    )


def supervised_parts(rows, chunk_rows):
    return plan_of(rows, chunk_rows).parts()


def plan_of(rows, chunk_rows):
    return PartPlan(rows.weights != 0, rows.target_row, len(rows.target), chunk_rows)


def test_supervised_rows_come_first_and_in_whole_steps():
    weights = torch.zeros(300)
    weights[[5, 7, 200]] = 1.0
    target_row = torch.arange(300) // 2
    (part,) = supervised_parts(rows_of(weights, target_row, 150), 256)
    assert len(part.keep) == ROW_STEP
    assert part.keep[:3].tolist() == [5, 7, 200]
    assert len(set(part.keep.tolist())) == ROW_STEP
    assert len(part.positions) == ROW_STEP
    assert part.positions[:3].tolist() == [2, 3, 100]
    assert part.positions[part.target_row[:3]].tolist() == [2, 3, 100]
    assert supervised_parts(rows_of(torch.zeros(300), target_row, 150), 256) == []
    assert len(supervised_parts(rows_of(torch.ones(70), target_row[:70], 35), 256)[0].keep) == 70


@pytest.mark.parametrize("chunk_rows", [7, 64, 1000])
def test_every_row_is_in_one_part_beside_its_own_target(chunk_rows):
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(500, generator=generator) * (torch.rand(500, generator=generator) > 0.4)
    target_row = torch.randint(90, (500,), generator=generator)
    rows = rows_of(weights, target_row, 90)
    plan = plan_of(rows, chunk_rows)
    for parts in (plan.parts(), plan.parts(plan.sizes().grown(plan.sizes(), 128))):
        kept = torch.cat([part.keep for part in parts])
        assert len(kept) == len(kept.unique())
        assert set(weights.nonzero().squeeze(1).tolist()) <= set(kept.tolist())
        for part in parts:
            real = weights[part.keep] > 0
            assert torch.equal(part.positions[part.target_row][real], target_row[part.keep][real])
            assert len(part.positions) == len(part.positions.unique())


def test_parts_of_different_batches_have_one_shape_once_their_sizes_hold_both():
    plans = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        weights = (torch.rand(500, generator=generator) > 0.2 * (1 + seed)).float()
        target_row = torch.randint(300, (500,), generator=generator).sort().values
        plans.append(plan_of(rows_of(weights, target_row, 300), 200))
    first, *others = (plan.sizes() for plan in plans)
    assert not others[1].hold(first)
    sizes = others[1].grown(first, 16).grown(others[0], 16)
    assert all(sizes.hold(one) for one in (first, *others))
    shapes = [[[t.shape for t in vars(part).values()] for part in plan.parts(sizes)] for plan in plans]
    assert shapes[0] == shapes[1] == shapes[2]
    assert plans[0].sizes() == first  # asking twice counts once


def test_sizes_by_hand():
    sizes = PartSizes(100, (64, 10))
    assert sizes.hold(PartSizes(100, (64, 10)))
    assert not sizes.hold(PartSizes(101, (1, 1)))
    assert not sizes.hold(PartSizes(1, (64, 11)))
    assert sizes.grown(PartSizes(90, (65, 3)), 64) == PartSizes(128, (128, 64))


def plain_norm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize("shape", [(5, 16), (2, 3, 4, 8)])
def test_norm_and_its_gradients_equal_autograd(shape):
    norm = RMSNorm(shape[-1], 1e-5)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    x = torch.randn(shape, requires_grad=True)
    upstream = torch.randn(shape)
    got = torch.autograd.grad((norm(x) * upstream).sum(), [x, norm.weight])
    wanted = torch.autograd.grad((plain_norm(x, norm.weight, 1e-5) * upstream).sum(), [x, norm.weight])
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_norm_under_autocast_rounds_only_its_result():
    norm = RMSNorm(576, 1e-6)
    x = torch.randn(9, 576).bfloat16()
    expected = plain_norm(x.float(), norm.weight, 1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(norm(x), expected.bfloat16())
        torch.testing.assert_close(norm(x, torch.float32), expected, rtol=1e-6, atol=1e-6)


def test_gradient_of_a_rotation_is_the_rotation_back():
    rotary = Rotary.at(torch.tensor([0, 3, 900]), 8, 100.0)
    x = torch.randn(3, 2, 8, requires_grad=True)
    rotated = rotary.rotate(x, torch.float32)
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))
    upstream = torch.randn(3, 2, 8)
    (gradient,) = torch.autograd.grad(rotated, x, upstream)
    back = dataclasses.replace(rotary, sin=-rotary.sin)
    torch.testing.assert_close(gradient, back.rotate(upstream, torch.float32))
    torch.testing.assert_close(back.rotate(rotated, torch.float32), x)


@pytest.mark.parametrize("width", [128 * 3, 41, 64])
def test_maximum_takes_the_first_of_equal_values(width):
    values = torch.randint(0, 6, (50, width), generator=torch.Generator().manual_seed(0)).float()
    top, index = maximum_and_index(values)
    first = (values == values.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(top, values.amax(-1))
    assert torch.equal(index, first)
