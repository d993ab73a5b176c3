"""Hydra launcher that runs the cells of a sweep as Ray tasks: `-m hydra/launcher=ray`.

Starts a Ray on this machine, or joins the cluster that `hydra.launcher.address` names; the working tree and the runs folder must
then be on a file system that all nodes share. Hydra finds it because it looks through `hydra_plugins`. Written here because the published plugin pins packages that joblib refuses.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, configure_log, filter_overrides, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

log = logging.getLogger(__name__)


class RayLauncher(Launcher):
    """One task a cell, each with `num_cpus` and `num_gpus` reserved; `max_cells` bounds how many run at once."""

    def __init__(
        self, *, address: str | None, num_cpus: float, num_gpus: float, max_cells: int | None
    ) -> None:
        self.address, self.num_cpus, self.num_gpus, self.max_cells = address, num_cpus, num_gpus, max_cells

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        import ray

        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        Path(str(self.config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        # Workers begin in Ray's own folder: give them this one's modules, and the folder itself below.
        where = str(Path.cwd())
        ray.init(
            address=self.address,
            num_cpus=None if self.address or self.max_cells is None else int(self.max_cells * self.num_cpus),
            include_dashboard=False,
            log_to_driver=True,
            runtime_env={"env_vars": {"PYTHONPATH": where}},
        )
        try:
            cell = ray.remote(num_cpus=self.num_cpus, num_gpus=self.num_gpus, max_retries=0)(run_cell_there)
            state = Singleton.get_state()
            waiting = []
            for number, overrides in enumerate(job_overrides, start=initial_job_idx):
                log.info(f"\t#{number} : {' '.join(filter_overrides(overrides))}")
                parts = (self.hydra_context, self.task_function, self.config, state)
                waiting.append(cell.remote(where, number, list(overrides), *parts))
            return ray.get(waiting)
        finally:
            ray.shutdown()


def run_cell_there(
    where: str,
    number: int,
    overrides: list[str],
    hydra_context: HydraContext,
    task_function: TaskFunction,
    config: DictConfig,
    state: dict[Any, Any],
) -> JobReturn:
    """Compose and run one cell in a worker process."""
    import os

    os.chdir(where)
    setup_globals()
    Singleton.set_state(state)
    composed = hydra_context.config_loader.load_sweep_config(config, overrides)
    with open_dict(composed):
        composed.hydra.job.id = f"{composed.hydra.job.name}_{number}"
        composed.hydra.job.num = number
    result = run_job(
        hydra_context=hydra_context,
        config=composed,
        task_function=task_function,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )
    result.cfg = result.hydra_cfg = None  # large, and not every interpolation survives the way back
    return result
