"""Ablations compose and train, grids skip, survive and resume, launchers compose."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from dspark.data.features import FeatureCache
from dspark.data.synthetic import synthetic_cache
from dspark.runs import Run
from experiments.build import tapped_layers
from experiments.cli import CONFIGS
from experiments.sweep import config_sha, finished_run
from experiments.train import budgeted_steps, split_documents, train

ROOT = Path(CONFIGS).parent
FILES = sorted(Path(CONFIGS, "ablation").glob("*.yaml"))
NAMES = [path.stem for path in FILES]
SAME_AS_DEFAULT = {"baseline", "markov_rank_64", "decay_gamma_4", "block_8", "depth_2"}
TINY = [
    "verifier=tiny",
    "trainer.seq_length=64",
    "trainer.max_steps=1",
    "trainer.val_documents=1",
    "trainer.precision=32-true",
    "trainer.progress=false",
    "optimizer.warmup_steps=1",
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    return synthetic_cache(tmp_path_factory.mktemp("cache") / "tiny")


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(version_base="1.3", config_dir=CONFIGS):
        return compose("train", [*TINY, *overrides])


def on_tiny_verifier(cfg: DictConfig) -> DictConfig:
    """The same configuration at the tiny verifier's scale: 1/64 of the vocabulary, no layers to start from."""
    if cfg.draft.vocab_size is not None:
        cfg.draft.vocab_size //= 64
    cfg.draft.init = "random"
    return cfg


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_an_ablation_says_what_it_asks_and_expects(path):
    lines = path.read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert lines[1].startswith("# Question: ")
    assert "?" in lines[1]
    assert lines[2].startswith("# Expect: ")


def test_every_ablation_changes_what_it_names_and_nothing_else():
    plain = config_sha(composed())
    shas = {name: config_sha(composed(f"+ablation={name}")) for name in NAMES}
    assert {name for name, sha in shas.items() if sha == plain} == SAME_AS_DEFAULT
    others = [sha for name, sha in shas.items() if name not in SAME_AS_DEFAULT]
    assert len(set(others)) == len(others)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in SAME_AS_DEFAULT - {"baseline"}])
def test_every_ablation_trains_a_step(name, cache, tmp_path):
    cfg = on_tiny_verifier(
        composed(f"+ablation={name}", f"data.cache={cache.path}", f"runs={tmp_path}", "test=false")
    )
    manifest = train(cfg).manifest
    assert manifest.status == "complete"
    assert manifest.results["steps"] == 1


def test_lists_compose_left_to_right_and_the_command_line_wins():
    cfg = composed("+ablation=[block_4,no_confidence,block_12]")
    assert (cfg.draft.block_size, cfg.confidence.enabled) == (12, False)
    assert composed("+ablation=[block_4,no_markov]", "draft.block_size=6").draft.block_size == 6
    assert composed("+ablation=[block_4,no_markov]").head.kind == "none"


def test_a_draft_reads_some_of_the_cached_layers(cache, tmp_path):
    stored = list(cache.manifest.aux_layer_ids)
    view = cache.with_taps(stored[1:])
    assert view.contract().aux_layer_ids == tuple(stored[1:])
    assert (view[0].aux == cache[0].aux[:, 1:]).all()
    assert view.with_taps(stored[2:])[0].aux.equal(cache[0].aux[:, 2:])
    assert cache.with_taps(stored) is cache
    assert tapped_layers(composed("draft.taps=[-1]"), cache.manifest) == stored[-1:]
    with pytest.raises(ValueError, match=r"aux_layer_ids \[7\].*holds \[1, 2, 3\]"):
        cache.with_taps([7])
    with pytest.raises(ValueError, match=r"draft.taps is \[-9\], but the cache holds 3 layers"):
        tapped_layers(composed("draft.taps=[-9]"), cache.manifest)
    cfg = on_tiny_verifier(composed("draft.taps=[1,3]", f"data.cache={cache.path}", f"runs={tmp_path}"))
    run = train(cfg)
    described = json.loads((run.checkpoint("best") / "draft.json").read_text())
    assert described["config"]["aux_layer_ids"] == [1, 3]
    assert run.manifest.results["documents"] == len(cache.greedy_first("test"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["+ablation=no_markov", "confidence.use_prev_embedding=true"],
            "set confidence.use_prev_embedding=false",
        ),
        (["+ablation=[no_markov,markov_rank_32]"], "head is 'none' but markov_rank is 32"),
        (["+draft.blocksize=4"], "draft.blocksize is not a setting; draft has: .*block_size"),
    ],
)
def test_contradictions_and_misspelt_keys_are_named(cache, tmp_path, overrides, message):
    cfg = on_tiny_verifier(composed(*overrides, f"data.cache={cache.path}", f"runs={tmp_path}"))
    with pytest.raises(ValueError, match=message):
        train(cfg)
    assert not list(tmp_path.iterdir())


# ---- budgets


def test_a_token_budget_is_counted_in_document_tokens(cache, tmp_path):
    cfg = composed("trainer.max_tokens=150", "trainer.max_steps=500", "trainer.rows_per_batch=2")
    rows, _ = split_documents(cfg, cache)
    steps = budgeted_steps(cfg, rows)
    used = [int((rows[i].lse != 0).sum()) for i in range(2 * steps)]
    assert sum(used) >= 150 > sum(used[: 2 * (steps - 1)])
    assert budgeted_steps(composed("trainer.max_tokens=150", "trainer.max_steps=1"), rows) == 1
    assert budgeted_steps(composed("trainer.max_tokens=null", "trainer.max_steps=9"), rows) == 9
    with pytest.raises(ValueError, match=r"trainer.devices is 'auto'"):
        budgeted_steps(composed("trainer.max_tokens=5", "trainer.devices=auto"), rows)


# ---- grids


def command(
    *overrides: str, cache: FeatureCache, runs: Path, cwd: Path = ROOT
) -> subprocess.CompletedProcess:
    small = [
        "draft.vocab_size=100",
        "draft.init=random",
        "head.rank=8",
        f"data.cache={cache.path}",
        f"runs={runs}",
    ]
    # Overrides must stand together behind the flags; later ones win.
    flags, typed = [o for o in overrides if o == "-m"], [o for o in overrides if o != "-m"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "experiments.train", *flags, *TINY, *small, *typed],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
        timeout=600,
    )


def test_a_grid_survives_a_failed_cell_and_a_rerun_does_what_is_missing(cache, tmp_path):
    grid = ("-m", "+ablation=confidence_detached,[no_markov,markov_rank_32]", "seed=0,1", "test=false")
    first = command(*grid, cache=cache, runs=tmp_path / "runs")
    assert first.returncode == 1
    assert "4 cells: 2 ran, 0 skipped, 2 failed" in first.stdout.replace("\n", " ")
    sweep = next((tmp_path / "runs/sweeps").iterdir())
    cells = pd.read_csv(sweep / "cells.csv")
    assert cells["status"].tolist() == ["ran", "ran", "failed", "failed"]
    assert cells["message"].str.contains("markov_rank is 8|markov_rank is 32").sum() == 2
    assert "Traceback" in (sweep / "2/traceback.txt").read_text()
    runs = sorted(p for p in (tmp_path / "runs").iterdir() if p.name != "sweeps")
    assert [Run.open(r).manifest.status for r in runs] == ["complete", "complete"]
    typed = Run.open(runs[0]).manifest.command
    assert typed.startswith("python -m experiments.train verifier=tiny")
    assert "+ablation=confidence_detached" in typed

    manifest = json.loads((runs[0] / "manifest.json").read_text())
    (runs[0] / "manifest.json").write_text(json.dumps({**manifest, "status": "running"}))  # killed half-way
    second = command(
        "-m", "+ablation=confidence_detached", "seed=0,1", "test=false", cache=cache, runs=tmp_path / "runs"
    )
    assert second.returncode == 0
    assert "2 cells: 1 ran, 1 skipped, 0 failed" in second.stdout.replace("\n", " ")


def test_a_single_run_is_repeated_unless_told_to_skip(cache, tmp_path):
    cfg = on_tiny_verifier(composed(f"data.cache={cache.path}", f"runs={tmp_path}", "test=false"))
    run = train(cfg)
    assert finished_run(tmp_path, config_sha(cfg)).path == run.path
    cfg.label, cfg.trainer.log_every = "another name", 3
    assert finished_run(tmp_path, config_sha(cfg)).path == run.path
    cfg.seed = 1
    assert finished_run(tmp_path, config_sha(cfg)) is None
    assert config_sha(cfg, without=["seed"]) == config_sha(composed_like(cfg, seed=0), without=["seed"])


def composed_like(cfg: DictConfig, *, seed: int) -> DictConfig:
    other = cfg.copy()
    other.seed = seed
    return other


@pytest.mark.parametrize(
    ("launcher", "target"),
    [
        ("workers", "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"),
        ("slurm", "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"),
        ("ray", "hydra_plugins.dspark_ray_launcher.RayLauncher"),
    ],
)
def test_launchers_compose(launcher, target):
    if launcher != "ray":
        pytest.importorskip(target.rsplit(".", 2)[0])
    with initialize_config_dir(version_base="1.3", config_dir=CONFIGS):
        cfg = compose("train", [f"hydra/launcher={launcher}", "runs=x"], return_hydra_config=True)
    assert cfg.hydra.launcher._target_ == target
    assert re.fullmatch(r"x/sweeps/\d{8}-\d{6}", cfg.hydra.sweep.dir)
    from hydra.utils import get_class

    assert get_class(target)
