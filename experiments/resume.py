"""Going on with a run where it stopped: its own configuration, but for what the command changes of it."""

from __future__ import annotations

from collections.abc import Sequence

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from dspark.runs import Run
from dspark.training import checkpoint_path
from experiments.cli import CONFIGS, leaves
from experiments.sweep import config_sha


def resumed_config(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """The configuration that the run `cfg.resume` recorded, with what the command says instead.

    `cfg` is what Hydra made of `overrides`, the command's. A key or group that they name is taken from it, and so is whatever
    else they made other than the default is, as an `experiment` or an `ablation` does. Raises FileNotFoundError for no run.
    """
    run = Run.open(cfg.resume)
    default, given = leaves(_defaults()), leaves(cfg)
    recorded = leaves(OmegaConf.load(run.path / "config.yaml"))
    named = [o.key_or_group for o in OverridesParser.create().parse_overrides(list(overrides))]

    def is_named(name: str) -> bool:
        return any(name == one or name.startswith(f"{one}.") for one in named)

    changed = {
        name: value
        for name, value in given.items()
        if is_named(name) or name not in default or default[name] != value
    }
    gone = default.keys() - given.keys()
    kept = {
        name: value
        for name, value in recorded.items()
        if name in changed or not (name in gone or is_named(name))
    }
    result = OmegaConf.create({})
    for name, value in (kept | changed).items():
        OmegaConf.update(result, name, value, force_add=True)
    return result


def check_resumable(run: Run, cfg: DictConfig) -> None:
    """Raise ValueError where the run has no full checkpoint, or one whose optimizer state this strategy would misread."""
    checkpoint_path(run)
    before, now = OmegaConf.load(run.path / "config.yaml").trainer, cfg.trainer
    for key, peculiar, reason in (
        ("strategy", "fsdp2", "fsdp2 orders the optimizer's state in its own way"),
        ("precision", "bf16-masters", "with bf16-masters the optimizer's state holds a part of the weights"),
    ):
        old, new = str(before[key]), str(now[key])
        if old != new and peculiar in (old, new):
            raise ValueError(
                f"run {run.path.name} was trained with trainer.{key}={old}, but trainer.{key} is {new}: {reason}. Resume with "
                f"trainer.{key}={old}, or start a run from the weights with warm_start={run.path}."
            )


def record_resumed(run: Run, cfg: DictConfig) -> None:
    """Write the configuration that the run goes on with over the one it had."""
    cfg = OmegaConf.merge(cfg, {"resume": None})
    run.reconfigure(OmegaConf.to_yaml(cfg, resolve=True), config_sha(cfg))


def _defaults() -> DictConfig:
    if GlobalHydra.instance().is_initialized():
        return compose("train")
    with initialize_config_dir(version_base="1.3", config_dir=CONFIGS):
        return compose("train")
