"""One look for every figure: sizes that read at notebook scale, and one colour per domain, policy and predictor."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

INK = "#2b2f36"
GRID = "#e6e8eb"
MUTED = "#9aa1ab"

DOMAINS = {"all": INK, "math": "#3b6fb6", "code": "#2a9d77", "chat": "#d9653b"}

POLICIES = {
    "plain decoding": MUTED,
    "best fixed length": "#c99a1f",
    "best static threshold": "#2a9d77",
    "scheduler, raw head": "#8fb4e3",
    "scheduler, calibrated head": "#3b6fb6",
    "scheduler, asynchronous": "#7a5195",
    "scheduler, global search": "#b44b8f",
    "scheduler, perfect head": "#d9653b",
    "oracle (knows the outcome)": INK,
}

SIGNALS = {"confidence": "#3b6fb6", "max_prob": "#d9653b", "entropy": "#2a9d77", "margin": "#c99a1f"}
SIGNAL_NAMES = {
    "confidence": "confidence head",
    "max_prob": "top probability",
    "entropy": "entropy",
    "margin": "margin",
}

STAGES = {
    "raw": "#d9653b",
    "mapped": "#d9a13b",
    "affine": "#8a6fb0",
    "sts": "#3b6fb6",
    "sts_by_domain": "#8fb4e3",
    "sas": "#2a9d77",
    "sas_by_domain": "#8fcdb5",
    "isotonic": MUTED,
}
STAGE_NAMES = {
    "raw": "as it comes",
    "mapped": "mapped to a rate",
    "affine": "one affine",
    "sts": "sequential temperatures",
    "sts_by_domain": "sequential temperatures, by domain",
    "sas": "sequential scale and shift",
    "sas_by_domain": "sequential scale and shift, by domain",
    "isotonic": "isotonic (reference)",
}


def use_style() -> None:
    """Set Matplotlib's defaults for the notebooks: 11 pt text, light grid, no top and right spines, sharp pictures."""
    sns.set_theme(
        context="notebook",
        style="ticks",
        rc={
            "font.size": 11,
            "axes.titlesize": 12,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.titlepad": 10,
            "axes.labelsize": 11,
            "axes.labelcolor": INK,
            "axes.edgecolor": MUTED,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "grid.color": GRID,
            "grid.linewidth": 0.8,
            "xtick.labelsize": 10,
            "ytick.labelsize": 10,
            "xtick.color": MUTED,
            "ytick.color": MUTED,
            "xtick.labelcolor": INK,
            "ytick.labelcolor": INK,
            "text.color": INK,
            "legend.fontsize": 10,
            "legend.frameon": False,
            "lines.linewidth": 1.9,
            "lines.markersize": 5.5,
            "figure.dpi": 110,
            "savefig.dpi": 160,
            "savefig.bbox": "tight",
            "figure.constrained_layout.use": True,
        },
    )


def panels(
    columns: int, *, width: float = 4.2, height: float = 3.6, rows: int = 1, sharey: bool = True
) -> Sequence[Axes]:
    """A flat list of rows * columns axes of a new figure, each `width` x `height` inches."""
    _, grid = plt.subplots(
        rows,
        columns,
        figsize=(width * columns, height * rows),
        sharey=sharey,
        squeeze=False,
        layout="constrained",
    )
    return list(grid.flat)


def legend_right(ax: Axes, title: str | None = None) -> Axes:
    """Put the legend beside the axes, clear of the data."""
    ax.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), title=title, alignment="left")
    return ax


def legend_below(axes: Sequence[Axes], *, columns: int = 6) -> None:
    """One legend for all panels, under them; a label that several panels share appears once."""
    entries = {label: h for ax in axes for h, label in zip(*ax.get_legend_handles_labels())}
    axes[0].figure.legend(
        entries.values(), entries.keys(), loc="outside lower center", ncols=min(columns, len(entries))
    )


def percent(ax: Axes, axis: str) -> Axes:
    """Label the `x` or `y` axis of fractions in per cent."""
    (ax.xaxis if axis == "x" else ax.yaxis).set_major_formatter(
        PercentFormatter(1.0, decimals=0, symbol=" %")
    )
    return ax
