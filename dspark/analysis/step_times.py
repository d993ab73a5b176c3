"""Training-step times (the rows of `experiments.bench step`) as one small figure."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from dspark.analysis.style import INK, MUTED

PHASES = {
    "part:context": ("context projection", "#8fb4e3"),
    "part:layers": ("layers", "#3b6fb6"),
    "part:loss": ("vocabulary loss and its gradient", "#d9653b"),
    "part:loss backward": ("loss, backward", "#d9a13b"),
    "part:layers backward": ("layers, backward", "#2a9d77"),
    "part:context backward": ("context projection, backward", "#8fd1bb"),
    "forward": ("forward, all", "#c4c9d0"),
    "backward": ("backward, all", MUTED),
}


def draw_step_times(rows: pd.DataFrame, ax: Axes) -> Axes:
    """Median milliseconds of a step as one stacked bar an implementation and dtype: by part where the rows have parts."""
    labels = []
    seen: set[str] = set()
    for (dtype, peer), group in rows.groupby(["dtype", "peer"], sort=False):
        times = group.set_index("phase")["ms_median"]
        parts = [phase for phase in PHASES if phase in times.index]
        if any(phase.startswith("part:") for phase in parts):
            parts = [phase for phase in parts if phase.startswith("part:")]
        left, height = 0.0, len(labels)
        for phase in parts:
            name, colour = PHASES[phase]
            ax.barh(height, times[phase], left=left, color=colour, label=None if name in seen else name)
            seen.add(name)
            left += times[phase]
        ax.text(left, height, f" {times['step']:.0f} ms", va="center", color=INK)
        labels.append(f"{peer}, {dtype}")
    ax.set_yticks(range(len(labels)), labels)
    ax.invert_yaxis()
    ax.set_xlabel("milliseconds a step (median)")
    ax.set_xlim(right=1.12 * ax.get_xlim()[1])
    ax.grid(axis="y", visible=False)
    ax.legend(loc="upper left", bbox_to_anchor=(1.02, 1.05))
    return ax
