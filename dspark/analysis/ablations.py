"""Tables and figures of a grid of ablations: which rows differ from the baseline, where in the block, and at what cost.

A row is one configuration trained with several seeds on one budget and evaluated on one set of prompts. tau is the plain mean over
domains and includes the bonus token. Intervals resample prompts within each domain, the same ones for both rows, and seeds, the
same ones where both rows have them: another sample of prompts and other seeds would land inside, as far as so few seeds can tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from dspark.analysis.style import INK, MUTED

PROMPT = ["domain", "prompt_id", "temperature"]
BETTER, WORSE, SAME, FEW = "better", "worse", "not distinguishable", "too few seeds"
SHADES = {BETTER: "#2a9d77", WORSE: "#d9653b", SAME: MUTED, FEW: MUTED}
LINES = ["#3b6fb6", "#d9653b", "#2a9d77", "#c99a1f", "#8a6fb0", "#b44b8f"]


def leaderboard_table(
    totals: pd.DataFrame, runs: pd.DataFrame, *, baseline: str, draws: int, level: float, seed: int
) -> pd.DataFrame:
    """One row a label, best first: tau, its spread over seeds, tau by domain, and the difference to `baseline` with interval.

    `totals` are prompt totals (`dspark.analysis.tables.prompt_totals`) of every run on the same prompts; `runs` has run_id, label,
    seed, parameters and step_seconds, and columns that are equal within a label, which are passed on. `verdict` says whether the
    interval excludes zero; below three shared seeds it says `too few seeds`.

    Raises:
        ValueError: if no run is labelled `baseline`, or a run lacks prompts that another one has.
    """
    labels = list(dict.fromkeys(runs["label"]))
    if baseline not in labels:
        raise ValueError(f"no run is labelled {baseline!r}; the labels are {', '.join(labels)}.")
    order = list(runs["run_id"])
    points, samples = _taus(totals, order, draws, seed)
    rng = np.random.default_rng((seed, 1))
    columns = {label: _by_seed(runs, order, label) for label in labels}
    carried = [c for c in runs if c not in ("run_id", "label", "seed", "parameters", "step_seconds")]
    rows = []
    for label in labels:
        mine, theirs = columns[label], columns[baseline]
        own = runs[runs["label"] == label]
        taus = points["all"][list(mine.values())]
        shared = sorted(set(mine) & set(theirs))
        low, high, difference = np.nan, np.nan, np.nan
        if shared and label != baseline:
            (tau, drawn), (reference, base) = _paired(points, samples, (mine, theirs), shared, rng)
            difference = tau - reference
            low, high = _interval(drawn - base, level)
        rows.append(
            {
                "label": label,
                "tau": float(np.mean(taus)),
                "tau_spread": float(np.std(taus, ddof=1)) if len(taus) > 1 else np.nan,
                "difference": difference,
                "difference_low": low,
                "difference_high": high,
                "verdict": _verdict(label == baseline, len(shared), low, high),
                "seeds": len(mine),
                **{
                    f"tau_{d}": float(np.mean(v[list(mine.values())]))
                    for d, v in points.items()
                    if d != "all"
                },
                "parameters": own["parameters"].iloc[0],
                "step_seconds": float(own["step_seconds"].median()),
                **{c: own[c].iloc[0] for c in carried},
                "run_ids": " ".join(own["run_id"]),
            }
        )
    return pd.DataFrame(rows).sort_values("tau", ascending=False, ignore_index=True)


def position_gains(positions: pd.DataFrame, labels: Sequence[str], *, baseline: str) -> pd.DataFrame:
    """Conditional acceptance by position of each label less the baseline's, in points: mean, least and most over shared seeds.

    `positions` has label, seed, domain, position, reached and accepted. Columns: label, position, gain, gain_low, gain_high.
    """
    sums = positions.groupby(["label", "seed", "domain", "position"])[["reached", "accepted"]].sum()
    rate = (sums["accepted"] / sums["reached"]).groupby(["label", "seed", "position"]).mean()
    reference = rate.loc[baseline]
    parts = []
    for label in labels:
        gaps = (rate.loc[label] - reference).dropna().groupby("position")
        frame = pd.DataFrame({"gain": gaps.mean(), "gain_low": gaps.min(), "gain_high": gaps.max()})
        parts.append(frame.reset_index().assign(label=label))
    return pd.concat(parts, ignore_index=True)[["label", "position", "gain", "gain_low", "gain_high"]]


def pair_gains(
    totals: pd.DataFrame,
    runs: pd.DataFrame,
    pairs: Mapping[str, tuple[str, str]],
    *,
    draws: int,
    level: float,
    seed: int,
) -> pd.DataFrame:
    """How many more tokens a round one label emits than another, relative: `pairs[name] = (label, reference)`.

    Means over the seeds that both have; the interval resamples prompts and those seeds. Columns: name, tau, tau_reference, gain,
    gain_low, gain_high (1 is twice the tokens), seeds. Pairs without a shared seed are left out.
    """
    order = list(runs["run_id"])
    points, samples = _taus(totals, order, draws, seed)
    rng = np.random.default_rng((seed, 1))
    rows = []
    for name, labels in pairs.items():
        mine, theirs = (_by_seed(runs, order, label) for label in labels)
        shared = sorted(set(mine) & set(theirs))
        if not shared:
            continue
        (tau, drawn), (reference, base) = _paired(points, samples, (mine, theirs), shared, rng)
        low, high = _interval(drawn / base - 1.0, level)
        rows.append((name, tau, reference, tau / reference - 1.0, low, high, len(shared)))
    names = ["name", "tau", "tau_reference", "gain", "gain_low", "gain_high", "seeds"]
    return pd.DataFrame(rows, columns=names)


def sampled_estimates(
    alphas: Mapping[str, Sequence[float]], runs: pd.DataFrame, *, baseline: str
) -> pd.DataFrame:
    """Tokens a round that sampled drafts would bring at temperature 1, 1 + sum_i prod_{j<=i} alpha_j, by label, best first.

    `alphas[run_id]` are the mean overlaps of draft and verifier (paper eq. 8) by position, over the positions that replay of greedy
    answers reached (`dspark.evaluation.summarise`). Means stand for products, and greedy answers are easier than sampled ones: an
    estimate, to compare rows by, and no tau. Columns: label, estimate, estimate_spread (standard deviation over seeds), gain over
    the baseline's (relative, mean over shared seeds), gain_low and gain_high (least and most of those), seeds.
    """
    own = runs[["run_id", "label", "seed"]]
    own = own.assign(estimate=[1.0 + float(np.cumprod(alphas[run]).sum()) for run in own["run_id"]])
    by_seed = own.pivot(index="seed", columns="label", values="estimate")
    gains = by_seed.div(by_seed[baseline], axis=0) - 1.0
    columns = {
        "estimate": by_seed.mean(),
        "estimate_spread": by_seed.std(),
        "gain": gains.mean(),
        "gain_low": gains.min(),
        "gain_high": gains.max(),
        "seeds": by_seed.count(),
    }
    table = pd.DataFrame(columns).sort_values("estimate", ascending=False)
    return table.rename_axis("label").reset_index()


def setting_curve(table: pd.DataFrame, setting: str) -> pd.DataFrame:
    """The rows of a leaderboard that differ from the baseline in `setting` alone, and the baseline, by value: column `value`.

    `changes` of a row reads like `draft.block_size: 8 -> 4`; a setting switched off (null) becomes infinity.
    """
    own = table[table["changes"].str.startswith(f"{setting}:") & ~table["changes"].str.contains(";")]
    if own.empty:
        return table.iloc[:0].assign(value=pd.Series(dtype=float))
    texts = own["changes"].str.split(": ").str[1].str.split(" -> ")
    start = _number(texts.iloc[0][0])
    chosen = own.assign(value=[_number(pair[1]) for pair in texts])
    base = table[table["changes"] == ""].assign(value=start)
    return pd.concat([chosen, base]).sort_values("value", ignore_index=True)


def plot_differences(table: pd.DataFrame, ax: Axes) -> Axes:
    """Each row's tau less the baseline's with its interval; grey where the interval covers zero."""
    rows = table[table["difference"].notna()].iloc[::-1]
    y = np.arange(len(rows))
    colours = rows["verdict"].map(SHADES)
    ax.hlines(y, rows["difference_low"], rows["difference_high"], color=colours, linewidth=2.6, alpha=0.55)
    ax.scatter(rows["difference"], y, color=colours, zorder=3)
    ax.axvline(0.0, color=INK, linewidth=1, linestyle=(0, (2, 3)))
    ax.set_yticks(y, rows["label"])
    ax.set(xlabel="tau less the baseline's", ylabel="")
    ax.grid(axis="y", visible=False)
    return ax


def plot_position_gain(gains: pd.DataFrame, ax: Axes) -> Axes:
    """Conditional acceptance less the baseline's by position; bars reach from the least to the most over seeds."""
    labels = list(dict.fromkeys(gains["label"]))
    shifts = np.linspace(-0.12, 0.12, len(labels)) if len(labels) > 1 else [0.0]
    for number, (label, shift) in enumerate(zip(labels, shifts, strict=True)):
        rows = gains[gains["label"] == label]
        x, colour = rows["position"] + shift, LINES[number % len(LINES)]
        ax.vlines(x, 100 * rows["gain_low"], 100 * rows["gain_high"], color=colour, linewidth=2, alpha=0.4)
        ax.plot(x, 100 * rows["gain"], "o-", color=colour, label=label)
    ax.axhline(0.0, color=INK, linewidth=1, linestyle=(0, (2, 3)))
    ax.set(xlabel="position in the block", ylabel="conditional acceptance, points over baseline")
    ax.xaxis.set_major_locator(FixedLocator(sorted(set(gains["position"]))))
    ax.legend()
    return ax


def plot_setting(curve: pd.DataFrame, ax: Axes, *, label: str, log: bool = False) -> Axes:
    """tau against one setting; bars are one standard deviation over seeds. Infinity stands at the right edge as "off"."""
    finite = curve.loc[np.isfinite(curve["value"]), "value"]
    edge = 2.0 * finite.max() if len(finite) else 1.0
    x = curve["value"].where(np.isfinite(curve["value"]), edge)
    ax.errorbar(x, curve["tau"], yerr=curve["tau_spread"].fillna(0.0), fmt="o-", color=LINES[0], capsize=3)
    base = curve["changes"] == ""
    ax.plot(x[base], curve.loc[base, "tau"], "o", color=LINES[1], label="default", zorder=4, markersize=8)
    if log:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticks(x, ["off" if np.isinf(v) else f"{v:g}" for v in curve["value"]])
    ax.set(xlabel=label, ylabel="tau (bonus included)")
    ax.legend()
    return ax


def plot_pair_gains(gains: pd.DataFrame, ax: Axes) -> Axes:
    """The gains of `pair_gains` in per cent with their intervals, one column a pair, in the table's order."""
    x = np.arange(len(gains))
    ax.vlines(x, 100 * gains["gain_low"], 100 * gains["gain_high"], color=LINES[0], linewidth=2.6, alpha=0.45)
    ax.plot(x, 100 * gains["gain"], "o", color=LINES[0])
    for at, row in zip(x, gains.itertuples(), strict=True):
        text = f"{row.tau_reference:.2f} → {row.tau:.2f}"
        ax.annotate(text, (at, 100 * row.gain), (9, 0), textcoords="offset points", va="center", fontsize=9)
    ax.axhline(0.0, color=INK, linewidth=1, linestyle=(0, (2, 3)))
    ax.set_xticks(x, gains["name"])
    ax.set(xlim=(-0.5, len(gains) - 0.1), ylabel="tokens a round, per cent more")
    ax.grid(axis="x", visible=False)
    return ax


def plot_sampled_estimates(estimates: pd.DataFrame, table: pd.DataFrame, ax: Axes, *, baseline: str) -> Axes:
    """Tokens a round over the baseline's in per cent: greedy drafts as measured, sampled ones as `sampled_estimates` has them.

    Bars of the estimates reach from the least to the most over seeds.
    """
    rows = estimates[estimates["label"] != baseline].iloc[::-1]
    tau = table.set_index("label")["tau"]
    y, greedy = np.arange(len(rows)), 100 * (tau[rows["label"]] / tau[baseline] - 1.0).to_numpy()
    ax.hlines(y, greedy, 100 * rows["gain"], color=MUTED, linewidth=1, alpha=0.5)
    ax.hlines(y, 100 * rows["gain_low"], 100 * rows["gain_high"], color=LINES[0], linewidth=2.6, alpha=0.45)
    ax.plot(greedy, y, "o", color=MUTED, markerfacecolor="white", label="greedy, measured")
    ax.plot(100 * rows["gain"], y, "o", color=LINES[0], label="sampled, estimated")
    ax.axvline(0.0, color=INK, linewidth=1, linestyle=(0, (2, 3)))
    ax.set_yticks(y, rows["label"])
    ax.set(xlabel="tokens a round, per cent over the baseline", ylabel="")
    ax.grid(axis="y", visible=False)
    ax.legend(loc="lower right")
    return ax


def plot_cost(table: pd.DataFrame, ax: Axes, *, cost: str, label: str) -> Axes:
    """tau against a cost column, one point a row; rows that differ from the baseline are coloured and named."""
    for row in table.to_dict("records"):
        named = row["verdict"] != SAME
        colour = INK if row["verdict"] == "baseline" else SHADES[row["verdict"]]
        ax.plot(row[cost], row["tau"], "o", color=colour, alpha=1.0 if named else 0.6)
        if named:
            at, offset = (row[cost], row["tau"]), (6, 3)
            ax.annotate(row["label"], at, offset, textcoords="offset points", fontsize=8, color=colour)
    ax.margins(x=0.2)
    ax.set(xlabel=label, ylabel="tau (bonus included)")
    return ax


def _taus(
    totals: pd.DataFrame, order: Sequence[str], draws: int, seed: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Point [runs] and resampled [draws, runs] tau by domain, and their plain mean under "all"."""
    points, samples = {}, {}
    for place, (domain, part) in enumerate(totals.groupby("domain")):
        wide = part.groupby(["run_id", *PROMPT])[["rounds", "accepted"]].sum().unstack("run_id")
        rounds, accepted = wide["rounds"].reindex(columns=order), wide["accepted"].reindex(columns=order)
        if rounds.isna().to_numpy().any():
            run = rounds.columns[rounds.isna().any()][0]
            raise ValueError(
                f"run {run} lacks {int(rounds[run].isna().sum())} prompts of {domain} that others have."
            )
        rng = np.random.default_rng((seed, 0, place))
        weights = rng.multinomial(len(wide), np.full(len(wide), 1.0 / len(wide)), size=draws).astype(float)
        r, a = rounds.to_numpy(), accepted.to_numpy()
        points[domain] = 1.0 + a.sum(0) / r.sum(0)
        samples[domain] = 1.0 + (weights @ a) / (weights @ r)
    for values in (points, samples):
        values["all"] = np.mean(list(values.values()), axis=0)
    return points, samples


def _paired(
    points: Mapping[str, np.ndarray],
    samples: Mapping[str, np.ndarray],
    columns: tuple[Mapping[int, int], Mapping[int, int]],
    shared: Sequence[int],
    rng: np.random.Generator,
) -> list[tuple[float, np.ndarray]]:
    """Of two rows, the mean tau over the seeds that both have, and its resamples [draws]: of the same prompts and seeds."""
    picks = rng.integers(0, len(shared), size=(len(samples["all"]), len(shared)))
    own = [[column[s] for s in shared] for column in columns]
    return [
        (float(points["all"][c].mean()), np.take_along_axis(samples["all"][:, c], picks, axis=1).mean(1))
        for c in own
    ]


def _interval(values: np.ndarray, level: float) -> tuple[float, float]:
    tail = 100.0 * (1.0 - level) / 2.0
    low, high = np.percentile(values, [tail, 100.0 - tail])
    return float(low), float(high)


def _by_seed(runs: pd.DataFrame, order: Sequence[str], label: str) -> dict[int, int]:
    own = runs[runs["label"] == label]
    return {int(s): order.index(r) for s, r in zip(own["seed"], own["run_id"], strict=True)}


def _verdict(is_baseline: bool, seeds: int, low: float, high: float) -> str:
    if is_baseline:
        return "baseline"
    if seeds < 3:
        return FEW
    return BETTER if low > 0 else WORSE if high < 0 else SAME


def _number(text: str) -> float:
    return float("inf") if text == "None" else float(text)
