"""Benchmarks: `python -m experiments.bench step [key=value ...]` and `python -m experiments.bench steps [--option value ...]`.

`step` times a draft's training step, ours beside other trainers' (experiments/bench_step.py), and draws a figure next to its rows.
`steps` times a verifier's forward for growing numbers of tokens and writes a step-cost table (experiments/bench_steps.py).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from experiments import bench_steps
from experiments.bench_step import Settings, measure, summary, write_rows
from experiments.cli import command

USAGE = "usage: python -m experiments.bench step [key=value ...] | steps [--option value ...]   (step --help, steps --help)"
console = Console()


@command("bench")
def step(cfg: DictConfig) -> list[dict[str, Any]]:
    out = Path(cfg.out or f"outputs/bench/{cfg.geometry}-{cfg.device}-{cfg.dtype}.jsonl")
    settings = Settings(
        geometry=str(cfg.geometry),
        device=str(cfg.device),
        dtype=str(cfg.dtype),
        peers=tuple(cfg.peers),
        repeats=int(cfg.repeats),
        warmup=int(cfg.warmup),
        threads=int(cfg.threads),
        seed=int(cfg.seed),
        memory=bool(cfg.memory),
        tolerance=float(cfg.tolerance),
        profile=Path(cfg.profile) if cfg.profile else None,
    )
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("building")
        rows = measure(settings, say=lambda line: progress.update(task, description=line))
    write_rows(rows, out)
    console.print(step_table(rows))
    console.print(work_table(rows))
    figure = draw(rows, out.with_suffix(".png"))
    console.print(f"{summary(rows)}; rows in {out}, figure {figure}", soft_wrap=True)
    return rows


def step_table(rows: list[dict[str, Any]]) -> Table:
    """Median, range, memory and rate of every implementation's step."""
    table = Table(title="training step")
    for name in ("", "median ms", "range ms", "peak GiB", "TFLOP/s", "of the matrix rate"):
        table.add_column(name, justify="left" if not name else "right")
    for row in rows:
        if row["phase"] == "step":
            table.add_row(
                f"{row['peer']} {row['version']}",
                f"{row['ms_median']:.1f}",
                f"{row['ms_min']:.1f} – {row['ms_max']:.1f}",
                "–" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}",
                f"{row['tflops']:.3f}",
                f"{row['utilisation']:.0%}",
            )
    return table


def work_table(rows: list[dict[str, Any]]) -> Table:
    """Counted operations of a step by part, and the milliseconds they take at the measured matrix-product rate."""
    facts = rows[0]
    table = Table(title="needed operations")
    for name in ("part", "GFLOP", "ms at the matrix rate"):
        table.add_column(name, justify="left" if name == "part" else "right")
    parts = {**facts["flops_by_part"], "all": facts["flops"]}
    for name, flops in parts.items():
        table.add_row(name, f"{flops / 1e9:.1f}", f"{flops / facts['matrix_tflops'] / 1e9:.1f}")
    return table


def draw(rows: list[dict[str, Any]], path: Path) -> Path:
    """The figure of one run's rows, written to `path`."""
    import matplotlib
    import pandas as pd

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from dspark.analysis.step_times import draw_step_times
    from dspark.analysis.style import use_style

    use_style()
    frame = pd.DataFrame(rows)
    figure, ax = plt.subplots(figsize=(8.0, 1.2 + 0.55 * frame.groupby(["peer", "dtype"]).ngroups))
    draw_step_times(frame, ax)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
    return path


def main() -> int:
    """Hand the command line to one of the two benchmarks. Exit status 2 for neither."""
    kind = sys.argv[1] if len(sys.argv) > 1 else ""
    if kind == "steps":
        return bench_steps.main(sys.argv[2:])
    if kind != "step":
        print(USAGE, file=sys.stderr)
        return 2
    del sys.argv[1]
    step()
    return 0


if __name__ == "__main__":
    sys.exit(main())
