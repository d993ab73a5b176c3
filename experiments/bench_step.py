"""Time a draft's training step, ours and a peer's side by side: same weights, batch and anchors, repetitions interleaved.

    python -m experiments.bench step peers=[speculators]                                 # geometry smollm on this machine
    python experiments/bench_step.py --geometry kimi --device cuda --dtype bf16 --peers speculators --out rows.jsonl

The second form needs torch, safetensors and this checkout, so that it runs where Hydra is not installed.

A step is forward, loss and backward; the optimizer is left out because all implementations use the same. Features, weights and
anchors are random but seeded. Anchors lie so deep inside their documents that every slot is supervised, because implementations
disagree about slots beyond a document's end. The losses of all implementations are compared before anything is timed.

One JSON line per (peer, phase):
  ms_median, ms_min, ms_max  of the repetitions
  peak_gib                   peak memory of the step with weights, gradients, batch and the verifier's frozen rows, measured with
                             this implementation alone. CPU: growth of a process's resident set; CUDA: torch's allocator
  first_step_s               seconds of the first step, compilation included
  tflops                     needed floating-point operations (`count_flops`, 10^12) over the median time; the same count for
                             every implementation, so work done in vain lowers it
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parent.parent
if not __package__:
    sys.path.insert(0, str(ROOT))
    import experiments  # noqa: F401  (sets the allocator up before torch allocates)

from dspark import __version__  # noqa: E402
from dspark.blocks import DraftBatch, build_blocks, sample_anchors  # noqa: E402
from dspark.config import DraftConfig  # noqa: E402
from dspark.graphs import StepGraph  # noqa: E402
from dspark.losses import LossWeights  # noqa: E402
from dspark.masters import round_matrices  # noqa: E402
from dspark.nn.draft import Draft, DraftOutput  # noqa: E402
from dspark.nn.float8 import require_float8, use_float8  # noqa: E402
from dspark.objective import LossSums, Planned, plan_loss, training_loss  # noqa: E402
from dspark.vocab import VocabMap  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Our step and its variants: name -> (`trainer.precision` of bf16 steps on CUDA, `trainer.float8`). CPU steps are bf16-mixed.
OURS = {
    "dspark": ("bf16-masters", None),
    "dspark-mixed": ("bf16-mixed", None),
    "dspark-float8": ("bf16-mixed", "tensor"),
    "dspark-float8-row": ("bf16-mixed", "row"),
}
PEERS = (*list(OURS)[1:], "speculators")
PROMPT = 32  # unsupervised tokens at the start of each document
SPREAD = 3.0  # standard deviation of the random verifier's logits


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Shape of a step: a draft, one packed row of equal documents, and its anchors. `chunk_rows` and `graph` are ours alone."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    draft_vocab: int
    rank: int
    aux_layers: int
    anchors: int
    block: int
    sample_from_anchor: bool
    tokens: int
    documents: int
    chunk_rows: int
    graph: bool  # on CUDA ours is recorded and replayed: where kernels are short

    def config(self) -> DraftConfig:
        return DraftConfig(
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=1e-6,
            rope_theta=50_000.0,
            max_position_embeddings=2 * self.tokens,
            vocab_size=self.vocab,
            draft_vocab_size=self.draft_vocab,
            block_size=self.block,
            sample_from_anchor=self.sample_from_anchor,
            mask_token_id=self.vocab - 1,
            aux_layer_ids=tuple(range(1, self.aux_layers + 1)),
            num_verifier_layers=self.aux_layers + 2,
            layer_types=("full_attention",) * self.layers,
            sliding_window=None,
            head="vanilla" if self.rank else "none",
            markov_rank=self.rank,
            confidence=True,
            confidence_uses_prev_embedding=self.rank > 0,
            logit_scale=1.0,
        )


GEOMETRIES = {
    "tiny": Geometry(
        layers=2,
        hidden=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ffn=96,
        vocab=512,
        draft_vocab=256,
        rank=16,
        aux_layers=3,
        anchors=12,
        block=4,
        sample_from_anchor=False,
        tokens=160,
        documents=2,
        chunk_rows=16,
        graph=True,
    ),
    "smollm": Geometry(
        layers=2,
        hidden=576,
        heads=9,
        kv_heads=3,
        head_dim=64,
        ffn=1536,
        vocab=49_152,
        draft_vocab=8_192,
        rank=256,
        aux_layers=5,
        anchors=128,
        block=8,
        sample_from_anchor=False,
        tokens=1_024,
        documents=1,
        chunk_rows=896,
        graph=True,
    ),
    "qwen4b": Geometry(
        layers=5,
        hidden=2_560,
        heads=32,
        kv_heads=8,
        head_dim=128,
        ffn=9_728,
        vocab=151_936,
        draft_vocab=151_936,
        rank=256,
        aux_layers=5,
        anchors=512,
        block=7,
        sample_from_anchor=True,
        tokens=4_096,
        documents=4,
        chunk_rows=1_792,
        graph=True,
    ),
    "kimi": Geometry(
        layers=3,
        hidden=7_168,
        heads=56,
        kv_heads=8,
        head_dim=128,
        ffn=18_432,
        vocab=163_840,
        draft_vocab=32_000,
        rank=256,
        aux_layers=3,
        anchors=3_072,
        block=8,
        sample_from_anchor=False,
        tokens=20_000,
        documents=8,
        chunk_rows=8_192,
        graph=False,
    ),
}
# The recipe of the published checkpoint. Peers renormalise the verifier's probabilities over the draft vocabulary; so do we, here.
LOSS = LossWeights(
    terms={"ce": 0.1, "tv": 0.9},
    confidence=1.0,
    decay_gamma=4.0,
    ce_label="target_top1",
    target_norm="draft_vocab",
)


@dataclass
class Problem:
    """What every implementation is given: a draft's weights, the verifier's frozen tensors, and a batch."""

    geometry: Geometry
    config: DraftConfig
    device: torch.device
    dtype: torch.dtype
    embedding: Tensor
    head: Tensor
    vocab: VocabMap
    weights: dict[str, Tensor]
    batch: DraftBatch

    @property
    def rows(self) -> int:
        return self.geometry.anchors * self.config.num_proposals

    def autocast(self) -> Any:
        """bf16: autocast. fp32: none."""
        return torch.autocast(self.device.type, self.dtype) if self.dtype != torch.float32 else nullcontext()


def make_problem(geometry: Geometry, *, device: str, dtype: str, seed: int) -> Problem:
    """A seeded problem on `device`. Raises ValueError for an unknown dtype or a device that is not there."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; expected one of {sorted(DTYPES)}.")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, but torch sees no CUDA device here; use device=cpu.")
    config, where, kind = geometry.config(), torch.device(device), DTYPES[dtype]
    generator = torch.Generator(where).manual_seed(seed)

    def normal(*shape: int, std: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, device=where, dtype=dtype).normal_(0.0, std, generator=generator)

    with torch.device(where):
        draft = Draft(config, attention_backend="auto")
        weights = {}
        for name, parameter in draft.named_parameters():
            std = 0.02 if parameter.ndim > 1 else 0.1
            weights[name] = normal(*parameter.shape, std=std)
            if name.endswith("norm.weight"):
                weights[name] += 1.0
    kept = torch.randperm(config.vocab_size, generator=torch.Generator().manual_seed(seed))
    return Problem(
        geometry=geometry,
        config=config,
        device=where,
        dtype=kind,
        embedding=normal(config.vocab_size, config.hidden_size, dtype=kind),
        head=normal(config.vocab_size, config.hidden_size, std=SPREAD * config.hidden_size**-0.5, dtype=kind),
        vocab=VocabMap(kept[: config.draft_vocab_size].sort().values, config.vocab_size),
        weights=weights,
        batch=_make_batch(geometry, config, kind, normal, seed).to(where),
    )


def _make_batch(
    geometry: Geometry, config: DraftConfig, kind: torch.dtype, normal: Callable[..., Tensor], seed: int
) -> DraftBatch:
    length = geometry.tokens // geometry.documents
    place = torch.arange(geometry.tokens).unsqueeze(0)
    positions = place % length
    start = place - positions
    mask = (positions >= PROMPT) & (place < length * geometry.documents)
    # An anchor precedes a token that is `inside`; the anchor itself must be supervised too, for peers that mask by input token.
    inside = (positions > PROMPT) & (positions < length - geometry.block - 1)
    generator = torch.Generator().manual_seed(seed)
    anchors, valid = sample_anchors(inside, start, geometry.anchors, generator)
    if not bool(valid.all()):
        raise ValueError(
            f"{geometry.anchors} anchors do not fit: only {int(valid.sum())} tokens can be anchors."
        )
    last = normal(1, geometry.tokens, config.hidden_size)
    last = torch.nn.functional.rms_norm(last, last.shape[-1:], eps=config.rms_norm_eps)
    shape = 1, geometry.tokens, len(config.aux_layer_ids), config.hidden_size
    return DraftBatch(
        input_ids=torch.randint(config.vocab_size - 1, (1, geometry.tokens), generator=generator),
        positions=positions,
        doc_start=start,
        loss_mask=mask,
        aux=normal(*shape).to(kind),
        last=last.to(kind),
        lse=torch.full((1, geometry.tokens), 15.0),
        anchors=anchors,
        anchor_valid=valid,
    )


Mark = Callable[[str], None]


class Contender(Protocol):
    """One implementation of the step."""

    name: str
    version: str

    def step(self, mark: Mark) -> Tensor:
        """Forward and backward with gradients cleared first; `mark(phase)` says that the phase has ended. Returns the loss as
        ours defines it: sums of weighted terms over the sum of weights."""
        ...

    def overlap(self) -> Tensor:
        """Mean alpha of each proposal position in the last step, [N]."""
        ...


class Ours:
    """This package's step, in the form that its name stands for (`OURS`)."""

    def __init__(self, problem: Problem, *, name: str = "dspark", chunk_rows: int | None = None) -> None:
        self.name, self.version = name, __version__
        self.problem = problem
        self.chunk_rows = chunk_rows or problem.geometry.chunk_rows
        with torch.device(problem.device):
            self.draft = Draft(problem.config, attention_backend="auto")
        self.draft.set_frozen(problem.embedding, problem.head, problem.vocab, problem.dtype)
        self.draft.load_state_dict(problem.weights, strict=False)
        precision, scaling = OURS[name]
        if scaling:
            require_float8(problem.device, scaling)
            use_float8(self.draft, scaling=scaling)
        # Held, because a training holds them too.
        masters = (
            precision == "bf16-masters" and problem.device.type == "cuda" and problem.dtype == torch.bfloat16
        )
        self.rests = round_matrices(self.draft) if masters else {}
        self._mark: Mark = _ignore
        self._graph = None
        if problem.geometry.graph and problem.device.type == "cuda":
            self._graph = StepGraph(
                lambda batch: plan_loss(self.draft, batch, self.chunk_rows),
                self._sums,
                list(self.draft.parameters()),
                accumulate=1,
            )
        else:
            self.draft.layers[0].register_forward_pre_hook(self._context_done)
            self.draft.register_forward_hook(self._layers_done)

    def _context_done(self, layer: Any, inputs: tuple[Any, ...]) -> None:
        self._mark("context")
        keys, _ = next(part for part in inputs if isinstance(part, tuple))
        if keys.requires_grad:
            keys.register_hook(lambda grad: self._mark("layers backward"))

    def _layers_done(self, draft: Draft, inputs: tuple[Any, ...], output: DraftOutput) -> None:
        self._mark("layers")
        output.hidden.register_hook(lambda grad: self._mark("loss backward"))

    def _sums(self, batch: DraftBatch, planned: Planned | None = None) -> LossSums:
        return training_loss(
            self.draft,
            batch,
            LOSS,
            confidence_detach_inputs=False,
            chunk_rows=self.chunk_rows,
            planned=planned,
        )

    def step(self, mark: Mark) -> Tensor:
        self.draft.zero_grad(set_to_none=True)
        self._mark = mark
        with self.problem.autocast():
            sums = (self._graph or self._sums)(self.problem.batch)
        mark("forward" if self._graph else "loss")
        sums.numerator.backward()
        mark("backward" if self._graph else "context backward")
        self._mark = _ignore
        self._overlap = sums.alpha / sums.count
        return (sums.numerator / sums.denominator).detach()

    def overlap(self) -> Tensor:
        return self._overlap


def _ignore(phase: str) -> None:
    """A mark that nobody reads."""


def contender(name: str, problem: Problem) -> Contender:
    """Build one implementation. Raises ValueError for unknown names and for packages that are not installed."""
    if name in OURS:
        return Ours(problem, name=name)
    if name not in PEERS:
        raise ValueError(f"peers has {name!r}; expected names out of {PEERS}.")
    from experiments.bench_peers import Speculators

    return Speculators(problem)


# ---- counting


def count_flops(problem: Problem) -> dict[str, float]:
    """Floating-point operations that a step needs, by part; a product of [m, k] and [k, n] counts 2 m k n.

    Backward costs a trained matrix twice its forward (input and weight gradient), a frozen one once. `fc` needs no input
    gradient. Attention counts visible (query, key) pairs only. Slots that no proposal reads are left out of the last layer's
    queries and MLP; the first layer projects a mask's query, key and value once for all; target logits are needed once per
    distinct position.
    """
    g, config, batch = problem.geometry, problem.config, problem.batch
    blocks = build_blocks(batch, config)
    slots, proposals = g.anchors * g.block, problem.rows
    wide, narrow = g.heads * g.head_dim, g.kv_heads * g.head_dim
    context = (batch.anchors - batch.doc_start.gather(1, batch.anchors)).sum().item()
    flops = dict.fromkeys(("context", "block projections", "attention", "mlp", "vocabulary", "targets"), 0.0)
    flops["context"] += 2 * 2.0 * g.tokens * g.aux_layers * g.hidden * g.hidden
    for layer in range(g.layers):
        queries = proposals if layer == g.layers - 1 else slots
        per_anchor = queries / g.anchors
        flops["context"] += 3 * 2.0 * g.tokens * g.hidden * 2 * narrow
        rows = g.anchors + 1 if layer == 0 else slots
        flops["block projections"] += 3 * 2.0 * g.hidden * (rows * 2 * narrow + min(rows, queries) * wide)
        flops["block projections"] += 3 * 2.0 * g.hidden * queries * wide  # back to the hidden size
        flops["attention"] += 3 * 2 * 2.0 * wide * per_anchor * (context + g.anchors * g.block)
        flops["mlp"] += 3 * 2.0 * queries * 3 * g.hidden * g.ffn
    flops["vocabulary"] = 2.0 * proposals * g.draft_vocab * (2 * (g.hidden + g.rank) + g.rank)
    distinct = blocks.target_index[blocks.supervised].unique().numel()
    flops["targets"] = 2.0 * distinct * g.draft_vocab * g.hidden
    return flops


def matrix_rate(problem: Problem) -> float:
    """Operations per second of a large square matrix product in the problem's dtype on its device; best of several."""
    size, repeats = (8_192, 20) if problem.device.type == "cuda" else (2_048, 12)
    a = torch.randn(size, size, device=problem.device).to(problem.dtype)
    out = torch.empty_like(a)
    times = []
    for _ in range(repeats):
        _wait(problem.device)
        started = time.perf_counter()
        torch.mm(a, a, out=out)
        _wait(problem.device)
        times.append(time.perf_counter() - started)
    return 2.0 * size**3 / min(times)


# ---- timing


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """Milliseconds between marks: the clock on a CPU, events on the stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[tuple[str, Any]] = []
        self("start")

    def __call__(self, phase: str) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((phase, event))
        else:
            self.marks.append((phase, time.perf_counter()))

    def milliseconds(self) -> dict[str, float]:
        _wait(self.device)
        spans = {}
        for (_, before), (phase, after) in zip(self.marks, self.marks[1:], strict=False):
            if self.device.type == "cuda":
                spans[phase] = before.elapsed_time(after)
            else:
                spans[phase] = 1000 * (after - before)
        return spans


FORWARD = (
    "context",
    "layers",
    "loss",
    "forward",
)  # marks that end a part of the forward pass; all others: backward


def time_side_by_side(
    contenders: Sequence[Contender],
    device: torch.device,
    *,
    warmup: int,
    repeats: int,
    say: Callable[[str], None],
) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of every phase and repetition, by contender.

    Contenders take turns within each repetition, so that noise of the machine hits all of them. The host does not wait for a
    device between steps, as a training would not.
    """
    watches: dict[str, list[Stopwatch]] = {c.name: [] for c in contenders}
    for repeat in range(-warmup, repeats):
        for one in contenders:
            watch = Stopwatch(device)
            one.step(watch)
            if repeat >= 0:
                watches[one.name].append(watch)
        say(f"repetition {repeat + 1} of {repeats}" if repeat >= 0 else "warm-up")
    times: dict[str, dict[str, list[float]]] = {c.name: {} for c in contenders}
    for name, timed in watches.items():
        for spans in (watch.milliseconds() for watch in timed):
            forward = sum(ms for phase, ms in spans.items() if phase in FORWARD)
            phases = {
                "step": sum(spans.values()),
                "forward": forward,
                "backward": sum(spans.values()) - forward,
            }
            parts = {f"part:{phase}": ms for phase, ms in spans.items()} if len(spans) > 2 else {}
            for phase, ms in {**phases, **parts}.items():
                times[name].setdefault(phase, []).append(ms)
    return times


def write_profile(one: Contender, device: torch.device, path: Path, steps: int = 2) -> None:
    """A table of what the device (on a CPU, the operators) did in `steps` steps, longest first, times in ms a step."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=kinds) as record:
        for _ in range(steps):
            one.step(_ignore)
        _wait(device)
    events = []
    for event in record.key_averages():
        on_device = event.device_type == DeviceType.CUDA
        spent = event.self_device_time_total if on_device else event.self_cpu_time_total
        if on_device == (device.type == "cuda") and spent:
            events.append((spent / 1e3 / steps, event.count / steps, event.key))
    events.sort(reverse=True)
    lines = [f"{'ms a step':>10} {'calls':>7}  name", f"{sum(e[0] for e in events):10.3f} {'':7}  all"]
    lines += [f"{ms:10.3f} {calls:7.1f}  {name}" for ms, calls, name in events]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def _resident_bytes(field: str) -> int:
    """VmRSS or VmHWM of this process (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}; peak memory on a CPU is measured on Linux only.")


def resident_growth(name: str, geometry: str, dtype: str, seed: int) -> int:
    """Bytes by which this process grows over what it held before weights and batch existed, at the peak of three steps."""
    if name != "dspark":
        import experiments.bench_peers  # noqa: F401  (its imports are not the step's memory)
    torch.ones(2, requires_grad=True).sum().backward()
    before = _resident_bytes("VmRSS")
    problem = make_problem(GEOMETRIES[geometry], device="cpu", dtype=dtype, seed=seed)
    one = contender(name, problem)
    problem.weights, problem.head = {}, problem.head[:0].clone()  # the model has its own copies
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    for _ in range(3):
        one.step(_ignore)
    return _resident_bytes("VmHWM") - before


def allocated_growth(name: str, settings: Settings) -> int:
    """The same of the CUDA allocator, in this process."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    problem = make_problem(
        GEOMETRIES[settings.geometry], device=settings.device, dtype=settings.dtype, seed=settings.seed
    )
    one = contender(name, problem)
    problem.weights, problem.head = {}, problem.head[:0].clone()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        one.step(_ignore)
    return torch.cuda.max_memory_allocated() - before


def _measure_alone(name: str, geometry: str, dtype: str, seed: int, threads: int) -> int:
    command = [
        sys.executable, str(Path(__file__).resolve()), "--memory-of", name, "--geometry", geometry, "--dtype", dtype,
        "--seed", str(seed), "--threads", str(threads),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"measuring the memory of {name} failed: {done.stderr.strip().splitlines()[-1]}")
    return int(done.stdout.strip().splitlines()[-1])


# ---- the command


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the command line or Hydra decides."""

    geometry: str
    device: str
    dtype: str
    peers: tuple[str, ...]
    repeats: int
    warmup: int
    threads: int
    seed: int
    memory: bool
    tolerance: float
    profile: Path | None


def measure(settings: Settings, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """All rows of one run. Raises ValueError when an implementation's loss differs from ours by more than `tolerance`."""
    if settings.geometry not in GEOMETRIES:
        raise ValueError(f"geometry is {settings.geometry!r}; expected one of {sorted(GEOMETRIES)}.")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    problem = make_problem(
        GEOMETRIES[settings.geometry], device=settings.device, dtype=settings.dtype, seed=settings.seed
    )
    contenders = []
    for name in ("dspark", *settings.peers):
        contenders.append(contender(name, problem))
        say(f"built {name} {contenders[-1].version}")
    losses, first = {}, {}
    for one in contenders:
        started = time.perf_counter()
        losses[one.name] = float(one.step(_ignore))
        first[one.name] = time.perf_counter() - started
        say(f"first step of {one.name}: {first[one.name]:.1f} s")
    for name, loss in losses.items():
        if abs(loss - losses["dspark"]) > settings.tolerance * abs(losses["dspark"]):
            raise ValueError(
                f"{name}'s loss is {loss:.6f} and ours {losses['dspark']:.6f} on the same weights, batch and anchors: they do "
                "not do the same work, so their times cannot be compared."
            )
    say("losses agree: " + ", ".join(f"{name} {loss:.6f}" for name, loss in losses.items()))
    load = os.getloadavg()[0]
    times = time_side_by_side(
        contenders, problem.device, warmup=settings.warmup, repeats=settings.repeats, say=say
    )
    medians = {name: statistics.median(phases["step"]) for name, phases in times.items()}
    say("medians: " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in medians.items()))
    if settings.profile:
        write_profile(contenders[0], problem.device, settings.profile)
        say(f"profile of {contenders[0].name} in {settings.profile}")
    rate = matrix_rate(problem)
    flops = count_flops(problem)
    versions = {one.name: one.version for one in contenders}
    device, peaks = problem.device, dict.fromkeys(versions)
    if settings.memory:
        del one, contenders, problem
        for name in versions:
            say(f"measuring memory of {name}")
            if device.type == "cuda":
                peaks[name] = allocated_growth(name, settings)
            else:
                peaks[name] = _measure_alone(
                    name, settings.geometry, settings.dtype, settings.seed, torch.get_num_threads()
                )
    total = sum(flops.values())
    facts = {
        "tokens": GEOMETRIES[settings.geometry].tokens,
        "anchors": GEOMETRIES[settings.geometry].anchors,
        "flops": total,
        "flops_by_part": flops,
        "matrix_tflops": round(rate / 1e12, 4),
        "repeats": settings.repeats,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "device_name": _device_name(device),
        "load_before": round(load, 2),
        "date": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
    }
    rows = []
    for name, version in versions.items():
        for phase, values in times[name].items():
            median = statistics.median(values)
            whole = phase == "step"
            rows.append(
                {
                    "peer": name,
                    "version": version,
                    "geometry": settings.geometry,
                    "device": device.type,
                    "dtype": settings.dtype,
                    "phase": phase,
                    "ms_median": round(median, 3),
                    "ms_min": round(min(values), 3),
                    "ms_max": round(max(values), 3),
                    "peak_gib": round(peaks[name] / 2**30, 3) if peaks[name] else None,
                    "tflops": round(total / median / 1e9, 4) if whole else None,
                    "utilisation": round(total / median * 1e3 / rate, 4) if whole else None,
                    "first_step_s": round(first[name], 2) if whole else None,
                    "loss": losses[name],
                    **facts,
                }
            )
    return rows


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "cpu"


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """One line: our step, each peer's, and the ratio."""
    steps = {row["peer"]: row for row in rows if row["phase"] == "step"}
    ours = steps["dspark"]

    def gib(row: dict[str, Any]) -> str:
        return f", {row['peak_gib']:.2f} GiB" if row["peak_gib"] else ""

    text = f"{ours['geometry']} {ours['dtype']}: dspark {ours['ms_median']:.0f} ms{gib(ours)}"
    for name, row in steps.items():
        if name != "dspark":
            ratio = ours["ms_median"] / row["ms_median"]
            text += f"; {name} {row['version']} {row['ms_median']:.0f} ms{gib(row)}; ratio {ratio:.2f}"
    return text


def write_rows(rows: Sequence[dict[str, Any]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line of the form without Hydra."""
    parser = argparse.ArgumentParser(description="Time a draft's training step, ours and a peer's.")
    parser.add_argument("--geometry", default="smollm", choices=sorted(GEOMETRIES))
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--dtype", default="fp32", choices=sorted(DTYPES))
    parser.add_argument("--peers", nargs="*", default=[], help=f"out of {', '.join(PEERS)}")
    parser.add_argument("--repeats", type=int, default=15, help="timed steps of each (default: 15)")
    parser.add_argument("--warmup", type=int, default=3, help="untimed rounds (default: 3)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's choice")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-memory", action="store_true", help="skip the measurement of peak memory")
    parser.add_argument("--tolerance", type=float, default=0.01, help="largest relative difference of losses")
    parser.add_argument("--profile", type=Path, default=None, help="file for where our step's time goes")
    parser.add_argument("--out", default="outputs/bench_step.jsonl")
    parser.add_argument("--memory-of", default=None, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, or 1 after one line on stderr for a caller's mistake."""
    given = arguments(argv)
    if given.memory_of:
        torch.set_num_threads(given.threads)
        print(resident_growth(given.memory_of, given.geometry, given.dtype, given.seed))
        return 0
    settings = Settings(
        geometry=given.geometry,
        device=given.device,
        dtype=given.dtype,
        peers=tuple(given.peers),
        repeats=given.repeats,
        warmup=given.warmup,
        threads=given.threads,
        seed=given.seed,
        memory=not given.no_memory,
        tolerance=given.tolerance,
        profile=given.profile,
    )
    try:
        rows = measure(settings, say=lambda line: print(line, file=sys.stderr, flush=True))
        write_rows(rows, Path(given.out))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{summary(rows)}; rows in {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
