"""The backbone: visibility, layouts, decoding against training, precision of rotary tables."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dspark.blocks import build_blocks
from dspark.nn.attention import GROUP, plan_attention, resolve_backend
from dspark.nn.backbone import Rotary
from dspark.nn.draft import ContextCache
from tests.builders import draft_config, random_batch, random_draft

SLIDING = {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 5}
VARIANTS = {
    "fill_in": {},
    "anchor_first": {"sample_from_anchor": True},
    "sliding": SLIDING,
    "sliding_anchor_first": {**SLIDING, "sample_from_anchor": True},
}


def visible_by_loops(batch, config, window, b, a, slot, key):
    """Whether context token `key` may be seen, one case at a time."""
    anchor = int(batch.anchors[b, a])
    if key >= anchor or int(batch.doc_start[b, key]) != int(batch.doc_start[b, anchor]):
        return False
    return window is None or key > anchor + slot - window


@pytest.mark.parametrize("window", [None, 5])
def test_context_mask_equals_a_three_loop_version(window):
    config = (
        draft_config(layer_types=("sliding_attention",) * 2, sliding_window=5) if window else draft_config()
    )
    batch = random_batch(config, anchors=2 * GROUP + 3, rows=((60, 20), (81,)))
    plan = plan_attention(batch, config.block_size, {window}, "grouped")[window]
    width = config.block_size
    for b, groups in enumerate(plan.groups):
        for group in groups:
            first, last, lo, hi = group.anchors.start, group.anchors.stop, group.lo, group.hi
            mask = group.hidden == 0
            assert mask[:, : group.clear].all()
            assert group.clear == 0 or not mask[:, group.clear].all()
            assert mask.shape == ((last - first) * width, hi - lo + (last - first) * width)
            for a in range(first, last):
                for slot in range(width):
                    row = mask[(a - first) * width + slot]
                    for key in range(batch.input_ids.shape[1]):
                        expected = visible_by_loops(batch, config, window, b, a, slot, key)
                        assert bool(row[key - lo]) == expected if lo <= key < hi else not expected
                    own = row[hi - lo :].view(last - first, width)
                    assert not own[torch.arange(last - first) != a - first].any()
                    seen = [window is None or slot - window < other <= slot for other in range(width)]
                    assert own[a - first].tolist() == seen


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_grouped_attention_equals_dense(changes):
    grouped = random_draft(**changes)
    batch = random_batch(grouped.config, anchors=GROUP + 5)
    dense = random_draft(backend="dense", **changes)
    out, expected = grouped(batch).hidden, dense(batch).hidden
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_training_forward_equals_decoding_from_a_prefix(changes):
    """Every slot of every block, rebuilt from the document's prefix alone, token by token into a context cache."""
    draft = random_draft(**changes)
    batch = random_batch(draft.config, rows=((23, 17),), anchors=6)
    hidden = draft(batch).hidden
    for a, anchor in enumerate(batch.anchors[0].tolist()):
        start = int(batch.doc_start[0, anchor])
        cache = ContextCache(draft.config.num_layers)
        for at in range(start, anchor, 3):
            part = slice(at, min(at + 3, anchor))
            counts = torch.tensor([part.stop - part.start])
            draft.extend(cache, batch.aux[:, part], batch.positions[:, part], counts)
        decoded = draft.draft_block(cache, batch.input_ids[:, anchor], draft.config.block_size)
        torch.testing.assert_close(decoded[0], hidden[0, a], rtol=1e-4, atol=1e-5)


def test_decoding_ragged_rows_equals_each_row_alone():
    draft = random_draft()
    aux = torch.randn(2, 9, 3, draft.config.hidden_size)
    positions = torch.arange(9).repeat(2, 1)
    counts = torch.tensor([9, 4])
    anchors = torch.tensor([5, 7])
    together = ContextCache(2)
    draft.extend(together, aux, positions, counts)
    both = draft.draft_block(together, anchors, 4)
    draft.extend(together, aux[:, :2], together.lengths[:, None] + torch.arange(2), torch.tensor([2, 1]))
    again = draft.draft_block(together, anchors, 4)
    for row, count in enumerate([9, 4]):
        alone = ContextCache(2)
        draft.extend(alone, aux[row : row + 1, :count], positions[:1, :count], torch.tensor([count]))
        torch.testing.assert_close(draft.draft_block(alone, anchors[row : row + 1], 4)[0], both[row])
        more = 2 - row
        draft.extend(
            alone, aux[row : row + 1, :more], count + torch.arange(more).unsqueeze(0), torch.tensor([more])
        )
        torch.testing.assert_close(draft.draft_block(alone, anchors[row : row + 1], 4)[0], again[row])


def test_packed_document_equals_the_same_document_alone():
    draft = random_draft()
    packed = random_batch(draft.config, rows=((23, 17),), anchors=12)
    inside = packed.anchors[0] >= 23
    alone = dataclasses.replace(
        packed,
        **{
            name: getattr(packed, name)[:, 23:40]
            for name in ("input_ids", "positions", "loss_mask", "aux", "last", "lse")
        },
        doc_start=torch.zeros(1, 17, dtype=torch.int64),
        anchors=packed.anchors[:, inside] - 23,
        anchor_valid=packed.anchor_valid[:, inside],
    )
    torch.testing.assert_close(draft(packed).hidden[:, inside], draft(alone).hidden, rtol=1e-4, atol=1e-5)
    assert torch.equal(
        build_blocks(packed, draft.config).supervised[:, inside], build_blocks(alone, draft.config).supervised
    )


def test_rotary_frequencies_survive_a_cast_of_the_module():
    draft = random_draft().to(torch.bfloat16)
    positions = torch.tensor([0, 4095])
    rotary = draft._rotary(positions)
    exponent = torch.arange(0, 8, 2, dtype=torch.float64) / 8
    angles = positions.double().unsqueeze(1) * 10_000.0**-exponent
    assert rotary.cos.dtype == torch.float32
    torch.testing.assert_close(rotary.cos.double(), angles.cos(), rtol=0, atol=3e-4)
    assert torch.equal(rotary.cos, Rotary.at(positions, 8, 10_000.0).cos)


def test_rotation_of_one_position_by_hand():
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    rotary = Rotary.at(torch.tensor([2]), 4, 100.0)
    a, b = torch.tensor(2.0), torch.tensor(0.2)
    expected = torch.stack(
        [
            1 * a.cos() - 3 * a.sin(),
            2 * b.cos() - 4 * b.sin(),
            3 * a.cos() + 1 * a.sin(),
            4 * b.cos() + 2 * b.sin(),
        ]
    )
    torch.testing.assert_close(rotary.rotate(x, x.dtype)[0, 0], expected)


@pytest.mark.parametrize("rank", [8, 5])  # copied as words, and number by number
def test_joint_head_holds_the_head_and_follows_the_bias_matrix(rank):
    draft = random_draft(markov_rank=rank).bfloat16()
    head, bias = draft.lm_head.clone(), draft.markov_head.markov_w2.weight
    for _ in range(2):
        joint = draft.joint_head(torch.bfloat16)
        assert torch.equal(joint, torch.cat([head, bias], dim=1))
        assert torch.equal(draft.lm_head, head)
        with torch.no_grad():
            bias.mul_(-2)


def test_auto_backend_trains_on_cpu_and_the_kernel_is_refused_there():
    assert resolve_backend("auto", torch.device("cpu")) == "grouped"
    with pytest.raises(ValueError, match="needs a CUDA device"):
        resolve_backend("kernel", torch.device("cpu"))
    with pytest.raises(ValueError, match="expected one of"):
        resolve_backend("sdpa2", torch.device("cpu"))


def test_a_batch_without_a_usable_anchor_is_finite():
    draft = random_draft()
    batch = random_batch(draft.config)
    batch.loss_mask.zero_()
    batch.anchor_valid.zero_()
    batch.anchors.zero_()
    hidden = draft(batch).hidden
    assert hidden.isfinite().all()
    hidden.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in draft.parameters())
