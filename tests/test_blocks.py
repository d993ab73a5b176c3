"""Slots, labels, supervision and weights against hand-written cases, for both layouts."""

from __future__ import annotations

import math

import pytest
import torch

from dspark.blocks import DraftBatch, anchor_candidates, build_blocks, position_weights, sample_anchors
from tests.builders import draft_config


def two_documents() -> DraftBatch:
    """Tokens 100.. in one row: document one is rows 0-6 (prompt 0-2), document two rows 7-11 (prompt 7-8), one padding token."""
    start = torch.tensor([[0] * 7 + [7] * 5 + [12]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 0]]).bool()
    position = torch.arange(13).unsqueeze(0) - start
    return DraftBatch(
        input_ids=torch.arange(20, 33).unsqueeze(0),
        positions=position,
        doc_start=start,
        loss_mask=mask,
        aux=torch.zeros(1, 13, 3, 32),
        last=torch.zeros(1, 13, 32),
        lse=torch.zeros(1, 13),
        anchors=torch.tensor([[2, 5, 9]]),
        anchor_valid=torch.tensor([[True, True, True]]),
    )


def test_the_last_prompt_token_is_an_anchor_and_the_first_token_of_a_document_is_not():
    batch = two_documents()
    found = anchor_candidates(batch.loss_mask, batch.doc_start)[0].nonzero().squeeze(-1).tolist()
    assert found == [2, 3, 4, 5, 8, 9, 10]
    lone = torch.tensor([[False, True, True]])
    assert anchor_candidates(lone, torch.zeros(1, 3, dtype=torch.int64))[0].tolist() == [False, True, False]


@pytest.mark.parametrize("anchor_first", [False, True])
def test_blocks_of_both_layouts_by_hand(anchor_first):
    config = draft_config(block_size=4, sample_from_anchor=anchor_first)
    blocks = build_blocks(two_documents(), config)
    count = 4 if anchor_first else 3
    assert config.num_proposals == count
    assert config.first_slot == (0 if anchor_first else 1)
    assert blocks.slot_ids[0].tolist() == [[22, 96, 96, 96], [25, 96, 96, 96], [29, 96, 96, 96]]
    assert blocks.slot_positions[0].tolist() == [[2, 3, 4, 5], [5, 6, 7, 8], [2, 3, 4, 5]]
    # Proposal i is the token at a+i, its previous token and its verifier distribution stand at a+i-1: in both layouts.
    assert blocks.prev_ids[0, 0].tolist() == [22, 23, 24, 25][:count]
    assert blocks.labels[0, 0].tolist() == [23, 24, 25, 26][:count]
    assert blocks.target_index[0, 0].tolist() == [2, 3, 4, 5][:count]
    # Anchor 5 has one supervised token left in its document; anchor 9 two.
    assert blocks.supervised[0].tolist() == [
        [True, True, True, True][:count],
        [True, False, False, False][:count],
        [True, True, False, False][:count],
    ]


def test_a_gap_in_the_loss_mask_ends_supervision_for_good():
    batch = two_documents()
    batch.loss_mask[0, 4] = False
    supervised = build_blocks(batch, draft_config(block_size=4, sample_from_anchor=True)).supervised[0, 0]
    assert supervised.tolist() == [True, False, False, False]


def test_invalid_anchors_supervise_nothing():
    batch = two_documents()
    batch.anchor_valid[0, 1] = False
    assert not build_blocks(batch, draft_config()).supervised[0, 1].any()


@pytest.mark.parametrize(("anchor_first", "count"), [(True, 8), (False, 7)])
def test_weights_start_at_one_on_the_first_proposal_of_either_layout(anchor_first, count):
    config = draft_config(block_size=8, sample_from_anchor=anchor_first)
    weights = position_weights(config.num_proposals, 4.0, "cpu")
    expected = [math.exp(-k / 4.0) for k in range(count)]
    assert weights.tolist() == pytest.approx(expected)
    assert position_weights(3, None, "cpu").tolist() == [1.0, 1.0, 1.0]


def test_sampled_anchors_are_sorted_distinct_candidates_and_padding_repeats_the_last():
    batch = two_documents()
    candidates = {2, 3, 4, 5, 8, 9, 10}
    few, valid = sample_anchors(batch.loss_mask, batch.doc_start, 4, torch.Generator().manual_seed(1))
    assert valid.all()
    assert few[0].tolist() == sorted(set(few[0].tolist()))
    assert set(few[0].tolist()) <= candidates
    many, valid = sample_anchors(batch.loss_mask, batch.doc_start, 9, torch.Generator().manual_seed(1))
    assert many[0].tolist() == [*sorted(candidates), 10, 10]
    assert valid[0].tolist() == [True] * 7 + [False] * 2


def test_every_candidate_is_drawn_equally_often():
    batch = two_documents()
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(13)
    for _ in range(700):
        anchors, _ = sample_anchors(batch.loss_mask, batch.doc_start, 3, generator)
        counts[anchors[0]] += 1
    drawn = counts[counts > 0]
    assert len(drawn) == 7
    assert ((drawn - 300).abs() < 60).all()  # four standard deviations
