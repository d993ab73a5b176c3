"""Measure drafts in a real engine: `python -m experiments.serve_bench target=<verifier> drafts=[...] prompts=[...]`.

Starts vLLM in its own process for the verifier alone and for each draft, or measures servers that are already running, over the
same prompts, temperatures and concurrencies. Writes table.csv, table.md, table.parquet, the raw results and the engines' logs.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig, ListConfig, OmegaConf
from rich.console import Console

from dspark.runs import current_command, utc_now, write_table, write_text
from dspark.serving import (
    VERIFIER_ALONE,
    Cell,
    DraftSpec,
    Server,
    cell_table,
    draft_spec,
    engine_job,
    markdown,
    read_prompts,
    run_worker,
)
from experiments.cli import command

DRAFT_KEYS = {"model", "label", "method", "num_speculative_tokens", "options"}
console = Console()


@command("serve_bench")
def main(cfg: DictConfig) -> None:
    serve_bench(cfg)


def serve_bench(cfg: DictConfig) -> pd.DataFrame:
    """The whole command; returns the table."""
    if bool(cfg.servers) == bool(cfg.target):
        raise ValueError(
            "give either target=<verifier> (and drafts) or servers=[{label, url}], one of the two."
        )
    if cfg.draft_sampling not in ("auto", "greedy", "probabilistic"):
        raise ValueError(f"draft_sampling is {cfg.draft_sampling!r}; expected auto, greedy or probabilistic.")
    sets = {Path(p).stem: read_prompts(Path(p), cfg.limit) for p in cfg.prompts}
    cells = [
        Cell(
            name,
            float(t),
            int(c),
            int(cfg.max_tokens),
            cfg.seed,
            int(c) * int(cfg.waves) if cfg.waves else None,
        )
        for t in cfg.temperatures
        for c in cfg.concurrencies
        for name in sets
    ]
    out = Path(cfg.out) if cfg.out else Path("outputs/serve_bench") / time.strftime("%Y%m%d-%H%M%S")
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[dict[str, Any]]] = {}
    engines: dict[str, Any] = {}
    predicted: dict[str, Any] = {}
    if cfg.servers:
        for entry in cfg.servers:
            label, url = str(entry.label), str(entry.url)
            server = Server(url, timeout=float(cfg.timeout))
            engines[label] = {"url": url, "model": server.model}
            results[label] = []
            for cell in cells:
                with console.status(f"{label}: {cell.set} T={cell.temperature:g} C={cell.concurrency}"):
                    results[label].append(server.run_cell(sets[cell.set], cell, template(cfg)))
                console.print(progress_line(label, results[label][-1]), highlight=False)
    else:
        for spec in configurations(cfg):
            predicted[spec.label] = spec.predicted
            job = engine_job(
                cfg.target,
                sets,
                cells,
                engine=engine_arguments(cfg),
                speculative=spec.speculative or None,
                warmup=int(cfg.warmup),
                template=template(cfg),
                resolve=not cfg.jobs_only,
            )
            if cfg.jobs_only:
                write_text(out / f"{spec.label}.job.json", json.dumps(job))
                continue
            if cfg.results:
                answer = read_result(Path(cfg.results) / f"{spec.label}.json")
                results[spec.label], engines[spec.label] = answer["cells"], answer["engine"]
                continue
            console.print(f"{spec.label}: starting vLLM; log {out / spec.label}.log", highlight=False)
            with console.status(f"{spec.label}: 0/{len(cells)} cells") as status:
                answer = run_worker(
                    cfg.python or sys.executable,
                    job,
                    out,
                    spec.label,
                    timeout=float(cfg.timeout),
                    environment={k: str(v) for k, v in cfg.environment.items()},
                    progress=lambda n, s=status, label=spec.label: s.update(
                        f"{label}: {n}/{len(cells)} cells"
                    ),
                )
            results[spec.label], engines[spec.label] = answer["cells"], answer["engine"]
            for cell in answer["cells"]:
                console.print(progress_line(spec.label, cell), highlight=False)
    if cfg.jobs_only:
        jobs = sorted(p.name for p in out.glob("*.job.json"))
        console.print(f"[bold]{len(jobs)} jobs[/bold] in {out}: {', '.join(jobs)}", highlight=False)
        return pd.DataFrame()
    return report(out, cell_table(results, predicted), engines)


def read_result(path: Path) -> dict[str, Any]:
    """What a worker left elsewhere. Raises ValueError when it is missing; a job that was cut short counts as far as it got."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist; results= expects one <label>.json for every configuration.")
    return json.loads(path.read_text())


def configurations(cfg: DictConfig) -> list[DraftSpec]:
    """The engines to start: the verifier alone, then each draft, each again with adaptive verification where asked."""
    specs = [DraftSpec(VERIFIER_ALONE, {}, {})] if cfg.verifier_alone else []
    sampling = cfg.draft_sampling
    if sampling == "auto":
        sampling = "probabilistic" if any(t > 0 for t in cfg.temperatures) else "greedy"
    for entry in cfg.drafts:
        given = {"model": entry} if isinstance(entry, str) else OmegaConf.to_container(entry, resolve=True)
        if unknown := sorted(set(given) - DRAFT_KEYS):
            raise ValueError(f"drafts: unknown keys {unknown}; expected {sorted(DRAFT_KEYS)}.")
        options = given.get("options") or {}
        spec = draft_spec(
            given["model"],
            label=given.get("label"),
            method=given.get("method"),
            num_speculative_tokens=given.get("num_speculative_tokens"),
            options=options,
        )
        if spec.speculative["method"] == "dspark" and sampling == "probabilistic":
            spec = replace(spec, speculative={"draft_sample_method": sampling, **spec.speculative})
        specs.append(spec)
        if cfg.adaptive and spec.speculative["method"] == "dspark":
            adaptive = {**spec.speculative, "enable_adaptive_verification": True}
            specs.append(replace(spec, label=f"{spec.label}-adaptive", speculative=adaptive))
    labels = [s.label for s in specs]
    if len(set(labels)) != len(labels):
        raise ValueError(f"drafts: labels {labels} repeat; give each its own label.")
    return specs


def engine_arguments(cfg: DictConfig) -> dict[str, Any]:
    arguments = OmegaConf.to_container(cfg.engine, resolve=True)
    if arguments.get("max_num_seqs") is None:
        arguments["max_num_seqs"] = max(int(c) for c in cfg.concurrencies)
    return arguments


def template(cfg: DictConfig | ListConfig) -> dict[str, Any]:
    return OmegaConf.to_container(cfg.template, resolve=True)


def progress_line(label: str, cell: dict[str, Any]) -> str:
    drafts = cell["counters"].get("drafts")
    length = f", accept length {1 + cell['counters']['accepted'] / drafts:.3f}" if drafts else ""
    return (
        f"{label}: {cell['set']} T={cell['temperature']:g} C={cell['concurrency']}: "
        f"{cell['output_tokens'] / cell['seconds']:.1f} tok/s over {len(cell['requests'])} requests{length}"
    )


def report(out: Path, table: pd.DataFrame, engines: dict[str, Any]) -> pd.DataFrame:
    """Write the table and how it was made; print it and the last line."""
    write_table(table, out / "table.parquet")
    table.to_csv(out / "table.csv", index=False)
    write_text(out / "table.md", markdown(table))
    draw(table, out / "table.png")
    manifest = {"command": current_command(), "at": utc_now(), "engines": engines}
    write_text(out / "manifest.json", json.dumps(manifest, indent=2) + "\n")
    print(markdown(table), end="")
    drafted = table[(table["config"] != VERIFIER_ALONE) & table["accept_length"].notna()]
    if drafted.empty:
        console.print(
            f"[bold]{len(table)} rows[/bold], no draft measured; {out / 'table.md'}", highlight=False
        )
        return table
    best = drafted.sort_values("speed_up", ascending=False, na_position="last").iloc[0]
    speed = f", {best['speed_up']:.2f} x the verifier alone" if best["speed_up"] == best["speed_up"] else ""
    expected = best["predicted_accept_length"]
    against = f" (predicted {expected:.3f})" if expected == expected else ""
    console.print(
        f"[bold]{best['config']}: accept length {best['accept_length']:.3f}{against}{speed}[/bold] on {best['set']} at T={best['temperature']:g}, "
        f"concurrency {best['concurrency']}; {out / 'table.md'}",
        highlight=False,
        soft_wrap=True,
    )
    return table


def draw(table: pd.DataFrame, path: Path) -> None:
    """Speed-up by load for the temperatures with the most loads, and accept length against the prediction where there is one."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from dspark.analysis import serving as figures
    from dspark.analysis.style import panels, use_style

    predicted = table.dropna(subset=["predicted_accept_length", "accept_length"])
    loads = figures.sped_up(table).groupby("temperature")["concurrency"].nunique()
    # One load beside a curve would be a panel with one point.
    temperatures = list(loads.index[loads == loads.max()])
    if not temperatures and predicted.empty:
        return
    use_style()
    axes = panels(len(temperatures) + (not predicted.empty), width=5.0, height=3.8, sharey=False)
    for ax, temperature in zip(axes, temperatures, strict=False):
        figures.plot_speed_up(table, ax, temperature=temperature)
    if not predicted.empty:
        requests = predicted.groupby("concurrency")["requests"].sum()
        figures.plot_prediction(table, axes[-1], concurrency=int(requests.idxmax()))
    plt.savefig(path)
    plt.close("all")


if __name__ == "__main__":
    main()
