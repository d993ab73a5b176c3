"""Rank runs by acceptance: `python -m experiments.leaderboard runs=<folder of runs> [baseline=<label>]`.

Reads complete runs and their evaluated sets, computes nothing again, and refuses to rank runs that had another budget or were
measured on other prompts. Writes leaderboard.csv and .md, the tables that the ablation notebook reads, and manifest.json with
every run's manifest. The last line names the best row.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from dspark.analysis.ablations import leaderboard_table
from dspark.analysis.tables import markdown, prompt_totals
from dspark.runs import (
    Run,
    RunManifest,
    current_command,
    package_versions,
    read_table,
    write_table,
    write_text,
)
from experiments.cli import command, leaves
from experiments.sweep import BESIDE_THE_POINT, config_sha

# Settings that decide how much a run may learn from; a run that changes one of them had another budget. Anchors a row are
# left to ablations: the text seen is the same.
BUDGET = (
    "trainer.max_steps",
    "trainer.max_minutes",
    "trainer.max_tokens",
    "trainer.seq_length",
    "trainer.rows_per_batch",
    "trainer.accumulate",
    "trainer.devices",
    "trainer.num_nodes",
)
NAMED_ONLY = {"verifier.name", "data.name", "verifier.device"}

console = Console(width=None if sys.stdout.isatty() else 170)


@command("leaderboard")
def main(cfg: DictConfig) -> None:
    rank(cfg)


def rank(cfg: DictConfig) -> pd.DataFrame:
    """The whole command; returns the table."""
    runs = complete_runs(cfg.runs)
    dataset = cfg.set or shared_set(runs)
    configs = {run.path.name: OmegaConf.load(run.path / "config.yaml") for run in runs}
    facts = pd.DataFrame([describe(run, configs[run.path.name]) for run in runs])
    facts = label_rows(facts, configs, cfg.baseline)
    frames = {run.path.name: tables_of(run, dataset) for run in track(runs, "reading", transient=True)}
    facts = comparable(cfg, facts, configs, frames)
    totals = pd.concat([frames[r][0] for r in facts["run_id"]], ignore_index=True)
    options = {name: cfg.bootstrap[name] for name in ("draws", "level", "seed")}
    described = facts.drop(columns=["config_sha"])
    table = leaderboard_table(totals, described, baseline=cfg.baseline, **options)
    positions = pd.concat(
        [
            frames[r][1].assign(run_id=r, label=label, seed=s)
            for r, label, s in zip(facts["run_id"], facts["label"], facts["seed"], strict=True)
        ],
        ignore_index=True,
    )
    out = Path(cfg.out) if cfg.out else folder_of(cfg.runs) / "leaderboard"
    write_tables(out, table, totals, positions, facts)
    write_text(
        out / "manifest.json",
        json.dumps(
            provenance(cfg, dataset, totals, configs, facts, {r.path.name: r.manifest for r in runs}),
            indent=1,
        )
        + "\n",
    )
    show(table, cfg)
    last_line(table, dataset, totals, out)
    return table


# ---- reading


def folder_of(runs: Any) -> Path:
    return Path(runs) if isinstance(runs, str) else Path(runs[0]).parent


def complete_runs(runs: Any) -> list[Run]:
    """The complete runs that were named, by id. Raises ValueError when there is none."""
    if isinstance(runs, str):
        found = [Run(path.parent) for path in sorted(Path(runs).glob("*/manifest.json"))]
        found = found or ([Run.open(runs)] if (Path(runs) / "manifest.json").is_file() else [])
    else:
        found = [Run.open(path) for path in runs]
    done = [run for run in found if run.manifest.status == "complete"]
    left = [f"{run.path.name} ({run.manifest.status})" for run in found if run not in done]
    if left:
        console.print(f"left out, not complete: {', '.join(left)}", highlight=False)
    if not done:
        raise ValueError(
            f"no complete run in {runs}; `python -m experiments.train runs={runs}` writes them there."
        )
    return done


def shared_set(runs: Sequence[Run]) -> str:
    """The one evaluated set that every run has. Raises ValueError when there is none, or more than one."""
    sets = [{p.parent.name for p in run.path.glob("eval/*/rounds.parquet")} for run in runs]
    common = sorted(set.intersection(*sets))
    if len(common) == 1:
        return common[0]
    without = [run.path.name for run, own in zip(runs, sets, strict=True) if not own]
    hint = f" Without any: {', '.join(without[:4])}." if without else ""
    raise ValueError(
        f"the runs share {len(common)} evaluated sets ({', '.join(common) or 'none'}); choose one with set=, or measure them "
        f"with `python -m experiments.evaluate`.{hint}"
    )


def describe(run: Run, config: DictConfig) -> dict[str, Any]:
    """What the leaderboard says of a run beside its acceptance."""
    manifest = run.manifest
    results = manifest.results
    return {
        "run_id": run.path.name,
        "seed": manifest.seed,
        "config_sha": manifest.config_sha,
        "cell": config_sha(config, without=("seed",)),
        "parameters": results.get("parameters", float("nan")),
        "step_seconds": results.get("train_seconds", float("nan")) / max(1, results.get("steps", 0)),
        "ablation": str(config.get("label") or "")  # as in the run's id
        or "+".join(
            o.split("=", 1)[1].strip("[]").replace(",", "+")
            for o in manifest.overrides
            if o.lstrip("+").startswith("ablation=")
        ),
    }


def label_rows(facts: pd.DataFrame, configs: Mapping[str, DictConfig], baseline: str) -> pd.DataFrame:
    """Name every cell and say what it changes; of two runs of one cell and seed the newer one counts.

    Raises ValueError when no run carries the baseline's name.
    """
    facts = facts.sort_values("run_id").drop_duplicates(["cell", "seed"], keep="last")
    names = facts.groupby("cell")["ablation"].first()
    twice = names[names.duplicated(keep=False) | (names == "")]
    for cell in twice.index:
        names[cell] = f"{names[cell] or 'run'}-{cell[:6]}"
    base = facts.loc[facts["ablation"] == baseline, "cell"]
    if base.empty:
        raise ValueError(
            f"no run is labelled {baseline!r}; there are {', '.join(sorted(names))}. Name one with baseline=."
        )
    names[base.iloc[0]] = baseline
    reference = flat(configs[facts.loc[facts["cell"] == base.iloc[0], "run_id"].iloc[0]])
    own = {r: changes(reference, flat(configs[r])) for r in facts["run_id"]}
    return facts.assign(label=facts["cell"].map(names), changes=facts["run_id"].map(own)).drop(
        columns="ablation"
    )


def flat(config: DictConfig) -> dict[str, Any]:
    """Settings by dotted name, without empty ones and those that do not change what is computed."""
    skipped = (*BESIDE_THE_POINT, "seed")
    return {name: value for name, value in leaves(config).items() if name not in skipped and value != {}}


def changes(reference: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    names = [
        n for n in (*reference, *(n for n in own if n not in reference)) if reference.get(n) != own.get(n)
    ]
    return "; ".join(f"{name}: {reference.get(name)} -> {own.get(name)}" for name in names)


def tables_of(run: Run, dataset: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Prompt totals, and sums by domain and position, of one run's set."""
    folder = run.eval_folder(dataset)
    slots, rounds = read_table(folder / "slots.parquet"), read_table(folder / "rounds.parquet")
    totals = prompt_totals(slots, rounds).assign(run_id=run.path.name)
    keep = [
        "run_id",
        "dataset",
        "mode",
        "draft_sampling",
        "domain",
        "prompt_id",
        "temperature",
        "rounds",
        "accepted",
    ]
    return totals[keep], slots.groupby(["domain", "position"])[["reached", "accepted"]].sum().reset_index()


# ---- what may be compared


def comparable(
    cfg: DictConfig,
    facts: pd.DataFrame,
    configs: Mapping[str, DictConfig],
    frames: Mapping[str, tuple[pd.DataFrame, pd.DataFrame]],
) -> pd.DataFrame:
    """The rows that may be ranked. Raises ValueError that names runs, fields and both values, unless `leave_out`."""
    first = facts.loc[facts["label"] == cfg.baseline, "run_id"].iloc[0]
    terms = {r: contract(configs[r], frames[r][0]) for r in facts["run_id"]}
    odd = {}
    for run, own in terms.items():
        differing = [
            f"{k}: {terms[first][k]} in {first}, {own[k]} here" for k in own if own[k] != terms[first][k]
        ]
        if differing:
            odd[run] = "; ".join(differing)
    if odd and not cfg.leave_out:
        shown = " | ".join(f"{run}: {text}" for run, text in list(odd.items())[:3])
        raise ValueError(
            f"{len(odd)} of {len(terms)} runs cannot be ranked beside {first}. {shown}. Evaluate them alike, train them on one "
            "budget, or leave them out with leave_out=true."
        )
    for run, text in odd.items():
        console.print(f"left out {run}: {escape(text)}", highlight=False, soft_wrap=True)
    return facts[~facts["run_id"].isin(odd)].reset_index(drop=True)


def contract(config: DictConfig, totals: pd.DataFrame) -> dict[str, Any]:
    """What two runs must share before their acceptance is compared: budget, data, prompts and way of measuring."""
    prompts = sorted(set(zip(totals["domain"], totals["prompt_id"], totals["temperature"], strict=True)))
    data = {
        k: v for k, v in flat(config).items() if k.startswith(("verifier.", "data.")) and k not in NAMED_ONLY
    }
    return {
        **{key: OmegaConf.select(config, key) for key in BUDGET},
        **data,
        "prompts": f"{len(prompts)} ({pd.util.hash_array(pd.Series([str(p) for p in prompts]).to_numpy()).sum():016x})",
        "mode": ", ".join(sorted(set(totals["mode"]))),
        "draft_sampling": ", ".join(sorted(set(totals["draft_sampling"]))),
    }


# ---- writing


def write_tables(
    out: Path, table: pd.DataFrame, totals: pd.DataFrame, positions: pd.DataFrame, facts: pd.DataFrame
) -> None:
    write_text(out / "leaderboard.csv", table.to_csv(index=False, float_format="%.6g"))
    shown = table.drop(columns=["run_ids", "changes"]).round({"step_seconds": 3})
    notes = "\n".join(
        f"- `{row.label}`: {row.changes or 'the defaults'}; runs {row.run_ids}" for row in table.itertuples()
    )
    write_text(out / "leaderboard.md", f"{markdown(shown)}\n{notes}\n")
    write_table(table, out / "leaderboard.parquet")
    write_table(totals, out / "prompts.parquet")
    write_table(positions, out / "positions.parquet")
    write_table(facts, out / "runs.parquet")


def provenance(
    cfg: DictConfig,
    dataset: str,
    totals: pd.DataFrame,
    configs: Mapping[str, DictConfig],
    facts: pd.DataFrame,
    manifests: Mapping[str, RunManifest],
) -> dict[str, Any]:
    """Everything needed to say where the table comes from."""
    first = facts.loc[facts["label"] == cfg.baseline, "run_id"].iloc[0]
    return {
        "command": current_command(),
        "packages": package_versions(),
        "set": dataset,
        "prompts": int(totals[["domain", "prompt_id", "temperature"]].drop_duplicates().shape[0]),
        "baseline": cfg.baseline,
        "bootstrap": OmegaConf.to_container(cfg.bootstrap),
        "contract": contract(configs[first], totals[totals["run_id"] == first]),
        "baseline_config": OmegaConf.to_container(configs[first]),
        "runs": [asdict(manifests[r]) for r in facts["run_id"]],
    }


def show(table: pd.DataFrame, cfg: DictConfig) -> None:
    """The table on the terminal."""
    domains = [c for c in table if c.startswith("tau_") and c != "tau_spread"]
    level = f"{100 * float(cfg.bootstrap.level):.0f} %"
    drawn = Table(
        title=f"tau (bonus included), mean over seeds; difference to {cfg.baseline} with its {level} interval",
        title_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
    )
    heads = ["row", "tau ± sd", "difference", "verdict", "seeds", *(d.removeprefix("tau_") for d in domains)]
    for head in [*heads, "M parameters", "s a step", "cell"]:
        drawn.add_column(head, justify="left" if head in ("row", "verdict", "cell") else "right")
    for row in table.to_dict("records"):
        gap = "" if pd.isna(row["difference"]) else f"{row['difference']:+.3f}"
        if gap and not pd.isna(row["difference_low"]):
            gap += f" [{row['difference_low']:+.3f}, {row['difference_high']:+.3f}]"
        spread = "" if pd.isna(row["tau_spread"]) else f" ± {row['tau_spread']:.3f}"
        values = [
            escape(row["label"]),
            f"{row['tau']:.3f}{spread}",
            escape(gap),
            row["verdict"],
            str(row["seeds"]),
        ]
        values += [f"{row[d]:.3f}" for d in domains]
        drawn.add_row(*values, f"{row['parameters'] / 1e6:.1f}", f"{row['step_seconds']:.2f}", row["cell"])
    console.print(drawn)


def last_line(table: pd.DataFrame, dataset: str, totals: pd.DataFrame, out: Path) -> None:
    best = table.iloc[0]
    same = table[table["verdict"] == "not distinguishable"]["label"].tolist()
    unsure = f"; not distinguishable from the baseline: {', '.join(same)}" if same else ""
    prompts = totals[["domain", "prompt_id", "temperature"]].drop_duplicates().shape[0]
    console.print(
        f"[bold]best row {escape(best['label'])}: tau {best['tau']:.3f}[/bold] over {best['seeds']} seeds on {dataset} "
        f"({prompts} prompts){escape(unsure)}; tables in {out}",
        highlight=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
