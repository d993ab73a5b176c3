"""The rehearsal of a recipe: a cache of random states, trained on from the published recipe's own configuration, and resumed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from dspark.data.features import FeatureCache
from dspark.runs import Run
from experiments.random_cache import main, write

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("random") / "cache"
    write(path, geometry="tiny", documents=24, tokens=80, seed=0)
    return path


def test_the_cache_is_whole_and_of_the_geometrys_shapes(cache):
    features = FeatureCache.open(cache)
    assert features.manifest.splits == {"test": 1, "train": 22, "validation": 1}
    document = features[0]
    assert document.aux.shape == (80, 3, 64)
    assert document.aux.dtype == torch.bfloat16
    features.check_targets(documents=24, rows=80)  # the stored log-sum-exps are the random head's


def test_the_same_seed_gives_the_same_cache(cache, tmp_path):
    again = write(tmp_path / "again", geometry="tiny", documents=24, tokens=80, seed=0)
    mine = FeatureCache.open(cache).manifest
    assert [s.sha256 for s in again.shards] == [s.sha256 for s in mine.shards]
    other = write(tmp_path / "other", geometry="tiny", documents=24, tokens=80, seed=1)
    assert [s.sha256 for s in other.shards] != [s.sha256 for s in mine.shards]


def test_wrong_arguments_say_what_is_expected(tmp_path, capsys):
    assert main(["--geometry", "huge", "--out", str(tmp_path)]) == 1
    assert "expected one of" in capsys.readouterr().err
    assert main(["--geometry", "tiny", "--documents", "3", "--out", str(tmp_path)]) == 1
    assert "expected at least 24" in capsys.readouterr().err


def test_the_large_recipe_trains_on_it_and_resumes(cache, tmp_path):
    def train(*overrides: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "experiments.train", *overrides]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    done = train(
        "experiment=kimi_k27_code", f"data.cache={cache}", f"runs={tmp_path}", "verifier.aux_layer_ids=null",
        "verifier.mask_token_id=null", "draft.intermediate_size=96", "draft.num_heads=4", "draft.num_kv_heads=2",
        "draft.head_dim=16", "draft.vocab_size=256", "head.rank=16", "trainer.accelerator=cpu", "trainer.devices=1",
        "trainer.accumulate=2", "trainer.seq_length=80", "trainer.anchors=12", "trainer.num_workers=0",
        "trainer.precision=bf16-masters", "trainer.val_every=2", "trainer.progress=false", "trainer.max_steps=2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (run,) = tmp_path.iterdir()
    before = OmegaConf.load(run / "config.yaml")
    again = train("trainer.max_steps=4", f"resume={run}")
    assert again.returncode == 0, again.stderr[-2000:]
    assert Run.open(run).manifest.results["steps"] == 4
    after = OmegaConf.load(run / "config.yaml")  # only the length of the run was changed
    assert after.trainer.pop("max_steps") == 4
    assert before.trainer.pop("max_steps") == 2
    assert after == before
    assert [p.name for p in tmp_path.iterdir()] == [run.name]
