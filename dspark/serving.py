"""Talking to inference engines: worker processes with vLLM in them, running servers, and the table both fill.

An engine is measured in cells: one prompt set, temperature and concurrency. The same cells run with the verifier alone and with
each draft, so that every ratio compares equal work.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

WORKER = Path(__file__).with_name("serving_worker.py")
# Without these a card-less environment cannot start: flashinfer is left out of small installations.
WORKER_ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "PYTHONUNBUFFERED": "1",
}
VERIFIER_ALONE = "verifier"


@dataclass(frozen=True)
class Cell:
    """One measurement: a prompt set, or its first `limit` prompts, at one temperature and concurrency.

    `seed` None leaves sampling to the engine's own.
    """

    set: str
    temperature: float
    concurrency: int
    max_tokens: int
    seed: int | None
    limit: int | None = None


@dataclass(frozen=True)
class DraftSpec:
    """A draft as the engine is told of it: any method vLLM knows. `predicted` holds its run's evaluations by name."""

    label: str
    speculative: dict[str, Any]
    predicted: dict[str, dict[str, Any]]


# ---- drafts and prompts


def draft_spec(
    model: str | Path,
    *,
    label: str | None,
    method: str | None,
    num_speculative_tokens: int | None,
    options: Mapping[str, Any],
) -> DraftSpec:
    """What to tell vLLM about a draft folder; method and tokens are read from the folder where they are not given.

    Raises ValueError when the folder does not say them either.
    """
    folder = Path(model)
    facts: dict[str, Any] = {}
    if (folder / "dspark.json").is_file():
        facts = json.loads((folder / "dspark.json").read_text())
    elif (folder / "config.json").is_file():
        config = json.loads((folder / "config.json").read_text())
        methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
        facts = {
            "method": config.get("speculators_model_type"),
            "num_speculative_tokens": methods[0].get("speculative_tokens"),
        }
    method = method or facts.get("method")
    tokens = num_speculative_tokens or facts.get("num_speculative_tokens")
    if not method or not tokens:
        raise ValueError(
            f"draft {model} does not say its method and number of tokens; give both (method=dspark num_speculative_tokens=7)."
        )
    speculative = {"model": str(model), "method": method, "num_speculative_tokens": int(tokens), **options}
    return DraftSpec(label or folder.name, speculative, facts.get("measured") or {})


def read_prompts(path: Path, limit: int | None) -> list[dict[str, Any]]:
    """Prompts of a JSONL file, one object a line with `turns`: user turns only. Ids are line numbers.

    Raises ValueError that names the file and line.
    """
    if not path.is_file():
        raise ValueError(f"prompt file {path} does not exist.")
    prompts = []
    with path.open() as file:
        for number, line in enumerate(file):
            if limit is not None and len(prompts) == limit:
                break
            if not line.strip():
                continue
            try:
                turns = json.loads(line)["turns"]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(
                    f'{path} line {number + 1}: expected {{"turns": ["...", ...]}} ({error!r}).'
                ) from error
            if not turns or not all(isinstance(t, str) for t in turns):
                raise ValueError(f"{path} line {number + 1}: turns must be a non-empty list of strings.")
            prompts.append({"id": str(number), "turns": turns})
    if not prompts:
        raise ValueError(f"{path} has no prompts.")
    return prompts


# ---- an engine in its own process


def engine_job(
    target: str,
    sets: Mapping[str, Sequence[Mapping[str, Any]]],
    cells: Sequence[Cell],
    *,
    engine: Mapping[str, Any],
    speculative: Mapping[str, Any] | None,
    warmup: int,
    template: Mapping[str, Any],
    resolve: bool = True,
) -> dict[str, Any]:
    """The worker's job. Local paths become absolute, since the worker may start elsewhere, unless `resolve` is false."""
    speculative = dict(speculative) if speculative else None
    if resolve and speculative and Path(speculative.get("model", "")).is_dir():
        speculative["model"] = str(Path(speculative["model"]).resolve())
    local = Path(target).expanduser() if resolve else Path(target)
    return {
        "target": str(local.resolve()) if resolve and local.is_dir() else target,
        "engine": {k: v for k, v in engine.items() if v is not None},
        "speculative": speculative,
        "sets": {name: list(prompts) for name, prompts in sets.items()},
        "cells": [asdict(cell) for cell in cells],
        "warmup": warmup,
        "template": dict(template),
    }


def run_worker(
    python: str,
    job: Mapping[str, Any],
    folder: Path,
    label: str,
    *,
    timeout: float,
    environment: Mapping[str, str],
    progress: Callable[[int], None] = lambda cells: None,
) -> dict[str, Any]:
    """Run one engine over `job` in its own process; returns what it wrote to `<folder>/<label>.json`.

    The process's output goes to `<label>.log`. Raises ValueError with the engine's own last error lines when it fails, stops
    before the last cell, or runs longer than `timeout` seconds; cells finished before that stay in the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job_path, out, log = (folder / f"{label}.{end}" for end in ("job.json", "json", "log"))
    job_path.write_text(json.dumps(job))
    out.unlink(missing_ok=True)
    command = [python, str(WORKER), str(job_path.resolve()), str(out.resolve())]
    started = time.monotonic()
    with log.open("w") as stream:
        try:
            process = subprocess.Popen(
                command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, **WORKER_ENVIRONMENT, **environment},
                start_new_session=True,
            )
        except OSError as error:
            raise ValueError(f"python={python} cannot be run ({error}).") from error
        try:
            while process.poll() is None:
                if time.monotonic() - started > timeout:
                    raise ValueError(
                        f"engine '{label}' ran longer than {timeout:.0f} s; its log is {log}. Raise timeout, or ask for less."
                    )
                progress(_finished_cells(out))
                time.sleep(0.5)
        finally:
            _stop(process)
    progress(_finished_cells(out))
    result = json.loads(out.read_text()) if out.is_file() else {}
    if process.returncode != 0 or not result.get("complete"):
        raise ValueError(
            f"engine '{label}' failed with exit status {process.returncode}; its last errors, from {log}:\n"
            + "\n".join(f"  {line}" for line in last_errors(log.read_text(errors="replace")))
        )
    return result


def _finished_cells(out: Path) -> int:
    return len(json.loads(out.read_text())["cells"]) if out.is_file() else 0


def _stop(process: subprocess.Popen) -> None:
    """End the worker and the engine processes it started; they share its process group."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, 15)
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()


_PREFIX = re.compile(r"^(\(\w+ pid=\d+\)\s*)?((ERROR|WARNING|INFO) [\d-]+ [\d:.]+ \[[^\]]*\]\s*)?")
_ERROR = re.compile(r"^\s*([\w.]*(Error|Exception|Exit)\b|error:|CUDA error|Killed|Segmentation fault).*")
_WRAPPER = re.compile(r"Engine core initialization failed|See root cause above|EngineDeadError")


def last_errors(log: str, *, count: int = 4) -> list[str]:
    """The lines that say what went wrong: the last distinct exceptions, root causes before the wrappers that re-raise them."""
    lines = [_PREFIX.sub("", line).rstrip() for line in log.splitlines()]
    found = list(dict.fromkeys(line.strip() for line in lines if _ERROR.match(line)))
    causes = [line for line in found if not _WRAPPER.search(line)]
    if causes:
        return causes[-count:]
    return found[-count:] or [line for line in lines if line][-count:] or ["(the log is empty)"]


# ---- a server that is already running


class Server:
    """An OpenAI-compatible server: chat completions, and vLLM's counters where `/metrics` has them."""

    def __init__(self, url: str, *, timeout: float) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.timeout = timeout
        models = self._json("/v1/models")
        try:
            self.model = models["data"][0]["id"]
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{self.url}/v1/models lists no model: {str(models)[:200]}") from error

    def _request(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:300]
            raise ValueError(f"{self.url}{path} answered {error.code}: {text}") from error
        except (urllib.error.URLError, OSError) as error:
            raise ValueError(
                f"{self.url}{path} cannot be reached ({getattr(error, 'reason', error)}); is the server up?"
            ) from error

    def _json(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        raw = self._request(path, body)
        try:
            return json.loads(raw)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{self.url}{path} answered something that is not JSON: {raw[:100]!r}"
            ) from error

    def counters(self) -> dict[str, Any]:
        """Speculation counters since the server started; empty where it has none."""
        try:
            return parse_metrics(self._request("/metrics").decode())
        except ValueError:
            return {}

    def answer(
        self, messages: Sequence[Mapping[str, str]], cell: Cell, template: Mapping[str, Any]
    ) -> dict[str, Any]:
        """One chat completion: text, token counts, finish reason, seconds."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "temperature": cell.temperature,
            "max_tokens": cell.max_tokens,
        }
        if cell.seed is not None:
            body["seed"] = cell.seed
        if template:
            body["chat_template_kwargs"] = dict(template)
        started = time.perf_counter()
        reply = self._json("/v1/chat/completions", body)
        try:
            choice, usage = reply["choices"][0], reply["usage"]
            return {
                "text": choice["message"]["content"] or "",
                "tokens": int(usage["completion_tokens"]),
                "prompt_tokens": int(usage["prompt_tokens"]),
                "finish_reason": choice.get("finish_reason"),
                "seconds": time.perf_counter() - started,
            }
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{self.url} answered without choices or usage: {str(reply)[:200]}") from error

    def run_cell(
        self, prompts: Sequence[Mapping[str, Any]], cell: Cell, template: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Measure one cell with `concurrency` conversations in flight; same result as the worker's, with text for token ids."""

        def converse(prompt: Mapping[str, Any]) -> list[dict[str, Any]]:
            messages: list[dict[str, str]] = []
            rows = []
            for turn, question in enumerate(prompt["turns"]):
                messages.append({"role": "user", "content": question})
                row = self.answer(messages, cell, template)
                messages.append({"role": "assistant", "content": row["text"]})
                rows.append({"id": prompt["id"], "turn": turn, **row})
            return rows

        before = self.counters()
        started = time.perf_counter()
        with ThreadPoolExecutor(cell.concurrency) as pool:
            pending = {pool.submit(converse, prompt) for prompt in prompts[: cell.limit]}
            requests: list[dict[str, Any]] = []
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    requests += future.result()
        seconds = time.perf_counter() - started
        return {
            **asdict(cell),
            "seconds": seconds,
            "output_tokens": sum(r["tokens"] for r in requests),
            "counters": subtract_counters(self.counters(), before),
            "requests": requests,
        }


_SAMPLE = re.compile(r"^vllm:spec_decode_num_(\w+?)_total(?:\{([^}]*)\})?\s+([0-9.eE+]+)")
_NAMES = {
    "drafts": "drafts",
    "draft_tokens": "draft_tokens",
    "accepted_tokens": "accepted",
    "accepted_tokens_per_pos": "accepted_per_position",
}


def parse_metrics(text: str) -> dict[str, Any]:
    """vLLM's speculation counters out of Prometheus text, summed over engines; per-position counts as a list."""
    totals: dict[str, Any] = {}
    positions: dict[int, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if not match or match[1] not in _NAMES:
            continue
        name, value = _NAMES[match[1]], float(match[3])
        if name == "accepted_per_position":
            place = int(re.search(r'position="(\d+)"', match[2] or "")[1])
            positions[place] = positions.get(place, 0.0) + value
        else:
            totals[name] = totals.get(name, 0.0) + value
    if positions:
        totals["accepted_per_position"] = [positions.get(i, 0.0) for i in range(max(positions) + 1)]
    return totals


def subtract_counters(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Counters of an interval."""
    result: dict[str, Any] = {}
    for name, value in after.items():
        if isinstance(value, list):
            earlier = before.get(name) or [0.0] * len(value)
            result[name] = [a - b for a, b in zip(value, [*earlier, *[0.0] * len(value)], strict=False)]
        else:
            result[name] = value - before.get(name, 0.0)
    return result


# ---- the table


def cell_table(
    results: Mapping[str, Sequence[Mapping[str, Any]]],
    predicted: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> pd.DataFrame:
    """One row a configuration and cell, plus `overall` rows over the sets, from what workers or servers measured.

    tok_s is output tokens over wall seconds; speed_up its ratio to the verifier alone in the same cell; accept_length 1 +
    accepted / drafts, the bonus token included; rate_i the share of drafts-steps that keep proposal i (unconditional).
    same_text is the share of greedy requests whose output equals the verifier's alone. predicted_* is what the run measured
    for the set itself (`prediction`), among the evaluations `predicted[config]` that its export carries.
    """
    rows = []
    for config, cells in results.items():
        for cell in cells:
            rows.append(_row(config, cell, cell["set"]))
        by_load: dict[tuple[float, int], list[Mapping[str, Any]]] = {}
        for cell in cells:
            by_load.setdefault((cell["temperature"], cell["concurrency"]), []).append(cell)
        for group in by_load.values():
            if len(group) > 1:
                rows.append(_row(config, _merged(group), "overall"))
    frame = pd.DataFrame(rows)
    alone = {
        (cell["set"], cell["temperature"], cell["concurrency"]): cell
        for cell in results.get(VERIFIER_ALONE, ())
    }
    base = {
        (r["set"], r["temperature"], r["concurrency"]): r["tok_s"]
        for r in rows
        if r["config"] == VERIFIER_ALONE
    }
    keys = list(zip(frame["set"], frame["temperature"], frame["concurrency"], strict=True))
    frame["speed_up"] = [
        speed / base[key] if key in base else float("nan")
        for key, speed in zip(keys, frame["tok_s"], strict=True)
    ]
    frame["same_text"] = [
        same_text(results[config], alone, key) if config != VERIFIER_ALONE else float("nan")
        for config, key in zip(frame["config"], keys, strict=True)
    ]
    predictions = [
        prediction(predicted.get(config, {}), name, temperature)
        for config, (name, temperature, _) in zip(frame["config"], keys, strict=True)
    ]
    frame["predicted_accept_length"] = [p.get("tau", float("nan")) for p in predictions]
    frame["predicted_from"] = [p.get("name") for p in predictions]
    width = max((len(p.get("survival", ())) for p in predictions), default=0)
    for i in range(width):
        frame[f"predicted_rate_{i + 1}"] = [
            p["survival"][i] if i < len(p.get("survival", ())) else float("nan") for p in predictions
        ]
    first = ["config", "set", "temperature", "concurrency", "requests", "output_tokens", "tok_s", "speed_up"]
    return frame[[*first, *(c for c in frame.columns if c not in first)]]


def prediction(measured: Mapping[str, Mapping[str, Any]], name: str, temperature: float) -> dict[str, Any]:
    """The run's own measurement that a cell should reproduce: same set and temperature, and the drafts an engine makes there.

    Evaluations of a set are named after it with suffixes. Engines draft greedily at temperature 0 and, as `serve_bench` asks them,
    from the draft's distribution otherwise. Replay comes before decoding, which repeats the same measurement with more noise.
    """
    wanted = "greedy" if temperature == 0.0 else "sampled"
    fitting = [
        {"name": label, **m}
        for label, m in measured.items()
        if (label == name or label.startswith(f"{name}-"))
        and m.get("temperatures", [temperature]) == [temperature]
        and m.get("draft_sampling", wanted) == wanted
        and m.get("num_proposals", len(m["survival"])) == len(m["survival"])
    ]
    return min(fitting, key=lambda m: (m.get("mode") != "replay", len(m["name"])), default={})


def _row(config: str, cell: Mapping[str, Any], name: str) -> dict[str, Any]:
    counters = cell["counters"]
    drafts = counters.get("drafts") or 0
    row = {
        "config": config,
        "set": name,
        "temperature": cell["temperature"],
        "concurrency": cell["concurrency"],
        "requests": len(cell["requests"]),
        "output_tokens": cell["output_tokens"],
        "seconds": cell["seconds"],
        "tok_s": cell["output_tokens"] / cell["seconds"],
        "drafts": drafts,
        "accept_length": 1 + counters["accepted"] / drafts if drafts else float("nan"),
    }
    for i, kept in enumerate(counters.get("accepted_per_position") or ()):
        row[f"rate_{i + 1}"] = kept / drafts if drafts else float("nan")
    return row


def _merged(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several sets as one cell: tokens, seconds and counters added."""
    counters: dict[str, Any] = {}
    for cell in cells:
        for name, value in cell["counters"].items():
            if isinstance(value, list):
                old = counters.get(name, [0] * len(value))
                counters[name] = [a + b for a, b in zip(old, value, strict=True)]
            else:
                counters[name] = counters.get(name, 0) + value
    return {
        "temperature": cells[0]["temperature"],
        "concurrency": cells[0]["concurrency"],
        "requests": [r for cell in cells for r in cell["requests"]],
        "output_tokens": sum(c["output_tokens"] for c in cells),
        "seconds": sum(c["seconds"] for c in cells),
        "counters": counters,
    }


def same_text(
    cells: Sequence[Mapping[str, Any]],
    alone: Mapping[tuple[str, float, int], Mapping[str, Any]],
    key: tuple[str, float, int],
) -> float:
    """Share of greedy requests that came out as without a draft; nan for sampling, or where there is nothing to compare.

    Later turns are left out once an earlier answer of the conversation differed: their prompts are not the same.
    """
    name, temperature, concurrency = key
    if temperature != 0.0:
        return float("nan")
    equal = total = 0
    for cell in cells:
        place = (cell["set"], cell["temperature"], cell["concurrency"])
        if (
            name not in ("overall", cell["set"])
            or place[1:] != (temperature, concurrency)
            or place not in alone
        ):
            continue
        reference = {(r["id"], r["turn"]): _output(r) for r in alone[place]["requests"]}
        changed: set[str] = set()
        for request in sorted(cell["requests"], key=lambda r: (r["id"], r["turn"])):
            if request["id"] in changed or (request["id"], request["turn"]) not in reference:
                continue
            total += 1
            if _output(request) == reference[request["id"], request["turn"]]:
                equal += 1
            else:
                changed.add(request["id"])
    return equal / total if total else float("nan")


def _output(request: Mapping[str, Any]) -> Any:
    return request.get("token_ids", request.get("text"))


def markdown(frame: pd.DataFrame) -> str:
    """The table for reading: rounded, empty columns left out."""
    shown = frame.dropna(axis="columns", how="all").drop(columns=["seconds", "drafts"], errors="ignore")

    def text(column: str, value: Any) -> str:
        if isinstance(value, float) and value != value:
            return ""
        if column == "tok_s":
            return f"{value:.1f}"
        if column in ("speed_up", "temperature"):
            return f"{value:.2f}"
        return f"{value:.3f}" if isinstance(value, float) else str(value)

    lines = ["| " + " | ".join(shown.columns) + " |", "|" + "---|" * len(shown.columns)]
    lines += [
        "| " + " | ".join(text(c, v) for c, v in zip(shown.columns, row, strict=True)) + " |"
        for row in shown.itertuples(index=False)
    ]
    return "\n".join(lines) + "\n"
