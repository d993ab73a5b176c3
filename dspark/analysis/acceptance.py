"""Figures of acceptance. Each takes one table from `dspark.analysis.tables` or `dspark.walkthrough`, draws on one axis and
returns it. Positions count from 1, the proposal right after the anchor; tau includes the bonus token."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from dspark.analysis.style import DOMAINS, INK, MUTED, percent

NAMES = {"all": "mean"}
PALE = LinearSegmentedColormap.from_list("pale", ["#ffffff", "#dce8f5", "#8fb4e3", "#3b6fb6", "#1f3f73"])


def colours(labels: list[str]) -> dict[str, tuple[float, float, float]]:
    """A fixed colour for known domains, and distinct ones for everything else."""
    unknown = [label for label in labels if label not in DOMAINS]
    taken = {DOMAINS[label] for label in labels if label in DOMAINS}
    few = [
        shade
        for shade in (*list(DOMAINS.values())[1:4], "#8a6fb0", "#c99a1f", "#b44b8f")
        if shade not in taken
    ]
    spare = few if len(unknown) <= len(few) else sns.color_palette("husl", len(unknown))
    shades = dict(zip(unknown, map(to_rgb, spare), strict=False))
    return {label: to_rgb(DOMAINS[label]) if label in DOMAINS else shades[label] for label in labels}


def set_names(table: pd.DataFrame) -> pd.Series:
    """The set of each row, without the split and the way of measuring that `dataset` says behind it."""
    return table["dataset"].str.replace(
        r"(-(test|validation|train))?(-t\d.*)?(-sampled)?(-decode)?$", "", regex=True
    )


def curve_names(table: pd.DataFrame) -> pd.Series:
    """What each row belongs to: its domain, or, where several sets were measured, its set.

    Sets of one domain are curves of their own; drawn as one, they would jump between each other.
    """
    sets = set_names(table)
    return table["domain"] if sets[sets != "all"].nunique() == 1 else sets


def plot_conditional_acceptance(
    positions: pd.DataFrame, ax: Axes, *, hue: str = "domain", min_reached: float = 30.0
) -> Axes:
    """Paper fig. 2: is a proposal kept, given that every proposal before it was? Bands are bootstrap intervals.

    Positions that fewer than `min_reached` rounds reached are left out: their rates are noise.
    """
    _curves(positions[positions["reached"] >= min_reached], ax, hue, "conditional")
    ax.set(xlabel="position in the block", ylabel="conditional acceptance", ylim=(0, 1.02))
    return percent(ax, "y")


def plot_survival(positions: pd.DataFrame, ax: Axes, *, hue: str = "domain") -> Axes:
    """How many rounds keep proposals 1 to i; the area under a curve is the mean number of accepted drafts."""
    _curves(positions, ax, hue, "survival")
    ax.set(xlabel="position in the block", ylabel="share of rounds that keep 1 … i", ylim=(0, 1.02))
    return percent(ax, "y")


def plot_tau(table: pd.DataFrame, ax: Axes, *, label: str = "dataset", hue: str | None = None) -> Axes:
    """tau by set (or by any column) with its interval, one row each, largest on top; a dotted line marks no speculation."""
    shades = [None] if hue is None else list(dict.fromkeys(table[hue]))
    palette = colours([str(s) for s in shades])
    order = table.groupby(label)["tau"].mean().sort_values().index.tolist()
    order.sort(key=lambda name: name != "all")  # stable: the mean goes to the bottom
    offsets = np.linspace(-0.16, 0.16, len(shades)) if len(shades) > 1 else [0.0]
    for shade, offset in zip(shades, offsets, strict=True):
        rows = table if shade is None else table[table[hue] == shade]
        y = rows[label].map(order.index) - offset
        colour = palette[str(shade)] if shade is not None else DOMAINS["math"]
        ax.hlines(y, rows["tau_low"], rows["tau_high"], color=colour, linewidth=2.4, alpha=0.45)
        ax.plot(rows["tau"], y, "o", color=colour, label=None if shade is None else _label(hue, shade))
        for value, high, at in zip(rows["tau"], rows["tau_high"], y, strict=True):
            right = value if np.isnan(high) else high
            ax.annotate(
                f"{value:.2f}",
                (right, at),
                (6, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
                color=INK,
            )
    ax.axvline(1.0, color=MUTED, linewidth=1, linestyle=(0, (2, 3)))
    ax.set_yticks(range(len(order)), [f"mean of {label}s" if n == "all" else str(n) for n in order])
    ax.set(xlabel="tau, tokens a round (bonus included)", ylabel="")
    ax.set_xlim(0.9, np.nanmax(table[["tau", "tau_high"]].to_numpy()) * 1.08)
    ax.grid(axis="y", visible=False)
    if hue is not None:
        ax.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=len(shades), columnspacing=1.4)
    return ax


def plot_lost_length(positions: pd.DataFrame, ax: Axes, *, label: str = "domain") -> Axes:
    """Where the block's N tokens go: kept, lost because position i was the first rejection, or beyond the text."""
    width = int(positions["position"].max()) - 1
    groups = list(dict.fromkeys(positions[label]))[::-1]
    shades = [PALE(0.95 - 0.72 * i / max(1, width - 1)) for i in range(width)]
    for row, group in enumerate(groups):
        lost = (
            positions[positions[label] == group]
            .groupby("position")["lost"]
            .mean()
            .reindex(range(1, width + 2))
        )
        kept = width - lost.sum()
        ax.barh(row, kept, color=DOMAINS["code"], height=0.62, label="kept" if row == 0 else None)
        ax.text(kept / 2, row, f"{kept:.2f}", ha="center", va="center", color="white", fontsize=9.5)
        left = kept
        for i in range(width):
            ax.barh(
                row, lost[i + 1], left=left, color=shades[i], height=0.62, edgecolor="white", linewidth=0.6
            )
            if lost[i + 1] > 0.035 * width:
                dark = i < width / 2
                ax.text(
                    left + lost[i + 1] / 2,
                    row,
                    str(i + 1),
                    ha="center",
                    va="center",
                    color="white" if dark else INK,
                    fontsize=9.5,
                )
            left += lost[i + 1]
        ax.barh(
            row,
            lost[width + 1],
            left=left,
            color="#eceef1",
            height=0.62,
            label="end of the text" if row == 0 else None,
        )
    ax.barh(0, 0, color=shades[0], label="lost at position i")
    ax.set_yticks(range(len(groups)), [NAMES.get(g, str(g)) for g in groups])
    ax.set(xlabel=f"tokens of {width} proposed a round", xlim=(0, width))
    ax.grid(axis="y", visible=False)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, columnspacing=1.4, handlelength=1.2)
    return ax


def plot_depth(depths: pd.DataFrame, ax: Axes, *, hue: str = "domain") -> Axes:
    """tau by how many answer tokens precede the anchor, with intervals; bins are labelled by where they begin."""
    shown = [g for g in dict.fromkeys(depths[hue])]
    palette = colours([str(g) for g in shown])
    places = {edge: i for i, edge in enumerate(sorted(depths["depth"].unique()))}
    for group in shown:
        rows = depths[depths[hue] == group].sort_values("depth")
        x = rows["depth"].map(places)
        style = {"linestyle": (0, (4, 2))} if group == "all" else {}
        ax.fill_between(
            x, rows["tau_low"], rows["tau_high"], color=palette[str(group)], alpha=0.13, linewidth=0
        )
        ax.plot(
            x, rows["tau"], marker="o", color=palette[str(group)], label=NAMES.get(group, str(group)), **style
        )
    ax.set_xticks(range(len(places)), [f"{edge}+" for edge in places])
    ax.set(xlabel="answer tokens before the anchor", ylabel="tau")
    ax.legend()
    return ax


def plot_transitions(transitions: pd.DataFrame, ax: Axes) -> Axes:
    """The sequential head's bias: rows are previous tokens, columns the tokens it favours most after any of them."""
    previous = list(dict.fromkeys(transitions["previous"]))
    following = list(dict.fromkeys(transitions["next"]))
    grid = transitions.pivot_table(index="previous", columns="next", values="bias", aggfunc="mean")
    grid = grid.reindex(index=previous, columns=following)
    limit = np.nanpercentile(np.abs(grid.to_numpy()), 98)
    sns.heatmap(
        grid,
        ax=ax,
        cmap="vlag",
        center=0.0,
        vmin=-limit,
        vmax=limit,
        linewidths=0.5,
        cbar_kws={"label": "bias beyond the average", "shrink": 0.8},
        xticklabels=[visible(t) for t in following],
        yticklabels=[visible(t) for t in previous],
    )
    ax.grid(visible=False)
    ax.tick_params(axis="both", length=0)
    ax.tick_params(axis="x", rotation=90)
    ax.tick_params(axis="y", rotation=0)
    ax.set(xlabel="next token", ylabel="previous token")
    return ax


def plot_repairs(repairs: pd.DataFrame, ax: Axes, *, top: int = 12) -> Axes:
    """Proposals whose arg max the head turned right (to the right) or wrong (to the left), by what it changed."""
    names = (
        repairs["previous"].map(visible)
        + " → "
        + repairs["base"].map(visible)
        + " ⇒ "
        + repairs["final"].map(visible)
    )
    frame = repairs.assign(change=names)
    counts = frame.groupby(["change", "kind"])["count"].sum().unstack(fill_value=0)
    counts = counts.reindex(columns=["repaired", "broken"], fill_value=0)
    shown = counts.assign(total=counts.sum(axis=1)).sort_values("total").tail(top)
    y = np.arange(len(shown))
    ax.barh(
        y,
        shown["repaired"],
        color=DOMAINS["code"],
        height=0.7,
        label=f"repaired ({counts['repaired'].sum():.0f} in all)",
    )
    ax.barh(
        y,
        -shown["broken"],
        color=DOMAINS["chat"],
        height=0.7,
        label=f"broken ({counts['broken'].sum():.0f} in all)",
    )
    ax.axvline(0, color=INK, linewidth=0.8)
    ax.set_yticks(y, shown.index, family="monospace", fontsize=9)
    ax.xaxis.set_major_formatter(lambda value, _: f"{abs(value):.0f}")
    ax.set(xlabel="proposals", ylabel="previous → base choice ⇒ with the head")
    ax.grid(axis="y", visible=False)
    ax.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2, columnspacing=1.4)
    return ax


def plot_block(walk: pd.DataFrame, ax: Axes, *, width: int, title: str) -> Axes:
    """One block as a grid: a column a proposal, its likeliest tokens from top to bottom, shaded by probability.

    `walk` comes from `walk_table`; `width` is the number of columns to leave room for. The chosen token is framed: green where
    the verifier kept it, orange where it did not, grey where nobody knows.
    """
    depth = int(walk["rank"].max())
    grid = walk.pivot_table(index="rank", columns="position", values="probability").reindex(
        columns=range(1, width + 1)
    )
    ax.imshow(grid, cmap=PALE, vmin=0, vmax=1, aspect="auto", extent=(0.5, width + 0.5, depth + 0.5, 0.5))
    for row in walk.itertuples():
        ax.text(
            row.position,
            row.rank,
            visible(row.token),
            ha="center",
            va="center",
            fontsize=9,
            family="monospace",
            color="white" if row.probability > 0.55 else INK,
            fontweight="bold" if row.chosen else "normal",
        )
        if row.chosen:
            ax.add_patch(_frame(row.position, row.rank, row.kept))
    ax.set(xlabel="proposal", ylabel="rank", title=title, xlim=(0.5, width + 0.5), ylim=(depth + 0.5, 0.5))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.tick_params(length=0)
    ax.grid(visible=False)
    return ax


def visible(token: str) -> str:
    """A token as it can be read on a figure: spaces and line ends shown, dollars escaped, long ones cut."""
    shown = token.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣")
    shown = shown if len(shown) <= 12 else shown[:11] + "…"
    return shown.replace("$", r"\$") or "∅"


def inline(text: str) -> str:
    """Text in a line of Markdown, line ends shown and nothing in it read as markup."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>()#+-.!|$~" else c for c in text.replace("\n", "⏎ "))


def _frame(x: int, y: int, kept: bool | None) -> Rectangle:
    edge = MUTED if kept is None else DOMAINS["code"] if kept else DOMAINS["chat"]
    return Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, fill=False, edgecolor=edge, linewidth=2.2)


def _label(name: str, value: object) -> str:
    return f"{name} {value:g}" if isinstance(value, float) else str(value)


def _curves(positions: pd.DataFrame, ax: Axes, hue: str, value: str) -> None:
    rows = positions.dropna(subset=[value])
    groups = list(dict.fromkeys(rows[hue]))
    palette: Mapping[str, tuple[float, float, float]] = colours([str(g) for g in groups])
    for group in groups:
        curve = rows[rows[hue] == group].sort_values("position")
        colour, name = palette[str(group)], NAMES.get(group, str(group))
        style = {"linestyle": (0, (4, 2))} if group == "all" else {}
        ax.fill_between(
            curve["position"],
            curve[f"{value}_low"],
            curve[f"{value}_high"],
            color=colour,
            alpha=0.13,
            linewidth=0,
        )
        ax.plot(curve["position"], curve[value], marker="o", color=colour, label=name, **style)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend()
