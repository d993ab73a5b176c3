"""From slot and round tables to small tables with intervals: by set, by domain, by position, by depth, and paired between runs.

Intervals are percentile bootstrap over prompts: all rounds of a prompt are drawn together. A macro row is the plain mean over
its domains, or sets, each resampled on its own. tau includes the bonus token everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

KEYS = ["run_id", "dataset", "mode", "temperature", "draft_sampling"]
MACRO = "all"  # mean over domains, or over sets


def prompt_totals(slots: pd.DataFrame, rounds: pd.DataFrame, extra: Sequence[str] = ()) -> pd.DataFrame:
    """Sums that every statistic is a ratio of, one row a prompt (and value of `extra`): rounds, accepted, reached_i, accepted_i.

    Columns: `KEYS`, domain, `extra`, prompt_id, documents, rounds, accepted, reached_1 .. accepted_N.
    """
    keys = [*KEYS, "domain", *extra, "prompt_id"]
    weighed = rounds.assign(kept=rounds["accepted"] * rounds["visit"])
    frame = (
        weighed.groupby(keys, observed=True, dropna=False)
        .agg(documents=("doc_id", "nunique"), rounds=("visit", "sum"), accepted=("kept", "sum"))
        .reset_index()
    )
    by_position = slots.groupby([*keys, "position"], observed=True, dropna=False)[
        ["reached", "accepted"]
    ].sum()
    wide = by_position.unstack("position", fill_value=0.0)
    wide.columns = [f"{name}_{position}" for name, position in wide.columns]
    frame = frame.merge(wide.reset_index(), on=keys, how="left")
    return frame.fillna({name: 0.0 for name in wide.columns})


def num_proposals(totals: pd.DataFrame) -> int:
    """Largest position that the totals know."""
    return max(int(name.removeprefix("reached_")) for name in totals if name.startswith("reached_"))


def acceptance_table(totals: pd.DataFrame, *, draws: int, level: float, seed: int) -> pd.DataFrame:
    """tau with interval, mean accepted and conditional acceptance by position; one row a run, set and domain.

    A set of several domains gets a row of domain "all", their plain mean; several sets of one kind get a row of set "all".
    """
    width = num_proposals(totals)
    rows = []
    for labels, point, sample, sizes in _cells(totals, draws, seed):
        low, high = _interval(sample[:, 0], level, sizes)
        rows.append(
            {
                **labels,
                **sizes,
                "tau": point[0],
                "tau_low": low,
                "tau_high": high,
                "accepted": point[0] - 1.0,
                **{f"conditional_{i + 1}": point[1 + i] for i in range(width)},
            }
        )
    return pd.DataFrame(rows)


def position_table(totals: pd.DataFrame, *, draws: int, level: float, seed: int) -> pd.DataFrame:
    """Conditional acceptance and survival by position with intervals, and the length lost there; long form.

    `reached` is about how many rounds kept everything before the position. `lost` is how many tokens a round loses on average because this position was the first rejected:
    P(rejected at i) * (N - i + 1). Position N + 1 holds the rest of N - mean accepted: proposals beyond the text, or not made.
    """
    width = num_proposals(totals)
    rows = []
    for labels, point, sample, sizes in _cells(totals, draws, seed):
        conditional, survival, lost = np.split(point[1:], [width, 2 * width])
        reached = sizes["rounds"] * np.concatenate([[1.0], survival[:-1]])
        for i in range(width):
            low, high = _interval(sample[:, 1 + i], level, sizes)
            survival_low, survival_high = _interval(sample[:, 1 + width + i], level, sizes)
            rows.append(
                {
                    **labels,
                    "prompts": sizes["prompts"],
                    "position": i + 1,
                    "reached": reached[i],
                    "conditional": conditional[i],
                    "conditional_low": low,
                    "conditional_high": high,
                    "survival": survival[i],
                    "survival_low": survival_low,
                    "survival_high": survival_high,
                    "lost": lost[i],
                }
            )
        rest = width - (point[0] - 1.0) - np.nansum(lost)
        rows.append({**labels, "prompts": sizes["prompts"], "position": width + 1, "lost": rest})
    return pd.DataFrame(rows)


def depth_table(
    slots: pd.DataFrame, rounds: pd.DataFrame, *, edges: Sequence[int], draws: int, level: float, seed: int
) -> pd.DataFrame:
    """tau by how many tokens precede the anchor since the document's first answer token, in bins [edge, next edge)."""
    first = rounds[rounds["visit"] > 0].groupby("doc_id")["anchor"].min()
    bins = [*edges, np.inf]

    def deep(frame: pd.DataFrame) -> pd.DataFrame:
        depth = frame["anchor"] - frame["doc_id"].map(first)
        return frame.assign(depth=pd.cut(depth, bins, right=False, labels=list(edges)).astype(float))

    totals = prompt_totals(deep(slots), deep(rounds[rounds["visit"] > 0]), extra=["depth"])
    parts = []
    for depth, part in totals.groupby("depth", observed=True):
        table = acceptance_table(part, draws=draws, level=level, seed=seed)
        parts.append(table.assign(depth=int(depth)))
    frame = pd.concat(parts, ignore_index=True)
    return frame[[*KEYS, "domain", "depth", "prompts", "rounds", "tau", "tau_low", "tau_high"]]


def paired_table(
    totals: pd.DataFrame, run_a: str, run_b: str, *, draws: int, level: float, seed: int
) -> pd.DataFrame:
    """tau of run b less tau of run a over the prompts that both have, by set and domain, with a paired interval.

    `better` is the share of resamples in which b is ahead. Raises ValueError when the two share no prompt of a set.
    """
    groups = ["dataset", "mode", "temperature", "draft_sampling", "domain", "prompt_id"]
    a, b = (
        totals[totals["run_id"] == run].groupby(groups)[["rounds", "accepted"]].sum()
        for run in (run_a, run_b)
    )
    both = a.join(b, lsuffix="_a", rsuffix="_b", how="inner").reset_index()
    if both.empty:
        raise ValueError(
            f"runs {run_a} and {run_b} share no prompt: evaluate both on the same sets, in the same way."
        )
    rows = []
    kinds = ["dataset", "mode", "temperature", "draft_sampling"]
    for number, (kind, cell) in enumerate(both.groupby(kinds)):
        points, samples = [], []
        parts = list(cell.groupby("domain"))
        for place, (domain, part) in enumerate(parts):
            sums = part[["rounds_a", "accepted_a", "rounds_b", "accepted_b"]].to_numpy()
            weights = _weights(len(part), draws, (seed, number, place))
            points.append(_difference(sums.sum(0)))
            samples.append(_difference(weights @ sums))
            rows.append((kind, domain, len(part), points[-1], samples[-1]))
        if len(parts) > 1:
            rows.append((kind, MACRO, len(cell), np.mean(points, 0), np.mean(samples, 0)))
    records = []
    for kind, domain, prompts, point, sample in rows:
        low, high = _interval(sample[:, 2], level, {"prompts": prompts})
        records.append(
            {
                **dict(zip(kinds, kind, strict=True)),
                "domain": domain,
                "prompts": prompts,
                "tau_a": point[0],
                "tau_b": point[1],
                "difference": point[2],
                "difference_low": low,
                "difference_high": high,
                "better": float((sample[:, 2] > 0).mean()),
            }
        )
    return pd.DataFrame(records).assign(run_a=run_a, run_b=run_b)


def markdown(frame: pd.DataFrame, digits: int = 3) -> str:
    """The frame as a Markdown table."""

    def cell(value: object) -> str:
        if isinstance(value, float | np.floating):
            return "" if np.isnan(value) else f"{value:.{digits}f}"
        return str(value).replace("|", "\\|")

    lines = ["| " + " | ".join(map(str, frame.columns)) + " |", "|" + " --- |" * len(frame.columns)]
    lines += ["| " + " | ".join(map(cell, row)) + " |" for row in frame.itertuples(index=False)]
    return "\n".join(lines) + "\n"


def _cells(totals: pd.DataFrame, draws: int, seed: int):
    """(labels, point statistics, resampled statistics [draws, .], sizes) of every domain, and of every macro mean."""
    width = num_proposals(totals)
    columns = ["rounds", "accepted"]
    columns += [f"{name}_{i + 1}" for name in ("reached", "accepted") for i in range(width)]
    found = []
    for number, (key, cell) in enumerate(totals.groupby(KEYS, sort=False)):
        labels = dict(zip(KEYS, key, strict=True))
        domains = []
        for place, (domain, part) in enumerate(cell.groupby("domain")):
            per_prompt = part.groupby("prompt_id")[[*columns, "documents"]].sum()
            if per_prompt["rounds"].sum() <= 0:
                continue
            sums = per_prompt[columns].to_numpy()
            weights = _weights(len(sums), draws, (seed, number, place))
            sizes = {
                "prompts": len(sums),
                "documents": int(per_prompt["documents"].sum()),
                "rounds": float(sums[:, 0].sum()),
            }
            point, sample = _statistics(sums.sum(0), width), _statistics(weights @ sums, width)
            domains.append(({**labels, "domain": domain}, point, sample, sizes))
        found.append((labels, domains))
        yield from domains
        if len(domains) > 1:
            yield _macro({**labels, "domain": MACRO}, domains)
    kinds = pd.Series([tuple(v for k, v in labels.items() if k != "dataset") for labels, _ in found])
    for kind in kinds.unique():
        sets = [
            _macro(labels, domains) for (labels, domains), k in zip(found, kinds, strict=True) if k == kind
        ]
        if len(sets) > 1:
            yield _macro({**sets[0][0], "dataset": MACRO, "domain": MACRO}, sets)


def _macro(labels: dict, cells: list) -> tuple:
    sizes = {name: sum(cell[3][name] for cell in cells) for name in ("prompts", "documents", "rounds")}
    # A position that one domain never reaches has no mean over domains.
    return labels, np.mean([c[1] for c in cells], 0), np.mean([c[2] for c in cells], 0), sizes


def _statistics(sums: np.ndarray, width: int) -> np.ndarray:
    """[tau, conditional 1..N, survival 1..N, lost 1..N] from sums [..., 2 + 2N]; nan where nothing was reached."""
    rounds, accepted = sums[..., :1], sums[..., 1:2]
    reached, kept = sums[..., 2 : 2 + width], sums[..., 2 + width :]
    with np.errstate(invalid="ignore", divide="ignore"):
        tau = 1.0 + accepted / rounds
        lost = (reached - kept) * np.arange(width, 0, -1) / rounds
        return np.concatenate([tau, kept / reached, kept / rounds, lost], axis=-1)


def _difference(sums: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        a, b = 1.0 + sums[..., 1] / sums[..., 0], 1.0 + sums[..., 3] / sums[..., 2]
    return np.stack([a, b, b - a], axis=-1)


def _weights(prompts: int, draws: int, seed: tuple[int, ...]) -> np.ndarray:
    """How often each prompt is drawn, [draws, prompts]."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(prompts, np.full(prompts, 1.0 / prompts), size=draws).astype(float)


def _interval(sample: np.ndarray, level: float, sizes: dict) -> tuple[float, float]:
    """Percentile interval; nan for a single prompt, which says nothing about others."""
    if sizes["prompts"] < 2 or np.isnan(sample).all():
        return float("nan"), float("nan")
    tail = 100.0 * (1.0 - level) / 2.0
    low, high = np.nanpercentile(sample, [tail, 100.0 - tail])
    return float(low), float(high)
