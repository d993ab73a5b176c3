"""What a resumed run is configured with; that it repeats an uninterrupted one is in `test_training`."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from dspark.runs import Run, RunManifest
from experiments.cli import CONFIGS
from experiments.resume import record_resumed, resumed_config
from experiments.sweep import config_sha


def composed(*overrides: str):
    with initialize_config_dir(version_base="1.3", config_dir=CONFIGS):
        return compose("train", list(overrides))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """As its command left it: another loss, another precision, a longer block."""
    cfg = composed("loss=ce", "trainer.precision=32-true", "draft.block_size=12", "data.cache=elsewhere")
    manifest = RunManifest(
        run_id="one",
        command="",
        overrides=[],
        config_sha=config_sha(cfg),
        seed=0,
        verifier={},
        data={},
        parent=None,
    )
    return Run.create(tmp_path, manifest, OmegaConf.to_yaml(cfg, resolve=True))


def resumed(run: Run, *overrides: str):
    overrides = (f"resume={run.path}", *overrides)
    return resumed_config(composed(*overrides), overrides)


def test_a_resumed_run_keeps_all_that_the_command_does_not_name(run):
    before = OmegaConf.load(run.path / "config.yaml")
    cfg = resumed(run, "trainer.max_steps=77")
    assert cfg.pop("resume") == str(run.path)
    assert cfg.trainer.max_steps == 77
    cfg.trainer.max_steps = before.trainer.max_steps
    before.pop("resume")
    assert cfg == before
    assert OmegaConf.to_yaml(cfg) == OmegaConf.to_yaml(before)  # in the same order


def test_what_the_command_names_counts_even_where_it_is_the_default(run):
    cfg = resumed(run, "trainer.precision=auto", "draft.block_size=8")
    assert (cfg.trainer.precision, cfg.draft.block_size) == ("auto", 8)
    assert cfg.loss == composed("loss=ce").loss


def test_a_group_replaces_the_whole_group(run):
    kimi = composed("loss=kimi").loss
    assert kimi != composed("loss=ce").loss
    assert resumed(run, "loss=kimi").loss == kimi
    longer = resumed(run, "loss=kimi", "loss.decay_gamma=9").loss
    assert longer == OmegaConf.merge(kimi, {"decay_gamma": 9})


def test_what_an_ablation_changes_is_taken_from_it(run):
    ablated = composed("+ablation=no_markov")
    cfg = resumed(run, "+ablation=no_markov")
    assert cfg.head == ablated.head
    assert (cfg.trainer.precision, cfg.draft.block_size) == ("32-true", 12)


def test_the_run_records_what_it_goes_on_with(run):
    cfg = resumed(run, "trainer.max_steps=77")
    record_resumed(run, cfg)
    recorded = OmegaConf.load(run.path / "config.yaml")
    assert recorded.resume is None
    assert recorded.trainer.max_steps == 77
    assert run.manifest.config_sha == config_sha(recorded)
    assert config_sha(resumed(run)) == config_sha(recorded)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="not a run folder"):
        resumed_config(composed(f"resume={tmp_path}"), [f"resume={tmp_path}"])
