"""Grids of runs: which cells are finished already, what each cell did, and the summary when the grid ends.

A cell is one composed configuration. Its identity is `config_sha`, so a grid that was killed half-way is resumed by typing the
same command again: cells with a complete run of that identity are skipped. Every cell leaves `cell.json` in its folder of the
sweep, whichever launcher ran it.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dspark.runs import Run, write_text

# Settings that name, place or watch a run without changing what it computes.
BESIDE_THE_POINT = (
    "label",
    "runs",
    "resume",
    "skip_finished",
    "trainer.progress",
    "trainer.log_every",
    "trainer.num_workers",
    "trainer.resident",
)

console = Console(width=None if sys.stdout.isatty() else 150)


@dataclass
class Cell:
    """What one cell of a sweep did: `status` is ran, skipped, failed or lost (its process left no record)."""

    number: int
    overrides: list[str]
    status: str
    run: str | None = None
    tau: float | None = None
    seconds: float = 0.0
    message: str = ""


@dataclass(frozen=True)
class Outcome:
    """A complete run, and whether it was trained just now or found."""

    run: Run
    trained: bool


def config_sha(cfg: DictConfig, *, without: Sequence[str] = ()) -> str:
    """Twelve hex digits that two configurations share when they ask for the same computation.

    `without` leaves out further keys: without `seed` all repetitions of a cell have one identity.
    """
    values = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
    for key in (*BESIDE_THE_POINT, *without):
        group, _, name = key.rpartition(".")
        node = OmegaConf.select(values, group) if group else values
        if node is not None:
            node.pop(name, None)
    text = json.dumps(OmegaConf.to_container(values), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def finished_run(runs: Path, sha: str) -> Run | None:
    """The newest complete run below `runs` with that `config_sha`; unreadable manifests count as unfinished."""
    for path in sorted(Path(runs).glob("*/manifest.json"), reverse=True):
        try:
            manifest = Run(path.parent).manifest
        except ValueError:
            continue
        if manifest.status == "complete" and manifest.config_sha == sha:
            return Run(path.parent)
    return None


def in_sweep() -> bool:
    """Whether this process runs a cell of a multirun."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def cell_overrides() -> list[str]:
    """The overrides of this run or cell as typed; empty when called from Python."""
    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []


def run_cell(main: Callable[[DictConfig], object], cfg: DictConfig, program: str) -> None:
    """Run one cell and record how it ended. A failure is recorded, not raised, so that the other cells run.

    `program` replaces the command line's program: whichever process runs the cell, `sys.argv` then reads as the command that
    repeats this cell alone.
    """
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    cell = Cell(number=int(hydra.job.num), overrides=cell_overrides(), status="ran")
    argv, sys.argv = sys.argv, [program, *cell.overrides]
    started = time.time()
    try:
        outcome = main(cfg)
        if isinstance(outcome, Outcome):
            results = outcome.run.manifest.results
            cell.run, cell.tau = str(outcome.run.path), results.get("tau", results.get("validation_tau"))
            cell.status = "ran" if outcome.trained else "skipped"
    except Exception as error:
        cell.status, cell.message = "failed", f"{type(error).__name__}: {error}"
        write_text(folder / "traceback.txt", traceback.format_exc())
        print(
            f"error in cell {cell.number} ({' '.join(cell.overrides)}): {error}", file=sys.stderr, flush=True
        )
    finally:
        sys.argv = argv
        free_memory()
    cell.seconds = round(time.time() - started, 1)
    write_text(folder / "cell.json", json.dumps(asdict(cell), indent=2) + "\n")


def free_memory() -> None:
    """Let the next cell have what this one's objects held: trainer, module and optimizer refer to each other in circles, and
    a CUDA graph keeps its memory as long as they do."""
    gc.collect()
    torch.cuda.empty_cache()


def read_cells(sweep: Path) -> list[Cell]:
    """Every cell of a sweep folder by number; a cell without a record is `lost`."""
    cells = []
    for folder in sorted((p for p in sweep.glob("*") if p.name.isdigit()), key=lambda p: int(p.name)):
        record = folder / "cell.json"
        cells.append(
            Cell(**json.loads(record.read_text()))
            if record.is_file()
            else Cell(number=int(folder.name), overrides=[], status="lost", message="its process was killed")
        )
    return cells


class SweepSummary(Callback):
    """Hydra callback: at the end of a multirun says what ran, was skipped and failed, and exits with 1 after a failure."""

    def on_multirun_end(self, config: DictConfig, **_: object) -> None:
        sweep = Path(config.hydra.sweep.dir)
        cells = read_cells(sweep)
        frame = pd.DataFrame([asdict(cell) | {"overrides": " ".join(cell.overrides)} for cell in cells])
        write_text(sweep / "cells.csv", frame.to_csv(index=False))
        table = Table(
            title="Cells of the sweep", title_justify="left", header_style="bold", box=box.SIMPLE_HEAD
        )
        for name in ("#", "overrides", "status", "tau", "seconds", "run or message"):
            table.add_column(name, justify="right" if name in ("#", "tau", "seconds") else "left")
        recorded = [set(cell.overrides) for cell in cells if cell.overrides]
        shared = set.intersection(*recorded) if len(recorded) > 1 else set()
        for cell in cells:
            own = escape(" ".join(o for o in cell.overrides if o not in shared))
            tau = "" if cell.tau is None else f"{cell.tau:.3f}"
            where = escape(cell.message if cell.run is None else Path(cell.run).name)
            table.add_row(str(cell.number), own, cell.status, tau, f"{cell.seconds:.0f}", where)
        console.print(table)
        counts = {
            status: sum(c.status == status for c in cells) for status in ("ran", "skipped", "failed", "lost")
        }
        said = ", ".join(f"{n} {status}" for status, n in counts.items() if n or status != "lost")
        console.print(
            f"[bold]{len(cells)} cells: {said}[/bold]; {sweep / 'cells.csv'}", highlight=False, soft_wrap=True
        )
        if counts["failed"] + counts["lost"]:
            sys.exit(1)
