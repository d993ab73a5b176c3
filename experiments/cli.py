"""How every command starts: Hydra composes its config, and a caller's mistake ends in one line, not a traceback."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

CONFIGS = str(Path(__file__).resolve().parent.parent / "configs")


def command(config_name: str) -> Callable[[Callable[[DictConfig], object]], Callable[[], object]]:
    """Decorate `main(cfg)` into a command configured by `configs/<config_name>.yaml`.

    ValueError, FileNotFoundError and configuration errors are the caller's to mend: they print as one line on stderr and
    exit with status 1. Anything else is a defect and keeps its traceback. DSPARK_TRACEBACK=1 shows every traceback.
    """

    def decorate(main: Callable[[DictConfig], object]) -> Callable[[], object]:
        @functools.wraps(main)
        def guarded(cfg: DictConfig) -> object:
            try:
                return main(cfg)
            except (ValueError, FileNotFoundError, FileExistsError, OmegaConfBaseException) as error:
                if os.environ.get("DSPARK_TRACEBACK") == "1":
                    raise
                print(f"error: {error}", file=sys.stderr, flush=True)
                sys.exit(1)

        return hydra.main(version_base="1.3", config_path=CONFIGS, config_name=config_name)(guarded)

    return decorate
