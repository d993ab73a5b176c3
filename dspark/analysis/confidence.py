"""Figures of calibration and scheduling. Each takes one table that `experiments.calibrate` or `experiments.simulate`
wrote, draws on one axis and returns it; nothing is fitted or simulated here."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from dspark.analysis.style import (
    DOMAINS,
    INK,
    MUTED,
    POLICIES,
    SIGNAL_NAMES,
    SIGNALS,
    STAGE_NAMES,
    STAGES,
    percent,
)

PREFIX = "p_prefix_survives"
CONDITIONAL = "p_accept_given_prefix"
QUANTITY_NAMES = {PREFIX: "prefix survives", CONDITIONAL: "accepted, given the prefix"}


def metric_table(
    metrics: pd.DataFrame, *, metric: str, quantity: str, binning: str = "width"
) -> pd.DataFrame:
    """Mean over positions of one metric: rows (signal, stage), columns domains. ECE in per cent, others as they are."""
    rows = metrics[
        (metrics["metric"] == metric) & (metrics["quantity"] == quantity) & (metrics["binning"] == binning)
    ]
    wide = rows.pivot_table(index=["signal", "stage"], columns="domain", values="value", aggfunc="mean")
    signals, stages = list(SIGNALS), list(STAGES)
    order = sorted(wide.index, key=lambda key: (signals.index(key[0]), stages.index(key[1])))
    columns = [d for d in DOMAINS if d in wide.columns]
    return wide.loc[order, columns + [c for c in wide.columns if c not in columns]] * (
        100 if metric == "ece" else 1
    )


def plot_reliability(
    bins: pd.DataFrame,
    metrics: pd.DataFrame,
    ax: Axes,
    *,
    position: int,
    domain: str = "all",
    signal: str = "confidence",
    stages: tuple[str, ...] = ("raw", "sts"),
    quantity: str = PREFIX,
    binning: str = "mass",
) -> Axes:
    """Paper fig. 6: observed against predicted probability by bin, marker area by the bin's share, ECE and AUC beside it."""
    ax.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    lines = []
    for stage in stages:
        rows = _cell(bins, quantity, signal, stage, domain, position, binning).sort_values("predicted")
        ax.plot(rows["predicted"], rows["observed"], color=STAGES[stage], linewidth=1.4, zorder=2)
        ax.scatter(
            rows["predicted"],
            rows["observed"],
            s=8 + 260 * rows["weight"],
            color=STAGES[stage],
            edgecolor="white",
            linewidth=0.6,
            zorder=3,
            label=STAGE_NAMES[stage],
        )
        values = _cell(metrics, quantity, signal, stage, domain, position, "width").set_index("metric")[
            "value"
        ]
        lines.append((f"ECE {100 * values['ece']:.1f} %   AUC {values['auc']:.3f}", STAGES[stage]))
    crowded = any(line.get_ydata().max() > 0.8 for line in ax.lines[1:])  # the upper left corner is taken
    x, y, side = (0.98, 0.115, "right") if crowded else (0.03, 0.93, "left")
    for i, (text, colour) in enumerate(lines):
        ax.text(x, y - 0.085 * i, text, color=colour, fontsize=9.5, ha=side, transform=ax.transAxes)
    ax.set(
        xlim=(-0.02, 1.02),
        ylim=(-0.02, 1.02),
        xlabel="predicted",
        ylabel="observed",
        title=f"Position {position}",
    )
    ax.set_aspect("equal")
    return percent(percent(ax, "x"), "y")


def plot_metric_by_position(
    metrics: pd.DataFrame,
    ax: Axes,
    *,
    metric: str,
    domain: str = "all",
    signal: str = "confidence",
    stages: tuple[str, ...] = ("raw", "sts", "affine", "sas", "isotonic"),
    quantity: str = PREFIX,
) -> Axes:
    """One metric of one predictor by draft position, before and after each calibration, with its bootstrap interval.

    Stages that the table lacks are left out.
    """
    for stage in stages:
        rows = metrics[
            (metrics["quantity"] == quantity)
            & (metrics["signal"] == signal)
            & (metrics["stage"] == stage)
            & (metrics["domain"] == domain)
            & (metrics["binning"] == "width")
            & (metrics["metric"] == metric)
        ].sort_values("position")
        if rows.empty:
            continue
        ax.fill_between(
            rows["position"], rows["low"], rows["high"], color=STAGES[stage], alpha=0.15, linewidth=0
        )
        ax.plot(rows["position"], rows["value"], color=STAGES[stage], marker="o", label=STAGE_NAMES[stage])
    title = domain.capitalize() if domain != "all" else "All domains"
    return _label_positions(metrics, ax, metric=metric, title=title)


def plot_signals(
    metrics: pd.DataFrame,
    ax: Axes,
    *,
    metric: str,
    domain: str = "all",
    quantity: str = PREFIX,
    stage: str = "sts",
) -> Axes:
    """The head against signals that cost nothing, all calibrated the same way: one metric by draft position."""
    rows = metrics[
        (metrics["quantity"] == quantity)
        & (metrics["domain"] == domain)
        & (metrics["binning"] == "width")
        & (metrics["metric"] == metric)
        & (metrics["stage"] == stage)
    ]
    for signal, colour in SIGNALS.items():
        line = rows[rows["signal"] == signal].sort_values("position")
        if len(line):
            ax.fill_between(
                line["position"], line["low"], line["high"], color=colour, alpha=0.12, linewidth=0
            )
            ax.plot(line["position"], line["value"], color=colour, marker="o", label=SIGNAL_NAMES[signal])
    title = f"{_metric_name(metric)}, {QUANTITY_NAMES[quantity]}"
    return _label_positions(metrics, ax, metric=metric, title=title)


def _label_positions(metrics: pd.DataFrame, ax: Axes, *, metric: str, title: str) -> Axes:
    """Axes of a metric by draft position."""
    ax.set(xlabel="draft position", ylabel=_metric_name(metric), title=title)
    ax.xaxis.set_major_locator(FixedLocator(sorted(metrics["position"].unique())))
    if metric == "ece":
        ax.set_ylim(bottom=0, auto=True)  # panels share the axis: later ones must still widen it
        percent(ax, "y")
    return ax


def plot_threshold_sweep(sweep: pd.DataFrame, ax: Axes, *, y: str, stage: str = "raw") -> Axes:
    """Paper fig. 5: what a static threshold does to the acceptance rate, or to tau and the drafts verified a round."""
    names = {
        "acceptance_rate": "accepted / verified drafts",
        "tau": "tokens a round (tau)",
        "verified": "drafts verified a round",
    }
    for domain, colour in DOMAINS.items():
        rows = sweep[(sweep["domain"] == domain) & (sweep["stage"] == stage)].sort_values("threshold")
        if len(rows):
            ax.plot(rows["threshold"], rows[y], color=colour, marker="o", markersize=4, label=domain)
    ax.set(xlabel="confidence threshold", ylabel="", title=names[y].capitalize())
    return percent(ax, "y") if y == "acceptance_rate" else ax


def named_policies(simulation: pd.DataFrame) -> pd.DataFrame:
    """One row a (cost, mix, concurrency, named policy): the best fixed length and threshold stand for their families.

    Adds `name` (a key of `style.POLICIES`); policies without a name are left out.
    """
    names = {
        ("none", "-"): "plain decoding",
        ("oracle", "outcome"): "oracle (knows the outcome)",
        ("scheduler", "raw"): "scheduler, raw head",
        ("scheduler", "calibrated"): "scheduler, calibrated head",
        ("scheduler", "alpha"): "scheduler, perfect head",
    }
    families = {
        "fixed": "best fixed length",
        "threshold": "best static threshold",
        "scheduler_async": "scheduler, asynchronous",
        "scheduler_global": "scheduler, global search",
    }
    named = simulation.assign(
        name=[names.get((p, s), families.get(p)) for p, s in zip(simulation["policy"], simulation["source"])]
    ).dropna(subset=["name"])
    best = named.groupby(["cost", "mix", "concurrency", "name"])["throughput"].idxmax()
    return named.loc[best].reset_index(drop=True)


def plot_frontier(
    simulation: pd.DataFrame, ax: Axes, *, names: tuple[str, ...], label_points: bool = True
) -> Axes:
    """Paper fig. 7: throughput against speed per user, one point a concurrency; up and to the right is better.

    `simulation` holds one cost table and one mix.
    """
    table = named_policies(simulation)
    for name in names:
        rows = table[table["name"] == name].sort_values("concurrency")
        x, y = rows["tokens_per_second_per_user"], rows["throughput"]
        ax.plot(
            x,
            y,
            color=POLICIES[name],
            marker="o",
            label=name,
            linestyle="--" if name.startswith("oracle") else "-",
        )
        if label_points and name == names[-1]:
            for user, total, requests in zip(x, y, rows["concurrency"]):
                ax.annotate(
                    f"{requests}",
                    (user, total),
                    xytext=(6, 5),
                    textcoords="offset points",
                    fontsize=8.5,
                    color=INK,
                )
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="tokens a second, each user",
        ylabel="tokens a second, all users",
        title="Throughput against interactivity",
    )
    return _plain_log(ax)


def plot_speed_up(simulation: pd.DataFrame, ax: Axes, *, names: tuple[str, ...]) -> Axes:
    """Throughput over plain decoding by concurrency, with intervals over prompts; below 1 speculation loses."""
    table = named_policies(simulation)
    ax.axhline(1.0, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    for name in names:
        rows = table[table["name"] == name].sort_values("concurrency")
        plain = rows["throughput"] / rows["speed_up"]
        ax.fill_between(
            rows["concurrency"],
            rows["low"] / plain,
            rows["high"] / plain,
            color=POLICIES[name],
            alpha=0.12,
            linewidth=0,
        )
        ax.plot(
            rows["concurrency"], rows["speed_up"], color=POLICIES[name], marker="o", label=name,
            linestyle="--" if name.startswith("oracle") else "-",
        )  # fmt: skip
    ax.set(
        xscale="log",
        xlabel="concurrent requests",
        ylabel="speed-up over plain decoding",
        title="Speed-up by load",
    )
    ax.xaxis.set_major_locator(FixedLocator(sorted(table["concurrency"].unique())))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter("{x:.0f}")
    return ax


def plot_waste(simulation: pd.DataFrame, ax: Axes, *, names: tuple[str, ...]) -> Axes:
    """Share of verified drafts that were thrown away, by concurrency."""
    table = named_policies(simulation)
    for name in names:
        rows = table[table["name"] == name].sort_values("concurrency")
        rows = rows[rows["verified_drafts"] > 0]
        ax.plot(rows["concurrency"], rows["wasted_share"], color=POLICIES[name], marker="o", label=name)
    ax.set(
        xscale="log",
        xlabel="concurrent requests",
        ylabel="verified drafts thrown away",
        title="Waste by load",
        ylim=(0, None),
    )
    ax.xaxis.set_major_locator(FixedLocator(sorted(table["concurrency"].unique())))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter("{x:.0f}")
    return percent(ax, "y")


def plot_break_even(even: pd.DataFrame, ax: Axes, *, concurrency: tuple[int, ...]) -> Axes:
    """Speed-up of a fixed block length by its number of drafts, one line a load; a ring marks the best length."""
    shades = np.linspace(0.25, 1.0, len(concurrency))
    for shade, requests in zip(shades, concurrency):
        rows = even[even["concurrency"] == requests].sort_values("drafts")
        colour = (*[(1 - shade) + shade * c for c in (0.23, 0.44, 0.71)], 1.0)
        ax.plot(rows["drafts"], rows["speed_up"], color=colour, label=f"{requests}", marker="o", markersize=4)
        best = rows[rows["best"]]
        ax.plot(
            best["drafts"],
            best["speed_up"],
            "o",
            markersize=10,
            markerfacecolor="none",
            markeredgecolor=colour,
        )
    ax.axhline(1.0, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    ax.set(
        xlabel="drafts verified a round",
        ylabel="speed-up over plain decoding",
        title="Best fixed block length",
    )
    ax.xaxis.set_major_locator(FixedLocator(sorted(even["drafts"].unique())))
    return ax


def plot_costs(costs: pd.DataFrame, ax: Axes, *, colour: str = "#3b6fb6", up_to: int | None = None) -> Axes:
    """Step time against tokens verified together: the table's points and the curve that the scheduler reads."""
    shown = costs if up_to is None else costs[costs["tokens"] <= up_to]
    curve = shown[shown["kind"] == "curve"].sort_values("tokens")
    points = shown[shown["kind"] == "point"]
    inside, beyond = curve[~curve["extrapolated"]], curve[curve["extrapolated"]]
    ax.plot(inside["tokens"], inside["verify_ms"], color=colour, linewidth=1.6, label="used by the scheduler")
    if len(beyond):
        ax.plot(
            beyond["tokens"],
            beyond["verify_ms"],
            color=colour,
            linewidth=1.6,
            linestyle=":",
            label="extrapolated",
        )
    ax.plot(points["tokens"], points["verify_ms"], "o", color=colour, markersize=4.5, label="table")
    ax.set(
        xlabel="tokens verified together",
        ylabel="milliseconds a step",
        title=str(costs["cost"].iloc[0]),
        ylim=(0, None),
    )
    return ax


def _cell(
    table: pd.DataFrame, quantity: str, signal: str, stage: str, domain: str, position: int, binning: str
) -> pd.DataFrame:
    return table[
        (table["quantity"] == quantity)
        & (table["signal"] == signal)
        & (table["stage"] == stage)
        & (table["domain"] == domain)
        & (table["position"] == position)
        & (table["binning"] == binning)
    ]


def _metric_name(metric: str) -> str:
    return {
        "ece": "ECE",
        "brier": "Brier score",
        "log_loss": "log loss (nats)",
        "auc": "AUC",
        "mean_bias": "predicted - observed",
    }[metric]


def _plain_log(ax: Axes) -> Axes:
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    return ax
