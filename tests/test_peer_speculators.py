"""An outside oracle: speculators 0.9.0 on the same weights, batch and anchors (the mapping is in experiments/bench_peers.py)."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch

from dspark.losses import target_probabilities
from experiments.bench_step import GEOMETRIES, LOSS, Ours, make_problem

pytestmark = [
    pytest.mark.speculators,
    pytest.mark.skipif(
        importlib.util.find_spec("speculators") is None, reason="speculators is not installed"
    ),
]

VARIANTS = {
    "fill_in": {},
    "anchor_first": {"sample_from_anchor": True},
    "whole_vocabulary": {"draft_vocab": 512},
    "one_document": {"documents": 1},
}


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS)
def pair(request):
    from experiments.bench_peers import Speculators

    geometry = dataclasses.replace(GEOMETRIES["tiny"], **request.param)
    problem = make_problem(geometry, device="cpu", dtype="fp32", seed=1)
    return problem, Ours(problem), Speculators(problem)


def ignore(phase: str) -> None:
    pass


def test_losses_are_equal(pair):
    _, ours, theirs = pair
    torch.testing.assert_close(ours.step(ignore), theirs.step(ignore), rtol=1e-5, atol=0)


def test_gradients_are_equal(pair):
    problem, ours, theirs = pair
    ours.step(ignore)
    theirs.step(ignore)
    peer = dict(theirs.model.named_parameters())
    weight = torch.exp(-torch.arange(problem.config.num_proposals) / LOSS.decay_gamma)
    for name, parameter in ours.draft.named_parameters():
        # Ours is the gradient of a sum, theirs of a mean over supervised proposals.
        mean = parameter.grad / problem.rows
        scale = float(peer[name].grad.abs().max())
        torch.testing.assert_close(mean, peer[name].grad, rtol=1e-3, atol=1e-4 * scale, msg=name)
    assert theirs.to_our_mean == pytest.approx(float(len(weight) / weight.sum()))


def test_overlap_of_every_slot_is_equal(pair):
    problem, ours, theirs = pair
    theirs.step(ignore)
    batch, draft = problem.batch, ours.draft
    with torch.no_grad():
        output = draft(batch)
        q = draft.logits(output.hidden, output.features).softmax(-1)[0]
        states = batch.last[0][output.blocks.target_index[0]]
        p = target_probabilities(
            states.flatten(0, 1),
            batch.lse[0][output.blocks.target_index[0]].flatten(),
            draft.lm_head,
            1.0,
            LOSS.target_norm,
        )
        alpha = torch.minimum(q, p.view_as(q)).sum(-1)
    torch.testing.assert_close(alpha, theirs.row_overlap().detach(), rtol=1e-4, atol=1e-6)
    ours.step(ignore)
    torch.testing.assert_close(ours.overlap(), theirs.overlap(), rtol=1e-4, atol=1e-6)
