"""The leaderboard on made-up runs whose truth is known: ranks, intervals, refusals, and the notebook over its tables."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from dspark.analysis import ablations
from dspark.evaluation import ROUND_COLUMNS, SLOT_COLUMNS
from dspark.runs import Run, RunManifest, write_table
from experiments.cli import CONFIGS
from experiments.leaderboard import rank
from experiments.sweep import config_sha

NOTEBOOK = Path(CONFIGS).parent / "notebooks/03_ablations.ipynb"
N = 7
KEEP = {"math": 0.75, "code": 0.6, "chat": 0.4}  # conditional acceptance of the baseline
ROWS = {
    "baseline": 0.0,
    "no_markov": -0.12,
    "no_bigram_init": -0.05,
    "no_confidence": 0.0,
    "block_4": 0.0,
    "block_16": 0.01,
    "depth_1": -0.03,
    "depth_5": 0.05,
    "decay_gamma_2": 0.02,
    "decay_gamma_inf": -0.02,
}


@functools.cache
def composed(label: str, *extra: str) -> DictConfig:
    budget = ["trainer.max_steps=600", "trainer.max_minutes=null"]
    with initialize_config_dir(version_base="1.3", config_dir=CONFIGS):
        return compose("train", ["verifier=tiny", f"+ablation={label}", *budget, *extra])


def made_up_run(root: Path, label: str, seed: int, *extra: str, shift: float = 0.0, prompts: int = 12) -> Run:
    """A complete run folder whose drafts are kept with the baseline's rates plus `shift`; prompts share their luck."""
    cfg = composed(label, *extra).copy()
    cfg.seed = seed
    name = f"20260101-000000-{label}-s{seed}"
    manifest = RunManifest(
        run_id=name,
        command=f"python -m experiments.train +ablation={label} seed={seed}",
        overrides=[f"+ablation={label}", f"seed={seed}"],
        config_sha=config_sha(cfg),
        seed=seed,
        verifier={"name": "tiny"},
        data={},
        parent=None,
        status="complete",
        results={
            "steps": 50,
            "train_seconds": 10.0 + shift * 20,
            "parameters": 1000 + len(label),
            "alpha": [0.5, 0.4],
        },
    )
    run = Run.create(root, manifest, OmegaConf.to_yaml(cfg, resolve=True))
    slots, rounds = made_up_tables(name, min(cfg.draft.block_size - 1, N), shift, seed, prompts)
    write_table(slots, run.eval_folder("tiny-test") / "slots.parquet")
    write_table(rounds, run.eval_folder("tiny-test") / "rounds.parquet")
    return run


def made_up_tables(
    run_id: str, width: int, shift: float, seed: int, prompts: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    slots, rounds = [], []
    for domain, keep in KEEP.items():
        for prompt in range(prompts):
            luck = np.random.default_rng((prompt, len(domain))).normal(0, 0.12)
            noise = np.random.default_rng((prompt, seed, len(run_id))).normal(0, 0.01)
            rates = np.clip(keep + luck + noise + shift, 0.02, 0.98) * np.ones(width)
            survive = np.cumprod(rates)
            names = {
                "run_id": run_id,
                "dataset": "tiny-test",
                "domain": domain,
                "prompt_id": f"{domain}-{prompt}",
                "doc_id": f"{domain}-{prompt}",
                "anchor": 5,
                "temperature": 0.0,
                "top_k": 0,
                "top_p": 1.0,
                "draft_sampling": "greedy",
                "mode": "replay",
            }
            reached = 20.0 * np.concatenate([[1.0], survive[:-1]])
            for i in range(width):
                row = {
                    "position": i + 1,
                    "reached": reached[i],
                    "accepted": reached[i] * rates[i],
                    "r": rates[i],
                }
                slots.append({**dict.fromkeys(SLOT_COLUMNS, np.nan), **names, **row})
            row = {"visit": 20.0, "proposed": width, "accepted": survive.sum(), "emitted": survive.sum() + 1}
            rounds.append({**dict.fromkeys(ROUND_COLUMNS, np.nan), **names, **row})
    return pd.DataFrame(slots), pd.DataFrame(rounds)


def configured(runs: Path, *overrides: str):
    with initialize_config_dir(version_base="1.3", config_dir=CONFIGS):
        return compose("leaderboard", [f"runs={runs}", "bootstrap.draws=400", *overrides])


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("grid")
    for label, shift in ROWS.items():
        for seed in range(3):
            made_up_run(root, label, seed, shift=shift)
    rank(configured(root))
    return root


def test_rows_are_ranked_with_intervals_and_verdicts(grid):
    table = pd.read_csv(grid / "leaderboard/leaderboard.csv").set_index("label")
    assert table["tau"].is_monotonic_decreasing
    assert table.loc["baseline", "verdict"] == "baseline"
    assert table.loc["no_confidence", "verdict"] == "not distinguishable"
    for label in ("no_markov", "depth_1", "no_bigram_init"):
        assert table.loc[label, "verdict"] == "worse", label
    assert table.loc["depth_5", "verdict"] == "better"
    assert (table["seeds"] == 3).all()
    told = table.loc["no_markov"]
    assert told["difference_low"] < told["difference"] < told["difference_high"] < 0
    assert told["difference"] == pytest.approx(told["tau"] - table.loc["baseline", "tau"], abs=5e-6)
    assert told["tau"] == pytest.approx(told[["tau_math", "tau_code", "tau_chat"]].mean(), abs=5e-6)
    assert told["changes"].startswith("head.kind: vanilla -> none")
    assert table.loc["block_4", "changes"] == "draft.block_size: 8 -> 4"
    assert all(row.parameters == 1000 + len(label) for label, row in table.iterrows())
    assert told["step_seconds"] == pytest.approx((10 - 0.12 * 20) / 50)
    assert all(f"no_markov-s{s}" in told["run_ids"] for s in range(3))
    text = (grid / "leaderboard/leaderboard.md").read_text()
    assert "not distinguishable" in text
    manifest = json.loads((grid / "leaderboard/manifest.json").read_text())
    assert len(manifest["runs"]) == 3 * len(ROWS)
    assert manifest["contract"]["trainer.max_steps"] == 600


def test_tau_equals_accepted_over_rounds_by_hand(tmp_path):
    for seed in range(3):
        made_up_run(tmp_path, "baseline", seed)
    table = rank(configured(tmp_path))
    taus = []
    for path in sorted(tmp_path.glob("*-baseline-*")):
        rounds = pd.read_parquet(path / "eval/tiny-test/rounds.parquet")
        sums = (
            rounds.assign(kept=rounds["visit"] * rounds["accepted"])
            .groupby("domain")[["kept", "visit"]]
            .sum()
        )
        taus.append((1 + sums["kept"] / sums["visit"]).mean())
    assert table.loc[0, "tau"] == pytest.approx(np.mean(taus))
    assert table.loc[0, "tau_spread"] == pytest.approx(np.std(taus, ddof=1))


def test_pairing_makes_the_interval_narrower_than_the_prompts_spread(grid):
    """Prompts differ by far more than rows do; an unpaired interval would cover zero for every row."""
    table = pd.read_csv(grid / "leaderboard/leaderboard.csv").set_index("label")
    row = table.loc["depth_1"]
    rounds = pd.concat(
        pd.read_parquet(path) for path in grid.glob("*-baseline-s0/eval/tiny-test/rounds.parquet")
    )
    unpaired = 2 * 1.96 * (rounds.groupby("domain")["accepted"].std() / np.sqrt(12)).mean() / np.sqrt(3)
    assert row["difference_high"] - row["difference_low"] < 0.5 * unpaired


def test_two_seeds_are_too_few_to_tell(tmp_path):
    for seed in range(3):
        made_up_run(tmp_path, "baseline", seed)
    for seed in range(2):
        made_up_run(tmp_path, "no_markov", seed, shift=-0.2)
    table = rank(configured(tmp_path)).set_index("label")
    assert table.loc["no_markov", "verdict"] == "too few seeds"


@pytest.mark.parametrize(
    ("extra", "prompts", "field"),
    [
        (["trainer.max_steps=50"], 12, r"trainer.max_steps: 600 in .*, 50 here"),
        (["trainer.max_minutes=2"], 12, r"trainer.max_minutes: None in .*, 2 here"),
        ([], 11, r"prompts: 36 \(.*\) in .*, 33 \(.*\) here"),
    ],
)
def test_other_budgets_and_other_prompts_are_refused_by_name(tmp_path, extra, prompts, field):
    for seed in range(3):
        made_up_run(tmp_path, "baseline", seed)
        made_up_run(tmp_path, "no_markov", seed)
    odd = made_up_run(tmp_path, "depth_1", 0, *extra, prompts=prompts)
    with pytest.raises(ValueError, match=field) as caught:
        rank(configured(tmp_path))
    assert odd.path.name in str(caught.value)
    assert "no_markov" not in str(caught.value)
    assert set(rank(configured(tmp_path, "leave_out=true"))["label"]) == {"baseline", "no_markov"}


def test_mistakes_are_named(tmp_path):
    with pytest.raises(ValueError, match="no complete run"):
        rank(configured(tmp_path))
    made_up_run(tmp_path, "no_markov", 0)
    with pytest.raises(ValueError, match="no run is labelled 'baseline'; there are no_markov"):
        rank(configured(tmp_path))
    unfinished = made_up_run(tmp_path, "baseline", 0)
    unfinished.finish("failed", {})
    with pytest.raises(ValueError, match="no run is labelled"):
        rank(configured(tmp_path))
    for path in tmp_path.glob("*-no_markov-*/eval/tiny-test"):
        path.rename(path.with_name("other"))
    unfinished.finish("complete", {})
    with pytest.raises(ValueError, match="share 0 evaluated sets"):
        rank(configured(tmp_path))


def test_curves_hold_the_rows_that_differ_in_one_setting(grid):
    table = pd.read_parquet(grid / "leaderboard/leaderboard.parquet")
    assert ablations.setting_curve(table, "draft.block_size")["value"].tolist() == [4, 8, 16]
    assert ablations.setting_curve(table, "draft.num_layers")["label"].tolist() == [
        "depth_1",
        "baseline",
        "depth_5",
    ]
    assert ablations.setting_curve(table, "loss.decay_gamma")["value"].tolist() == [2, 4, np.inf]
    assert ablations.setting_curve(table, "optimizer.lr").empty


def test_position_gains_are_differences_of_conditional_acceptance(grid):
    positions = pd.read_parquet(grid / "leaderboard/positions.parquet")
    gains = ablations.position_gains(positions, ["no_markov", "block_4"], baseline="baseline")
    rows = gains[gains["label"] == "no_markov"]
    assert rows["position"].tolist() == list(range(1, N + 1))
    assert rows["gain"].between(-0.135, -0.09).all()
    assert (rows["gain_low"] <= rows["gain"]).all()
    assert (gains["label"] == "block_4").sum() == 3


def test_pair_gains_are_ratios_of_taus_with_an_interval(grid):
    totals, runs, table = (
        pd.read_parquet(grid / f"leaderboard/{n}.parquet") for n in ("prompts", "runs", "leaderboard")
    )
    pairs = {"head": ("baseline", "no_markov"), "itself": ("depth_5", "depth_5"), "absent": ("baseline", "x")}
    gains = ablations.pair_gains(totals, runs, pairs, draws=200, level=0.95, seed=0).set_index("name")
    assert list(gains.index) == ["head", "itself"]
    tau = table.set_index("label")["tau"]
    head, itself = gains.loc["head"], gains.loc["itself"]
    assert head["gain"] == pytest.approx(tau["baseline"] / tau["no_markov"] - 1)
    assert head["gain_low"] < head["gain"] < head["gain_high"]
    assert head["gain_low"] > 0
    assert itself[["gain", "gain_low", "gain_high"]].tolist() == [0, 0, 0]  # the same prompts and seeds
    assert (gains["seeds"] == 3).all()


def test_sampled_estimates_are_products_of_overlaps_by_seed():
    runs = pd.DataFrame(
        {"run_id": ["a0", "a1", "b0", "b1"], "label": ["baseline"] * 2 + ["other"] * 2, "seed": [0, 1, 0, 1]}
    )
    alphas = {"a0": [0.5, 0.5], "a1": [0.5, 0.4], "b0": [0.8, 0.5], "b1": [0.8, 0.5]}
    found = ablations.sampled_estimates(alphas, runs, baseline="baseline").set_index("label")
    assert list(found.index) == ["other", "baseline"]
    assert found.loc["baseline", "estimate"] == pytest.approx((1.75 + 1.7) / 2)
    assert found.loc["other", "estimate"] == pytest.approx(2.2)
    assert found.loc["other", "gain"] == pytest.approx((2.2 / 1.75 + 2.2 / 1.7) / 2 - 1)
    assert found.loc["other", "gain_low"] == pytest.approx(2.2 / 1.75 - 1)
    assert found.loc["other", "gain_high"] == pytest.approx(2.2 / 1.7 - 1)
    assert found.loc["baseline", ["gain", "gain_low", "gain_high"]].tolist() == [0, 0, 0]
    assert (found["seeds"] == 2).all()


# ---- the notebook


def cells() -> list[dict]:
    return json.loads(NOTEBOOK.read_text())["cells"]


def test_the_notebook_runs_on_a_small_grid(grid, monkeypatch):
    matplotlib.use("Agg")
    monkeypatch.chdir(NOTEBOOK.parent)
    monkeypatch.setenv("DSPARK_ABLATIONS_FOLDER", str(grid / "leaderboard"))
    plt.close("all")
    scope: dict = {}
    with matplotlib.rc_context():
        for cell in cells():
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), NOTEBOOK.name, "exec"), scope)
        figures = [plt.figure(number) for number in plt.get_fignums()]
        assert len(figures) == 7
        for figure in figures:
            figure.canvas.draw()
            assert all(ax.lines or ax.collections for ax in figure.axes)
    plt.close("all")
    assert "36 prompts" in scope["source"]


def test_the_notebook_keeps_to_its_form():
    code = ["".join(c["source"]) for c in cells() if c["cell_type"] == "code"]
    assert sum("parameters" in c["metadata"].get("tags", []) for c in cells()) == 1
    assert not any(line.lstrip().startswith("def ") for text in code for line in text.splitlines())
    assert sum(bool(line.strip()) for text in code for line in text.splitlines()) <= 70
    assert "**Question.**" in "".join(cells()[0]["source"])
