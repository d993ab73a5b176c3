"""The vocabulary map: both id spaces, offsets as engines read them, and refusals."""

from __future__ import annotations

import pytest
import torch

from dspark.vocab import VocabMap


def test_most_frequent_breaks_ties_toward_lower_ids_and_sorts():
    counts = torch.tensor([0, 5, 2, 2, 2, 0, 9])
    assert VocabMap.most_frequent(counts, 4).kept.tolist() == [1, 2, 3, 6]
    assert VocabMap.most_frequent(counts, 6).kept.tolist() == [0, 1, 2, 3, 4, 6]


def test_offsets_and_mask_are_consistent_as_engines_expect():
    vocab = VocabMap(torch.tensor([1, 4, 5]), 8)
    assert vocab.d2t.tolist() == [1, 3, 3]
    index = torch.arange(3)
    assert vocab.t2d[index + vocab.d2t].all()
    assert int(vocab.t2d.sum()) == 3
    assert VocabMap.from_d2t(vocab.d2t, 8).kept.tolist() == [1, 4, 5]


def test_conversions_are_inverse_and_unknown_tokens_are_minus_one():
    vocab = VocabMap(torch.tensor([1, 4, 5]), 8)
    assert vocab.draft_to_target(torch.tensor([[2], [0]])).tolist() == [[5], [1]]
    assert vocab.target_to_draft(torch.tensor([0, 1, 5, 7])).tolist() == [-1, 0, 2, -1]


def test_the_hash_follows_the_kept_ids():
    assert VocabMap(torch.tensor([1, 4]), 8).sha != VocabMap(torch.tensor([1, 5]), 8).sha
    assert VocabMap.full(8).sha == VocabMap(torch.arange(8), 8).sha


@pytest.mark.parametrize("kept", [[], [3, 1], [1, 1], [-1, 2], [1, 8]])
def test_unsorted_repeated_or_foreign_ids_are_refused(kept):
    with pytest.raises(ValueError, match=r"strictly increasing ids in 0..7"):
        VocabMap(torch.tensor(kept, dtype=torch.int64), 8)


def test_a_size_beyond_the_verifier_is_refused():
    with pytest.raises(ValueError, match=r"expected 1 to 4"):
        VocabMap.most_frequent(torch.ones(4, dtype=torch.int64), 5)
