"""What every sequential head of `configs/head/` must do. A new YAML there is tested without a line here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from dspark.config import Contract
from dspark.export import Origin, export_draft
from dspark.losses import LossWeights
from dspark.nn.heads import HEADS
from dspark.objective import draft_loss
from experiments.cli import CONFIGS
from tests.builders import random_batch, random_draft

FILES = sorted(Path(CONFIGS, "head").glob("*.yaml"))
KINDS = [kind for path in FILES if (kind := OmegaConf.load(path).kind) != "none"]
SERVED = {"vanilla"}
RANK, PROPOSALS, HIDDEN = 8, 3, 32


def head_of(kind: str):
    return random_draft(head=kind, markov_rank=RANK).markov_head


def inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, 5, PROPOSALS)
    return torch.randn(*shape, RANK, generator=generator), torch.randn(*shape, HIDDEN, generator=generator)


def test_every_head_has_a_configuration():
    assert set(HEADS) == set(KINDS)
    for path in FILES:
        assert set(OmegaConf.load(path)) == {"kind", "rank", "init", "backbone_scale"}


@pytest.mark.parametrize("kind", KINDS)
def test_block_equals_scanned_step(kind):
    head, (previous, hidden) = head_of(kind), inputs()
    block = head.block(previous, hidden)
    assert block.shape == previous.shape
    state = head.initial_state(hidden[..., 0, :])
    for i in range(PROPOSALS):
        step, state = head.step(previous[..., i, :], hidden[..., i, :], state)
        torch.testing.assert_close(block[..., i, :], step)


@pytest.mark.parametrize("kind", KINDS)
def test_a_proposal_never_looks_at_later_tokens(kind):
    head, (previous, hidden) = head_of(kind), inputs()
    before = head.block(previous, hidden)
    for i in range(PROPOSALS):
        changed, other = previous.clone(), hidden.clone()
        changed[..., i, :] += 1.0
        other[..., i, :] += 1.0
        after = head.block(changed, other)
        assert torch.equal(after[..., :i, :], before[..., :i, :])
        assert not torch.allclose(after[..., i, :], before[..., i, :])


@pytest.mark.parametrize("kind", KINDS)
def test_all_parameters_learn_with_finite_gradients(kind):
    draft = random_draft(head=kind, markov_rank=RANK)
    batch = random_batch(draft.config)
    weights = LossWeights(
        terms={"ce": 0.1, "tv": 0.9},
        confidence=1.0,
        decay_gamma=4.0,
        ce_label="target_top1",
        target_norm="verifier_vocab",
    )
    draft_loss(
        draft, draft(batch), batch, weights, confidence_detach_inputs=False, chunk_rows=16
    ).numerator.backward()
    for name, parameter in draft.markov_head.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_head_starts_as_plain_dflash(kind):
    head = HEADS[kind](vocab_size=11, draft_vocab_size=7, hidden_size=HIDDEN, rank=RANK)
    features = head.block(*inputs())
    assert head.markov_w2(features).abs().max() == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_only_heads_that_an_engine_serves_are_exported(kind, tmp_path):
    draft = random_draft(head=kind, markov_rank=RANK)
    contract = Contract(**{k: v for k, v in vars(draft.contract).items() if v is not None})

    def export(name, allow):
        return export_draft(
            draft,
            contract,
            Origin(verifier_name="tiny"),
            tmp_path / name,
            layout="speculators",
            dtype=torch.float32,
            embed_tokens=None,
            num_speculative_tokens=None,
            shard_bytes=None,
            allow_unservable=allow,
            card=lambda report: "a card",
            extra_files=(),
            facts={},
        )

    if kind in SERVED:
        assert any(engine.correct for engine in export("a", False).engines)
    else:
        with pytest.raises(ValueError, match=kind):
            export("a", False)
        assert not any(engine.correct for engine in export("b", True).engines)
