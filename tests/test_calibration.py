"""Reliability, scaling and its file: hand-derived numbers, known truths recovered, honest refusals."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch
from hydra import compose, initialize
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import expit
from sklearn.metrics import brier_score_loss, roc_auc_score
from sklearn.metrics import log_loss as sk_log_loss

from dspark import calibration as cal
from dspark.config import Contract
from dspark.runs import Run, load_draft, save_draft
from experiments.calibrate import calibrate, fold_into_checkpoint
from tests.builders import random_draft
from tests.slot_tables import calibrated_run, made_up_run, synthetic_slots

GRID = cal.temperature_grid(low=0.25, high=4.0, points=81)


def measured(p, y, w=None, **kw):
    p, y = np.asarray(p, dtype=float), np.asarray(y, dtype=float)
    w = np.ones_like(p) if w is None else np.asarray(w, dtype=float)
    p, y, w = p[w > 0], y[w > 0], w[w > 0]
    return cal.measure(p, y, w, **{"bins": 10, "binning": "width"} | kw)


@pytest.fixture(scope="module")
def hot() -> cal.Rounds:
    """A head whose logits are twice too large."""
    return cal.rounds_of(synthetic_slots(split="validation", prompts=60, tokens=80, heat=2.0, seed=1))


def fit(rounds: cal.Rounds, **changes) -> cal.Fitted:
    options = {"method": "temperature", "by_domain": False, "bins": 15, "signals": (), "source": {}}
    return cal.fit(rounds, run_id="synthetic", grid=GRID, binning="width", **(options | changes))


@pytest.fixture(scope="module")
def fitted(hot) -> cal.Fitted:
    return fit(hot, signals=cal.FREE_SIGNALS, source={"set": "validation"})


def test_ece_brier_and_bias_of_a_hand_computed_case():
    # Two bins: [0.2, 0.2] with one kept of two, [0.9, 0.9] with none kept of two.
    out = measured([0.2, 0.2, 0.9, 0.9], [1, 0, 0, 0])
    assert out["ece"] == pytest.approx(0.5 * 0.3 + 0.5 * 0.9)
    assert out["brier"] == pytest.approx((0.64 + 0.04 + 0.81 + 0.81) / 4)
    assert out["mean_bias"] == pytest.approx(0.55 - 0.25)
    assert out["base_rate"] == pytest.approx(0.25)


def test_hard_labels_agree_with_scikit_learn_also_when_weighted():
    rng = np.random.default_rng(0)
    p, w = np.round(rng.random(500), 2), rng.random(500)
    y = (rng.random(500) < p**2).astype(float)
    out = measured(p, y, w)
    assert out["auc"] == pytest.approx(roc_auc_score(y, p, sample_weight=w), abs=1e-9)
    assert out["brier"] == pytest.approx(brier_score_loss(y, p, sample_weight=w), abs=1e-9)
    clipped = np.clip(p, 1e-6, 1 - 1e-6)
    assert out["log_loss"] == pytest.approx(sk_log_loss(y, clipped, sample_weight=w), abs=1e-9)


def test_a_soft_label_counts_as_the_expectation_over_its_outcomes():
    rng = np.random.default_rng(1)
    p, soft = rng.random(400), rng.random(400)
    both = measured(np.r_[p, p], np.r_[np.ones(400), np.zeros(400)], np.r_[soft, 1 - soft])
    out = measured(p, soft)
    for metric in cal.METRICS:
        assert out[metric] == pytest.approx(both[metric], abs=1e-9), metric


def test_equal_mass_bins_carry_equal_weight_and_survive_ties():
    rng = np.random.default_rng(2)
    p, w = rng.random(3000) ** 3, rng.random(3000)
    rows = cal.reliability(p, p, w, bins=10, binning="mass")
    assert len(rows) == 10
    assert rows["weight"].to_numpy() == pytest.approx(0.1, abs=0.005)
    tied = cal.reliability(np.full(50, 0.7), np.ones(50), np.ones(50), bins=10, binning="mass")
    assert len(tied) == 1
    assert tied["weight"].sum() == pytest.approx(1.0)


def test_unknown_binning_is_refused():
    with pytest.raises(ValueError, match="'width' or 'mass'"):
        measured([0.5], [1.0], binning="log")


def test_auc_without_both_outcomes_is_not_a_number():
    assert np.isnan(measured([0.2, 0.8], [1, 1])["auc"])


@given(arrays(np.float64, (7, 5), elements=st.floats(0, 1)))
def test_the_product_of_conditionals_is_the_prefix_probability(c):
    prefix = cal.p_prefix_survives(c)
    assert (np.diff(prefix, axis=1) <= 0).all()
    for k in range(5):
        np.testing.assert_allclose(prefix[:, k], c[:, : k + 1].prod(1))


def test_slots_table_names_agree_with_the_product():
    slots = synthetic_slots(split="test", prompts=2)
    rounds = cal.rounds_of(slots)
    whole = rounds.present.all(1)
    from_table = slots.pivot_table(
        index=["doc_id", "anchor"], columns="position", values="p_prefix_survives", sort=False
    )
    product = cal.p_prefix_survives(rounds.values["confidence"])
    np.testing.assert_allclose(product[whole], from_table.to_numpy()[whole])


@pytest.mark.parametrize("mode", ["replay", "decode"])
def test_rounds_carry_visits_survival_and_conditionals(mode):
    slots = synthetic_slots(split="test", mode=mode, prompts=3)
    rounds = cal.rounds_of(slots.sample(frac=1, random_state=0))
    assert rounds.frame["visit"].sum() == pytest.approx(slots.loc[slots["position"] == 1, "reached"].sum())
    conditional, reached = rounds.accept_given_reached, rounds.reached
    known = reached > 0
    np.testing.assert_allclose(conditional[known], rounds.values["r"][known])
    visited = rounds.frame["visit"].to_numpy() > 0
    expected = np.cumprod(np.nan_to_num(rounds.values["r"]), axis=1)
    np.testing.assert_allclose(rounds.survives[visited], expected[visited], atol=1e-12)
    if mode == "decode":
        assert set(np.unique(rounds.survives)) <= {0.0, 1.0}


def test_rounds_refuse_missing_columns_empty_tables_and_duplicates():
    slots = synthetic_slots(split="test", prompts=1)
    with pytest.raises(ValueError, match=r"lacks columns \['margin'\]"):
        cal.rounds_of(slots.drop(columns="margin"))
    with pytest.raises(ValueError, match="empty"):
        cal.rounds_of(slots.iloc[:0])
    with pytest.raises(ValueError, match="twice"):
        cal.rounds_of(pd.concat([slots, slots.iloc[[3]]]))


def test_sequential_scaling_recovers_the_temperature_that_was_put_in(hot, fitted):
    # The head's logits are doubled; dividing them by 2 makes it exact at every position.
    scaling = fitted.calibration.scalings["all"]
    assert 1 / np.array(scaling.scales) == pytest.approx(2.0, rel=0.2)
    assert scaling.shifts == (0.0,) * hot.num_proposals


@pytest.mark.parametrize("mode", ["replay", "decode"])
def test_scaling_lowers_prefix_ece_on_prompts_it_has_not_seen(fitted, mode):
    fresh = cal.rounds_of(synthetic_slots(split="test", mode=mode, prompts=60, tokens=80, heat=2.0, seed=2))
    table = fitted.prefix(fresh)
    survives, weight = fresh.survives, fresh.prefix_weight
    for k in range(fresh.num_proposals):
        before, after = (
            measured(table[("confidence", stage)][:, k], survives[:, k], weight[:, k])["ece"]
            for stage in ("raw", "sts")
        )
        assert after < before
        assert after < 0.035


@pytest.mark.parametrize("method", ["temperature", "affine"])
def test_earlier_positions_stay_fixed_while_later_ones_are_fitted(hot, method):
    logits, fit_position = cal.clipped_logit(hot.values["confidence"]), position_fit(method)
    whole = cal.fit_sequential(logits, hot.survives, hot.prefix_weight, fit_position)
    first = cal.fit_sequential(logits[:, :3], hot.survives[:, :3], hot.prefix_weight[:, :3], fit_position)
    assert (whole.scales[:3], whole.shifts[:3]) == (first.scales, first.shifts)


def position_fit(method: str, *, grid=GRID, bins: int = 10, binning: str = "width") -> cal.PositionFit:
    if method == "affine":
        return cal.scale_and_shift
    return cal.temperature_search(grid=grid, bins=bins, binning=binning)


def small_head() -> tuple[cal.Rounds, np.ndarray]:
    rounds = cal.rounds_of(synthetic_slots(split="validation", prompts=3, heat=1.6, shift=0.3, seed=3))
    return rounds, np.nan_to_num(cal.clipped_logit(rounds.values["confidence"]))


def errors_by_position(rounds, logits, scaling, candidates, *, metric, **kw):
    """Per position: the metric of the prefix product for each (scale, shift), earlier positions as in `scaling`."""
    before = np.ones(len(rounds))
    for k in range(rounds.num_proposals):
        used = rounds.prefix_weight[:, k] > 0
        yield [
            measured(
                (before * expit(s * logits[:, k] + t))[used],
                rounds.survives[used, k],
                rounds.prefix_weight[used, k],
                **kw,
            )[metric]
            for s, t in [(scaling.scales[k], scaling.shifts[k]), *candidates]
        ]
        before = before * expit(scaling.scales[k] * logits[:, k] + scaling.shifts[k])


@pytest.mark.parametrize("binning", ["width", "mass"])
def test_the_temperature_search_equals_the_plain_definition(binning):
    rounds, logits = small_head()
    grid = cal.temperature_grid(low=0.5, high=3.0, points=9)
    chosen = cal.fit_sequential(
        logits,
        rounds.survives,
        rounds.prefix_weight,
        position_fit("temperature", grid=grid, bins=8, binning=binning),
    )
    candidates = [(1 / t, 0.0) for t in grid]
    for mine, *others in errors_by_position(
        rounds, logits, chosen, candidates, metric="ece", bins=8, binning=binning
    ):
        assert mine == pytest.approx(min(others), abs=1e-9)


def test_no_scale_and_shift_of_a_grid_has_less_log_loss_than_the_fitted_ones():
    rounds, logits = small_head()
    chosen = cal.fit_sequential(logits, rounds.survives, rounds.prefix_weight, cal.scale_and_shift)
    grid = [(s, t) for s in np.linspace(0.1, 2.0, 20) for t in np.linspace(-1.5, 1.5, 31)]
    for k, (mine, *others) in enumerate(errors_by_position(rounds, logits, chosen, grid, metric="log_loss")):
        best = grid[int(np.argmin(others))]
        assert mine <= min(others) + 1e-9
        assert best == pytest.approx((chosen.scales[k], chosen.shifts[k]), abs=0.15)


@settings(max_examples=15, deadline=None)
@given(st.floats(0.5, 2.5), st.floats(-1.0, 1.0), st.integers(0, 2**16))
def test_a_shift_beside_the_scale_is_never_worse_than_a_scale_alone(heat, shift, seed):
    rounds = cal.rounds_of(
        synthetic_slots(split="validation", prompts=2, num_proposals=3, heat=heat, shift=shift, seed=seed)
    )
    logits = np.nan_to_num(cal.clipped_logit(rounds.values["confidence"]))
    chosen = cal.fit_sequential(logits, rounds.survives, rounds.prefix_weight, cal.scale_and_shift)
    temperatures = [(1 / t, 0.0) for t in GRID]
    for mine, *others in errors_by_position(rounds, logits, chosen, temperatures, metric="log_loss"):
        assert mine <= min(others) + 1e-6


@pytest.mark.parametrize("mode", ["replay", "decode"])
def test_sequential_scale_and_shift_recovers_those_that_were_put_in_at_each_position(mode):
    slots = synthetic_slots(split="validation", mode=mode, prompts=200, tokens=90, num_proposals=3, seed=11)
    heat, shift = np.array([2.0, 0.6, 1.3]), np.array([0.8, -0.4, 0.0])
    at = slots["position"].to_numpy() - 1
    said = heat[at] * cal.clipped_logit(slots["confidence"].to_numpy()) + shift[at]
    rounds = cal.rounds_of(slots.assign(confidence=expit(said)))
    found = cal.fit_sequential(
        cal.clipped_logit(rounds.values["confidence"]),
        rounds.survives,
        rounds.prefix_weight,
        cal.scale_and_shift,
    )
    # sigmoid(scale * (heat * logit + shift) + t) is the truth for scale = 1 / heat, t = -shift / heat.
    assert np.array(found.scales) == pytest.approx(1 / heat, rel=0.15)
    assert np.array(found.shifts) == pytest.approx(-shift / heat, abs=0.12)


def test_a_perfect_head_keeps_temperature_one_when_candidates_tie():
    ones = np.ones((40, 2))
    tied = cal.fit_sequential(np.zeros((40, 2)), ones * 0.5, ones, position_fit("temperature", bins=1))
    assert tied.scales[0] == 1.0


def test_a_scale_that_nothing_tells_apart_stays_one():
    # With every logit 0 the scale is free; only the shift answers for the rate of 0.8.
    ones = np.ones((40, 1))
    found = cal.fit_sequential(np.zeros((40, 1)), ones * 0.8, ones, cal.scale_and_shift)
    assert found.scales == pytest.approx([1.0])
    assert found.shifts == pytest.approx([np.log(4)], abs=1e-4)


@pytest.mark.parametrize("method", ["temperature", "affine"])
def test_a_position_without_weight_is_left_as_it_is(method):
    rng = np.random.default_rng(12)
    weight = np.ones((60, 2)) * [1, 0]
    found = cal.fit_sequential(
        rng.standard_normal((60, 2)), rng.random((60, 2)), weight, position_fit(method)
    )
    assert (found.scales[1], found.shifts[1]) == (1.0, 0.0)


@pytest.mark.parametrize("kept", [0.0, 1.0])
def test_a_position_with_one_outcome_alone_stays_finite(kept):
    rng = np.random.default_rng(13)
    logits, ones = rng.standard_normal((50, 3)) * 4, np.ones((50, 3))
    found = cal.fit_sequential(logits, ones * kept, ones, cal.scale_and_shift)
    assert np.isfinite([*found.scales, *found.shifts]).all()
    assert np.abs(cal.p_prefix_survives(found(logits)) - kept).max() < 0.01


def two_domains(split: str, seed: int) -> cal.Rounds:
    """Code is shifted up and math down: no single scaling is right for both."""
    parts = [
        synthetic_slots(split=split, prompts=60, tokens=80, num_proposals=3, shift=by, seed=seed).query(
            "domain == @name"
        )
        for name, by in (("code", 0.8), ("math", -0.8))
    ]
    return cal.rounds_of(pd.concat(parts, ignore_index=True))


def test_a_fit_by_domain_mends_what_one_scaling_for_all_cannot():
    fitted = fit(two_domains("validation", 14), method="affine", by_domain=True)
    assert set(fitted.calibration.scalings) == {"math", "code"}
    fresh = two_domains("test", 15)
    domain, prefix = fresh.frame["domain"].to_numpy(), fitted.prefix(fresh)
    np.testing.assert_array_equal(
        prefix[("confidence", "sas_by_domain")],
        cal.p_prefix_survives(fitted.calibration.p_accept_given_prefix(fresh.values["confidence"], domain)),
    )
    for name in ("math", "code"):
        pooled, own = (
            measured(
                prefix[("confidence", stage)][domain == name, 0],
                fresh.survives[domain == name, 0],
                fresh.prefix_weight[domain == name, 0],
            )["ece"]
            for stage in ("sas", "sas_by_domain")
        )
        assert own < 0.03 < pooled


def test_each_row_gets_its_domains_scaling_and_a_domain_without_one_is_refused():
    scaling = cal.Scaling(scales=(0.5, 1.0), shifts=(0.1, 0.0))
    by_domain = {"math": scaling, "code": cal.Scaling(scales=(1.0, 1.0), shifts=(0.0, 0.0))}
    logits, names = np.array([[1.0, 2.0], [3.0, -1.0]]), np.array(["code", "math"])
    np.testing.assert_allclose(cal.scaled(by_domain, logits, names), expit([[1.0, 2.0], [1.6, -1.0]]))
    np.testing.assert_allclose(cal.scaled({"all": scaling}, logits, names), scaling(logits))
    with pytest.raises(ValueError, match=r"domains \['law'\] have no scaling; .* on \['math', 'code'\]"):
        cal.scaled(by_domain, logits, np.array(["law", "math"]))


def test_affine_recovers_scale_and_shift():
    rounds = cal.rounds_of(
        synthetic_slots(split="validation", prompts=80, tokens=80, heat=2.0, shift=0.6, seed=4)
    )
    scale, shift = cal.fit_affine(
        cal.clipped_logit(rounds.values["confidence"]), rounds.accept_given_reached, rounds.reached
    )
    assert scale == pytest.approx(0.5, abs=0.05)
    assert shift == pytest.approx(-0.3, abs=0.08)


def test_folding_the_affine_changes_the_logit_and_nothing_else():
    rng = np.random.default_rng(5)
    weight, bias, z = rng.standard_normal((1, 6)), rng.standard_normal(1), rng.standard_normal((9, 6))
    w, b = cal.fold_affine(weight, bias, 0.4, -0.7)
    np.testing.assert_allclose(z @ w.T + b, 0.4 * (z @ weight.T + bias) - 0.7)


def test_folded_tensors_keep_their_dtype():
    w, b = cal.fold_affine(
        torch.ones(1, 4, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16), 0.5, 0.25
    )
    assert w.dtype == b.dtype == torch.bfloat16
    assert w.tolist() == [[0.5] * 4]
    assert b.tolist() == [0.75]


def test_free_signals_are_mapped_to_rates_that_are_right_on_average(hot, fitted):
    for name in cal.FREE_SIGNALS:
        predicted = fitted.conditional(hot)[(name, "mapped")]
        for k in range(hot.num_proposals):
            out = measured(
                predicted[hot.reached[:, k] > 0, k],
                hot.accept_given_reached[hot.reached[:, k] > 0, k],
                hot.reached[hot.reached[:, k] > 0, k],
            )
            assert abs(out["mean_bias"]) < 1e-3, (name, k)


def test_an_unknown_signal_is_refused():
    with pytest.raises(ValueError, match="max_prob"):
        cal.signal_score("vibes", np.ones(3))


def test_isotonic_is_the_best_monotone_map_on_its_own_set(hot, fitted):
    table = fitted.prefix(hot)
    for k in range(hot.num_proposals):
        brier = {
            stage: measured(
                np.nan_to_num(table[("confidence", stage)][:, k]), hot.survives[:, k], hot.prefix_weight[:, k]
            )["brier"]
            for stage in ("raw", "affine", "sts", "isotonic")
        }
        if k == 0:
            assert brier["isotonic"] <= min(brier.values()) + 1e-12
        assert brier["isotonic"] <= brier["raw"] + 1e-12


def test_bootstrap_intervals_hold_the_point_and_shrink_with_prompts(hot):
    kw = {"bins": 10, "binning": "width"}
    widths = []
    for count in (20, 160):
        keep = hot.frame["prompt_id"].isin(hot.frame["prompt_id"].unique()[:count]).to_numpy()
        part = hot.take(keep)
        p = cal.p_prefix_survives(part.values["confidence"])[:, 0]
        y, w = part.survives[:, 0], part.prefix_weight[:, 0]
        spread = cal.bootstrap(
            p, y, w, part.frame["prompt_id"].to_numpy(), draws=300, level=0.95, seed=0, **kw
        )
        point = cal.measure(p, y, w, **kw)
        for metric in ("brier", "log_loss", "auc", "mean_bias"):
            low, high = spread[metric]
            assert low < point[metric] < high
        widths.append(spread["mean_bias"][1] - spread["mean_bias"][0])
    assert widths[1] < 0.6 * widths[0]


def test_bootstrap_draws_prompts_not_slots():
    # Slots of one prompt always agree: the interval must be as wide as for 10 prompts, not 10,000 slots.
    rng = np.random.default_rng(6)
    kept = (rng.random(10) < 0.5).astype(float)
    y, prompt = np.repeat(kept, 1000), np.repeat(np.arange(10), 1000)
    spread = cal.bootstrap(
        np.full(10_000, 0.5),
        y,
        np.ones(10_000),
        prompt,
        bins=10,
        binning="width",
        draws=500,
        level=0.95,
        seed=0,
    )
    low, high = spread["mean_bias"]
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(0.25 / 10), rel=0.25)


def test_one_prompt_has_no_interval():
    spread = cal.bootstrap(
        np.array([0.5, 0.6]),
        np.ones(2),
        np.ones(2),
        np.array(["a", "a"]),
        bins=5,
        binning="width",
        draws=10,
        level=0.9,
        seed=0,
    )
    assert all(np.isnan(v).all() for v in spread.values())


def test_report_has_every_predictor_domain_and_position():
    small = {"prompts": 2, "tokens": 25, "num_proposals": 2, "heat": 2.0}
    fitted = fit(
        cal.rounds_of(synthetic_slots(split="validation", seed=6, **small)),
        bins=10,
        signals=("max_prob", "entropy"),
    )
    report = cal.rounds_of(synthetic_slots(split="test", seed=7, **small))
    metrics, bins = cal.report_table(fitted, report, bins=10, draws=20, level=0.95, seed=0)
    assert set(metrics["domain"]) == {"all", "math", "code", "chat"}
    assert set(metrics["position"]) == {1, 2}
    scaled = ("sts", "sts_by_domain", "sas", "sas_by_domain", "isotonic")
    stages = {("confidence", s) for s in ("raw", "affine", *scaled)}
    stages |= {("max_prob", "raw")} | {(n, s) for n in ("max_prob", "entropy") for s in ("mapped", *scaled)}
    by_quantity = {q: set(zip(t["signal"], t["stage"])) for q, t in metrics.groupby("quantity")}
    assert by_quantity["p_prefix_survives"] == stages
    assert by_quantity["p_accept_given_prefix"] == {s for s in stages if s[1] != "isotonic"}
    key = ["quantity", "signal", "stage", "domain", "position", "binning"]
    assert not metrics.duplicated([*key, "metric"]).any()
    assert bins.groupby(key)["weight"].sum().to_numpy() == pytest.approx(1.0)


def test_calibration_file_round_trips_and_refuses_strangers(tmp_path, fitted):
    path = tmp_path / "calibration.json"
    fitted.calibration.write(path)
    assert cal.Calibration.read(path) == fitted.calibration
    with pytest.raises(FileNotFoundError, match=r"experiments\.calibrate"):
        cal.Calibration.read(tmp_path / "none.json")
    content = json.loads(path.read_text())
    for broken, message in (
        ("{", "not JSON"),
        (json.dumps({"a": 1}), "not a dspark-calibration"),
        (json.dumps(content | {"version": 99}), "version 99"),
        (json.dumps(content | {"version": 1}), "format version 1, this code reads 2; calibrate again"),
        (json.dumps({k: v for k, v in content.items() if k != "scale"}), r"lacks \['scale'\]"),
    ):
        path.write_text(broken)
        with pytest.raises(ValueError, match=message):
            cal.Calibration.read(path)


def test_a_calibration_of_another_block_length_is_refused(fitted):
    with pytest.raises(ValueError, match="3 positions, calibration of run synthetic has 5"):
        fitted.calibration.p_accept_given_prefix(np.full((2, 3), 0.5), np.array(["math", "code"]))


def test_runs_without_a_head_few_rounds_and_shared_prompts_are_refused(hot):
    blind = cal.rounds_of(synthetic_slots(split="test", prompts=1).assign(confidence=np.nan))
    with pytest.raises(ValueError, match="no confidence head"):
        cal.require_calibratable(blind, what="set test", min_rounds=1)
    with pytest.raises(ValueError, match=r"has \d+ rounds; at least 1000000"):
        cal.require_calibratable(hot, what="set validation", min_rounds=1_000_000)
    with pytest.raises(ValueError, match="share 180 prompts"):
        cal.require_disjoint(hot, hot, fit_name="a", report_name="b")
    cal.require_disjoint(hot, blind, fit_name="a", report_name="b")


@settings(max_examples=30, deadline=None)
@given(
    arrays(np.float64, (20, 3), elements=st.floats(0.01, 0.99)),
    st.lists(st.floats(0.3, 3.0), min_size=3, max_size=3),
    st.lists(st.floats(-2.0, 2.0), min_size=3, max_size=3),
)
def test_scaling_keeps_the_order_within_a_position(c, scales, shifts):
    scaling = cal.Scaling(scales=tuple(scales), shifts=tuple(shifts))
    for raw, cooled in zip(c.T, scaling(cal.clipped_logit(c)).T):
        order = np.argsort(raw, kind="stable")
        assert (np.diff(cooled[order]) >= -1e-12).all()


# The command


def composed(*overrides: str):
    with initialize(version_base="1.3", config_path="../configs"):
        return compose(
            "calibrate", overrides=["bootstrap.draws=20", "min_rounds=100", "grid.points=41", *overrides]
        )


def test_the_command_writes_its_tables_and_lowers_the_error():
    out = calibrated_run() / "calibration"
    written = cal.Calibration.read(out / "calibration.json")
    assert written.fit["set"] == "validation"
    assert written.report["set"] == "test"
    mean = written.report["mean_ece"]["confidence"]["all"]
    assert mean["sts"] < 0.5 * mean["raw"]
    metrics = pd.read_parquet(out / "calibration.parquet")
    in_table = metrics.query(
        "quantity == 'p_prefix_survives' and signal == 'confidence' and stage == 'sts' and domain == 'all' "
        "and metric == 'ece' and binning == 'width'"
    )["value"].mean()
    assert in_table == pytest.approx(mean["sts"], abs=1e-6)
    sweep = pd.read_parquet(out / "thresholds.parquet")
    assert set(sweep["stage"]) == {"raw", "sts"}
    assert json.loads((out / "manifest.json").read_text())["run_id"] == "a_run"


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["fit=test"], "fit and report are both 'test'"),
        (["min_rounds=100000"], "set 'validation' of run a_run has"),
        (["fit=train"], r"no evaluated set 'train'; it has \['test', 'validation'\]"),
        (["fold=true"], "no complete 'best' checkpoint"),
        (["method=platt"], r"method is 'platt'; expected one of \['temperature', 'affine'\]"),
        (["by_domain=true", "min_rounds=400"], "domain 'code' of set 'validation' has"),
    ],
)
def test_the_command_refuses_what_would_mislead(overrides, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        calibrate(composed(f"run={calibrated_run()}", *overrides))


def test_by_domain_wants_every_domain_of_the_report_in_the_fit_set(tmp_path):
    tables = {s: synthetic_slots(split=s, prompts=3, num_proposals=2) for s in ("validation", "test")}
    tables["validation"] = tables["validation"].query("domain != 'chat'")
    run = made_up_run(tmp_path / "narrow", tables)
    with pytest.raises(ValueError, match=r"'test' has domains \['chat'\] that 'validation' lacks"):
        calibrate(composed(f"run={run}", "min_rounds=1", "by_domain=true"))
    out = calibrate(composed(f"run={run}", "min_rounds=1", "bootstrap.draws=2", "thresholds=2"))
    stages = cal.Calibration.read(out / "calibration.json").report["mean_ece"]["confidence"]["chat"]
    assert {"sts", "sas"} <= set(stages)
    assert not any(s.endswith("by_domain") for s in stages)


@pytest.mark.parametrize("method, stage", [("temperature", "sts"), ("affine", "sas")])
def test_the_command_keeps_the_method_that_was_asked_for(tmp_path, method, stage):
    out = calibrate(
        composed(
            f"run={calibrated_run()}", f"method={method}", "by_domain=true", f"out={tmp_path}", "thresholds=2"
        )
    )
    written = cal.Calibration.read(out / "calibration.json")
    assert written.stage == f"{stage}_by_domain"
    assert set(written.scalings) == set(written.signals["entropy"].scalings) == {"math", "code", "chat"}
    shifts = np.concatenate([s.shifts for s in written.scalings.values()])
    assert (shifts == 0).all() == (method == "temperature")
    assert set(pd.read_parquet(out / "thresholds.parquet")["stage"]) == {"raw", written.stage}
    assert json.loads((out / "manifest.json").read_text())["method"] == method
    first, second = (s["confidence"] for s in (written.report["mean_ece"], default_report()))
    assert first == second  # every method is reported, whichever was chosen


def default_report() -> dict:
    path = calibrated_run() / "calibration" / "calibration.json"
    return cal.Calibration.read(path).report["mean_ece"]


def test_the_command_refuses_a_run_without_a_head_and_shared_prompts(tmp_path):
    slots = synthetic_slots(split="validation", prompts=2, num_proposals=2)
    blind = made_up_run(
        tmp_path / "blind", {s: slots.assign(confidence=np.nan) for s in ("validation", "test")}
    )
    with pytest.raises(
        ValueError, match=r"set 'validation' of run blind has no confidences: the run has no confidence head"
    ):
        calibrate(composed(f"run={blind}", "min_rounds=1"))
    same = made_up_run(tmp_path / "same", {s: slots.assign(dataset=s) for s in ("validation", "test")})
    with pytest.raises(ValueError, match="share 6 prompts"):
        calibrate(composed(f"run={same}", "min_rounds=1"))


def test_the_command_refuses_sets_that_were_drafted_differently(tmp_path):
    tables = {s: synthetic_slots(split=s, prompts=2, num_proposals=2) for s in ("validation", "test")}
    tables["test"] = tables["test"].assign(draft_sampling="greedy")
    run = made_up_run(tmp_path / "mixed", tables)
    with pytest.raises(ValueError, match=r"draft_sampling \['sampled'\], test with \['greedy'\]"):
        calibrate(composed(f"run={run}", "min_rounds=1"))


def test_fold_writes_a_checkpoint_whose_head_speaks_calibrated_logits(tmp_path):
    run = Run.open(made_up_run(tmp_path / "with_weights", {}))
    draft, written = (
        random_draft(),
        cal.Calibration.read(calibrated_run() / "calibration" / "calibration.json"),
    )
    save_draft(draft, run.checkpoints / "best", Contract(), {"note": "kept"})
    folded, _, facts = load_draft(
        fold_into_checkpoint(run, written, tmp_path / "folded"), attention_backend="grouped"
    )
    x = torch.randn(5, 32 + 8)
    before, after = (d.confidence_head.proj(x) for d in (draft, folded))
    torch.testing.assert_close(after, written.scale * before + written.shift)
    assert facts["note"] == "kept"
    assert facts["confidence_affine"] == [written.scale, written.shift]
    for name, tensor in draft.state_dict().items():
        if not name.startswith("confidence_head"):
            torch.testing.assert_close(folded.state_dict()[name], tensor, rtol=0, atol=0)
