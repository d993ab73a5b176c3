"""Is the confidence head right, and what makes it right: reliability, sequential scaling, baselines.

Two probabilities that must never be mixed, both `[M, N]` (M rounds, N proposals):

    p_accept_given_prefix[m, k]   draft k is kept, given that drafts 1..k-1 were     (the head's output, paper eq. 7)
    p_prefix_survives[m, k]       drafts 1..k are all kept = product of the former   (what a scheduler consumes)

Labels may be soft. A replayed slot carries the probability that it is reached and kept, a decoded one 0 or 1; every
measure here is the expectation over the outcome, so both kinds go through the same code. Weights are the expected
number of times a round (or a slot) occurs.

In replay the confidence of slot k is conditioned on the *text* before it. That is exact for rounds that reach slot k;
for rounds that lost a draft earlier it stands in for the confidence after the rejected draft. Conditional measures are
therefore exact in replay, prefix measures are exact only in decoded tables.

The head is trained on alpha, the acceptance of a draft *sampled* from q. Greedy drafts, or another temperature, are kept at
other rates, so a calibration belongs to the setting (draft sampling, temperature) whose slots it was fitted on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from scipy.special import expit, log_expit, logit
from sklearn.isotonic import IsotonicRegression

FORMAT = "dspark-calibration"
VERSION = 2
ROUND_KEYS = ["run_id", "dataset", "domain", "prompt_id", "doc_id", "temperature", "anchor"]
SLOT_VALUES = ["reached", "accepted", "r", "alpha", "confidence", "entropy", "max_prob", "margin"]
FREE_SIGNALS = ("max_prob", "entropy", "margin")
METRICS = ("ece", "brier", "log_loss", "auc", "mean_bias")
ALL = "all"  # key of a scaling that serves every domain; in reports, all domains together
STAGE_OF_METHOD = {"temperature": "sts", "affine": "sas"}
AUC_LEVELS = 512
EPSILON = 1e-6

Array = np.ndarray
PositionFit = Callable[[Array, Array, Array, Array], tuple[float, float]]


# ---------------------------------------------------------------------------------------------------------------------
# Slots, one round a row


@dataclass(frozen=True)
class Rounds:
    """A slot table in round-major form.

    `frame` has one row per (document, anchor), M in all: the key columns, `mode` and `visit`, the expected number of times the
    round occurs (1 in decode). `values[name]` is `[M, N]`, NaN where the table has no such slot (past a text's end).
    """

    frame: pd.DataFrame
    values: dict[str, Array]

    def __len__(self) -> int:
        return len(self.frame)

    @property
    def num_proposals(self) -> int:
        return self.values["reached"].shape[1]

    @property
    def present(self) -> Array:
        """[M, N] bool: the slot is in the table."""
        return ~np.isnan(self.values["reached"])

    @property
    def survives(self) -> Float[Array, "M N"]:
        """Probability (decode: outcome) that drafts 1..k are all kept, given the round happens; 0 where no slot is."""
        visit = self.frame["visit"].to_numpy()[:, None]
        return np.nan_to_num(
            np.divide(
                self.values["accepted"], visit, out=np.zeros_like(self.values["accepted"]), where=visit > 0
            )
        )

    @property
    def prefix_weight(self) -> Float[Array, "M N"]:
        """Weight of each slot when the question is about the prefix: the round's visits, 0 where no slot is."""
        return np.where(self.present, self.frame["visit"].to_numpy()[:, None], 0.0)

    @property
    def accept_given_reached(self) -> Float[Array, "M N"]:
        """Probability (decode: outcome) that draft k is kept given that it is reached; 0 where it never is."""
        reached = np.nan_to_num(self.values["reached"])
        return np.divide(
            np.nan_to_num(self.values["accepted"]), reached, out=np.zeros_like(reached), where=reached > 0
        )

    @property
    def reached(self) -> Float[Array, "M N"]:
        return np.nan_to_num(self.values["reached"])

    def take(self, keep: Array) -> Rounds:
        """The rounds that the boolean mask or index `keep` selects."""
        return Rounds(
            self.frame.loc[keep].reset_index(drop=True), {k: v[keep] for k, v in self.values.items()}
        )


def rounds_of(slots: pd.DataFrame) -> Rounds:
    """Turn a `slots` table into `Rounds`.

    Raises ValueError for missing columns, an empty table, or two rows of one (document, anchor, position).
    """
    missing = [c for c in [*ROUND_KEYS, "mode", "position", *SLOT_VALUES] if c not in slots.columns]
    if missing:
        raise ValueError(f"the slot table lacks columns {missing}; it must come from experiments.evaluate.")
    if slots.empty:
        raise ValueError(
            "the slot table is empty; run experiments.evaluate on a set with at least one response first."
        )
    code = slots.groupby(ROUND_KEYS, sort=False, dropna=False).ngroup().to_numpy()
    position = slots["position"].to_numpy().astype(np.int64)
    if position.min() < 1:
        raise ValueError(f"slot positions start at {position.min()}; tables count positions from 1.")
    rounds, width = int(code.max()) + 1, int(position.max())
    cell = code * width + position - 1
    if len(np.unique(cell)) != len(cell):
        twice = (
            slots.loc[pd.Series(cell).duplicated().to_numpy(), [*ROUND_KEYS, "position"]].iloc[0].to_dict()
        )
        raise ValueError(
            f"the slot table holds {twice} twice; give one run and one draw of each document at a time."
        )
    first = np.zeros(rounds, dtype=np.int64)
    first[code[::-1]] = np.arange(len(code))[::-1]
    frame = slots.iloc[first][[*ROUND_KEYS, "mode"]].reset_index(drop=True)
    values = {}
    for name in SLOT_VALUES:
        grid = np.full(rounds * width, np.nan)
        grid[cell] = slots[name].to_numpy(dtype=np.float64)
        values[name] = grid.reshape(rounds, width)
    frame["visit"] = np.nan_to_num(values["reached"][:, 0])
    return Rounds(frame, values)


def p_prefix_survives(p_accept_given_prefix: Float[Array, "*batch N"]) -> Float[Array, "*batch N"]:
    """Probability that drafts 1..k all survive: the running product of the conditional probabilities."""
    return np.cumprod(p_accept_given_prefix, axis=-1)


def clipped_logit(probability: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """log(p / (1 - p)) with p held inside [1e-6, 1 - 1e-6], so that a saturated head stays finite."""
    return logit(np.clip(probability, EPSILON, 1 - EPSILON))


# ---------------------------------------------------------------------------------------------------------------------
# Measures of one probability against one (soft) label


def bin_edges(
    predicted: Float[Array, " n"], weight: Float[Array, " n"], *, bins: int, binning: str
) -> Float[Array, " edges"]:
    """Edges of `bins` cells on [0, 1]: equal `width`, or equal `mass` (weighted quantiles, duplicates merged)."""
    if binning == "width":
        return np.linspace(0.0, 1.0, bins + 1)
    if binning != "mass":
        raise ValueError(f"binning is {binning!r}; expected 'width' or 'mass'.")
    order = np.argsort(predicted, kind="stable")
    mass = np.cumsum(weight[order])
    at = np.searchsorted(mass, mass[-1] * np.arange(1, bins) / bins)
    return np.unique(np.concatenate([[0.0], predicted[order][np.minimum(at, len(order) - 1)], [1.0]]))


def bin_index(predicted: Float[Array, " n"], edges: Float[Array, " edges"]) -> Int[Array, " n"]:
    """Cell of each prediction; a cell owns its lower edge, the last one both."""
    return np.clip(np.searchsorted(edges, predicted, side="right") - 1, 0, len(edges) - 2)


def reliability(
    predicted: Float[Array, " n"],
    label: Float[Array, " n"],
    weight: Float[Array, " n"],
    *,
    bins: int,
    binning: str,
) -> pd.DataFrame:
    """One row per non-empty bin: low, high, mean `predicted`, mean `observed`, `weight` (share of the total)."""
    edges = bin_edges(predicted, weight, bins=bins, binning=binning)
    cell, cells = bin_index(predicted, edges), len(edges) - 1
    mass, p, y = (
        np.bincount(cell, weights=w, minlength=cells) for w in (weight, weight * predicted, weight * label)
    )
    full = mass > 0
    return pd.DataFrame(
        {
            "bin": np.flatnonzero(full) + 1,
            "low": edges[:-1][full],
            "high": edges[1:][full],
            "predicted": p[full] / mass[full],
            "observed": y[full] / mass[full],
            "weight": mass[full] / mass.sum(),
        }
    )


def ece(
    predicted: Float[Array, " n"],
    label: Float[Array, " n"],
    weight: Float[Array, " n"],
    *,
    bins: int,
    binning: str,
) -> float:
    """Expected calibration error: sum over bins of share * |mean predicted - mean observed|, in [0, 1]."""
    edges = bin_edges(predicted, weight, bins=bins, binning=binning)
    gaps = np.bincount(bin_index(predicted, edges), weights=weight * (predicted - label))
    return float(np.abs(gaps).sum() / weight.sum())


def auc(predicted: Float[Array, " n"], label: Float[Array, " n"], weight: Float[Array, " n"]) -> float:
    """Chance that a kept draft scored above a lost one, ties counting half; NaN if only one outcome has weight.

    A soft label counts as `label` of a kept and `1 - label` of a lost draft at the same score.
    """
    _, level = np.unique(predicted, return_inverse=True)
    kept, lost = (np.bincount(level, weights=w) for w in (weight * label, weight * (1 - label)))
    return float(_auc_of_levels(kept[None], lost[None])[0])


def _auc_of_levels(kept: Float[Array, "D levels"], lost: Float[Array, "D levels"]) -> Float[Array, " D"]:
    below = np.cumsum(lost, axis=1) - lost
    pairs = kept.sum(1) * lost.sum(1)
    wins = (kept * (below + 0.5 * lost)).sum(1)
    return np.divide(wins, pairs, out=np.full(len(kept), np.nan), where=pairs > 0)


def _pointwise(predicted: Array, label: Array) -> tuple[Array, Array, Array]:
    """Brier score, log loss and bias of each item, in expectation over the outcome that the soft label stands for."""
    p = np.clip(predicted, EPSILON, 1 - EPSILON)
    brier = predicted**2 - 2 * predicted * label + label
    log_loss = -label * np.log(p) - (1 - label) * np.log1p(-p)
    return brier, log_loss, predicted - label


def measure(
    predicted: Float[Array, " n"],
    label: Float[Array, " n"],
    weight: Float[Array, " n"],
    *,
    bins: int,
    binning: str,
) -> dict[str, float]:
    """The numbers in METRICS, plus `base_rate` (mean label) and `weight` (total).

    ece        see `ece`
    brier      mean squared error against the outcome, in [0, 1]
    log_loss   nats
    auc        see `auc`
    mean_bias  mean predicted - mean observed; positive is overconfident
    """
    total = float(weight.sum())
    if not total > 0:
        return dict.fromkeys(METRICS, float("nan")) | {"base_rate": float("nan"), "weight": 0.0}
    brier, log_loss, bias = (float((weight * x).sum() / total) for x in _pointwise(predicted, label))
    return {
        "ece": ece(predicted, label, weight, bins=bins, binning=binning),
        "brier": brier,
        "log_loss": log_loss,
        "auc": auc(predicted, label, weight),
        "mean_bias": bias,
        "base_rate": float((weight * label).sum() / total),
        "weight": total,
    }


def bootstrap(
    predicted: Float[Array, " n"],
    label: Float[Array, " n"],
    weight: Float[Array, " n"],
    prompt: Array,
    *,
    bins: int,
    binning: str,
    draws: int,
    level: float,
    seed: int,
    metrics: Sequence[str] = METRICS,
) -> dict[str, tuple[float, float]]:
    """Percentile interval of each of `metrics` when prompts (not slots) are drawn again with replacement.

    Bin edges stay those of the full sample. AUC is taken on 512 quantile levels of the score, which moves it by less
    than 1e-3. ECE is a sum of absolute values, so its interval lies a little high when few prompts are there.
    """
    _, who = np.unique(prompt, return_inverse=True)
    prompts = int(who.max()) + 1 if len(who) else 0
    if prompts < 2 or not weight.sum() > 0:
        return dict.fromkeys(metrics, (float("nan"), float("nan")))
    times = (
        np.random.default_rng(seed)
        .multinomial(prompts, np.full(prompts, 1 / prompts), size=draws)
        .astype(np.float64)
    )

    def resampled(values: Array, cell: Array, cells: int) -> Array:
        return times @ np.bincount(who * cells + cell, weights=values, minlength=prompts * cells).reshape(
            prompts, cells
        )

    def mean(values: Array) -> Array:
        return (times @ np.bincount(who, weights=weight * values, minlength=prompts)) / total

    def sampled_ece() -> Array:
        edges = bin_edges(predicted, weight, bins=bins, binning=binning)
        gaps = resampled(weight * (predicted - label), bin_index(predicted, edges), len(edges) - 1)
        return np.abs(gaps).sum(1) / total

    def sampled_auc() -> Array:
        edges = np.unique(np.quantile(predicted, np.linspace(0, 1, AUC_LEVELS + 1)[1:-1]))
        level_of = np.searchsorted(edges, predicted, side="right")
        return _auc_of_levels(
            *(resampled(w, level_of, len(edges) + 1) for w in (weight * label, weight * (1 - label)))
        )

    total = times @ np.bincount(who, weights=weight, minlength=prompts)
    brier, log_loss, bias = _pointwise(predicted, label)
    samplers = {
        "ece": sampled_ece,
        "brier": lambda: mean(brier),
        "log_loss": lambda: mean(log_loss),
        "auc": sampled_auc,
        "mean_bias": lambda: mean(bias),
    }
    tails = [50 * (1 - level), 50 * (1 + level)]
    intervals = {}
    for name in metrics:
        sample = samplers[name]()
        low, high = np.nanpercentile(sample, tails) if np.isfinite(sample).any() else (np.nan, np.nan)
        intervals[name] = (float(low), float(high))
    return intervals


# ---------------------------------------------------------------------------------------------------------------------
# Fits


def temperature_grid(*, low: float, high: float, points: int) -> Float[Array, " points"]:
    """Candidate temperatures, evenly spaced in the logarithm, with 1 (no change) always among them."""
    if not 0 < low <= 1 <= high or points < 2:
        raise ValueError(
            f"temperature grid {low}..{high} with {points} points; expected 0 < low <= 1 <= high and 2 or more."
        )
    return np.unique(np.append(np.geomspace(low, high, points), 1.0))


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Conditional acceptance sigmoid(scales[k] * logit + shifts[k]) at position k+1.

    A temperature T is the scale 1/T with shift 0. A positive scale keeps the order within a position.
    """

    scales: tuple[float, ...]
    shifts: tuple[float, ...]

    def __call__(self, logits: Float[Array, "*batch N"]) -> Float[Array, "*batch N"]:
        return expit(np.asarray(self.scales) * logits + np.asarray(self.shifts))


def fit_sequential(
    logits: Float[Array, "M N"],
    survives: Float[Array, "M N"],
    weight: Float[Array, "M N"],
    fit_position: PositionFit,
) -> Scaling:
    """One scale and shift a position, left to right on the prefix product (paper section 4).

        a_k(s, t) = prod_{i<k} sigmoid(s_i * logit_i + t_i) * sigmoid(s * logit_k + t)

    `fit_position(logits, before, survives, weight)`, over the slots of one position, chooses (s, t); `before` is the
    product over the earlier positions, which stay as already chosen. A position without weight keeps (1, 0).
    """
    scales, shifts = np.ones(logits.shape[1]), np.zeros(logits.shape[1])
    before = np.ones(len(logits))
    for k in range(logits.shape[1]):
        used = weight[:, k] > 0
        if used.any():
            scales[k], shifts[k] = fit_position(
                logits[used, k], before[used], survives[used, k], weight[used, k]
            )
        before = before * expit(scales[k] * np.nan_to_num(logits[:, k]) + shifts[k])
    return Scaling(scales=tuple(scales.tolist()), shifts=tuple(shifts.tolist()))


def temperature_search(*, grid: Float[Array, " points"], bins: int, binning: str) -> PositionFit:
    """Sequential temperature scaling, the paper's: the shift is 0, the ECE of the prefix product is least over `grid`.

    Of equally good temperatures the one nearest to 1 wins.
    """

    def fit_position(logits: Array, before: Array, survives: Array, weight: Array) -> tuple[float, float]:
        errors = _ece_by_temperature(logits, before, survives, weight, grid, bins, binning)
        ties = np.flatnonzero(errors <= errors.min() + 1e-12)
        return float(1 / grid[ties[np.argmin(np.abs(np.log(grid[ties])))]]), 0.0

    return fit_position


def scale_and_shift(logits: Array, before: Array, survives: Array, weight: Array) -> tuple[float, float]:
    """The scale and shift for which the prefix product has least log loss; where nothing tells, (1, 0).

    Log loss and not ECE, because two parameters chosen on a binned error follow its noise.
    """
    scale, shift = _logistic(logits[:, None], survives, weight, before=before, start=np.array([1.0, 0.0]))
    return float(scale), float(shift)


def scaled(
    scalings: Mapping[str, Scaling], logits: Float[Array, "*batch N"], domain: Array
) -> Float[Array, "*batch N"]:
    """Conditional acceptance by the scaling of each row's `domain` (shape `*batch`), or by the one that serves all.

    Raises ValueError for a domain that has no scaling.
    """
    if ALL in scalings:
        return scalings[ALL](logits)
    known, names = list(scalings), np.unique(domain)
    unknown = sorted(str(n) for n in set(names) - set(known))
    if unknown:
        raise ValueError(
            f"domains {unknown} have no scaling; the calibration was fitted by domain, on {known}. "
            "Calibrate with by_domain=false, or on a fit set that holds these domains."
        )
    probability = np.empty(logits.shape)
    for name in names:
        probability[domain == name] = scalings[name](logits[domain == name])
    return probability


def _ece_by_temperature(
    logits: Array, before: Array, label: Array, weight: Array, grid: Array, bins: int, binning: str
) -> Float[Array, " points"]:
    errors = np.empty(len(grid))
    for t, temperature in enumerate(grid):
        predicted = before * expit(logits / temperature)
        if binning == "width":
            cell = np.minimum((predicted * bins).astype(np.int64), bins - 1)
        else:
            cell = bin_index(predicted, bin_edges(predicted, weight, bins=bins, binning=binning))
        errors[t] = np.abs(np.bincount(cell, weights=weight * (predicted - label), minlength=bins)).sum()
    return errors / weight.sum()


def fit_affine(
    logits: Float[Array, "M N"], label: Float[Array, "M N"], weight: Float[Array, "M N"]
) -> tuple[float, float]:
    """The one scale s and shift t for which sigmoid(s * logit + t) has least weighted log loss, over all positions.

    A serving engine takes nothing but weights, and a head's logit is linear in them, so this map can be folded in
    (`fold_affine`).
    """
    return scale_and_shift(
        np.nan_to_num(logits).reshape(-1), np.ones(logits.size), label.reshape(-1), weight.reshape(-1)
    )


def fit_signal(
    signal: Float[Array, "M N"], label: Float[Array, "M N"], weight: Float[Array, "M N"]
) -> tuple[float, Float[Array, " N"]]:
    """Slope (shared) and intercepts (one a position) that turn a free signal into a conditional acceptance logit."""
    rows, width = signal.shape
    where = np.tile(np.eye(width), (rows, 1))
    design = np.concatenate([np.nan_to_num(signal).reshape(-1, 1), where[:, 1:]], axis=1)
    c = _logistic(
        design,
        label.reshape(-1),
        weight.reshape(-1),
        before=np.ones(len(design)),
        start=np.zeros(width + 1),
    )
    return float(c[0]), c[-1] + np.concatenate([[0.0], c[1:-1]])


def _logistic(
    design: Float[Array, "n d"],
    label: Float[Array, " n"],
    weight: Float[Array, " n"],
    *,
    before: Float[Array, " n"],
    start: Float[Array, " d1"],
) -> Float[Array, " d1"]:
    """Weighted least log loss of before * sigmoid(design @ b + b_last) with soft labels; the last one is the intercept.

    Fisher scoring, which is Newton's method where `before` is 1. A ridge of 1e-6 of the total weight towards `start`
    keeps it finite where an outcome is missing.
    """
    x = np.concatenate([design, np.ones((len(design), 1))], axis=1)
    used = weight > 0
    x, label, before, weight = (
        x[used],
        label[used],
        before[used],
        weight[used] / max(weight[used].sum(), EPSILON),
    )
    ridge = np.full(x.shape[1], 1e-6)
    beta = start.astype(np.float64)

    def objective(b: Array) -> float:
        z = x @ b
        loss = -label * log_expit(z) - (1 - label) * np.log((1 - before) + before * expit(-z))
        return float((weight * loss).sum() + 0.5 * (ridge * (b - start) ** 2).sum())

    value = objective(beta)
    for _ in range(100):
        z = x @ beta
        predicted, down = before * expit(z), expit(-z)
        lost = (1 - before) + before * down
        gradient = x.T @ (weight * down / lost * (predicted - label)) + ridge * (beta - start)
        curvature = (x * (weight * predicted * down**2 / lost)[:, None]).T @ x + np.diag(ridge)
        step = np.linalg.solve(curvature, gradient)
        size = 1.0
        while objective(beta - size * step) > value and size > 1e-8:
            size /= 2
        beta = beta - size * step
        earlier, value = value, objective(beta)
        if earlier - value < 1e-12:
            break
    return beta


def signal_score(name: str, values: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """A free signal as an unbounded score that rises with trust.

    max_prob  log-odds of the draft's top probability
    margin    log-odds of (top - second probability)
    entropy   -log of the draft's entropy in nats
    """
    if name in ("max_prob", "margin"):
        return clipped_logit(values)
    if name == "entropy":
        return -np.log(np.maximum(values, EPSILON))
    raise ValueError(f"free signal {name!r} is unknown; expected one of {FREE_SIGNALS}.")


@dataclass(frozen=True)
class IsotonicPrefix:
    """Upper reference: a monotone map per position from the raw prefix product to survival. Not a conditional model."""

    maps: tuple[IsotonicRegression, ...]

    @classmethod
    def fit(
        cls, prefix: Float[Array, "M N"], survives: Float[Array, "M N"], weight: Float[Array, "M N"]
    ) -> IsotonicPrefix:
        maps = []
        for k in range(prefix.shape[1]):
            used = weight[:, k] > 0
            model = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip")
            maps.append(
                model.fit(prefix[used, k], survives[used, k], sample_weight=weight[used, k])
                if used.any()
                else model.fit([0, 1], [0, 1])
            )
        return cls(tuple(maps))

    def __call__(self, prefix: Float[Array, "M N"]) -> Float[Array, "M N"]:
        return np.stack(
            [model.predict(np.nan_to_num(prefix[:, k])) for k, model in enumerate(self.maps)], axis=1
        )


def fold_affine(weight: Any, bias: Any, scale: float, shift: float) -> tuple[Any, Any]:
    """A linear head's (weight, bias) such that its logit becomes scale * logit + shift; arrays or tensors, dtype kept."""
    return weight * scale, bias * scale + shift


# ---------------------------------------------------------------------------------------------------------------------
# calibration.json


@dataclass(frozen=True, kw_only=True)
class SignalMap:
    """From a free signal to conditional acceptance: the logit slope * score + intercepts[k], scaled as the head's is.

    Slope shared, one intercept a position, the form of vLLM's online estimator; `score` is `signal_score`.
    """

    slope: float
    intercepts: tuple[float, ...]
    scalings: Mapping[str, Scaling]

    def logits(self, score: Float[Array, "*batch N"]) -> Float[Array, "*batch N"]:
        """Logit of the mapped conditional acceptance, before any scaling."""
        return self.slope * score + np.asarray(self.intercepts)

    def p_accept_given_prefix(
        self, score: Float[Array, "*batch N"], domain: Array
    ) -> Float[Array, "*batch N"]:
        """Mapped and scaled conditional acceptance of scores whose rows belong to `domain`."""
        return scaled(self.scalings, self.logits(score), domain)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What `calibration.json` holds (version 2; version 1 had temperatures only and is refused).

    `method`: temperature (every shift is 0, temperature = 1 / scale) or affine. `scalings`: calibrated
    p_accept_given_prefix at position k+1 is sigmoid(scales[k] * logit(confidence) + shifts[k]), under the key `all` for
    every request, or under each domain's name where it was fitted by domain.
    `scale`, `shift`: the single affine sigmoid(scale * logit + shift) for engines that take nothing but weights.
    `signals`: the same for each free signal. `fit`, `report`: where the numbers come from (set, rounds, prompts,
    binning) and the mean ECE before and after, free-form.
    """

    run_id: str
    method: str
    scalings: Mapping[str, Scaling]
    scale: float
    shift: float
    signals: Mapping[str, SignalMap]
    fit: Mapping[str, Any]
    report: Mapping[str, Any]

    @property
    def num_proposals(self) -> int:
        return len(next(iter(self.scalings.values())).scales)

    @property
    def stage(self) -> str:
        """The stage of `report_table` that this calibration is."""
        return stage_of(self.method, by_domain=ALL not in self.scalings)

    def p_accept_given_prefix(
        self, confidence: Float[Array, "*batch N"], domain: Array
    ) -> Float[Array, "*batch N"]:
        """Calibrated conditional acceptance from the raw confidence of rows that belong to `domain`; NaN stays NaN."""
        if confidence.shape[-1] != self.num_proposals:
            raise ValueError(
                f"confidences have {confidence.shape[-1]} positions, calibration of run {self.run_id} has {self.num_proposals}; "
                "calibrate the run that wrote the slots."
            )
        return scaled(self.scalings, clipped_logit(confidence), domain)

    def affine(self, confidence: Float[Array, "*batch N"]) -> Float[Array, "*batch N"]:
        """Conditional acceptance after the single affine, as the folded head would output it."""
        return expit(self.scale * clipped_logit(confidence) + self.shift)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".json.tmp")
        partial.write_text(
            json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=2) + "\n"
        )
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """Raises FileNotFoundError, or ValueError if the file is not a calibration of this version."""
        if not path.is_file():
            raise FileNotFoundError(f"no calibration at {path}; write one with experiments.calibrate.")
        try:
            content = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON ({error}).") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"{path} is not a {FORMAT} file.")
        if content.get("version") != VERSION:
            raise ValueError(
                f"{path} has format version {content.get('version')}, this code reads {VERSION}; calibrate again."
            )
        names = [f.name for f in fields(cls)]
        missing = [n for n in names if n not in content]
        if missing:
            raise ValueError(f"{path} lacks {missing}.")
        signals = {
            name: SignalMap(
                slope=m["slope"], intercepts=tuple(m["intercepts"]), scalings=_scalings(m["scalings"])
            )
            for name, m in content["signals"].items()
        }
        scalings = _scalings(content["scalings"])
        return cls(**{n: content[n] for n in names} | {"scalings": scalings, "signals": signals})


def _scalings(content: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, Scaling]:
    return {d: Scaling(scales=tuple(c["scales"]), shifts=tuple(c["shifts"])) for d, c in content.items()}


def stage_of(method: str, *, by_domain: bool) -> str:
    """Name of a sequential scaling in reports. Raises ValueError for a method that there is not."""
    if method not in STAGE_OF_METHOD:
        raise ValueError(f"method is {method!r}; expected one of {list(STAGE_OF_METHOD)}.")
    return STAGE_OF_METHOD[method] + ("_by_domain" if by_domain else "")


# ---------------------------------------------------------------------------------------------------------------------
# From a fit set and a report set to tables


def require_calibratable(rounds: Rounds, *, what: str, min_rounds: int) -> None:
    """Raise ValueError unless `rounds` has confidences and at least `min_rounds` expected rounds."""
    confidence = rounds.values["confidence"]
    if np.isnan(confidence[rounds.present]).any():
        raise ValueError(
            f"{what} has no confidences: the run has no confidence head. Train one with confidence=on, or evaluate a run that has it."
        )
    total = float(rounds.frame["visit"].sum())
    if total < min_rounds:
        raise ValueError(
            f"{what} has {total:.0f} rounds; at least {min_rounds} are needed for a calibration that means something. "
            "Evaluate more prompts, or lower min_rounds if you accept the noise."
        )


def require_disjoint(fit: Rounds, report: Rounds, *, fit_name: str, report_name: str) -> None:
    """Raise ValueError if the two sets share a prompt: a calibration must be judged on prompts it has not seen."""
    shared = set(fit.frame["prompt_id"]) & set(report.frame["prompt_id"])
    if shared:
        raise ValueError(
            f"fit set {fit_name} and report set {report_name} share {len(shared)} prompts (for example {min(map(str, shared))}); "
            "choose sets of different splits."
        )


@dataclass(frozen=True)
class Fitted:
    """Everything that was fitted on one set: the head's `Calibration` and the predictors to compare it with.

    `prefix(rounds)` maps (signal, stage) to p_prefix_survives `[M, N]`; `conditional(rounds)` to p_accept_given_prefix
    where the predictor has one. Stages: `raw`; `affine` (one scale and shift); `mapped` (a free signal through
    `fit_signal`); `sts` (sequential temperatures) and `sas` (sequential scales and shifts), each also `_by_domain` where
    the fit set has all of the domains; `isotonic`. `scalings` is signal -> stage -> domain -> scaling.
    """

    calibration: Calibration
    scalings: Mapping[str, Mapping[str, Mapping[str, Scaling]]]
    isotonic: Mapping[str, IsotonicPrefix]

    def conditional(self, rounds: Rounds) -> dict[tuple[str, str], Array]:
        head, domain = rounds.values["confidence"], rounds.frame["domain"].to_numpy()
        table = {("confidence", "raw"): head, ("confidence", "affine"): self.calibration.affine(head)}
        logits = {"confidence": clipped_logit(head)}
        for name, mapping in self.calibration.signals.items():
            if name == "max_prob":
                table[(name, "raw")] = rounds.values[name]
            logits[name] = mapping.logits(signal_score(name, rounds.values[name]))
            table[(name, "mapped")] = expit(logits[name])
        for name, stages in self.scalings.items():
            for stage, scalings in stages.items():
                if ALL in scalings or set(domain) <= set(scalings):
                    table[(name, stage)] = scaled(scalings, logits[name], domain)
        return table

    def prefix(self, rounds: Rounds) -> dict[tuple[str, str], Array]:
        conditional = self.conditional(rounds)
        table = {key: p_prefix_survives(value) for key, value in conditional.items()}
        for name, model in self.isotonic.items():
            table[(name, "isotonic")] = model(table[(name, "raw" if name == "confidence" else "mapped")])
        return table


def fit(
    rounds: Rounds,
    *,
    run_id: str,
    method: str,
    by_domain: bool,
    grid: Float[Array, " points"],
    bins: int,
    binning: str,
    signals: Sequence[str],
    source: Mapping[str, Any],
) -> Fitted:
    """Fit the head and every free signal in `signals` by each method, over all rounds and by domain.

    `method` and `by_domain` choose which of these the calibration is; the others are there to compare it with.
    `grid`, `bins` and `binning` are those of the temperature search. `source` is recorded.
    """
    chosen = stage_of(method, by_domain=by_domain)
    survives, weight = rounds.survives, rounds.prefix_weight
    domain = rounds.frame["domain"].to_numpy()
    parts = {
        False: {ALL: np.full(len(rounds), True)},
        True: {str(d): domain == d for d in sorted(set(domain))},
    }
    fits = {
        "temperature": temperature_search(grid=grid, bins=bins, binning=binning),
        "affine": scale_and_shift,
    }

    def every_scaling(logits: Array) -> dict[str, dict[str, Scaling]]:
        return {
            stage_of(name, by_domain=split): {
                d: fit_sequential(logits[rows], survives[rows], weight[rows], fit_position)
                for d, rows in parts[split].items()
            }
            for split in parts
            for name, fit_position in fits.items()
        }

    head = clipped_logit(rounds.values["confidence"])
    scale, shift = fit_affine(head, rounds.accept_given_reached, rounds.reached)
    scalings = {"confidence": every_scaling(head)}
    isotonic = {
        "confidence": IsotonicPrefix.fit(
            p_prefix_survives(np.nan_to_num(rounds.values["confidence"])), survives, weight
        )
    }
    mapped = {}
    for name in signals:
        score = np.nan_to_num(signal_score(name, rounds.values[name]))
        slope, intercepts = fit_signal(score, rounds.accept_given_reached, rounds.reached)
        logits = slope * score + intercepts
        scalings[name] = every_scaling(logits)
        mapped[name] = SignalMap(
            slope=slope, intercepts=tuple(intercepts.tolist()), scalings=scalings[name][chosen]
        )
        isotonic[name] = IsotonicPrefix.fit(p_prefix_survives(expit(logits)), survives, weight)
    calibration = Calibration(
        run_id=run_id,
        method=method,
        scalings=scalings["confidence"][chosen],
        scale=scale,
        shift=shift,
        signals=mapped,
        fit={**source, "bins": bins, "binning": binning, "rounds": float(rounds.frame["visit"].sum())},
        report={},
    )
    return Fitted(calibration, scalings, isotonic)


def report_table(
    fitted: Fitted, rounds: Rounds, *, bins: int, draws: int, level: float, seed: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Measure every predictor on `rounds`: a tidy table of metrics and a table of reliability bins.

    metrics: quantity, signal, stage, domain, position, binning, metric, value, low, high, rounds, prompts.
    bins: quantity, signal, stage, domain, position, binning, then the columns of `reliability`.

    `quantity` is p_prefix_survives or p_accept_given_prefix. `domain` is each domain and `all`. Only ECE depends on
    the binning; the other metrics are listed under `width`.
    """
    metric_rows, bin_rows = [], []
    domain_of, prompt_of = rounds.frame["domain"].to_numpy(), pd.factorize(rounds.frame["prompt_id"])[0]
    domains = [ALL, *sorted(set(domain_of))]
    questions = {
        "p_prefix_survives": (fitted.prefix(rounds), rounds.survives, rounds.prefix_weight),
        "p_accept_given_prefix": (fitted.conditional(rounds), rounds.accept_given_reached, rounds.reached),
    }
    for quantity, (predictors, label, weight) in questions.items():
        for (signal, stage), predicted in predictors.items():
            for domain in domains:
                for k in range(rounds.num_proposals):
                    used = (weight[:, k] > 0) & ((domain_of == domain) | (domain == ALL))
                    if not used.any():
                        continue
                    p, y, w, prompts = predicted[used, k], label[used, k], weight[used, k], prompt_of[used]
                    key = {
                        "quantity": quantity,
                        "signal": signal,
                        "stage": stage,
                        "domain": domain,
                        "position": k + 1,
                    }
                    size = {"rounds": float(w.sum()), "prompts": len(np.unique(prompts))}
                    for binning, metrics in (("width", METRICS), ("mass", ("ece",))):
                        values = (
                            measure(p, y, w, bins=bins, binning=binning)
                            if binning == "width"
                            else {"ece": ece(p, y, w, bins=bins, binning=binning)}
                        )
                        spread = bootstrap(
                            p,
                            y,
                            w,
                            prompts,
                            bins=bins,
                            binning=binning,
                            draws=draws,
                            level=level,
                            seed=seed,
                            metrics=metrics,
                        )
                        for metric, (low, high) in spread.items():
                            metric_rows.append(
                                {
                                    **key,
                                    "binning": binning,
                                    "metric": metric,
                                    "value": values[metric],
                                    "low": low,
                                    "high": high,
                                    **size,
                                }
                            )
                        bin_rows.append(
                            reliability(p, y, w, bins=bins, binning=binning).assign(**key, binning=binning)
                        )
    return pd.DataFrame(metric_rows), pd.concat(bin_rows, ignore_index=True)
