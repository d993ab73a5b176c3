"""Calibrate a run's confidence head: `python -m experiments.calibrate run=runs/<id> [method=affine] [by_domain=true]`.

Reads the slot tables that `experiments.evaluate` left in the run, fits on one set, judges on another, and writes

    calibration.json      the chosen scales and shifts, the single affine, maps of the free signals (dspark.calibration)
    calibration.parquet   ECE, Brier, log loss, AUC and mean bias with intervals, by predictor, domain and position;
                          every method is in it, chosen or not
    reliability.parquet   the bins behind the reliability diagrams
    thresholds.parquet    what a static threshold keeps and loses, raw and calibrated
    manifest.json         what was read and how
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from omegaconf import DictConfig
from rich.console import Console

from dspark import calibration as cal
from dspark.runs import (
    Run,
    current_command,
    load_draft,
    read_table,
    save_draft,
    utc_now,
    write_table,
    write_text,
)
from dspark.simulation import threshold_sweep
from experiments.cli import command

console = Console()


@command("calibrate")
def main(cfg: DictConfig) -> None:
    calibrate(cfg)


def calibrate(cfg: DictConfig) -> Path:
    """The whole command; returns the folder it wrote."""
    if cfg.fit == cfg.report:
        raise ValueError(
            f"fit and report are both {cfg.fit!r}; a calibration judged on the set it was fitted on says nothing. "
            "Give two sets, for example fit=validation report=test."
        )
    cal.stage_of(cfg.method, by_domain=bool(cfg.by_domain))  # refuse before any work
    run = Run.open(cfg.run)
    if cfg.fold:
        run.checkpoint("best")
    out = Path(cfg.out) if cfg.out else run.path / "calibration"
    fit_set, report_set = evaluated_set(run, cfg.fit), evaluated_set(run, cfg.report)
    slots = {name: read_table(run.eval_folder(name) / "slots.parquet") for name in (fit_set, report_set)}
    fit, report = (cal.rounds_of(slots[name]) for name in (fit_set, report_set))
    for name, rounds in ((fit_set, fit), (report_set, report)):
        cal.require_calibratable(
            rounds, what=f"set {name!r} of run {run.path.name}", min_rounds=int(cfg.min_rounds)
        )
    cal.require_disjoint(fit, report, fit_name=fit_set, report_name=report_set)
    if cfg.by_domain:
        require_domains(fit, report, fit_set=fit_set, report_set=report_set, min_rounds=int(cfg.min_rounds))
    for column in ("draft_sampling", "temperature", "mode"):
        kinds = [sorted(slots[name][column].unique()) for name in (fit_set, report_set)]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"{fit_set} was measured with {column} {kinds[0]}, {report_set} with {kinds[1]}; a calibration belongs to "
                "one way of drafting. Evaluate both sets in the same way."
            )
    signals = [s for s in cfg.signals if not np.isnan(fit.values[s][fit.present]).any()]

    with console.status("fitting scales and shifts"):
        fitted = cal.fit(
            fit,
            run_id=run.path.name,
            method=cfg.method,
            by_domain=bool(cfg.by_domain),
            grid=cal.temperature_grid(
                low=float(cfg.grid.low), high=float(cfg.grid.high), points=int(cfg.grid.points)
            ),
            bins=int(cfg.bins),
            binning=cfg.fit_binning,
            signals=signals,
            source=_source(fit_set, slots[fit_set], fit),
        )
    with console.status("measuring, with bootstrap over prompts"):
        metrics, bins = cal.report_table(
            fitted,
            report,
            bins=int(cfg.bins),
            draws=int(cfg.bootstrap.draws),
            level=float(cfg.bootstrap.level),
            seed=int(cfg.bootstrap.seed),
        )
    head, chosen = report.values["confidence"], fitted.calibration.stage
    calibrated = fitted.calibration.p_accept_given_prefix(head, report.frame["domain"].to_numpy())
    sweeps = [
        threshold_sweep(report, score, np.linspace(0.0, 0.8, int(cfg.thresholds)).tolist()).assign(
            stage=stage
        )
        for stage, score in (("raw", head), (chosen, calibrated))
    ]
    summary = mean_ece(metrics)
    calibration = replace(
        fitted.calibration, report={**_source(report_set, slots[report_set], report), "mean_ece": summary}
    )
    calibration.write(out / "calibration.json")
    for name, table in (
        ("calibration", metrics),
        ("reliability", compact(bins)),
        ("thresholds", pd.concat(sweeps, ignore_index=True)),
    ):
        write_table(table.assign(run_id=run.path.name), out / f"{name}.parquet")
    write_text(out / "manifest.json", _manifest(run, cfg, calibration))
    if cfg.fold:
        folder = fold_into_checkpoint(run, calibration, out / "folded")
        console.print(f"affine folded into {folder}", highlight=False)
    for line in _lines(summary):
        console.print(line, highlight=False, soft_wrap=True)
    overall = summary["confidence"][cal.ALL]
    worst = max(set(summary["confidence"]) - {cal.ALL}, key=lambda d: summary["confidence"][d][chosen])
    console.print(
        f"[bold]mean ECE of the prefix product {100 * overall['raw']:.2f} % -> {100 * overall[chosen]:.2f} %[/bold] "
        f"({chosen}; worst domain {worst} {100 * summary['confidence'][worst][chosen]:.2f} %) on {report_set} ({report.frame['visit'].sum():.0f} rounds, {report.frame['prompt_id'].nunique()} prompts); "
        f"{out / 'calibration.json'}",
        highlight=False,
        soft_wrap=True,
    )
    return out


def evaluated_set(run: Run, name: str) -> str:
    """The evaluated set called `name`, or the only one that ends in -`name` (test for smollm2-test).

    Raises ValueError that lists the run's sets if there is none or more than one.
    """
    sets = sorted(p.parent.name for p in (run.path / "eval").glob("*/slots.parquet"))
    if name in sets:
        return name
    endings = [s for s in sets if s.endswith(f"-{name}")]
    if len(endings) != 1:
        raise ValueError(
            f"run {run.path.name} has {'more than one' if endings else 'no'} evaluated set {name!r}; it has {sets}. "
            "Evaluate the run on that set with experiments.evaluate, or name one of these."
        )
    return endings[0]


def require_domains(
    fit: cal.Rounds, report: cal.Rounds, *, fit_set: str, report_set: str, min_rounds: int
) -> None:
    """Raise ValueError unless each domain can be fitted by itself, and each domain of the report set is among them."""
    domain = fit.frame["domain"].to_numpy()
    for name in sorted(set(domain)):
        cal.require_calibratable(
            fit.take(domain == name), what=f"domain {name!r} of set {fit_set!r}", min_rounds=min_rounds
        )
    unseen = sorted(set(report.frame["domain"]) - set(domain))
    if unseen:
        raise ValueError(
            f"by_domain=true, and set {report_set!r} has domains {unseen} that {fit_set!r} lacks; evaluate the run on "
            "prompts of these domains too, or use by_domain=false."
        )


def compact(bins: pd.DataFrame) -> pd.DataFrame:
    """The bins in single precision: they are only drawn, and the file is copied into results."""
    return bins.astype({name: np.float32 for name in ("low", "high", "predicted", "observed", "weight")})


def mean_ece(metrics: pd.DataFrame) -> dict[str, dict[str, dict[str, float]]]:
    """ECE of the prefix product, equal-width bins, averaged over positions: signal -> domain -> stage."""
    rows = metrics.query("quantity == 'p_prefix_survives' and metric == 'ece' and binning == 'width'")
    means = rows.groupby(["signal", "domain", "stage"])["value"].mean()
    table: dict[str, dict[str, dict[str, float]]] = {}
    for (signal, domain, stage), value in means.items():
        table.setdefault(signal, {}).setdefault(domain, {})[stage] = round(float(value), 6)
    return table


def fold_into_checkpoint(run: Run, calibration: cal.Calibration, folder: Path) -> Path:
    """Copy the run's best checkpoint with the affine in its confidence head; engines then read calibrated logits."""
    draft, contract, facts = load_draft(run.checkpoint("best"), attention_backend="grouped")
    if draft.confidence_head is None:
        raise ValueError(f"run {run.path.name} has no confidence head to fold a calibration into.")
    head = draft.confidence_head.proj
    head.weight.data, head.bias.data = cal.fold_affine(
        head.weight.data, head.bias.data, calibration.scale, calibration.shift
    )
    save_draft(
        draft, folder, contract, {**facts, "confidence_affine": [calibration.scale, calibration.shift]}
    )
    return folder


def _source(name: str, slots: pd.DataFrame, rounds: cal.Rounds) -> dict[str, Any]:
    return {
        "set": name,
        "mode": sorted(slots["mode"].unique()),
        "temperature": sorted(float(t) for t in slots["temperature"].unique()),
        "draft_sampling": sorted(slots["draft_sampling"].unique()),
        "prompts": int(rounds.frame["prompt_id"].nunique()),
        "rounds": float(rounds.frame["visit"].sum()),
    }


def _manifest(run: Run, cfg: DictConfig, calibration: cal.Calibration) -> str:
    content = {
        "run_id": run.path.name,
        "command": current_command(),
        "written": utc_now(),
        "fit": dict(calibration.fit),
        "report": {k: v for k, v in calibration.report.items() if k != "mean_ece"},
        "method": calibration.method,
        "by_domain": bool(cfg.by_domain),
        "bins": int(cfg.bins),
        "bootstrap": {k: cfg.bootstrap[k] for k in ("draws", "level", "seed")},
    }
    return json.dumps(content, indent=2) + "\n"


def _lines(summary: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    order = ("raw", "mapped", "affine", "sts", "sts_by_domain", "sas", "sas_by_domain", "isotonic")
    return [
        f"  {signal:<11}{domain:<5}" + "  ".join(f"{s} {100 * stages[s]:.2f} %" for s in order if s in stages)
        for signal, domains in summary.items()
        for domain, stages in domains.items()
    ]


if __name__ == "__main__":
    main()
