"""The model card of an export, written from a run's own records. What nobody recorded is said to be unknown, never guessed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from dspark.config import Contract, DraftConfig
from dspark.export import ExportReport, Origin, serve_command
from dspark.runs import Run, RunManifest, read_table

BOOTSTRAP_DRAWS = 1000


def tau_interval(
    rounds: pd.DataFrame, *, draws: int = BOOTSTRAP_DRAWS, seed: int = 0, level: float = 0.95
) -> tuple[float, float]:
    """Percentile bootstrap interval of tau over prompts: rounds of one prompt are drawn together.

    `rounds` needs prompt_id, visit and accepted; tau = 1 + sum(visit * accepted) / sum(visit).
    """
    kept = rounds["visit"] * rounds["accepted"]
    by_prompt = (
        pd.DataFrame({"prompt": rounds["prompt_id"], "kept": kept, "visit": rounds["visit"]})
        .groupby("prompt")
        .sum()
    )
    chosen = np.random.default_rng(seed).integers(0, len(by_prompt), (draws, len(by_prompt)))
    values = 1.0 + by_prompt["kept"].to_numpy()[chosen].sum(1) / by_prompt["visit"].to_numpy()[chosen].sum(1)
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def measured_acceptance(run: Run) -> dict[str, dict[str, Any]]:
    """Every evaluation in the run by set: tau with its interval, survival by position, prompts, mode and temperature."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted((run.path / "eval").glob("*/summary.json")):
        summary = json.loads(path.read_text())
        rounds = read_table(path.parent / "rounds.parquet")
        low, high = tau_interval(rounds)
        found[path.parent.name] = {
            "tau": summary["tau"],
            "tau_low": low,
            "tau_high": high,
            "survival": summary["survival"],
            "prompts": int(rounds["prompt_id"].nunique()),
            "mode": str(rounds["mode"].iloc[0]),
            "temperatures": sorted({float(t) for t in rounds["temperature"]}),
            "draft_sampling": summary.get("draft_sampling", "greedy"),
            "num_proposals": summary.get("num_proposals", len(summary["survival"])),
        }
    return found


def model_card(
    report: ExportReport,
    *,
    config: DraftConfig,
    contract: Contract,
    origin: Origin,
    manifest: RunManifest,
    recipe: Mapping[str, Any],
    measured: Mapping[str, Mapping[str, Any]],
) -> str:
    """README.md of an export."""
    layout = "anchor-first" if config.sample_from_anchor else "fill-in (1+N)"
    command = serve_command(
        report.folder, origin, method=report.method, num_speculative_tokens=report.num_speculative_tokens
    )
    sections = [
        f"# {report.method} draft for {origin.verifier_name}",
        "A speculative-decoding draft: it proposes tokens, the verifier checks them, and the text is the verifier's own. "
        "Written by `python -m experiments.export`.",
        "## Serve it",
        f"```sh\n{command}\n```",
        _engine_table(report),
        "## What it is",
        _table(
            {
                "verifier": _or_unknown(origin.verifier_name),
                "verifier revision": _or_unknown(origin.verifier_revision),
                "verifier weights": _or_unknown(contract.verifier_sha),
                "layers, width": f"{config.num_layers} x {config.hidden_size} ({config.num_heads} heads, {config.num_kv_heads} KV heads)",
                "taps": f"residual stream after {', '.join(map(str, config.aux_layer_ids))} of {config.num_verifier_layers} layers",
                "block": f"{config.block_size} slots, {layout}: {config.num_proposals} proposals trained, {report.num_speculative_tokens} to serve",
                "draft vocabulary": f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens",
                "sequential head": f"{config.head}, rank {config.markov_rank}",
                "confidence head": "yes" if config.confidence else "no",
                "attention": _attention(config),
                "files": f"{report.tensors} tensors, {report.bytes:,} bytes of data in {len(report.files)} file(s), {report.layout} layout",
            }
        ),
        "## How it was trained",
        _table(_training(manifest, recipe)),
        "## Acceptance",
        _acceptance(measured, report),
        "## Limits",
        _limits(config, recipe, report),
    ]
    return "\n\n".join(sections) + "\n"


def _training(manifest: RunManifest, recipe: Mapping[str, Any]) -> dict[str, str]:
    if "imported_from" in manifest.data:
        return {
            "imported from": f"{manifest.data['imported_from']} ({manifest.data['kind']})",
            "recipe": "unknown here",
        }
    loss, trainer, optimizer = (recipe.get(k) or {} for k in ("loss", "trainer", "optimizer"))
    terms = " + ".join(f"{w:g} {n}" for n, w in (loss.get("terms") or {}).items() if w)
    return {
        "run": f"{manifest.run_id} (status {manifest.status}, commit {manifest.code.get('commit', 'unknown')[:12]})",
        "command": f"`{manifest.command}`",
        "data": f"{_or_unknown(manifest.data.get('documents'))} documents, responses by {_or_unknown(manifest.data.get('responses_by'))}, "
        f"prompt set {_or_unknown(manifest.data.get('prompts_sha'))}",
        "loss": f"{_or_unknown(terms or None)}, confidence weight {_or_unknown(loss.get('confidence'))}, decay_gamma {_or_unknown(loss.get('decay_gamma'))}",
        "optimisation": f"{_or_unknown(manifest.results.get('steps', trainer.get('max_steps')))} steps, learning rate "
        f"{_or_unknown(optimizer.get('lr'))}, rows of {_or_unknown(trainer.get('seq_length'))} tokens, {_or_unknown(trainer.get('anchors'))} anchors",
        "started from": _or_unknown((manifest.parent or {}).get("warm_start"))
        if manifest.parent
        else "its own initial weights",
    }


def _acceptance(measured: Mapping[str, Mapping[str, Any]], report: ExportReport) -> str:
    if not measured:
        return "Not measured in this run; `python -m experiments.evaluate` does that."
    rows = [
        "| set | prompts | mode | temperature | tau (95 % over prompts) | survival at 1.. |",
        "|---|---|---|---|---|---|",
    ]
    for name, m in measured.items():
        survival = " ".join(f"{v:.3f}" for v in m["survival"])
        temperatures = ", ".join(f"{t:g}" for t in m["temperatures"])
        rows.append(
            f"| {name} | {m['prompts']} | {m['mode']} | {temperatures} | {m['tau']:.3f} ({m['tau_low']:.3f} to {m['tau_high']:.3f}) | {survival} |"
        )
    return "\n".join(
        [
            *rows,
            "",
            "tau counts the bonus token: 1 + kept drafts a round, as vLLM's mean acceptance length does. Survival at i is the share of "
            "rounds that keep at least i drafts, vLLM's per-position rate.",
        ]
    )


def _limits(config: DraftConfig, recipe: Mapping[str, Any], report: ExportReport) -> str:
    longest = (recipe.get("trainer") or {}).get("seq_length")
    lines = [
        "- It fits this verifier only: same weights, same tokenizer, same chat template.",
        f"- Positions beyond {longest:,} tokens were never trained."
        if longest
        else "- The longest trained position is unknown.",
        f"- Rotary tables and `max_position_embeddings` reach {config.max_position_embeddings:,} tokens.",
    ]
    if config.pruned:
        lines.append(
            f"- It cannot propose the {config.vocab_size - config.draft_vocab_size:,} tokens outside its vocabulary."
        )
    lines += [f"- {note[0].upper()}{note[1:]}." for note in report.notes]
    return "\n".join(lines)


def _engine_table(report: ExportReport) -> str:
    rows = [f"| {e.version} | {'yes' if e.correct else '**no**'} | {e.note} |" for e in report.engines]
    return "\n".join(["| vLLM | decodes it correctly | note |", "|---|---|---|", *rows])


def _attention(config: DraftConfig) -> str:
    if set(config.layer_types) == {"full_attention"}:
        return "full in every layer, bidirectional within the block"
    kinds = ", ".join(k.removesuffix("_attention") for k in config.layer_types)
    return f"by layer: {kinds}; sliding layers see {config.sliding_window} tokens and are causal within the block"


def _table(rows: Mapping[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows.items())])


def _or_unknown(value: Any) -> str:
    return "unknown" if value is None else str(value)
