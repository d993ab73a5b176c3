"""Acceptance arithmetic: identities, and the replay recursion against simulated rounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspark.acceptance import (
    accepted_distribution,
    conditional_acceptance,
    expected_accepted,
    replay_counts,
    replay_visits,
    survival,
    tau_from_counts,
)


def test_survival_and_expected_accepted_by_hand():
    keep = torch.tensor([[0.5, 0.5, 1.0], [1.0, 0.0, 1.0]])
    assert survival(keep).tolist() == [[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]
    assert expected_accepted(keep).tolist() == [1.0, 1.0]


def test_accepted_distribution_sums_to_one_and_has_the_mean_of_survival():
    keep = np.random.default_rng(0).random((5, 7))
    moves = accepted_distribution(keep)
    np.testing.assert_allclose(moves.sum(-1), 1.0)
    np.testing.assert_allclose(moves @ np.arange(8), np.cumprod(keep, -1).sum(-1))


def test_visits_of_certain_and_impossible_drafts():
    """Nothing kept: every anchor is visited. Everything kept with N = 2: every third one."""
    assert replay_visits(np.zeros((5, 2))).tolist() == [1, 1, 1, 1, 1]
    assert replay_visits(np.ones((7, 2))).tolist() == [1, 0, 0, 1, 0, 0, 1]


def test_replay_counts_equal_simulated_rounds():
    rng = np.random.default_rng(3)
    keep = rng.random((40, 3))
    keep[-2:, 1:] = keep[-1:, :2] = 0  # beyond the text
    accepted = rounds = 0
    trials = 4000
    for _ in range(trials):
        at = 0
        while at < len(keep):
            kept = int((rng.random(3) < keep[at]).cumprod().sum())
            accepted, rounds, at = accepted + kept, rounds + 1, at + kept + 1
    expected = replay_counts(keep)
    np.testing.assert_allclose((accepted / trials, rounds / trials), expected, rtol=0.02)
    assert 1.0 <= tau_from_counts(*expected) <= 4.0


def test_conditional_acceptance_is_nan_where_nothing_was_reached():
    reached = np.array([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    accepted = np.array([[1.0, 0.5, 0.0], [0.0, 0.0, 0.0]])
    values = conditional_acceptance(reached, accepted)
    assert values[:2].tolist() == [0.5, 0.5]
    assert np.isnan(values[2])


def test_tau_counts_the_bonus_token_and_refuses_zero_rounds():
    assert tau_from_counts(3.0, 2.0) == 2.5
    with pytest.raises(ValueError, match="zero verification rounds"):
        tau_from_counts(0.0, 0.0)
