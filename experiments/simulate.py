"""What scheduling buys: `python -m experiments.simulate run=runs/<id> [costs=...]`.

Walks the rounds of a replayed slot table at several concurrencies under each policy and a step-cost table (the model is
stated in `dspark.simulation`), and writes

    simulation.parquet   throughput, speed per user, waste and gain of every policy, concurrency and domain mix
    break_even.parquet   by block length: the acceptance at which speculation pays, and whether it does
    costs.parquet        the step-cost curve that was used
    manifest.json        what was read and how

`python -m experiments.simulate benchmark=true` times the simulator itself on made-up rounds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import track

from dspark import calibration as cal
from dspark.costs import CostTable, fit_hinge
from dspark.runs import Run, current_command, read_table, utc_now, write_table, write_text
from dspark.simulation import Policy, Walk, break_even, compare, lanes_of, run, walk_of
from experiments.calibrate import evaluated_set
from experiments.cli import CONFIGS, command

console = Console()


@command("simulate")
def main(cfg: DictConfig) -> None:
    if cfg.benchmark:
        benchmark(cfg)
    else:
        simulate(cfg)


def simulate(cfg: DictConfig) -> Path:
    """The whole command; returns the folder it wrote."""
    if not cfg.run:
        raise ValueError(
            "no run was given; use run=runs/<id>, or benchmark=true to time the simulator alone."
        )
    source = Run.open(cfg.run)
    costs = load_costs(cfg)
    dataset = evaluated_set(source, cfg.set)
    slots = read_table(source.eval_folder(dataset) / "slots.parquet")
    rounds = cal.rounds_of(slots)
    walk, order = walk_of(rounds)
    calibration = load_calibration(cfg, source, dataset)
    conditional, prefix = scores_of(
        rounds.take(order),
        calibration,
        sampled=set(slots["draft_sampling"]) == {"sampled"},
        free_signals=bool(cfg.free_signals),
    )
    policies = policies_of(cfg, walk.num_proposals, prefix)
    out = Path(cfg.out) if cfg.out else source.path / "simulation" / costs.name
    cells = [(mix, int(requests)) for mix in cfg.mixes for requests in cfg.concurrency]
    results, even = [], []
    for mix, requests in track(
        cells, description=f"{len(policies)} policies", console=console, transient=True
    ):
        results.append(
            compare(
                walk,
                policies,
                conditional,
                prefix_scores=prefix,
                costs=costs,
                mix=mix,
                requests=requests,
                replicas=int(cfg.replicas),
                servers=max(1, int(cfg.lanes) // (int(cfg.replicas) * requests)),
                steps=int(cfg.steps),
                warmup=int(cfg.warmup),
                resample=bool(cfg.resample),
                seed=int(cfg.seed),
            )
        )
        even.append(break_even(walk, costs, mix=mix, requests=requests))
    table, even_table = (
        pd.concat(t, ignore_index=True).assign(run_id=source.path.name) for t in (results, even)
    )
    write_table(table, out / "simulation.parquet")
    write_table(even_table, out / "break_even.parquet")
    write_table(
        cost_curve(costs, int(max(cfg.concurrency)) * (walk.num_proposals + 1)), out / "costs.parquet"
    )
    write_text(out / "manifest.json", _manifest(cfg, source, costs, slots, calibration))
    for line in _lines(table, even_table, costs):
        console.print(line, highlight=False, soft_wrap=True)
    return out


def load_costs(cfg: DictConfig) -> CostTable:
    """The step-cost table by name or path, smoothed and with drafting costs as configured."""
    path = Path(cfg.costs)
    if not path.suffix:
        path = Path(CONFIGS) / "cost" / f"{cfg.costs}.json"
        if not path.is_file():
            known = sorted(p.stem for p in path.parent.glob("*.json"))
            raise ValueError(f"cost table {cfg.costs!r} is unknown; expected a path or one of {known}.")
    costs = CostTable.read(path)
    if cfg.smooth:
        costs = fit_hinge(costs)
    if cfg.draft_ms is not None:
        costs = costs.with_draft(fixed_ms=float(cfg.draft_ms), per_request_ms=float(cfg.draft_ms_per_request))
    return costs


def load_calibration(cfg: DictConfig, source: Run, dataset: str) -> cal.Calibration | None:
    """The run's calibration, or None where it has none. Raises ValueError if it was fitted on the simulated set."""
    path = Path(cfg.calibration) if cfg.calibration else source.path / "calibration" / "calibration.json"
    if not cfg.calibration and not path.is_file():
        return None
    calibration = cal.Calibration.read(path)
    if calibration.fit.get("set") == dataset:
        raise ValueError(
            f"{path} was fitted on {dataset!r}, the set to simulate; calibrated confidences would be flattered. "
            f"Simulate another set, or calibrate with fit=<another set> report={dataset}."
        )
    return calibration


def scores_of(
    rounds: cal.Rounds, calibration: cal.Calibration | None, *, sampled: bool, free_signals: bool
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(p_accept_given_prefix, p_prefix_survives) by source, 0 where no slot is.

    raw          the head as it is
    calibrated   after the calibration's scaling, by domain where it was fitted so
    max_prob, entropy, margin   free signals, mapped and scaled on the calibration's fit set in the same way
    alpha        with `sampled` drafts only: the true chance of acceptance, what a perfect head would say
    """
    conditional = {"alpha": np.clip(rounds.values["alpha"], 0.0, 1.0)} if sampled else {}
    head, domain = rounds.values["confidence"], rounds.frame["domain"].to_numpy()
    if not np.isnan(head[rounds.present]).any():
        conditional["raw"] = head
        if calibration is not None:
            conditional["calibrated"] = calibration.p_accept_given_prefix(head, domain)
    if calibration is not None and free_signals:
        for name, mapping in calibration.signals.items():
            score = cal.signal_score(name, rounds.values[name])
            conditional[name] = mapping.p_accept_given_prefix(score, domain)
    conditional = {name: np.where(rounds.present, np.nan_to_num(c), 0.0) for name, c in conditional.items()}
    return conditional, {name: cal.p_prefix_survives(c) for name, c in conditional.items()}


def policies_of(cfg: DictConfig, num_proposals: int, sources: Mapping[str, Any]) -> list[Policy]:
    """Every policy that the table's confidences allow."""
    policies = [Policy("none", "-", float("nan")), Policy("oracle", "outcome", float("nan"))]
    policies += [Policy("fixed", "-", float(n)) for n in cfg.fixed or range(1, num_proposals + 1)]
    head = next((s for s in ("calibrated", "raw") if s in sources), None)
    if head:
        policies += [Policy("threshold", head, float(t)) for t in cfg.thresholds]
    policies += [Policy("scheduler", source, float("nan")) for source in sources]
    best = head or next(iter(sources), None)
    kinds = ("scheduler_async", "scheduler_global") if best else ()
    return policies + [Policy(kind, best, float("nan")) for kind in kinds]


def cost_curve(costs: CostTable, most: int) -> pd.DataFrame:
    """The table's points up to `most` tokens and a fine curve between: cost, tokens, verify_ms, kind (point | curve)."""
    fine = np.unique(np.r_[np.arange(1, min(most, 1024) + 1), np.linspace(1, most, 512).astype(int)])
    at = {"point": costs.tokens[costs.tokens <= most], "curve": fine}
    parts = [
        pd.DataFrame({"tokens": x, "verify_ms": costs.verify_ms_at(x), "kind": kind})
        for kind, x in at.items()
    ]
    table = pd.concat(parts, ignore_index=True)
    return table.assign(cost=costs.name, extrapolated=costs.is_extrapolated(table["tokens"].to_numpy()))


def _manifest(
    cfg: DictConfig, source: Run, costs: CostTable, slots: pd.DataFrame, calibration: cal.Calibration | None
) -> str:
    content = {
        "run_id": source.path.name,
        "command": current_command(),
        "written": utc_now(),
        "set": str(slots["dataset"].iloc[0]),
        "prompts": int(slots["prompt_id"].nunique()),
        "documents": int(slots["doc_id"].nunique()),
        "calibration": calibration.stage if calibration else None,
        "calibration_fit": dict(calibration.fit) if calibration else None,
        "cost": {
            "name": costs.name,
            "kind": costs.kind,
            "draft_ms_at_1": float(costs.draft_ms_at(np.array(1))),
            "provenance": dict(costs.provenance),
        },
        "steps": int(cfg.steps),
        "lanes": int(cfg.lanes),
        "replicas": int(cfg.replicas),
        "resample": bool(cfg.resample),
        "seed": int(cfg.seed),
    }
    return json.dumps(content, indent=2) + "\n"


def _lines(table: pd.DataFrame, even: pd.DataFrame, costs: CostTable) -> list[str]:
    """A line a concurrency of the first mix (the best static policy, then the scheduler), then the verdict."""
    mix = table["mix"].iloc[0]
    lines = []
    for requests, rows in table[table["mix"] == mix].groupby("concurrency"):
        static = rows[rows["policy"].isin(["none", "fixed", "threshold"])].nlargest(1, "throughput").iloc[0]
        setting = "" if np.isnan(static["setting"]) else f" {static['setting']:g}"
        line = f"  {requests:>4} requests: {static['policy']}{setting} {static['throughput']:.4g} tok/s, {static['speed_up']:.2f}x plain"
        for source in ("calibrated", "raw", "alpha"):
            of_source = rows[rows["source"] == source].set_index("policy")
            if "scheduler" in of_source.index:
                chosen = of_source.loc["scheduler"]
                line += (
                    f"; scheduler ({source}) {chosen['throughput']:.4g} tok/s ({100 * chosen['gain']:+.1f} %), "
                    f"asynchronous {of_source.loc['scheduler_async', 'throughput']:.4g}"
                )
                break
        lines.append(line)
    best = even[even["best"] & (even["mix"] == mix)]
    losing = best.loc[best["drafts"] == 0, "concurrency"].tolist()
    free = "" if costs.has_draft else "; drafting was taken as free, set draft_ms to change that"
    lines.append(
        f"[bold]best block length by concurrency: "
        f"{', '.join(f'{r.concurrency}: {r.drafts}' for r in best.itertuples())}[/bold]; "
        f"{f'no speed-up from any fixed length at {losing}' if losing else 'a fixed length pays at every concurrency'}{free}"
    )
    return lines


def benchmark(cfg: DictConfig) -> dict[str, float]:
    """Time `benchmark_rounds` scheduler steps at concurrency 256 on one core; prints the seconds and the rate."""
    rng = np.random.default_rng(0)
    steps, requests, width, documents, tokens = int(cfg.benchmark_rounds), 256, 7, 500, 200
    keep = rng.beta(3.0, 1.0, size=(documents * tokens, width)).astype(np.float32)
    anchor = np.tile(np.arange(tokens), documents)
    row = np.arange(documents * tokens)
    landing = anchor[:, None] + 1 + np.arange(width + 1)
    walk = Walk(
        kept=np.cumprod(keep, axis=1),
        available=np.minimum(width, tokens - anchor).astype(np.int32),
        remaining=(tokens - anchor).astype(np.int32),
        next_round=np.where(landing < tokens, row[:, None] + 1 + np.arange(width + 1), -1).astype(np.int32),
        first=np.arange(documents) * tokens,
        prompt=np.arange(documents),
        domain=np.full(documents, "all"),
        document=row // tokens,
        visit=np.full(documents * tokens, 0.3),
    )
    costs = load_costs(cfg)
    lanes = lanes_of(walk, mix="all", requests=requests, replicas=1, servers=1, resample=False, rng=rng)
    started = time.perf_counter()
    totals = run(
        walk,
        Policy("scheduler", "raw", float("nan")),
        score=walk.kept,
        costs=costs,
        lanes=lanes,
        steps=steps,
        warmup=0,
        seed=0,
    )
    seconds = time.perf_counter() - started
    rate = steps * requests / seconds
    console.print(
        f"[bold]{steps} steps x {requests} requests ({steps * requests / 1e6:.1f} M rounds) in {seconds:.1f} s[/bold]: "
        f"{rate / 1e6:.2f} M rounds/s on one core; simulated {float(totals.emitted.sum()) / 1e6:.1f} M tokens",
        highlight=False,
        soft_wrap=True,
    )
    return {"seconds": seconds, "rounds_per_second": rate}


if __name__ == "__main__":
    main()
