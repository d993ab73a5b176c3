"""Two CPU processes train, validate and save what one does, whether they copy the draft (DDP) or shard it (FSDP2)."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from hydra import compose, initialize_config_dir
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader

from dspark import training
from dspark.data.batches import HeldOutDocuments
from dspark.data.features import FeatureCache
from dspark.data.synthetic import synthetic_cache
from dspark.runs import Run, load_draft
from dspark.training import _RankShare
from experiments.cli import CONFIGS
from experiments.train import split_documents, train

ROOT = Path(CONFIGS).parent
STEPS = 5
# Validations after steps 2 and 4, and one after training; three documents, so that ranks replay unequally many. The learning rate
# is constant because a run that is to be continued does not know how many steps there will be.
TINY = [
    "verifier=tiny",
    "draft.vocab_size=100",
    "draft.init=random",
    "head.rank=8",
    "trainer.seq_length=16",
    "trainer.max_steps=5",
    "trainer.max_minutes=null",
    "trainer.val_every=2",
    "trainer.val_documents=3",
    "trainer.log_every=1",
    "trainer.precision=32-true",
    "trainer.progress=false",
    "optimizer.warmup_steps=1",
    "optimizer.min_lr_ratio=1.0",
]
ONE = ["trainer.rows_per_batch=4"]
TWO = ["trainer.devices=2", "trainer.accumulate=2"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    return synthetic_cache(tmp_path_factory.mktemp("cache") / "tiny")


@pytest.fixture(scope="module")
def one(cache, tmp_path_factory) -> Run:
    return trained(tmp_path_factory.mktemp("one"), cache, *ONE)


def configured(runs: Path, cache: FeatureCache, *overrides: str):
    with initialize_config_dir(version_base="1.3", config_dir=CONFIGS):
        return compose("train", [*TINY, f"data.cache={cache.path}", f"runs={runs}", *overrides])


def trained(runs: Path, cache: FeatureCache, *overrides: str) -> Run:
    return train(configured(runs, cache, *overrides))


def typed(runs: Path, cache: FeatureCache, *overrides: str) -> Run:
    """The run of the command line, which starts the second process itself."""
    command = [sys.executable, "-m", "experiments.train", *TINY, f"data.cache={cache.path}", f"runs={runs}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *overrides], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (folder,) = runs.iterdir()
    return Run(folder)


def forked(runs: Path, cache: FeatureCache, *overrides: str) -> Run:
    """The same from two processes that a cluster would have started, forked where the imports are already done."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["experiments.train"])
    ranks = [
        context.Process(target=be_rank, args=(rank, port, runs, cache.path, overrides)) for rank in (0, 1)
    ]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(timeout=180)
        assert [rank.exitcode for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    (folder,) = runs.iterdir()
    return Run(folder)


def be_rank(rank: int, port: int, runs: Path, cache: Path, overrides: tuple[str, ...]) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    rank_zero_only.rank = rank  # Lightning reads the environment when imported, which was before the fork
    torch.set_num_threads(1)
    trained(runs, FeatureCache.open(cache), *overrides)


def metrics_of(run: Run) -> pd.DataFrame:
    return pd.read_parquet(run.path / "metrics.parquet").set_index(["step", "name"]).sort_index()


def assert_same_training(run: Run, one: Run) -> None:
    mine, expected = metrics_of(run), metrics_of(one)
    assert sorted(set(expected.index.get_level_values("step"))) == list(range(1, STEPS + 1))
    pd.testing.assert_series_equal(
        mine["total"] / mine["count"], expected["total"] / expected["count"], rtol=1e-4
    )
    # Every rank counts the one gradient norm.
    counts = [table["count"].drop("grad_norm", level="name") for table in (mine, expected)]
    pd.testing.assert_series_equal(*counts, rtol=1e-6)
    for which in ("best", "last"):
        found, wanted = (load_draft(r.checkpoint(which), attention_backend="grouped") for r in (run, one))
        assert found[2]["step"] == wanted[2]["step"]
        assert found[2]["validation_tau"] == pytest.approx(wanted[2]["validation_tau"], rel=1e-4)
        torch.testing.assert_close(found[0].state_dict(), wanted[0].state_dict(), rtol=0, atol=1e-4)
    results = [r.manifest.results for r in (run, one)]
    assert results[0]["steps"] == results[1]["steps"] == STEPS
    assert results[0]["tau"] == pytest.approx(results[1]["tau"], rel=1e-4)
    files = [sorted(str(p.relative_to(r.path)) for p in r.path.rglob("*")) for r in (run, one)]
    assert [f for f in files[0] if "events" not in f] == [f for f in files[1] if "events" not in f]


def test_a_rank_has_steps_without_a_usable_anchor(cache, tmp_path):
    """Rows of 16 tokens may end before an anchor; the second rank's rows of the first step both do."""
    rows, _ = split_documents(configured(tmp_path, cache), cache)
    assert [i for i in range(4) if not rows[i].anchor_valid.any()] == [1, 3]


def test_ddp_trains_as_one_process_does(cache, one, tmp_path):
    run = typed(tmp_path, cache, *TWO, "trainer.strategy=ddp")
    assert_same_training(run, one)


def test_ddp_with_masters_trains_as_one_process_does(cache, tmp_path):
    """Gradients are averaged in bf16, so only nearly: to a few parts in a thousand of the loss."""
    masters = "trainer.precision=bf16-masters"
    one = trained(tmp_path / "one", cache, *ONE, masters, "test=false")
    two = forked(tmp_path / "two", cache, *TWO, "trainer.strategy=ddp", masters, "test=false")
    losses = [metrics_of(run).xs("loss", level="name") for run in (one, two)]
    assert losses[0].index.tolist() == list(range(1, STEPS + 1))
    pd.testing.assert_series_equal(*[t["total"] / t["count"] for t in losses], rtol=5e-3)
    found, wanted = (load_draft(run.checkpoint("last"), attention_backend="grouped")[0] for run in (two, one))
    for mine, other in zip(found.parameters(), wanted.parameters(), strict=True):
        assert (mine - other).norm() <= 0.01 * other.norm() + 1e-3


def test_fsdp2_stopped_and_resumed_trains_as_one_process_does(cache, one, tmp_path):
    """Layers are recomputed in the backward pass here, from weights that must still be gathered then."""
    sharded = [*TWO, "trainer.strategy=fsdp2", "trainer.checkpoint_layers=true"]
    half = forked(tmp_path, cache, *sharded, "trainer.max_steps=2", "test=false")
    assert half.manifest.results["steps"] == 2
    run = forked(tmp_path, cache, *sharded, f"resume={half.path}")
    assert run.path == half.path
    assert_same_training(run, one)
    with pytest.raises(ValueError, match=r"trainer\.strategy=fsdp2, but trainer\.strategy is auto"):
        trained(tmp_path, cache, *ONE, f"resume={run.path}")


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_ranks_validate_in_equally_many_steps(world, cache):
    documents = HeldOutDocuments(cache, [4, 0, 2], dtype=torch.float32)
    shares = [list(DataLoader(_RankShare(documents, r, world), batch_size=None)) for r in range(world)]
    assert len({len(share) for share in shares}) == 1
    assert sorted(item[1] for share in shares for item in share if item is not None) == [0, 2, 4]


def test_learning_rates_follow_the_first_ranks_clock(cache, tmp_path, monkeypatch):
    """A second rank is told the share of the time budget that has passed, whatever its own clock says."""
    elapsed, lr_scale = [], training.lr_scale

    def recorded(step: int, **schedule: float) -> float:
        elapsed.append(schedule["elapsed"])
        return lr_scale(step, **schedule)

    monkeypatch.setattr(training, "lr_scale", recorded)
    monkeypatch.setattr(
        SingleDeviceStrategy, "broadcast", lambda self, value, src=0: 0.25 if type(value) is float else value
    )
    trained(tmp_path, cache, "trainer.max_minutes=9", "trainer.max_steps=2", "test=false")
    assert set(elapsed) == {0.0, 0.25}
    assert elapsed[-1] == 0.25
