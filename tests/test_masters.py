"""bf16 weights with fp32 masters: the arithmetic of AdamW, what is kept and saved, exact resuming, and training by them."""

from __future__ import annotations

import copy
import inspect
import multiprocessing

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn

from dspark import masters
from dspark.data.features import FeatureCache
from dspark.data.synthetic import synthetic_cache
from dspark.losses import LossWeights
from dspark.masters import MasterAdamW, joined, round_matrices, split
from dspark.objective import draft_loss
from dspark.runs import Run
from dspark.training import check_parallel
from experiments.train import distribution, resolve_precision
from tests.builders import random_batch, random_draft
from tests.test_training import configured, killed_and_resumed, losses_of, trained, weights_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MASTERS = "trainer.precision=bf16-masters"
BETAS = (0.9, 0.95)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    return synthetic_cache(tmp_path_factory.mktemp("cache") / "tiny")


@pytest.fixture(scope="module")
def run(cache, tmp_path_factory) -> Run:
    return trained(cache, tmp_path_factory.mktemp("run"), MASTERS)


def grouped(parameters, **changes):
    return [{"params": list(parameters), "lr": 1e-2, "weight_decay": 0.1, **changes}]


def pair(seed=0, shapes=((7, 5), (6, 4), (3, 3))):
    """Parameters, of which the first two are rounded and the last stays as it is, what rounding left, and all in fp32."""
    generator = torch.Generator().manual_seed(seed)
    wide = [torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes]
    halves = [split(w) for w in wide[:2]]
    parameters = [nn.Parameter(rounded) for rounded, _ in halves] + [nn.Parameter(wide[2].clone())]
    return parameters, dict(zip(parameters, [rest for _, rest in halves], strict=False)), wide


def gradients(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator).to(p) for p in parameters]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_weight_and_its_rest_are_every_bit_of_its_master(compiled):
    """Ties are where 16 bits are tight; a NaN need not keep its payload."""
    plain = (
        inspect.unwrap(masters.split),
        inspect.unwrap(masters.joined),
    )  # runtime type checks do not compile
    split, joined = (masters._one_pass(f, compiled) for f in plain)
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([0x0000, 0x7FFF, 0x8000, 0x8001, 0xFFFF]).repeat(2000)
    tops = torch.randint(-(2**15), 2**15, (len(ends),), generator=torch.Generator().manual_seed(1)) << 16
    edge = torch.tensor([0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF, 0x7F800001, -0x800000, -(2**31), 1, 0])
    master = torch.cat([bits, tops + ends, edge]).int().view(torch.float32).to(DEVICE)
    rounded, rest = split(master)
    again, nan = joined(rounded, rest), master.isnan()
    assert torch.equal(again.view(torch.int32)[~nan], master.view(torch.int32)[~nan])
    assert bool(again[nan].isnan().all() & rounded[nan].isnan().all())
    tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(rounded[~nan & ~tie], master[~nan & ~tie].bfloat16())
    assert bool((rounded[~nan & tie].float().abs() > master[~nan & tie].abs()).all())


@pytest.mark.parametrize("part", [masters.PART, 30])
def test_masters_are_what_adamw_makes_of_fp32_parameters(part, monkeypatch):
    monkeypatch.setattr(masters, "PART", part)
    parameters, rests, wide = pair()
    plain = [nn.Parameter(w.clone()) for w in wide]
    ours = MasterAdamW(grouped(parameters), rests=rests, betas=BETAS)
    theirs = torch.optim.AdamW(grouped(plain), betas=BETAS, fused=True)
    for step in range(20):
        for mine, other, gradient in zip(parameters, plain, gradients(parameters, step), strict=True):
            mine.grad, other.grad = gradient, gradient.float()
        if step == 7:  # as where a batch does not reach a weight
            parameters[1].grad = plain[1].grad = None
        ours.step()
        theirs.step()
        for mine, other in zip(parameters, plain, strict=True):
            assert torch.equal(ours.master(mine), other)
            assert torch.equal(mine, other.to(mine.dtype))


def test_steps_below_the_resolution_of_bf16_add_up():
    """Between 0.5 and 1 bf16 numbers are 2^-8 apart; a constant gradient makes every step of Adam one of `lr`."""
    parameter = nn.Parameter(torch.ones(4, 4, device=DEVICE, dtype=torch.bfloat16))
    groups = grouped([parameter], lr=1e-4, weight_decay=0.0)
    rests = {parameter: torch.zeros(4, 4, dtype=torch.int16)}
    optimizer = MasterAdamW(groups, rests=rests, betas=BETAS)
    seen = []
    for _ in range(100):
        parameter.grad = torch.full_like(parameter, 0.25)
        optimizer.step()
        seen.append(float(parameter.detach()[0, 0]))
    assert seen[:19] == [1.0] * 19  # the first move is at half the distance, 19.5 steps
    assert seen[19] == 1.0 - 2**-8
    assert seen[-1] == pytest.approx(0.99, abs=2**-9)
    assert float(optimizer.master(parameter)[0, 0]) == pytest.approx(0.99, abs=1e-5)


def test_a_restored_optimizer_goes_on_exactly():
    parameters, rests, _ = pair()
    optimizer = MasterAdamW(grouped(parameters), rests=rests, betas=BETAS)

    def advance(optimizer, parameters, steps):
        for step in steps:
            for parameter, gradient in zip(parameters, gradients(parameters, step), strict=True):
                parameter.grad = gradient
            optimizer.step()

    advance(optimizer, parameters, range(5))
    saved, weights = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in parameters]
    advance(optimizer, parameters, range(5, 9))
    others, theirs, _ = pair(seed=1)
    for other, weight in zip(others, weights, strict=True):  # the model's to restore
        other.data = weight
    restored = MasterAdamW(grouped(others, lr=3.0), rests=theirs, betas=(0.5, 0.5))
    restored.load_state_dict(saved)
    kinds = {name: value.dtype for p in others for name, value in restored.state[p].items()}
    assert kinds.pop("rest") == torch.int16
    assert set(kinds.values()) == {torch.float32}
    advance(restored, others, range(5, 9))
    for mine, other in zip(parameters, others, strict=True):
        assert torch.equal(mine, other)
        for name, value in optimizer.state[mine].items():
            assert torch.equal(value, restored.state[other][name]), name
    assert restored.param_groups[0]["lr"] == 1e-2


def test_a_state_with_whole_masters_is_taken_over():
    parameters, rests, wide = pair()
    optimizer = MasterAdamW(grouped(parameters), rests=rests, betas=BETAS)
    saved = copy.deepcopy(optimizer.state_dict())
    other = wide[0] + 0.3
    saved["state"][0] = {n: v for n, v in saved["state"][0].items() if n != "rest"} | {"master": other}
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.master(parameters[0]), other)
    assert torch.equal(optimizer.master(parameters[1]), wide[1])
    assert "master" in saved["state"][0]  # the caller's is as it was


def test_all_processes_start_from_the_first_ones_masters(tmp_path):
    """Both have the first one's parameters, as after DDP has sent them, and masters of their own."""
    ranks = [
        multiprocessing.get_context("spawn").Process(target=send_masters, args=(rank, tmp_path))
        for rank in (0, 1)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=120)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first["after"], second["after"], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first["before"], first["after"], strict=True))
    assert not torch.equal(second["before"][0], second["after"][0])


def send_masters(rank, folder):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=2
    )
    parameters, rests, _ = pair()
    rests = {p: rest + rank for p, rest in rests.items()}
    optimizer = MasterAdamW(grouped(parameters), rests=rests, betas=BETAS)
    found = {"before": [optimizer.master(p).clone() for p in parameters]}
    optimizer.broadcast(0)
    torch.save(found | {"after": [optimizer.master(p) for p in parameters]}, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_state_of_another_precision_is_refused():
    parameters, rests, wide = pair()
    plain = [nn.Parameter(w.clone()) for w in wide]
    theirs = torch.optim.AdamW(grouped(plain), betas=BETAS)
    for parameter, gradient in zip(plain, gradients(plain, 0), strict=True):
        parameter.grad = gradient
    theirs.step()
    optimizer = MasterAdamW(grouped(parameters), rests=rests, betas=BETAS)
    with pytest.raises(ValueError, match=r"parameter 0, torch\.bfloat16.*another trainer\.precision"):
        optimizer.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_matrices_are_rounded_and_all_else_stays(head):
    draft = random_draft(head=head)
    before = copy.deepcopy(draft.state_dict())
    rests = round_matrices(draft)
    names = {name for name, p in draft.named_parameters() if p.dtype == torch.bfloat16}
    assert names == {name for name, p in draft.named_parameters() if p in rests}
    assert {"fc.weight", "layers.1.mlp.down_proj.weight", "markov_head.markov_w2.weight"} <= names
    apart = {n for n, p in draft.named_parameters() if p.ndim < 2}
    apart |= {"confidence_head.proj.weight", "markov_head.markov_w1.weight"}
    assert not names & apart
    assert len(names | apart) == len(list(draft.parameters()))
    for name, parameter in draft.named_parameters():
        whole = joined(parameter, rests[parameter]) if parameter in rests else parameter
        assert torch.equal(whole, before[name])


def test_gradients_of_rounded_weights_are_those_of_mixed_precision():
    """Autocast rounds the same weights to the same numbers; only where gradients are added up may the results differ."""
    weights = LossWeights(
        terms={"ce": 0.1, "tv": 0.9},
        confidence=1.0,
        decay_gamma=4.0,
        ce_label="text",
        target_norm="verifier_vocab",
    )
    mixed, rounded = random_draft(), random_draft()
    for parameter in (*mixed.parameters(), *rounded.parameters()):  # no ties, which autocast rounds to even
        bits = parameter.data.view(torch.int32)
        bits += (bits & 0xFFFF) == 0x8000
    round_matrices(rounded)
    batch = random_batch(mixed.config)
    losses = []
    for draft in (mixed, rounded):
        with torch.autocast("cpu", torch.bfloat16):
            sums = draft_loss(
                draft, draft(batch), batch, weights, confidence_detach_inputs=False, chunk_rows=64
            )
        sums.numerator.backward()
        losses.append(float(sums.numerator.detach()))
    assert losses[0] == losses[1]
    for mine, other in zip(rounded.parameters(), mixed.parameters(), strict=True):
        assert mine.grad.dtype == mine.dtype
        torch.testing.assert_close(mine.grad.float(), other.grad, rtol=2**-8, atol=1e-6)


def test_a_saved_draft_holds_the_masters_and_the_checkpoint_their_halves(run):
    saved = weights_of(run)
    state = torch.load(run.checkpoints / "last.ckpt", weights_only=False)
    computing = {name.removeprefix("draft."): t for name, t in state["state_dict"].items()}
    rounded = [name for name, t in computing.items() if t.dtype == torch.bfloat16 and name != "lm_head"]
    layers = len({name.split(".")[1] for name in saved if name.startswith("layers.")})
    assert len(rounded) == 7 * layers + 2  # and fc, and markov_w2
    for name in rounded:
        assert saved[name].dtype == torch.float32
        assert torch.equal(split(saved[name])[0], computing[name])
        assert not torch.equal(saved[name], computing[name].float())
    moments = state["optimizer_states"][0]["state"]
    rests = [m["rest"] for m in moments.values() if "rest" in m]
    assert len(rests) == len(rounded)
    whole = {name: split(saved[name])[1] for name in rounded}
    assert all(any(torch.equal(rest, w) for w in whole.values()) for rest in rests)
    assert {float(m["step"]) for m in moments.values()} == {6.0}


def test_resuming_repeats_the_uninterrupted_run_exactly(cache, tmp_path, monkeypatch):
    whole, _, resumed = killed_and_resumed(cache, tmp_path, monkeypatch, MASTERS)
    assert losses_of(whole).tolist() == losses_of(resumed).tolist()
    a, b = weights_of(whole), weights_of(resumed)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_training_reaches_the_loss_of_mixed_precision(cache, tmp_path):
    steps = ("trainer.max_steps=60", "trainer.val_every=60", "optimizer.lr=5e-3", "loss=ce", "test=false")
    mixed = losses_of(trained(cache, tmp_path / "a", "trainer.precision=bf16-mixed", *steps))
    ours = losses_of(trained(cache, tmp_path / "b", MASTERS, *steps))
    assert ours.iloc[-10:].mean() < 0.7 * ours.iloc[:3].mean()
    assert ours.iloc[-10:].mean() == pytest.approx(mixed.iloc[-10:].mean(), rel=0.01)


def test_resuming_in_another_precision_is_refused(cache, run):
    with pytest.raises(
        ValueError, match=r"trainer\.precision=bf16-masters, but trainer\.precision is 32-true"
    ):
        trained(cache, run.path.parent, f"resume={run.path}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.precision=bf16"], r"precision is 'bf16'; expected one of .*bf16-masters"),
        ([MASTERS, "trainer.strategy=fsdp2", "trainer.devices=2"], r"strategy=fsdp2 shards"),
        (["trainer.graph=true", "trainer.strategy=fsdp2"], r"strategy is fsdp2; set trainer\.graph=false"),
        (["trainer.graph=true", "trainer.devices=2"], r"there are 2; set trainer\.graph=false"),
        (["trainer.graph=true", "trainer.num_nodes=3"], r"there are 3; set trainer\.graph=false"),
    ],
)
def test_what_cannot_be_combined_is_refused_before_the_run_begins(cache, tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        trained(cache, tmp_path, *overrides)
    assert not list(tmp_path.iterdir())


def test_one_process_may_record_its_step_and_several_may_keep_masters():
    check_parallel(graph=True, masters=True, processes=1, sharded=False)
    check_parallel(graph=False, masters=True, processes=8, sharded=False)
    assert resolve_precision("bf16-masters", "cpu") == "bf16-masters"


@pytest.mark.parametrize(
    ("amx", "avx512_bf16", "expected"),
    [(True, True, "bf16-mixed"), (False, True, "bf16-mixed"), (False, False, "32-true")],
)
def test_auto_is_bf16_where_the_processor_multiplies_it(monkeypatch, amx, avx512_bf16, expected):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    assert resolve_precision("auto", "cpu") == expected
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported")  # private names, which a torch may lack
    assert resolve_precision("auto", "cpu") == "32-true"


@pytest.mark.parametrize(
    ("strategy", "devices", "kind"),
    [
        ("ddp", 2, DDPStrategy),
        ("auto", 2, DDPStrategy),
        ("fsdp2", 2, ModelParallelStrategy),
        ("auto", 1, str),
    ],
)
def test_ddp_does_not_send_frozen_weights_in_every_forward(cache, tmp_path, strategy, devices, kind):
    chosen = distribution(
        configured(cache, tmp_path, f"trainer.strategy={strategy}", f"trainer.devices={devices}")
    )
    assert isinstance(chosen, kind)
    if kind is DDPStrategy:
        assert chosen._ddp_kwargs["broadcast_buffers"] is False
