"""The only Lightning file: how a draft is optimised, validated by replay, and checkpointed.

One step: `DraftModule.training_step` -> `DraftModule.forward` -> `training_loss` (`Draft.forward`, `draft_loss`) -> gradient of the
loss *sum*; `on_before_optimizer_step` divides all gradients once by the supervised weight of every micro-batch and rank.

Under `trainer.strategy=fsdp2` every rank owns a shard of the trained weights, their gradients and the optimizer's state. The module
is sharded as a whole: the loss reads head weights outside the draft's own forward, and a layer's context keys and values are
projected outside the layer's, so weights are gathered once a micro-batch, for `DraftModule.forward` and its backward pass.

With `trainer.precision=bf16-masters` the draft computes, and is validated, with bf16 matrices whose fp32 masters the optimizer updates
(`dspark.masters`). Saved drafts hold the masters; `last.ckpt` holds the matrices and what they lack, so that resuming is exact.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pandas as pd
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from dspark.acceptance import tau_from_counts
from dspark.blocks import DraftBatch
from dspark.config import Contract
from dspark.data.batches import HeldOutDocuments, PackedRows, StreamSampler, stack_rows
from dspark.data.features import Features
from dspark.graphs import StepGraph
from dspark.losses import LossWeights
from dspark.masters import MasterAdamW, round_matrices
from dspark.nn.draft import Draft
from dspark.objective import LossSums, Planned, plan_loss, training_loss
from dspark.replay import Replay, replay_document
from dspark.runs import Run, save_draft, write_table


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with linear warm-up and a cosine to `min_lr_ratio` of the peak. Decay applies to matrices of the layers only.

    With `budget_seconds` the cosine follows the clock wherever that is ahead of the steps, so that a run stopped by time has
    annealed too.
    """

    lr: float
    head_lr: float
    warmup_steps: int
    min_lr_ratio: float
    weight_decay: float
    betas: Sequence[float]
    budget_seconds: float | None


def lr_scale(step: int, *, warmup: int, total: int, floor: float, elapsed: float = 0.0) -> float:
    """Factor on the peak learning rate at an optimizer step: linear warm-up, then half a cosine down to `floor`.

    `elapsed` is the share of the time budget that has passed; the schedule is as far along as steps or time, whichever is more.
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, max((step - warmup) / max(1, total - warmup), elapsed))
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


class DraftModule(L.LightningModule):
    """Trains `draft`. Logged loss equals the optimised loss: sums over micro-batches and ranks, divided once."""

    def __init__(
        self,
        *,
        draft: Draft,
        contract: Contract,
        loss: LossWeights,
        optimizer: OptimizerConfig,
        confidence_detach_inputs: bool,
        chunk_rows: int,
        graph: bool,
        masters: bool,
        verifier_norm: tuple[Tensor, float] | None,
        run: Run | None,
    ) -> None:
        """`verifier_norm` is (weight, eps) of the verifier's final norm, for caches that hold un-normed states.

        `graph` records the step as a CUDA graph, on CUDA. `masters` trains matrices in bf16 with masters in fp32; the step must
        then run under autocast to bf16.
        """
        super().__init__()
        self.draft, self.contract, self.loss_weights, self.optimizer_config = draft, contract, loss, optimizer
        self.confidence_detach_inputs, self.chunk_rows = confidence_detach_inputs, chunk_rows
        self.graph, self.run = graph, run
        self._graph: StepGraph | None = None
        self.masters = masters
        self._rests: dict[nn.Parameter, Tensor] | None = None  # until the optimizer has them
        self._optimizer: torch.optim.Optimizer | None = None
        self.norm_eps = verifier_norm[1] if verifier_norm else None
        self.register_buffer("norm_weight", verifier_norm[0] if verifier_norm else None, persistent=False)
        self._started = time.time()
        self._elapsed = 0.0
        self.best_tau = 0.0
        self.validated_step = -1
        self.metrics = MetricTotals()
        self._denominator: Tensor | None = None
        self._replays: list[tuple[float, Replay]] = []

    def normed(self, batch: DraftBatch) -> DraftBatch:
        """The batch with `last` after the verifier's final norm, whichever form the cache holds."""
        if self.norm_weight is not None:
            last = batch.last.float()
            last = torch.nn.functional.rms_norm(
                last, last.shape[-1:], self.norm_weight.float(), self.norm_eps
            )
            return replace(batch, last=last.to(batch.last.dtype))
        return batch

    def on_train_start(self) -> None:
        self._started = time.time()
        if self.graph and self.device.type == "cuda":
            self._graph = StepGraph(
                lambda batch: plan_loss(self.draft, batch, self.chunk_rows),
                self.sums,
                [p for p in self.draft.parameters() if p.requires_grad],
                accumulate=self.trainer.accumulate_grad_batches,
            )

    def configure_model(self) -> None:
        """Shard the trained weights over all ranks where the strategy is FSDP2, or round them where they have masters: before
        DDP sorts parameters by dtype. Frozen buffers stay whole on every rank."""
        strategy = self.trainer.strategy
        sharded = isinstance(strategy, ModelParallelStrategy)
        check_parallel(
            graph=self.graph, masters=self.masters, processes=self.trainer.world_size, sharded=sharded
        )
        if self.masters and self._rests is None:
            self._rests = round_matrices(self.draft)
        if sharded and not isinstance(self, FSDPModule):
            mesh = init_device_mesh(strategy.root_device.type, (strategy.world_size,))
            fully_shard(self, mesh=mesh, reshard_after_forward=False)

    def forward(self, batch: DraftBatch) -> tuple[Tensor, LossSums]:
        """The loss sum, which carries the gradient, and all sums. Sharding hooks look for the former among plain tensors."""
        sums = self.sums(batch) if self._graph is None else self._graph(batch)
        return sums.numerator, sums

    def sums(self, batch: DraftBatch, planned: Planned | None = None) -> LossSums:
        batch = self.normed(batch)
        return training_loss(
            self.draft,
            batch,
            self.loss_weights,
            confidence_detach_inputs=self.confidence_detach_inputs,
            chunk_rows=self.chunk_rows,
            planned=planned,
        )

    def training_step(self, batch: DraftBatch, index: int) -> Tensor:
        loss, sums = self(batch)
        self._stop_if_not_finite(sums.numerator, batch)
        self._denominator = (
            sums.denominator if self._denominator is None else self._denominator + sums.denominator
        )
        losses = torch.stack([sums.numerator.detach(), sums.vocabulary, sums.confidence])
        self.metrics.add(("loss", "loss_vocabulary", "loss_confidence"), losses, sums.denominator.expand(3))
        for name in ("alpha", "greedy_hit"):
            positions = range(1, self.draft.config.num_proposals + 1)
            self.metrics.add(tuple(f"{name}@{i}" for i in positions), getattr(sums, name), sums.count)
        return loss

    def _stop_if_not_finite(self, loss: Tensor, batch: DraftBatch) -> None:
        # Reading the value stalls a GPU, so there only now and then.
        if loss.device.type == "cuda" and self.global_step % 25:
            return
        if not bool(loss.isfinite()):
            where = "not saved (no run folder)"
            if self.run is not None:
                self.run.path.mkdir(
                    parents=True, exist_ok=True
                )  # ranks after the first have no folder until now
                where = self.run.path / "bad_batch.pt"
                torch.save(vars(batch.to("cpu")), where)
            raise FloatingPointError(
                f"loss is {float(loss.detach())} at step {self.global_step}; the batch is in {where}. Lower optimizer.lr, or look "
                "for out-of-range features; out of memory on some devices shows up this way too."
            )

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Turn summed gradients into the gradient of the global mean. Lightning has averaged over ranks and accumulation."""
        budget = self.optimizer_config.budget_seconds
        # By the first rank's clock: learning rates that differ would drive the ranks' weights apart.
        if budget is not None:
            self._elapsed = self.trainer.strategy.broadcast((time.time() - self._started) / budget)
        denominator = self.all_reduce_sum(self._denominator)
        self._denominator = None
        scale = self.trainer.world_size * self.trainer.accumulate_grad_batches / denominator.clamp(min=1e-8)
        grads = [p.grad for p in self.draft.parameters() if p.grad is not None]
        torch._foreach_mul_([g.to_local() if isinstance(g, DTensor) else g for g in grads], scale)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the global norm. Lightning refuses to with a fused optimizer under autocast, for the sake of loss scaling,
        which bf16 does without."""
        if gradient_clip_val:
            norm = torch.nn.utils.clip_grad_norm_(self.draft.parameters(), gradient_clip_val)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            self.metrics.add(("grad_norm",), norm.view(1), torch.ones_like(norm).view(1))

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        return (
            self.trainer.strategy.reduce(value.clone(), reduce_op="sum")
            if self.trainer.world_size > 1
            else value
        )

    def configure_optimizers(self) -> dict[str, Any]:
        config = self.optimizer_config
        head = [] if self.draft.markov_head is None else list(self.draft.markov_head.parameters())
        confidence = (
            [] if self.draft.confidence_head is None else list(self.draft.confidence_head.parameters())
        )
        apart = {id(p) for p in head + confidence}
        rest = [p for p in self.draft.parameters() if id(p) not in apart]
        groups = [
            {
                "params": [p for p in rest if p.ndim >= 2],
                "weight_decay": config.weight_decay,
                "lr": config.lr,
            },
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0, "lr": config.lr},
            {"params": head + confidence, "weight_decay": 0.0, "lr": config.head_lr},
        ]
        groups, betas = [group for group in groups if group["params"]], tuple(config.betas)
        if self.masters:
            optimizer = MasterAdamW(groups, rests=self._rests, betas=betas)
            if self.trainer.world_size > 1:
                optimizer.broadcast(0)
            self._rests = {}
        else:
            optimizer = torch.optim.AdamW(groups, betas=betas, fused=True)
        self._optimizer = optimizer
        total = int(self.trainer.estimated_stepping_batches)

        def scale(step: int) -> float:
            return lr_scale(
                step,
                warmup=config.warmup_steps,
                total=total,
                floor=config.min_lr_ratio,
                elapsed=self._elapsed,
            )

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    # ---- validation: replay of held-out documents

    def on_validation_start(self) -> None:
        """Ranks replay documents of different lengths, so sharded weights are gathered once for all of them."""
        if isinstance(self, FSDPModule):
            self.unshard()

    def validation_step(self, item: tuple[DraftBatch, int, float] | None, index: int) -> None:
        if item is None:
            return
        batch, _, temperature = item
        replay = replay_document(
            self.draft,
            self.normed(batch),
            temperature=temperature,
            draft_sampling="greedy",
            num_proposals=self.draft.config.num_proposals,
            confidence_threshold=None,
        )
        self._replays.append((temperature, replay))

    def on_validation_epoch_end(self) -> None:
        replays, self._replays = self._replays, []
        mine = torch.tensor(
            [float(sum(r.accepted.sum() for _, r in replays)), float(sum(r.rounds for _, r in replays))],
            device=self.device,
        )
        accepted, rounds = self.all_reduce_sum(mine)
        if self.trainer.sanity_checking or float(rounds) == 0:
            return
        tau = tau_from_counts(float(accepted), float(rounds))
        self.validated_step = self.global_step
        self.metrics.add(("val_accepted",), mine[:1], mine[1:])
        self.log("tau", tau, prog_bar=True, rank_zero_only=True)
        if self.run is not None:
            state = whole_tensors(self.draft)  # of shards, to which all ranks contribute
            if self.trainer.is_global_zero:
                state |= self.master_weights()
                facts = {"step": self.global_step, "validation_tau": tau}
                for name in ("last", "best") if tau > self.best_tau else ("last",):
                    save_draft(self.draft, self.run.checkpoints / name, self.contract, facts, state)
        self.best_tau = max(self.best_tau, tau)

    def master_weights(self) -> dict[str, Tensor]:
        """Masters, on the CPU, in place of the weights that are rounded from them; empty where there are none."""
        if not isinstance(self._optimizer, MasterAdamW):
            return {}
        return {name: self._optimizer.master(p).cpu() for name, p in self.draft.named_parameters()}

    def on_validation_end(self) -> None:
        """Weights gathered for validation would hide what the optimizer does to the shards."""
        if isinstance(self, FSDPModule):
            self.reshard()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # `lm_head` may be a view into the draft's joint matrix; loading for shards broadcasts a tensor's memory as it lies.
        checkpoint["state_dict"] = {n: t.contiguous() for n, t in checkpoint["state_dict"].items()}
        checkpoint["best_tau"] = self.best_tau
        checkpoint["contract"] = vars(self.contract)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        Contract(**checkpoint["contract"]).check(
            self.contract, mine="the checkpoint", theirs="this run's configuration"
        )
        self.best_tau = checkpoint["best_tau"]


def check_parallel(*, graph: bool, masters: bool, processes: int, sharded: bool) -> None:
    """Raise ValueError for what several processes, or sharded weights, cannot train with."""
    if graph and (sharded or processes > 1):
        found = "trainer.strategy is fsdp2" if sharded else f"there are {processes}"
        raise ValueError(
            f"trainer.graph=true records the step of a single process with whole weights, but {found}; set trainer.graph=false."
        )
    if masters and sharded:
        raise ValueError(
            "trainer.precision=bf16-masters keeps what bf16 weights lack of fp32 in the optimizer, whole, where trainer.strategy=fsdp2 shards; "
            "use trainer.strategy=ddp or trainer.precision=bf16-mixed."
        )


def whole_tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    """A module's state, gathered where it is sharded: all ranks must call this together."""
    state = module.state_dict()
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}


class StreamedCheckpoints(TorchCheckpointIO):
    """`last.ckpt` written straight to its folder, under a temporary name until it is whole, and read by mapping it.

    Lightning's own way builds the file in memory, writes it to the system's temporary folder and moves it from there. The state
    of a large draft takes 14 bytes a weight, which neither memory nor that folder may have to spare.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        torch.save(checkpoint, temporary)
        os.replace(temporary, path)

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Tensors are copies on write, so that training does not touch the file."""
        return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)


class MetricTotals:
    """Sums and counts since the last flush, kept on the device so that adding never waits for it."""

    def __init__(self) -> None:
        self.totals: dict[tuple[str, ...], Tensor] = {}

    def add(self, names: tuple[str, ...], totals: Tensor, counts: Tensor) -> None:
        """Add to several metrics at once: `totals` and `counts` are [len(names)]."""
        pairs = torch.stack([totals.detach(), counts.detach()]).double()
        self.totals[names] = pairs + self.totals[names] if names in self.totals else pairs

    def flush(self, add_ranks: Callable[[Tensor], Tensor]) -> dict[str, tuple[float, float]]:
        """Name -> (total, count) over all ranks, omitting metrics without a single count. All ranks must call this together.

        `add_ranks` sums a tensor over ranks; every rank has added the same names.
        """
        if not self.totals:
            return {}
        names = [name for group in self.totals for name in group]
        totals, counts = add_ranks(torch.cat(list(self.totals.values()), dim=1)).tolist()
        self.totals = {}
        values = zip(names, zip(totals, counts, strict=True), strict=True)
        return {name: pair for name, pair in values if pair[1] > 0}


class MetricsTable(Callback):
    """Writes `metrics.parquet` (run_id, step, name, total, count) and hands running means to Lightning's loggers."""

    def __init__(self, run: Run, every: int) -> None:
        self.run, self.every = run, every
        self.records: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"records": self.records}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.records = state["records"]

    def on_train_batch_end(self, trainer: L.Trainer, module: DraftModule, *_: Any) -> None:
        if trainer.global_step % self.every == 0 and trainer.fit_loop._should_accumulate() is False:
            self._collect(trainer, module)

    def on_validation_end(self, trainer: L.Trainer, module: DraftModule) -> None:
        if not trainer.sanity_checking:
            self._collect(trainer, module)
            self._write(trainer)

    def on_train_end(self, trainer: L.Trainer, module: DraftModule) -> None:
        self._collect(trainer, module)
        self._write(trainer)

    def _collect(self, trainer: L.Trainer, module: DraftModule) -> None:
        flushed = module.metrics.flush(module.all_reduce_sum)
        for name, (total, count) in flushed.items():
            self.records.append(
                {
                    "run_id": self.run.path.name,
                    "step": trainer.global_step,
                    "name": name,
                    "total": total,
                    "count": count,
                }
            )
        means = {name: total / count for name, (total, count) in flushed.items()}
        for logger in trainer.loggers:
            logger.log_metrics(means, step=trainer.global_step)
        if "loss" in means:
            trainer.callback_metrics["loss"] = torch.tensor(means["loss"])
            trainer.progress_bar_metrics["loss"] = means["loss"]

    def _write(self, trainer: L.Trainer) -> None:
        if trainer.is_global_zero and self.records:
            write_table(pd.DataFrame(self.records), self.run.path / "metrics.parquet")


class BadFeatures(Callback):
    """Stops the run once too many documents held non-finite features; they are skipped and counted until then."""

    def __init__(self, rows: PackedRows, max_fraction: float) -> None:
        self.rows, self.max_fraction = rows, max_fraction

    def on_train_batch_end(self, trainer: L.Trainer, module: DraftModule, *_: Any) -> None:
        if self.rows.bad_documents > max(1.0, self.max_fraction * len(self.rows.documents)):
            raise ValueError(
                f"{self.rows.bad_documents} documents with NaN or infinite features were skipped, more than "
                f"{self.max_fraction:.1%} of {len(self.rows.documents)}. The cache is damaged: collect it again."
            )


class DraftData(L.LightningDataModule):
    """Packed training rows and held-out documents of one set of features; owns the position in the training stream."""

    def __init__(
        self,
        *,
        cache: Features,
        rows: PackedRows,
        validation: list[int],
        rows_per_batch: int,
        total_batches: int,
        num_workers: int,
        resident: bool,
    ) -> None:
        """`resident` holds the training features in the device's memory; the rows then need no worker processes.

        Raises ValueError when `resident` and `num_workers` are both asked for.
        """
        super().__init__()
        if resident and num_workers:
            raise ValueError(
                "trainer.resident=true reads rows from device memory; set trainer.num_workers=0."
            )
        self.resident = resident
        self.cache, self.rows, self.validation = cache, rows, validation
        self.rows_per_batch, self.total_batches, self.num_workers = rows_per_batch, total_batches, num_workers
        self.consumed = 0

    def train_dataloader(self) -> DataLoader:
        device = self.trainer.strategy.root_device
        if self.resident and self.rows.resident is None:
            self.rows.make_resident(device, self.validation)
        sampler = StreamSampler(
            self.total_batches,
            self.rows_per_batch,
            self.consumed,
            self.trainer.global_rank,
            self.trainer.world_size,
        )
        workers = {"persistent_workers": True, "prefetch_factor": 4} if self.num_workers else {}
        return DataLoader(
            self.rows,
            batch_sampler=sampler,
            collate_fn=stack_rows,
            num_workers=self.num_workers,
            multiprocessing_context="forkserver" if self.num_workers else None,
            pin_memory=device.type == "cuda" and not self.resident and self.cache.device is None,
            **workers,
        )

    def val_dataloader(self) -> DataLoader:
        documents = HeldOutDocuments(self.cache, self.validation, dtype=self.rows.dtype)
        rank, world = self.trainer.global_rank, self.trainer.world_size
        return DataLoader(
            _RankShare(documents, rank, world),
            batch_size=None,
            collate_fn=partial(_with_temperature, cache=self.cache),
        )

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        if isinstance(batch, DraftBatch):
            return batch.to(device, non_blocking=True)
        if batch is None:
            return None
        inner, number, temperature = batch
        return inner.to(device), number, temperature

    def state_dict(self) -> dict[str, int]:
        trainer = self.trainer
        return {"consumed": trainer.global_step * trainer.accumulate_grad_batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.consumed = state["consumed"]


class _RankShare(torch.utils.data.Dataset):
    """Every `world`-th held-out document, rank r from the r-th on, and None where this makes one fewer than on other ranks.

    Ranks must take equally many validation steps: Lightning refuses a rank without any.
    """

    def __init__(self, documents: HeldOutDocuments, rank: int, world: int) -> None:
        self.documents, self.rank, self.world = documents, rank, world

    def __len__(self) -> int:
        return -(-len(self.documents) // self.world)

    def __getitem__(self, step: int) -> tuple[DraftBatch, int] | None:
        if step >= len(self):
            raise IndexError(step)
        place = step * self.world + self.rank
        return self.documents[place] if place < len(self.documents) else None


def _with_temperature(
    item: tuple[DraftBatch, int] | None, cache: Features
) -> tuple[DraftBatch, int, float] | None:
    if item is None:
        return None
    batch, number = item
    return batch, number, cache.info(number).temperature


def checkpoint_path(run: Run) -> Path:
    """The trainer's full state for resuming. Raises ValueError when there is none."""
    path = run.checkpoints / "last.ckpt"
    if not path.is_file():
        raise ValueError(
            f"run {run.path.name} has no checkpoints/last.ckpt to resume from; start a new run instead."
        )
    return path
