"""The CUDA forms against the CPU ones: attention, loss and gradients, and no recompilation after warm-up."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from dspark.graphs import StepGraph
from dspark.losses import LossWeights
from dspark.nn.float8 import CAPABILITY, SCALINGS, use_float8
from dspark.objective import draft_loss, plan_loss, training_loss
from tests.builders import random_batch, random_draft

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WEIGHTS = LossWeights(
    terms={"ce": 0.1, "tv": 0.9},
    confidence=1.0,
    decay_gamma=4.0,
    ce_label="target_top1",
    target_norm="verifier_vocab",
)
GEOMETRY = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "block_size": 8}
SLIDING = {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 9}


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()


def sums_and_gradients(draft, batch):
    draft.zero_grad()
    sums = draft_loss(draft, draft(batch), batch, WEIGHTS, confidence_detach_inputs=False, chunk_rows=64)
    sums.numerator.backward()
    return sums, [p.grad.float().cpu() for p in draft.parameters()]


@pytest.mark.parametrize(
    "changes", [{}, {"sample_from_anchor": True}, SLIDING], ids=["fill", "first", "sliding"]
)
def test_loss_and_gradients_equal_the_cpu_form(changes):
    draft = random_draft(backend="auto", **GEOMETRY, **changes)
    batch = random_batch(draft.config, anchors=32, rows=((120, 60), (90, 100)))
    expected, wanted = sums_and_gradients(draft, batch)
    got, grads = sums_and_gradients(copy.deepcopy(draft).cuda(), batch.to("cuda"))
    torch.testing.assert_close(got.numerator.cpu(), expected.numerator, rtol=2e-3, atol=1e-3)
    for a, b in zip(grads, wanted, strict=True):
        assert (a - b).norm() <= 5e-3 * b.norm() + 1e-5


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < CAPABILITY,
    reason="needs float8 products",
)
def test_compiled_float8_gradients_are_those_of_plain_float8(scaling):
    draft = random_draft(backend="auto", **GEOMETRY).cuda()
    use_float8(draft, scaling=scaling)
    batch = random_batch(draft.config, anchors=32, rows=((120, 60), (90, 100))).to("cuda")
    found = {}
    for compiled in (False, True):
        draft.compile_regions = compiled
        with torch.autocast("cuda", torch.bfloat16):
            found[compiled] = sums_and_gradients(draft, batch)
    compiled, plain = (float(found[way][0].numerator.detach()) for way in (True, False))
    assert compiled == pytest.approx(plain, rel=0.01)
    for (name, _), a, b in zip(draft.named_parameters(), found[True][1], found[False][1], strict=True):
        # float8 rounds to 3 bits; a lost gradient would be 1.0
        assert (a - b).norm() <= 0.2 * b.norm() + 1e-5, name


def test_new_batches_of_the_same_shape_compile_nothing():
    draft = random_draft(backend="auto", **GEOMETRY).cuda()
    counters = torch._dynamo.utils.counters

    def step(seed):
        batch = random_batch(draft.config, anchors=32, rows=((120, 60), (90, 100)), seed=seed).to("cuda")
        sums_and_gradients(draft, batch)
        return counters["stats"]["unique_graphs"]

    step(0)
    warm = step(1)
    assert [step(seed) for seed in range(2, 12)] == [warm] * 10


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_replayed_step_equals_the_ordinary_one_also_after_the_weights_have_moved(accumulate):
    draft = random_draft(backend="auto", **GEOMETRY).cuda()
    parameters = list(draft.parameters())

    def compute(batch, planned=None):
        return training_loss(
            draft, batch, WEIGHTS, confidence_detach_inputs=False, chunk_rows=64, planned=planned
        )

    graph = StepGraph(
        lambda batch: plan_loss(draft, batch, chunk_rows=64), compute, parameters, accumulate=accumulate
    )
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    for seed in range(4):
        rows = ((120, 60), (90, 100)) if seed < 3 else ((70, 60),)  # the last has another shape
        batch = random_batch(draft.config, anchors=32, rows=rows, seed=seed).to("cuda")
        if seed == 2:  # needs larger parts than the batches before it
            batch = few_supervised(batch, 0)
        elif seed < 2:
            batch = few_supervised(batch, 40)
        expected = compute(batch)
        wanted = torch.autograd.grad(expected.numerator, parameters)
        expected.numerator = expected.numerator.detach()
        optimizer.zero_grad()
        for _ in range(accumulate):
            got = graph(batch)
            (got.numerator / accumulate).backward()
        torch.testing.assert_close(got.numerator, expected.numerator, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(got.alpha, expected.alpha, rtol=1e-3, atol=1e-3)
        assert torch.equal(got.count, expected.count)
        for parameter, b in zip(parameters, wanted, strict=True):
            assert (parameter.grad - b).norm() <= 5e-3 * b.norm() + 1e-5
        optimizer.step()
    assert graph.recordings == 3  # the first, the larger and the shorter batch


def few_supervised(batch, last):
    """The batch without supervision of the `last` tokens of every row."""
    mask = batch.loss_mask.clone()
    mask[:, mask.shape[1] - last :] = False
    return dataclasses.replace(batch, loss_mask=mask)


def test_a_step_never_waits_for_the_device_but_for_the_numbers_of_its_parts():
    """That one wait is for an event, which torch does not take for a synchronisation, and which precedes the forward pass."""
    draft = random_draft(backend="auto", **GEOMETRY).cuda()
    draft.register_forward_pre_hook(lambda *_: torch.cuda._sleep(2_000_000_000))  # a pass of about a second

    def step(seed):
        batch = random_batch(draft.config, anchors=32, rows=((120, 60), (90, 100)), seed=seed).to("cuda")
        draft.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if seed > 1 else "default")
        try:
            with torch.autocast("cuda", torch.bfloat16):
                sums = training_loss(
                    draft,
                    batch,
                    WEIGHTS,
                    confidence_detach_inputs=False,
                    chunk_rows=64,
                )
            assert seed <= 1 or not torch.cuda.current_stream().query()
            sums.numerator.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    for seed in range(4):  # the first two may compile
        step(seed)
