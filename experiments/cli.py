"""How every command starts: Hydra composes its config, and a caller's mistake ends in one line, not a traceback."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from experiments.sweep import in_sweep, run_cell

CONFIGS = str(Path(__file__).resolve().parent.parent / "configs")


class Task:
    """A command's `main` behind its guard. Pickles as the name of its module, so that any launcher's processes import it."""

    def __init__(self, main: Callable[[DictConfig], object]) -> None:
        self.main = main
        functools.update_wrapper(self, main)

    def __call__(self, cfg: DictConfig) -> object:
        if in_sweep():
            return run_cell(self.main, cfg, self.main.__code__.co_filename)
        try:
            return self.main(cfg)
        except (ValueError, FileNotFoundError, FileExistsError, OmegaConfBaseException) as error:
            if os.environ.get("DSPARK_TRACEBACK") == "1":
                raise
            if isinstance(error, MissingMandatoryValue):
                error = (
                    f"{error.full_key} is not given; add {error.full_key}=<value> (--help shows every key)."
                )
            print(f"error: {error}", file=sys.stderr, flush=True)
            sys.exit(1)

    def __reduce__(self) -> tuple[Callable[[str], Task], tuple[str]]:
        module = self.main.__module__
        return task_of, (sys.modules["__main__"].__spec__.name if module == "__main__" else module,)


def task_of(module: str) -> Task:
    """The task of a command's module."""
    return importlib.import_module(module).main.__wrapped__


def command(config_name: str) -> Callable[[Callable[[DictConfig], object]], Callable[[], object]]:
    """Decorate `main(cfg)` into a command configured by `configs/<config_name>.yaml`.

    ValueError, FileNotFoundError and configuration errors are the caller's to mend: they print as one line on stderr and
    exit with status 1. Anything else is a defect and keeps its traceback. DSPARK_TRACEBACK=1 shows every traceback.
    A cell of a sweep never ends the sweep: see `experiments.sweep`.
    """

    def decorate(main: Callable[[DictConfig], object]) -> Callable[[], object]:
        return hydra.main(version_base="1.3", config_path=CONFIGS, config_name=config_name)(Task(main))

    return decorate


def listed(value: Any) -> list[Any]:
    """A setting that may be one value, a list, or null."""
    if value is None:
        return []
    return list(value) if OmegaConf.is_list(value) else [value]


def leaves(cfg: DictConfig) -> dict[str, Any]:
    """Every setting by its dotted name, interpolations resolved; lists and empty mappings are settings themselves."""

    def below(value: Any, name: str) -> dict[str, Any]:
        if not (isinstance(value, dict) and value):
            return {name: value}
        return {k: v for key, inner in value.items() for k, v in below(inner, f"{name}.{key}").items()}

    container = OmegaConf.to_container(cfg, resolve=True)
    return {k: v for key, value in container.items() for k, v in below(value, str(key)).items()}
