"""The prefix scheduler: what it admits, what it must not look at, and the counterexample that shows why it stops."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark import scheduler


@st.composite
def problems(draw, *, convex: bool = False, coarse: bool = False):
    """(p_accept_given_prefix [R, N], sps): small enough to enumerate."""
    requests, width = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    levels = st.sampled_from([0.0, 0.25, 0.5, 1.0]) if coarse else st.floats(0.0, 1.0)
    conditional = np.array(draw(st.lists(levels, min_size=requests * width, max_size=requests * width)))
    steps = draw(
        st.lists(st.floats(0.0, 1.0), min_size=requests * (width + 1), max_size=requests * (width + 1))
    )
    increments = np.sort(steps) if convex else np.array(steps)
    seconds = 0.5 + np.cumsum(increments)
    return conditional.reshape(requests, width), np.concatenate([[0.0], 1 / seconds])


def theta(survival: np.ndarray, lengths, sps: np.ndarray) -> float:
    tau = len(survival) + sum(survival[r, :n].sum() for r, n in enumerate(lengths))
    return tau * sps[len(survival) + int(sum(lengths))]


@settings(max_examples=80, deadline=None)
@given(problems(convex=True))
def test_early_stop_equals_brute_force_when_step_time_is_convex(problem):
    conditional, sps = problem
    survival = np.cumprod(conditional, axis=1)
    found = scheduler.admit(survival, sps, early_stop=True)
    choices = itertools.product(range(survival.shape[1] + 1), repeat=len(survival))
    assert theta(survival, found, sps) == pytest.approx(
        max(theta(survival, c, sps) for c in choices), rel=1e-9
    )


@settings(max_examples=80, deadline=None)
@given(problems())
def test_global_search_equals_brute_force_on_any_curve(problem):
    conditional, sps = problem
    survival = np.cumprod(conditional, axis=1)
    found = scheduler.admit(survival, sps, early_stop=False)
    choices = itertools.product(range(survival.shape[1] + 1), repeat=len(survival))
    assert theta(survival, found, sps) == pytest.approx(
        max(theta(survival, c, sps) for c in choices), rel=1e-9
    )


@settings(max_examples=80, deadline=None)
@given(problems(coarse=True))
def test_algorithm_1_written_out_as_a_loop_gives_the_same_lengths(problem):
    conditional, sps = problem
    survival = np.cumprod(conditional, axis=1)
    requests = len(survival)
    order = sorted(
        ((r, k) for r, k in np.ndindex(survival.shape) if survival[r, k] > 0),
        key=lambda x: (-survival[x], x[1], x[0]),
    )
    lengths, best, tau = np.zeros(requests, dtype=int), requests * sps[requests], float(requests)
    for count, (r, k) in enumerate(order, start=1):
        tau += survival[r, k]
        if tau * sps[requests + count] <= best:
            break
        best, lengths[r] = tau * sps[requests + count], k + 1
    np.testing.assert_array_equal(scheduler.admit(survival, sps, early_stop=True), lengths)


@settings(max_examples=80, deadline=None)
@given(problems(coarse=True), st.integers(0, 2), st.integers(0, 2), st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_later_confidences_never_decide_about_an_earlier_draft(problem, r, k, other):
    conditional, sps = problem
    r, k = r % conditional.shape[0], k % conditional.shape[1]
    changed = conditional.copy()
    changed[r, k + 1 :] = other
    before, after = (
        scheduler.admit(np.cumprod(c, axis=1), sps, early_stop=True) for c in (conditional, changed)
    )
    assert (before[r] >= k + 1) == (after[r] >= k + 1)


@settings(max_examples=50, deadline=None)
@given(problems(coarse=True))
def test_a_larger_number_only_adds_drafts_and_is_used_up(problem):
    survival = np.cumprod(problem[0], axis=1)
    possible = np.count_nonzero(survival)
    before = np.zeros(len(survival), dtype=int)
    for number in range(survival.size + 2):
        lengths = scheduler.admit_number(survival, np.asarray(number))
        assert (lengths >= before).all()
        assert lengths.sum() == min(number, possible)
        before = lengths


@settings(max_examples=50, deadline=None)
@given(problems(convex=True))
def test_a_cheaper_marginal_token_never_shrinks_the_number_admitted(problem):
    conditional, sps = problem
    survival = np.cumprod(conditional, axis=1)
    seconds = np.concatenate([[np.inf], 1 / sps[1:]])
    numbers = []
    for share in (1.0, 0.5, 0.1):  # the same first step, ever flatter growth
        flatter = seconds[1] + share * (seconds[1:] - seconds[1])
        numbers.append(
            int(scheduler.best_number(survival, np.concatenate([[0.0], 1 / flatter]), early_stop=True))
        )
    assert numbers == sorted(numbers)


def test_batched_steps_equal_one_step_at_a_time():
    rng = np.random.default_rng(0)
    survival = np.cumprod(rng.choice([0.3, 0.6, 0.9, 1.0], size=(40, 6, 4)), axis=-1)
    sps = np.concatenate([[0.0], 1 / (1 + 0.1 * np.maximum(0, np.arange(1, 31) - 8))])
    for early_stop in (True, False):
        whole = scheduler.admit(survival, sps, early_stop=early_stop)
        for one, lengths in zip(survival, whole):
            np.testing.assert_array_equal(scheduler.admit(one, sps, early_stop=early_stop), lengths)


def test_free_tokens_admit_everything_that_can_survive_and_dear_ones_nothing():
    survival = np.array([[0.9, 0.5, 0.0], [0.2, 0.1, 0.01]])
    flat, dear = np.ones(9), np.concatenate([[0.0], 1 / np.arange(1, 9) ** 2])
    assert scheduler.admit(survival, flat, early_stop=True).tolist() == [2, 3]
    assert scheduler.admit(survival, dear, early_stop=True).tolist() == [0, 0]


def test_a_short_cost_curve_is_refused():
    with pytest.raises(ValueError, match="sps covers up to 3 tokens"):
        scheduler.admit(np.ones((2, 2)), np.ones(4), early_stop=True)


def test_threshold_cuts_at_the_first_low_score_even_if_later_ones_recover():
    scores = np.array([[0.9, 0.4, 0.95], [0.3, 0.9, 0.9], [0.5, 0.5, 0.5]])
    assert scheduler.static_threshold(scores, 0.5).tolist() == [1, 0, 3]


def test_fixed_length_never_exceeds_what_was_drafted():
    assert scheduler.fixed_length(np.array([7, 2, 0]), 4).tolist() == [4, 2, 0]


def test_oracle_verifies_only_drafts_that_will_be_kept():
    kept = np.arange(1, 5) <= np.array([[2], [0], [4]])
    assert scheduler.oracle(kept, np.ones(16)).tolist() == [2, 0, 4]


# Appendix A: two tokens A and B, p = (0.7, 0.3), q = (0.5, 0.5); the second confidence gives the first draft away.
SPS = np.array([0.0, 1.0, 0.5, 0.45])
CONFIDENCE_AFTER = {"A": 0.9, "B": 0.0}


def first_token_is_a(lengths_of, draws: int, rng: np.random.Generator) -> float:
    """Share of A among first tokens when drafts are verified by rejection sampling as far as `lengths_of` admits them."""
    lengths = {x: int(lengths_of(np.cumprod([[0.8, c]], axis=1))[0]) for x, c in CONFIDENCE_AFTER.items()}
    drafted_a = rng.random(draws) < 0.5
    verified = np.where(drafted_a, lengths["A"], lengths["B"]) >= 1
    kept = rng.random(draws) < np.where(drafted_a, 1.0, 0.3 / 0.5)  # min(1, p / q)
    corrected = np.ones(draws, dtype=bool)  # the residual max(0, p - q) has all its mass on A
    verifier = rng.random(draws) < 0.7
    return float(np.where(verified, np.where(kept, drafted_a, corrected), verifier).mean())


def test_appendix_a_lengths_are_those_of_the_paper():
    a, b = (np.cumprod([[0.8, c]], axis=1) for c in CONFIDENCE_AFTER.values())
    assert [int(scheduler.admit(x, SPS, early_stop=False)[0]) for x in (a, b)] == [2, 0]
    assert [int(scheduler.admit(x, SPS, early_stop=True)[0]) for x in (a, b)] == [0, 0]
    assert theta(a, [2], SPS) == pytest.approx(1.134)
    assert theta(b, [2], SPS) == pytest.approx(0.81)


DRAWS = 200_000
NOISE = 4 * np.sqrt(0.7 * 0.3 / DRAWS)


def test_without_the_stop_the_output_distribution_is_biased_to_085():
    share = first_token_is_a(
        lambda s: scheduler.admit(s, SPS, early_stop=False), DRAWS, np.random.default_rng(1)
    )
    assert share == pytest.approx(0.85, abs=NOISE)


def test_with_the_stop_the_output_distribution_is_the_verifiers():
    share = first_token_is_a(
        lambda s: scheduler.admit(s, SPS, early_stop=True), DRAWS, np.random.default_rng(2)
    )
    assert share == pytest.approx(0.7, abs=NOISE)


@pytest.mark.parametrize("number", [1, 2])
def test_a_number_from_earlier_steps_keeps_the_distribution_too(number):
    share = first_token_is_a(
        lambda s: scheduler.admit_number(s, np.asarray(number)), DRAWS, np.random.default_rng(2 + number)
    )
    assert share == pytest.approx(0.7, abs=NOISE)
