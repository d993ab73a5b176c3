"""Train a DSpark draft on a feature cache: `python -m experiments.train [overrides]`.

With no argument it trains the embedded default (and collects its cache first when there is none). The last line says what was
reached and where the run is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from dspark.config import Contract
from dspark.data.batches import PackedRows
from dspark.data.features import Features
from dspark.data.online import OnlineFeatures
from dspark.nn.draft import Draft
from dspark.nn.float8 import require_float8, use_float8
from dspark.runs import Run, RunManifest, current_command, load_draft, new_run_id
from dspark.training import (
    BadFeatures,
    DraftData,
    DraftModule,
    MetricsTable,
    StreamedCheckpoints,
    check_parallel,
    checkpoint_path,
)
from dspark.vocab import VocabMap
from dspark.warm_start import start_from_bigrams, start_from_draft, start_from_verifier_layers
from experiments.build import (
    build_draft,
    build_draft_config,
    build_loss,
    build_optimizer,
    build_vocab,
    check_keys,
)
from experiments.cli import command
from experiments.collect import evenly, load_verifier
from experiments.evaluate import replay_split
from experiments.resume import check_resumable, record_resumed, resumed_config
from experiments.sharing import Shared, shared_by_cells
from experiments.sweep import Outcome, cell_overrides, config_sha, finished_run, in_sweep

console = Console()

PRECISIONS = ("auto", "bf16-mixed", "bf16-masters", "32-true")


@command("train")
def main(cfg: DictConfig) -> Outcome:
    if cfg.resume:
        cfg = resumed_config(cfg, cell_overrides())
    skip = in_sweep() if cfg.skip_finished is None else bool(cfg.skip_finished)
    done = finished_run(Path(cfg.runs), config_sha(cfg)) if skip else None
    if done is None:
        return Outcome(train(cfg, shared_by_cells() if in_sweep() else Shared()), trained=True)
    console.print(f"finished already: run {done.path}", highlight=False, soft_wrap=True)
    return Outcome(done, trained=False)


def train(cfg: DictConfig, shared: Shared | None = None) -> Run:
    """The whole run: cache, draft, optimisation with replay validation, and the test split. Returns the finished run.

    Trainings given the same `shared` open, load and count their data once, as long as they agree on them.
    """
    shared = Shared() if shared is None else shared
    check_keys(cfg)
    check_float8(cfg)
    precision = resolve_precision(cfg.trainer.precision, cfg.trainer.accelerator)
    check_parallel(
        graph=bool(cfg.trainer.graph),
        masters=precision == "bf16-masters",
        processes=process_count(cfg),
        sharded=cfg.trainer.strategy == "fsdp2",
    )
    started = time.time()
    resumed = Run.open(cfg.resume) if cfg.resume else None
    if resumed is not None:
        check_resumable(resumed, cfg)  # refuse before any expensive work
    quiet()
    cache = shared.features(cfg)
    L.seed_everything(cfg.seed, verbose=False)  # here, whether or not opening has drawn numbers
    rows, validation = split_documents(cfg, cache)
    steps = budgeted_steps(cfg, rows)
    frozen_dtype = torch.bfloat16 if precision.startswith("bf16") else torch.float32
    earlier = WarmStart.open(cfg.warm_start) if cfg.warm_start and resumed is None else None
    vocab = build_vocab(cfg, cache.manifest, shared.response_counts(cache, rows.documents))
    if earlier is not None and len(earlier.draft.vocab) == len(vocab):
        vocab = earlier.draft.vocab  # head rows mean its tokens, however often this cache's answers use them
    draft = build_draft(cfg, build_draft_config(cfg, cache.manifest, len(vocab)), cache, vocab, frozen_dtype)
    draft.compile_regions = bool(cfg.trainer.compile)
    draft.checkpoint_layers = bool(cfg.trainer.checkpoint_layers)
    if cfg.trainer.float8:
        use_float8(draft, scaling=cfg.trainer.float8)
    contract = cache.contract().merged(**{k: v for k, v in vars(draft.contract).items() if v is not None})
    cache.contract().check(
        draft.contract, mine=f"{cache.name} {cache.path}", theirs="the draft's configuration"
    )
    if resumed is None:
        start_weights(cfg, draft, contract, cache, rows.documents, vocab, earlier, shared)

    run = resumed or start_run(cfg, cache, rows)
    if rank_zero_only.rank == 0:
        if resumed is not None:
            record_resumed(run, cfg)
        console.print(
            describe(cfg, draft, cache, rows, precision, steps, run), highlight=False, soft_wrap=True
        )
    module = DraftModule(
        draft=draft,
        contract=contract,
        loss=build_loss(cfg),
        optimizer=build_optimizer(cfg),
        confidence_detach_inputs=bool(cfg.confidence.detach_inputs),
        chunk_rows=int(cfg.trainer.chunk_rows),
        graph=bool(cfg.trainer.graph),
        masters=precision == "bf16-masters",
        verifier_norm=verifier_norm(cache),
        run=run,
    )
    data = DraftData(
        cache=cache,
        rows=rows,
        validation=validation,
        rows_per_batch=int(cfg.trainer.rows_per_batch),
        total_batches=steps * int(cfg.trainer.accumulate),
        num_workers=int(cfg.trainer.num_workers),
        resident=bool(cfg.trainer.resident),
    )
    trainer = build_trainer(cfg, run, rows, precision, steps)
    try:
        if data.resident and trainer.world_size == 1:
            shared.make_resident(rows, trainer.strategy.root_device, validation)
        training_started = time.time()
        trainer.fit(module, data, ckpt_path=checkpoint_path(run) if resumed else None, weights_only=False)
        seconds = time.time() - training_started
        if module.validated_step != trainer.global_step:  # stopped by time, between two validations
            trainer.validate(module, datamodule=data, verbose=False)
        results = finish(cfg, run, cache, seconds, module, trainer)
    except BaseException as error:
        if trainer.is_global_zero:
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            run.finish(status, {"error": str(error)[:500]})
        raise
    if trainer.is_global_zero:
        console.print(last_line(run, results, time.time() - started), highlight=False, soft_wrap=True)
    return run


def quiet() -> None:
    """Lightning's tips and device banners say nothing about the run."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning.*")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def split_documents(cfg: DictConfig, cache: Features) -> tuple[PackedRows, list[int]]:
    """Training rows and the validation documents: the split's greedy answers, evenly spread."""
    train_documents = cache.select(split="train")
    validation = cache.greedy_first("validation")
    if not validation:
        raise ValueError(
            f"{cache.path} has no validation documents; collect prompts of a `validation` split too."
        )
    rows = PackedRows(
        cache,
        train_documents,
        seq_length=int(cfg.trainer.seq_length),
        anchors=int(cfg.trainer.anchors),
        seed=int(cfg.seed),
        dtype=torch.bfloat16,
    )
    return rows, evenly(validation, int(cfg.trainer.val_documents))


def budgeted_steps(cfg: DictConfig, rows: PackedRows) -> int:
    """Optimizer steps of the run: `max_steps`, or fewer where `max_tokens` is spent sooner, so that the cosine ends there too."""
    options = cfg.trainer
    if options.max_tokens is None:
        return int(options.max_steps)
    if not isinstance(options.devices, int):
        raise ValueError(
            f"trainer.max_tokens needs the number of processes, but trainer.devices is {options.devices!r}; give a number."
        )
    if not options.max_tokens > 0:
        raise ValueError(f"trainer.max_tokens is {options.max_tokens}; expected a positive number, or null.")
    processes = int(options.devices) * int(options.num_nodes)
    rows_per_step = processes * int(options.rows_per_batch) * int(options.accumulate)
    return min(int(options.max_steps), rows.steps_for(int(options.max_tokens), rows_per_step))


def process_count(cfg: DictConfig) -> int:
    """How many processes train, where `devices` is a number; 1 where Lightning has yet to count them."""
    options = cfg.trainer
    return int(options.devices) * int(options.num_nodes) if isinstance(options.devices, int) else 1


def check_float8(cfg: DictConfig) -> None:
    """Refuse float8 products where device or precision does not allow them."""
    options = cfg.trainer
    if not options.float8:
        return
    on_cuda = options.accelerator != "cpu" and torch.cuda.is_available()
    require_float8(torch.device("cuda" if on_cuda else "cpu"), str(options.float8))
    precision = resolve_precision(options.precision, options.accelerator)
    if precision not in ("bf16-mixed", "bf16-masters"):
        raise ValueError(
            f"trainer.float8 is {options.float8}, but trainer.precision is {precision}: float8 products come with "
            "bf16 activations. Set trainer.precision=bf16-mixed, or trainer.float8=false."
        )


def resolve_precision(precision: str, accelerator: str) -> str:
    """`auto` is bf16-mixed on CUDA and on processors that multiply bf16, else 32-true. Raises ValueError for unknown names."""
    if precision not in PRECISIONS:
        raise ValueError(f"trainer.precision is {precision!r}; expected one of {', '.join(PRECISIONS)}.")
    if precision != "auto":
        return precision
    if accelerator != "cpu" and torch.cuda.is_available():
        return "bf16-mixed"
    return "bf16-mixed" if torch.backends.mkldnn.is_available() and _multiplies_bf16() else "32-true"


def _multiplies_bf16() -> bool:
    """Whether this processor has AMX, or AVX-512 with dot products of bf16, which take less than half the time of fp32's."""
    with contextlib.suppress(AttributeError):
        return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return False


def verifier_norm(cache: Features) -> tuple[torch.Tensor, float] | None:
    """(weight, eps) of the verifier's final norm where the cache holds states from before it."""
    if cache.manifest.last == "post_norm":
        return None
    return cache.verifier_weights()["norm.weight"], cache.manifest.verifier.rms_norm_eps


@dataclass(frozen=True)
class WarmStart:
    """The draft to start from, its contract, and where it lies."""

    draft: Draft
    contract: Contract
    folder: Path

    @classmethod
    def open(cls, run: str) -> WarmStart:
        folder = Run.open(run).checkpoint("best")
        draft, contract, _ = load_draft(folder, attention_backend="grouped")
        return cls(draft, contract, folder)


def start_weights(
    cfg: DictConfig,
    draft: Draft,
    contract: Contract,
    cache: Features,
    documents: list[int],
    vocab: VocabMap,
    earlier: WarmStart | None,
    shared: Shared,
) -> None:
    """Set the trainable weights' start: an earlier draft, or the verifier's layers and a bigram table as configured."""
    if earlier is not None:
        kept = start_from_draft(
            draft,
            earlier.draft,
            earlier.contract,
            current=contract,
            convert_layout=bool(cfg.convert_layout),
        )
        console.print(f"warm start from {earlier.folder}" + (f"; new: {', '.join(kept)}" if kept else ""))
        return
    if cfg.draft.init not in ("verifier_layers", "random"):
        raise ValueError(f"draft.init is {cfg.draft.init!r}; expected verifier_layers or random.")
    if cfg.head.init not in ("bigram", "zeros"):
        raise ValueError(f"head.init is {cfg.head.init!r}; expected bigram or zeros.")
    if cfg.draft.init == "verifier_layers":
        config = draft.config
        if config.num_layers > config.num_verifier_layers:
            raise ValueError(
                f"draft.num_layers is {config.num_layers}, but the verifier has {config.num_verifier_layers} layers to start "
                "from; use draft.init=random."
            )
        verifier = cache.verifier if isinstance(cache, OnlineFeatures) else load_verifier(cfg)
        cache.contract().check(
            Contract(verifier_sha=verifier.info.weights_sha),
            mine=f"{cache.name} {cache.path}",
            theirs=f"verifier {verifier.info.name}",
        )
        first = verifier.info.num_layers - config.num_layers
        layers = [verifier.layer_weights(first + i) for i in range(config.num_layers)]
        sample = torch.cat([cache[d].aux for d in documents[:8]])
        # The tap closest to what the first copied layer reads: the residual stream after `first` layers.
        tap = min(range(len(config.aux_layer_ids)), key=lambda i: abs(config.aux_layer_ids[i] - first))
        start_from_verifier_layers(draft, layers, verifier.final_norm_weight(), tap, sample)
    if cfg.head.init == "bigram" and draft.markov_head is not None:
        factors = shared.bigrams(cache, documents, vocab, draft.config.markov_rank)
        start_from_bigrams(draft, factors, backbone_scale=float(cfg.head.backbone_scale))


def start_run(cfg: DictConfig, cache: Features, rows: PackedRows) -> Run:
    """Create the run folder with everything needed to say what this run is. Only the first process writes it."""
    overrides = cell_overrides()
    ablation = next(
        (o.split("=", 1)[1] for o in overrides if o.lstrip("+").startswith("ablation=")), "default"
    )
    label = cfg.label or ablation.strip("[]").replace(",", "+")
    root, run_id = Path(cfg.runs), new_run_id(label, int(cfg.seed))
    if rank_zero_only.rank != 0:
        return Run(root / run_id)  # never written: results, checkpoints and loggers are the first process's
    manifest = cache.manifest
    described = RunManifest(
        run_id=run_id,
        command=current_command(),
        overrides=overrides,
        config_sha=config_sha(cfg),
        seed=int(cfg.seed),
        verifier={
            "name": manifest.verifier.name,
            "weights_sha": manifest.verifier.weights_sha,
            "revision": manifest.verifier.revision,
        },
        data={
            **cache.origin(),
            "prompts_sha": manifest.prompts_sha,
            "responses_by": manifest.responses_by,
            "documents": len(rows.documents),
            "cropped": rows.cropped,
        },
        parent={"warm_start": str(cfg.warm_start)} if cfg.warm_start else None,
    )
    resolved = OmegaConf.to_yaml(cfg, resolve=True)
    for copy in range(2, 100):
        try:
            return Run.create(root, described, resolved)
        except FileExistsError:  # two cells of a sweep that began in the same second
            described.run_id = f"{run_id}-{copy}"
    raise FileExistsError(f"{root} already has a hundred runs named {run_id}.")


def describe(
    cfg: DictConfig, draft: Draft, cache: Features, rows: PackedRows, precision: str, steps: int, run: Run
) -> str:
    """What is about to be trained, in a few lines."""
    config = draft.config
    layout = "anchor-first" if config.sample_from_anchor else "fill-in"
    gamma = cfg.loss.decay_gamma
    return (
        f"[bold]DSpark draft[/bold] of {cache.manifest.verifier.name}: {config.num_layers} layers x {config.hidden_size}, "
        f"block {config.block_size} {layout} (N = {config.num_proposals}), head {config.head} rank {config.markov_rank}, "
        f"vocabulary {config.draft_vocab_size}/{config.vocab_size}, {trained_parameters(draft) / 1e6:.1f} M trained parameters\n"
        f"data {cache.path}: {len(rows.documents)} documents in {rows.rows_per_epoch} rows of {rows.seq_length} tokens; "
        f"{steps} steps of {cfg.trainer.anchors} anchors, {precision}, "
        f"decay_gamma {gamma if gamma is not None else 'off'}\nrun {run.path}"
    )


def trained_parameters(draft: Draft) -> int:
    """Numbers that training changes; the verifier's tensors are buffers, and not among them."""
    return sum(p.numel() for p in draft.parameters())


def build_trainer(cfg: DictConfig, run: Run, rows: PackedRows, precision: str, steps: int) -> L.Trainer:
    """Lightning's trainer; distribution is its strategies' business.

    Its `ModelParallelStrategy` is FSDP2 with the sharding that `DraftModule.configure_model` asks for.
    """
    options = cfg.trainer
    callbacks: list[Callback] = [
        MetricsTable(run, every=int(options.log_every)),
        BadFeatures(rows, float(options.max_bad_fraction)),
        ModelCheckpoint(dirpath=run.checkpoints, filename="last", save_top_k=1, enable_version_counter=False),
    ]
    if options.progress:
        callbacks.append(RichProgressBar(leave=True))
    return L.Trainer(
        max_steps=steps,
        max_epochs=-1,
        max_time={"minutes": float(options.max_minutes)} if options.max_minutes else None,
        accelerator=options.accelerator,
        devices=options.devices,
        num_nodes=int(options.num_nodes),
        strategy=distribution(cfg),
        # bf16 weights compute as fp32 ones do under autocast; only that there is nothing to cast.
        precision="bf16-mixed" if precision == "bf16-masters" else precision,
        accumulate_grad_batches=int(options.accumulate),
        gradient_clip_val=float(options.clip) if options.clip else None,
        val_check_interval=min(int(options.val_every), steps) * int(options.accumulate),
        check_val_every_n_epoch=None,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        logger=[
            CSVLogger(run.path, name="", version="logs"),
            TensorBoardLogger(run.path, name="", version="logs"),
        ],
        callbacks=callbacks,
        plugins=[StreamedCheckpoints()],
        enable_progress_bar=bool(options.progress),
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=run.path,
    )


def distribution(cfg: DictConfig) -> str | Strategy:
    """Lightning's strategy for `trainer.strategy`, where its defaults would not do."""
    name = cfg.trainer.strategy
    if name == "fsdp2":  # one checkpoint file of whole tensors: any number of processes can resume it
        return ModelParallelStrategy(save_distributed_checkpoint=False)
    if name == "ddp" or (name == "auto" and process_count(cfg) > 1):
        # Buffers are the verifier's embedding and head, the same everywhere once DDP has begun.
        return DDPStrategy(broadcast_buffers=False)
    return name


def finish(
    cfg: DictConfig, run: Run, cache: Features, seconds: float, module: DraftModule, trainer: L.Trainer
) -> dict[str, object]:
    """Replay the test split with the best draft and close the manifest."""
    results: dict[str, object] = {
        "steps": trainer.global_step,
        "train_seconds": round(seconds, 1),
        "validation_tau": round(module.best_tau, 4),
        "parameters": trained_parameters(module.draft),
    }
    if not trainer.is_global_zero:
        return results
    if cfg.test:
        device = "cuda" if trainer.strategy.root_device.type == "cuda" else "cpu"
        results |= replay_split(run, cache, split="test", limit=cfg.test_documents, device=device)
    run.finish("complete", results)
    return results


def last_line(run: Run, results: dict[str, object], seconds: float) -> str:
    if "tau" not in results:
        return f"done in {seconds:.0f} s: validation tau {results['validation_tau']}; run {run.path}"
    alpha = " ".join(f"{value:.2f}" for value in results["alpha"])
    return (
        f"[bold]tau {results['tau']:.3f}[/bold] on {results['documents']} held-out greedy answers "
        f"(bonus token included), mean accepted {results['accepted']:.3f}, alpha@1..{len(results['alpha'])} {alpha}; "
        f"{results['train_seconds']:.0f} s of training, {seconds:.0f} s in all; run {run.path}"
    )


if __name__ == "__main__":
    main()
