"""Turn a checkpoint that others wrote into a run folder: `python -m experiments.import_draft source=<folder or Hub id>`.

Afterwards `evaluate run=`, `train warm_start=` and `export run=` take it like any run.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from dspark.data.features import FeatureCache
from dspark.importing import import_draft, read_served, write_run
from dspark.runs import Run, current_command
from experiments.cli import command

console = Console()


@command("import_draft")
def main(cfg: DictConfig) -> None:
    import_checkpoint(cfg)


def import_checkpoint(cfg: DictConfig) -> Run:
    """The whole command; returns the folder it wrote as a run."""
    out = Path(cfg.out) if cfg.out else Path("runs") / f"imported-{Path(cfg.source).name}"
    if out.exists():
        raise ValueError(f"{out} exists; name another folder with out=, or remove it first.")
    cache = FeatureCache.open(cfg.cache, verify="sizes") if cfg.cache else None
    served = read_served(fetch(cfg.source, cfg.revision))
    imported = import_draft(
        served,
        verifier_contract=cache.contract() if cache else None,
        lm_head=cache.verifier_weights()["lm_head.weight"] if cache else None,
        num_verifier_layers=cfg.num_verifier_layers,
        sample_from_anchor=cfg.sample_from_anchor,
        convert_layout=bool(cfg.convert_layout),
        attention_backend="grouped",
    )
    run = write_run(imported, out, source=cfg.source, command=current_command(), overrides=[])
    for note in imported.notes:
        console.print(f"note: {note}", highlight=False)
    config = imported.draft.config
    console.print(
        f"[bold]{len(served.tensors)} tensors mapped[/bold] from {imported.kind} checkpoint {cfg.source}: {config.num_layers} layers, taps "
        f"{list(config.aux_layer_ids)}, block {config.block_size} {'anchor-first' if config.sample_from_anchor else 'fill-in'}, "
        f"head {config.head} rank {config.markov_rank}; run {run.path}",
        highlight=False,
        soft_wrap=True,
    )
    return run


def fetch(source: str, revision: str | None) -> Path:
    """A local folder as it is; anything else is a Hub id, of which configuration and safetensors are downloaded.

    Raises ValueError when neither works.
    """
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=["*.json", "*.safetensors"]))
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        raise ValueError(
            f"source={source} is neither a folder nor a Hub id that this machine can reach ({type(error).__name__})."
        ) from error


if __name__ == "__main__":
    main()
