"""The training loop on a tiny cache: global normalisation, resuming, warm starts, metrics, stops."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pandas as pd
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, open_dict

from dspark.blocks import DraftBatch
from dspark.data.batches import PackedRows, StreamSampler, pack_rows, stack_rows
from dspark.data.features import FeatureCache
from dspark.data.synthetic import synthetic_cache
from dspark.losses import LossWeights
from dspark.objective import draft_loss
from dspark.runs import Run, load_draft
from dspark.training import DraftModule, StreamedCheckpoints, lr_scale
from experiments.cli import CONFIGS
from experiments.train import train
from tests.builders import random_batch, random_draft

TINY = [
    "verifier=tiny",
    "draft.vocab_size=100",
    "draft.init=random",
    "draft.block_size=4",
    "head.rank=8",
    "trainer.seq_length=128",
    "trainer.anchors=24",
    "trainer.max_steps=6",
    "trainer.max_minutes=null",
    "head.init=zeros",
    "trainer.val_every=3",
    "trainer.val_documents=4",
    "trainer.log_every=1",
    "trainer.precision=32-true",
    "trainer.progress=false",
    "optimizer.warmup_steps=2",
]
WEIGHTS = LossWeights(
    terms={"ce": 0.1, "tv": 0.9},
    confidence=1.0,
    decay_gamma=4.0,
    ce_label="text",
    target_norm="verifier_vocab",
)


@pytest.fixture(scope="session")
def tiny_cache(tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    return synthetic_cache(tmp_path_factory.mktemp("cache") / "tiny")


def configured(cache: FeatureCache, runs: Path, *overrides: str) -> DictConfig:
    with initialize_config_dir(version_base="1.3", config_dir=CONFIGS):
        return compose("train", [*TINY, f"data.cache={cache.path}", f"runs={runs}", *overrides])


def trained(cache: FeatureCache, runs: Path, *overrides: str) -> Run:
    return train(configured(cache, runs, *overrides))


def weights_of(run: Run, which: str = "last") -> dict[str, torch.Tensor]:
    return load_draft(run.checkpoint(which), attention_backend="grouped")[0].state_dict()


def losses_of(run: Run) -> pd.Series:
    table = pd.read_parquet(run.path / "metrics.parquet")
    loss = table[table["name"] == "loss"].set_index("step")
    return (loss["total"] / loss["count"]).sort_index()


def test_a_run_leaves_everything_that_says_what_it_was(tiny_cache, tmp_path):
    run = trained(tiny_cache, tmp_path)
    manifest = run.manifest
    assert manifest.status == "complete"
    assert manifest.results["steps"] == 6
    assert manifest.results["documents"] == len(tiny_cache.select(split="test", temperature=0.0)) == 3
    assert manifest.data["documents"] == len(tiny_cache.select(split="train"))
    assert {"tau", "accepted", "alpha", "train_seconds"} <= set(manifest.results)
    draft, _, _ = load_draft(run.checkpoint("best"), attention_backend="grouped")
    assert manifest.results["parameters"] == sum(p.numel() for p in draft.parameters())
    for name in (
        "config.yaml",
        "metrics.parquet",
        "checkpoints/last.ckpt",
        "checkpoints/best/draft.safetensors",
    ):
        assert (run.path / name).stat().st_size > 0
    table = pd.read_parquet(run.path / "metrics.parquet")
    assert list(table.columns) == ["run_id", "step", "name", "total", "count"]
    rates = table[table["name"].str.startswith(("alpha", "greedy_hit"))]
    assert (rates["count"] > 0).all()
    assert ((rates["total"] / rates["count"]).between(0, 1)).all()


def killed_and_resumed(cache, tmp_path, monkeypatch, *overrides: str) -> tuple[Run, Run, Run]:
    """A run of eight steps; one that was killed in its seventh; and the latter again, resumed."""
    steps = ("trainer.max_steps=8", "trainer.val_every=4", "trainer.accumulate=2", *overrides)
    whole = trained(cache, tmp_path / "a", *steps)
    step = DraftModule.training_step

    def killed_in_step_seven(self, batch, index):
        if self.global_step == 6:
            raise KeyboardInterrupt
        return step(self, batch, index)

    with monkeypatch.context() as patch:
        patch.setattr(DraftModule, "training_step", killed_in_step_seven)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            trained(cache, tmp_path / "b", *steps)
    half = Run.open(next((tmp_path / "b").iterdir()))
    assert half.manifest.status != "complete"
    return whole, half, trained(cache, tmp_path / "b", *steps, f"resume={half.path}")


def test_resuming_repeats_the_uninterrupted_run_exactly(tiny_cache, tmp_path, monkeypatch):
    whole, half, resumed = killed_and_resumed(tiny_cache, tmp_path, monkeypatch)
    assert resumed.path == half.path
    first, second = losses_of(whole), losses_of(resumed)
    assert second.index.tolist() == list(range(1, 9))
    assert first.tolist() == second.tolist()
    a, b = weights_of(whole), weights_of(resumed)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_checkpoint_holds_moments_and_schedule(tiny_cache, tmp_path):
    run = trained(tiny_cache, tmp_path)
    state = torch.load(run.checkpoints / "last.ckpt", weights_only=False)
    moments = state["optimizer_states"][0]["state"]
    assert len(moments) > 10
    assert all(m["exp_avg"].abs().sum() > 0 for m in moments.values())
    assert {float(m["step"]) for m in moments.values()} == {6.0}
    assert state["lr_schedulers"][0]["last_epoch"] == 6


def test_a_checkpoint_replaces_the_former_only_when_it_is_whole(tmp_path):
    files, path = StreamedCheckpoints(), tmp_path / "new" / "last.ckpt"
    files.save_checkpoint({"w": torch.ones(3)}, path)
    with pytest.raises(AttributeError, match="pickle"):
        files.save_checkpoint({"w": torch.zeros(3), "cannot": lambda: None}, path)
    files.load_checkpoint(path)["w"].zero_()  # training goes on in the tensors that were loaded
    assert files.load_checkpoint(path)["w"].tolist() == [1.0, 1.0, 1.0]
    files.save_checkpoint({"w": torch.zeros(3)}, path)
    assert files.load_checkpoint(path)["w"].tolist() == [0.0, 0.0, 0.0]
    assert [p.name for p in path.parent.iterdir()] == ["last.ckpt"]


def test_resuming_with_another_contract_names_both_values(tiny_cache, tmp_path):
    run = trained(tiny_cache, tmp_path)
    with pytest.raises(ValueError, match="block_size: 4 in the checkpoint, 8 in"):
        trained(tiny_cache, tmp_path, f"resume={run.path}", "draft.block_size=8", "trainer.max_steps=8")


def test_warm_start_copies_weights_and_refuses_the_other_layout(tiny_cache, tmp_path):
    first = trained(tiny_cache, tmp_path)
    still = ("trainer.max_steps=1", "optimizer.lr=0.0", "optimizer.head_lr=0.0", f"warm_start={first.path}")
    again = trained(tiny_cache, tmp_path, *still, "label=warm")
    a, b = weights_of(first, "best"), weights_of(again)
    assert all(torch.equal(a[name], b[name]) for name in a)
    with pytest.raises(ValueError, match="sample_from_anchor: False in the warm start, True in this run"):
        trained(tiny_cache, tmp_path, *still, "draft.sample_from_anchor=true", "label=other")
    converted = trained(
        tiny_cache, tmp_path, *still, "draft.sample_from_anchor=true", "convert_layout=true", "label=c"
    )
    assert converted.manifest.status == "complete"


def test_warm_start_keeps_the_vocabulary_its_weights_were_trained_for(tiny_cache, tmp_path, monkeypatch):
    pruned = "draft.vocab_size=200"
    with monkeypatch.context() as other_data:  # answers in which the highest ids are the most frequent
        other_data.setattr("experiments.sharing.response_counts", lambda cache, documents: torch.arange(272))
        first = trained(tiny_cache, tmp_path, pruned)
    still = ("trainer.max_steps=1", "optimizer.lr=0.0", "optimizer.head_lr=0.0", f"warm_start={first.path}")
    again = trained(tiny_cache, tmp_path, *still, pruned, "label=warm")
    assert weights_of(again)["kept_ids"].tolist() == list(range(72, 272))
    assert weights_of(trained(tiny_cache, tmp_path, pruned, "label=cold"))["kept_ids"].tolist() != list(
        range(72, 272)
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+trainer.anchor=3"], "trainer.anchor is not a setting"),
        (["+loss.gamma=3"], "loss.gamma is not a setting"),
        (["head=none", "head.rank=0"], "use_prev_embedding=false"),
        (["draft.vocab_size=100000"], "expected 1 to 272"),
        (["draft.init=verifier"], "expected verifier_layers or random"),
        (["resume=nowhere"], "not a run folder"),
    ],
)
def test_mistakes_are_named_before_training(tiny_cache, tmp_path, overrides, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        trained(tiny_cache, tmp_path, *overrides)


def test_accumulation_and_batching_give_the_gradient_of_the_global_mean():
    """(1 x 4 rows), (2 x 2) and (4 x 1) with very different supervision: sums divided once are all the same."""
    draft = random_draft()
    batch = random_batch(draft.config, rows=((40,), (9,), (30,), (6,)), anchors=12)

    def gradient(parts):
        draft.zero_grad()
        denominator = 0.0
        for rows in parts:
            sub = DraftBatch(**{name: value[rows] for name, value in vars(batch).items()})
            sums = draft_loss(draft, draft(sub), sub, WEIGHTS, confidence_detach_inputs=False, chunk_rows=64)
            sums.numerator.backward()
            denominator += float(sums.denominator)
        return torch.cat([p.grad.flatten() / denominator for p in draft.parameters()])

    whole = gradient([[0, 1, 2, 3]])
    torch.testing.assert_close(gradient([[0, 1], [2, 3]]), whole, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradient([[0], [1], [2], [3]]), whole, rtol=1e-4, atol=1e-6)


def test_accumulated_training_equals_wider_batches(tiny_cache, tmp_path):
    wide = trained(tiny_cache, tmp_path / "a", "trainer.rows_per_batch=2")
    deep = trained(tiny_cache, tmp_path / "b", "trainer.accumulate=2")
    a, b = weights_of(wide), weights_of(deep)
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=1e-5)


def test_learning_rate_warms_up_then_falls_by_steps_or_time():
    scale = [lr_scale(s, warmup=2, total=12, floor=0.1) for s in range(13)]
    assert scale[:2] == [0.5, 1.0]
    assert scale[2] == 1.0
    assert scale[7] == pytest.approx(0.55)
    assert scale[12] == pytest.approx(0.1)
    assert lr_scale(3, warmup=2, total=10**6, floor=0.1, elapsed=1.0) == pytest.approx(0.1)


def test_rows_hold_whole_documents_within_the_length():
    lengths = {d: n for d, n in enumerate([5, 9, 3, 12, 4, 30, 1])}
    rows = pack_rows(lengths, list(lengths), 12)
    assert sorted(d for row in rows for d in row) == list(range(7))
    assert all(sum(min(lengths[d], 12) for d in row) <= 12 for row in rows)
    assert len(rows) < 7


def test_batches_are_a_function_of_seed_and_position(tiny_cache):
    def rows(seed):
        return PackedRows(
            tiny_cache,
            tiny_cache.select(split="train"),
            seq_length=128,
            anchors=16,
            seed=seed,
            dtype=torch.bfloat16,
        )

    a, b, other = rows(0), rows(0), rows(1)
    later = a.rows_per_epoch + 2
    assert torch.equal(a[later].input_ids, b[later].input_ids)
    assert torch.equal(a[later].anchors, b[later].anchors)
    assert not torch.equal(a[0].input_ids, other[0].input_ids)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_take_disjoint_rows_and_resume_where_they_stopped(world):
    whole = [list(StreamSampler(5, 2, 0, rank, world)) for rank in range(world)]
    flat = [index for rank in whole for batch in rank for index in batch]
    assert sorted(flat) == list(range(5 * 2 * world))
    assert list(StreamSampler(5, 2, 3, 0, world)) == whole[0][3:]


def test_documents_with_bad_features_are_skipped_and_counted(tiny_cache):
    rows = PackedRows(
        tiny_cache, tiny_cache.select(split="train"), seq_length=128, anchors=16, seed=0, dtype=torch.bfloat16
    )
    sound = rows[0]
    first = rows.rows(0)[0][0]
    whole = type(tiny_cache).__getitem__

    class Damaged:
        def __getitem__(self, index):
            document = whole(tiny_cache, index)
            if index == first:
                document = dataclasses.replace(document, aux=document.aux.clone().fill_(float("nan")))
            return document

    rows.cache = Damaged()
    batch = rows[0]
    assert rows.bad_documents == 1
    assert batch.aux.isfinite().all()
    assert int(batch.loss_mask.sum()) < int(sound.loss_mask.sum())


def test_resident_rows_equal_rows_read_from_disk(tiny_cache):
    def rows():
        return PackedRows(
            tiny_cache,
            tiny_cache.select(split="train"),
            seq_length=128,
            anchors=16,
            seed=0,
            dtype=torch.bfloat16,
        )

    read, resident = rows(), rows()
    resident.make_resident("cpu")
    for index in range(2 * read.rows_per_epoch):
        for name, tensor in vars(read[index]).items():
            assert torch.equal(tensor, getattr(resident[index], name)), name


def test_stacked_rows_keep_every_tensor():
    draft = random_draft()
    batch = random_batch(draft.config)
    rows = [DraftBatch(**{name: value[b : b + 1] for name, value in vars(batch).items()}) for b in range(2)]
    stacked = stack_rows(rows)
    assert all(torch.equal(getattr(stacked, name), value) for name, value in vars(batch).items())


def test_training_learns_a_tiny_verifier(tiny_cache, tmp_path):
    run = trained(
        tiny_cache, tmp_path, "trainer.max_steps=60", "trainer.val_every=60", "optimizer.lr=5e-3", "loss=ce"
    )
    loss = losses_of(run)
    assert loss.iloc[-5:].mean() < 0.7 * loss.iloc[:3].mean()


def test_unknown_groups_stay_unknown(tiny_cache, tmp_path):
    cfg = configured(tiny_cache, tmp_path)
    with open_dict(cfg):
        cfg.draft.pop("init")
    with pytest.raises(ValueError, match=r"draft\.init has no value"):
        train(cfg)
