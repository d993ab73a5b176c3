"""Time a verifier's forward for growing numbers of tokens and write a step-cost table.

    python -m experiments.bench steps                                                      # SmolLM2 on this machine
    python experiments/bench_steps.py --device cuda --dtype bfloat16 --model-path DIR --out configs/cost/mine.json

The second form needs nothing but torch and transformers, so that it runs on a machine with neither Hydra nor this package.

What is timed: one forward with key-value cache over B new tokens in all, split evenly over at most `requests` sequences that
each hold `context` cached tokens, logits of every new token included, since verification needs them. Sizes are visited in
random order, `repeats` times each, and the median is kept. On CUDA the forward is captured in a CUDA graph, as engines do,
unless `eager` is set. The table's form is described in `dspark/costs.py`.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

if not __package__:  # SmolLM2, without --model-path, is loaded by this checkout
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@torch.no_grad()
def measure_steps(
    model: Any,
    *,
    tokens: Sequence[int],
    context: int,
    requests: int,
    repeats: int,
    warmup: int,
    eager: bool,
    say: Callable[[str], None],
) -> dict[int, list[float]]:
    """Milliseconds of each repeat by number of tokens; numbers that `requests` does not divide are rounded down to it.

    `model` is a Transformers causal language model; `eager` is ignored off CUDA, where nothing is captured.
    """
    sizes = sorted({n if n <= requests else n - n % requests for n in tokens})
    graph = model.device.type == "cuda" and not eager
    steps = {}
    for n in sizes:
        step = _step(model, rows=min(n, requests), columns=n // min(n, requests), context=context)
        for _ in range(warmup):
            step()
        steps[n] = _captured(step) if graph else step
        say(f"prepared {n} tokens")
    times: dict[int, list[float]] = {n: [] for n in sizes}
    order = random.Random(0)
    for repeat in range(repeats):
        for n in order.sample(sizes, len(sizes)):
            times[n].append(_milliseconds(steps[n], model.device))
        say(f"repeat {repeat + 1} of {repeats}")
    return times


def _step(model: Any, *, rows: int, columns: int, context: int) -> Callable[[], None]:
    """One forward over [rows, columns] new tokens behind `context` cached ones; the cache is put back afterwards."""
    from transformers import DynamicCache

    device, vocab = model.device, model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocab, (rows, context + columns), generator=torch.Generator().manual_seed(0)).to(
        device
    )
    cache = DynamicCache()
    model(input_ids=ids[:, :context], past_key_values=cache, use_cache=True, logits_to_keep=1)
    # Put back after each step, and held: a captured forward goes on reading them.
    held = [(layer.keys, layer.values) for layer in cache.layers]
    new = ids[:, context:].contiguous()
    positions = torch.arange(context, context + columns, device=device).expand(rows, columns)
    # A ready-made 4-D mask keeps data-dependent checks out of the captured forward.
    visible = torch.arange(context + columns, device=device) <= positions[..., None]
    mask = torch.zeros(visible.shape, dtype=model.dtype, device=device)
    mask = mask.masked_fill(~visible, torch.finfo(model.dtype).min)[:, None]

    def step() -> None:
        model(
            input_ids=new, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        for layer, (keys, values) in zip(cache.layers, held, strict=True):
            layer.keys, layer.values = keys, values

    return step


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(keep: Callable[[], None] = step) -> None:  # `keep` holds the tensors that the graph reads
        graph.replay()

    return replay


def _milliseconds(step: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1000 * (time.perf_counter() - started)


def cost_table(name: str, times: dict[int, list[float]], provenance: dict[str, Any]) -> dict[str, Any]:
    """The JSON content of a measured table."""
    medians = {n: statistics.median(values) for n, values in times.items()}
    # Of the middle half: one pause of a shared machine says nothing about a median.
    spread = 0.0
    for n, values in times.items():
        if len(values) > 1:
            low, _, high = statistics.quantiles(values, n=4)
            spread = max(spread, (high - low) / medians[n])
    return {
        "format": "dspark-step-cost",
        "version": 1,
        "name": name,
        "kind": "measured",
        "interpolation": "linear",
        "tokens": list(medians),
        "verify_ms": [round(ms, 4) for ms in medians.values()],
        "draft": None,
        "provenance": {**provenance, "widest_quartiles_over_median": round(spread, 3)},
    }


def load_model(model_path: str | None, device: str, dtype: str) -> tuple[Any, str]:
    """(model, its name). Without a path: SmolLM2, through the package's verifier.

    Raises ValueError for an unknown dtype, a device that is not there, or a folder that holds no model.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; expected one of {sorted(DTYPES)}.")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, but torch sees no CUDA device here; use device=cpu.")
    if model_path is None:
        from dspark.verifier import Verifier

        return Verifier.load_smollm2(
            compute_dtype=DTYPES[dtype], device=device
        ).model, "SmolLM2-135M-Instruct"
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=DTYPES[dtype])
    except OSError as error:
        raise ValueError(f"no model could be loaded from {model_path}: {error}") from error
    return model.to(device).eval(), Path(model_path).name


def run(cfg: Any) -> dict[str, Any]:
    """Measure, write `cfg.out`, return the table. `cfg` has the attributes that `arguments` lists, whatever its type."""
    model, model_name = load_model(cfg.model_path, cfg.device, cfg.dtype)
    if cfg.threads:
        torch.set_num_threads(int(cfg.threads))
    on_cuda = model.device.type == "cuda"
    out = Path(cfg.out)
    times = measure_steps(
        model,
        tokens=[int(n) for n in cfg.tokens],
        context=int(cfg.context),
        requests=int(cfg.requests),
        repeats=int(cfg.repeats),
        warmup=int(cfg.warmup),
        eager=bool(cfg.eager),
        say=lambda line: print(f"\r{line:<40}", end="", file=sys.stderr, flush=True),
    )
    print(file=sys.stderr)
    provenance = {
        "model": model_name,
        "dtype": cfg.dtype,
        "device": torch.cuda.get_device_name(model.device)
        if on_cuda
        else f"{_processor()}, {torch.get_num_threads()} threads",
        "context": int(cfg.context),
        "requests": int(cfg.requests),
        "repeats": int(cfg.repeats),
        "cuda_graph": on_cuda and not cfg.eager,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "timer": "wall clock around one forward, device synchronised; median of the repeats",
    }
    table = cost_table(out.stem, times, provenance)
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in table.items()]
    out.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    first, last = table["verify_ms"][0], table["verify_ms"][-1]
    print(
        f"{model_name} on {provenance['device']}: {first:.2f} ms for {table['tokens'][0]} token, {last:.2f} ms for "
        f"{table['tokens'][-1]} ({last / first:.1f}x); cost table {out}"
    )
    return table


def _processor() -> str:
    try:
        names = [
            s.split(":", 1)[1].strip()
            for s in Path("/proc/cpuinfo").read_text().splitlines()
            if s.startswith("model name")
        ]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or "cpu"


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench steps", description="Time a verifier's forward by number of tokens."
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16 (default: float32)")
    parser.add_argument(
        "--model-path", default=None, help="Transformers model folder (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument(
        "--out", default="outputs/steps.json", help="file to write (default: outputs/steps.json)"
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=list(TOKENS), help="numbers of tokens to time"
    )
    parser.add_argument("--context", type=int, default=256, help="cached tokens a sequence (default: 256)")
    parser.add_argument(
        "--requests", type=int, default=8, help="sequences the tokens are split over (default: 8)"
    )
    parser.add_argument("--repeats", type=int, default=9, help="timed forwards a size (default: 9)")
    parser.add_argument("--warmup", type=int, default=2, help="forwards before timing a size (default: 2)")
    parser.add_argument(
        "--threads", type=int, default=0, help="CPU threads; 0 leaves torch's choice (default: 0)"
    )
    parser.add_argument("--eager", action="store_true", help="on CUDA: no CUDA graph")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, or 1 after one line on stderr for a caller's mistake."""
    try:
        run(arguments(argv))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
