"""Joint rounding: less error in what matrices do, the same where nothing can be made up for, and moments as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from dspark import rounding
from dspark.data.synthetic import synthetic_cache
from dspark.nn.backbone import Layer
from dspark.pretrained import dequantise, quantise, read_packed, rounded_codes, step_of
from dspark.rounding import BLOCK, TABLE, input_moments, round_jointly, stages, table_moments
from dspark.runs import load_draft
from experiments.cli import CONFIGS
from experiments.pack import pack_run
from experiments.train import train
from tests.builders import random_batch, random_draft
from tests.test_training import TINY


def problem(outputs: int = 24, inputs: int = BLOCK + 17) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """W, a scale a line, and moments of inputs that hang together and differ in size."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator)
    mixed = torch.randn(400, 12, generator=generator) @ torch.randn(12, inputs, generator=generator)
    x = mixed + 0.3 * torch.randn(400, inputs, generator=generator)
    x[:, 5] *= 30
    _, scales = quantise(weight, step=0.4)
    return weight, scales.float().unsqueeze(1), x.T @ x


def cost(difference: torch.Tensor, moments: torch.Tensor) -> float:
    return float((difference @ moments * difference).sum())


def test_outputs_are_closer_than_after_rounding_each_entry():
    weight, scale, moments = problem()
    codes = round_jointly(weight, scale, moments)
    each = (weight / scale).round() * scale
    assert cost(codes * scale - weight, moments) < 0.25 * cost(each - weight, moments)
    assert codes.dtype == torch.int16
    assert (codes * scale - weight).square().mean() < 9 * (
        each - weight
    ).square().mean()  # still those weights


def test_unrelated_inputs_leave_nothing_to_make_up_for():
    weight, scale, _ = problem()
    codes = round_jointly(weight, scale, torch.diag(torch.rand(weight.shape[1]) + 0.1))
    assert torch.equal(codes, (weight / scale).round().to(torch.int16))


def test_a_scale_a_column_lines_of_zeros_and_unseen_inputs_are_allowed():
    weight, _, moments = problem()
    weight[:, 3] = 0
    moments[7] = moments[:, 7] = 0
    _, scales = quantise(weight.T, step=0.4)
    codes = round_jointly(weight, scales.float().unsqueeze(0), moments)
    assert (codes[:, 3] == 0).all()
    assert torch.equal(codes[:, 7], (weight[:, 7] / scales[7].float()).round().to(torch.int16))
    with pytest.raises(ValueError, match="not finite"):
        round_jointly(weight, scales.float().unsqueeze(0), moments * float("nan"))


def test_moments_are_those_of_the_inputs_with_every_mask_counted(monkeypatch):
    draft = random_draft()
    batches = [random_batch(draft.config, seed=i) for i in range(2)]
    modules = {name: module for group in stages(draft) for name, module in group.items()}
    found = input_moments(draft, batches, modules)

    def in_every_slot(layer, x, cos, sin, first_query, alike, plain=Layer.before_attention):
        return plain(layer, x, cos, sin, first_query, False)

    monkeypatch.setattr(Layer, "before_attention", in_every_slot)
    wanted = input_moments(draft, batches, modules)
    for name, moments in wanted.items():
        torch.testing.assert_close(found[name], moments, rtol=1e-4, atol=1e-4 * float(moments.abs().max()))
        assert moments.diagonal().sum() > 0, name
    taps = torch.cat([b.aux.flatten(-2).flatten(0, 1) for b in batches]).float()
    torch.testing.assert_close(found["fc.weight"], taps.T @ taps, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("every", "proposals"), [(8, 3), (9, 4)])
def test_moments_of_the_table_say_what_a_change_of_a_row_does(every, proposals, monkeypatch):
    monkeypatch.setattr(rounding, "ROWS", 2)
    draft = random_draft(logit_scale=0.5, block_size=4, sample_from_anchor=proposals == 4)
    assert draft.config.num_proposals == proposals
    batch = random_batch(draft.config)
    found = table_moments(draft, [batch])
    output = draft(batch)
    hidden, features = (x.flatten(0, -2)[::every] for x in (output.hidden, output.features))
    change = 1e-3 * torch.randn(features.shape[-1], generator=torch.Generator().manual_seed(0))
    p, q = (draft.logits(hidden, f).double().log_softmax(-1) for f in (features, features + change))
    nats = float((p.exp() * (p - q)).sum().detach())
    assert nats > 0
    assert float((change @ found @ change).detach()) / 2 == pytest.approx(nats, rel=0.02)


def test_a_packed_run_holds_the_jointly_rounded_matrices(tmp_path: Path):
    cache = synthetic_cache(tmp_path / "cache")
    with initialize_config_dir(version_base="1.3", config_dir=CONFIGS):
        overrides = [*TINY, f"data.cache={cache.path}", f"runs={tmp_path}", "test=false"]
        run = train(compose("train", overrides))
        options = [f"out={tmp_path}/packed/a", "documents=4", "anchors=6", "test_documents=2"]
        cfg = compose("pack", [f"run={run.path}", *options])
    size = pack_run(cfg)
    assert 0 < size < 10**6
    assert size == sum(path.stat().st_size for path in (tmp_path / "packed").iterdir())
    facts, tensors = read_packed(tmp_path / "packed/a")
    assert facts["measured"]["before"]["documents"] == 2
    assert facts["measured"]["after"]["tau"] >= 1
    draft, _, _ = load_draft(run.checkpoint("best"), attention_backend="grouped")
    assert set(facts["packing"]["jointly"]) == {TABLE} | {name for group in stages(draft) for name in group}
    name = "layers.0.mlp.gate_proj.weight"
    original = draft.get_parameter(name).detach()
    codes, scales = quantise(original, step=facts["packing"]["steps"]["mlp.gate_proj"])
    assert not torch.equal(tensors[name], dequantise(codes, scales))
    steps = ((tensors[name] - original) / scales.float().unsqueeze(1)).abs()
    assert steps.mean() < 1
    with pytest.raises(ValueError, match=r"packed/a\.safetensors exists"):
        pack_run(cfg)


def test_codes_and_the_draft_they_leave_agree():
    draft = random_draft()
    batch = random_batch(draft.config)
    before = {n: p.detach().clone() for n, p in draft.named_parameters()}
    codes = rounded_codes(draft, [batch])
    for name, found in codes.items():
        lines = before[name].T if name.startswith("markov_head") else before[name]
        _, scales = quantise(lines, step=step_of(name))
        own = dequantise(found.T if name.startswith("markov_head") else found, scales)
        torch.testing.assert_close(draft.get_parameter(name), own.T if "markov" in name else own)
