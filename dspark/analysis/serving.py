"""What an engine measured (the table of `experiments.serve_bench`) as figures."""

from __future__ import annotations

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from dspark.analysis.style import GRID, INK, MUTED

OVERALL, VERIFIER = "overall", "verifier"  # the set and the configuration that the table calls so


def configurations(table: pd.DataFrame) -> list[str]:
    """Labels of the drafts measured, in the table's order; the verifier alone is what they are compared with."""
    return [c for c in table["config"].unique() if c != VERIFIER]


def sped_up(table: pd.DataFrame) -> pd.DataFrame:
    """The drafts' rows over all sets that have the verifier alone to be compared with."""
    return table[(table["set"] == OVERALL) & (table["config"] != VERIFIER)].dropna(subset=["speed_up"])


def plot_speed_up(table: pd.DataFrame, ax: Axes, *, temperature: float) -> Axes:
    """Throughput over the verifier's alone, against the number of requests in flight; all sets together.

    Below the dashed line drafting costs more than it brings.
    """
    rows = sped_up(table)
    rows = rows[rows["temperature"] == temperature]
    ax.axhline(1.0, color=MUTED, linestyle="--", linewidth=1.2)
    sns.lineplot(
        rows, x="concurrency", y="speed_up", hue="config", hue_order=configurations(table), marker="o", ax=ax
    )
    loads = sorted(rows["concurrency"].unique())
    ax.set_xscale("log", base=2)
    ax.set_xticks(loads, [str(n) for n in loads])
    ax.set_ylim(bottom=0.0)
    ax.set(
        xlabel="requests in flight",
        ylabel="tokens a second / verifier alone",
        title=f"Speed-up, T = {temperature:g}",
    )
    ax.legend(title=None)
    return ax


def plot_prediction(table: pd.DataFrame, ax: Axes, *, concurrency: int) -> Axes:
    """Accept length in the engine against what replay predicted, one point a draft, set and temperature.

    On the line both agree; the grey band is three per cent around it.
    """
    rows = table[(table["concurrency"] == concurrency) & (table["set"] != OVERALL)]
    rows = rows.dropna(subset=["predicted_accept_length", "accept_length"])
    ends = pd.concat([rows["predicted_accept_length"], rows["accept_length"]])
    low, high = 0.97 * ends.min(), 1.03 * ends.max()
    ax.fill_between(
        [low, high], [0.97 * low, 0.97 * high], [1.03 * low, 1.03 * high], color=GRID, linewidth=0
    )
    ax.plot([low, high], [low, high], color=INK, linewidth=1.0)
    sns.scatterplot(
        rows,
        x="predicted_accept_length",
        y="accept_length",
        hue="config",
        hue_order=[c for c in configurations(table) if c in set(rows["config"])],
        style="temperature",
        s=70,
        ax=ax,
    )
    ax.set(xlim=(low, high), ylim=(low, high), xlabel="replay", ylabel="engine", title="Accept length")
    ax.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    return ax
