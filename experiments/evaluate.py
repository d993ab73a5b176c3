"""Measure acceptance: `python -m experiments.evaluate run=runs/<id> [mode=replay|decode|lossless|walk] [overrides]`.

Replay needs a feature cache and no verifier; decode runs the real loop. Every set leaves `<run>/eval/<set>/` with slots, rounds
and a summary; all sets of one call share one table. The last line gives tau with its interval.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import DictConfig, OmegaConf
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dspark.analysis import tables
from dspark.blocks import DraftBatch
from dspark.config import Contract
from dspark.data.batches import HeldOutDocuments
from dspark.data.features import FeatureCache, Features
from dspark.data.generation import Request, Response, generate
from dspark.data.prompts import Prompt, read_jsonl
from dspark.data.responses import TokenDocument, answer_prompts, row_seed
from dspark.decode import DecodeSettings, Round, decode, responses
from dspark.evaluation import CachedTargets, decode_tables, replay_tables, summarise
from dspark.lossless import LogEntry, compare_greedy, conditional_test, read_log, two_sample_test
from dspark.nn.draft import Draft
from dspark.runs import Run, code_version, current_command, load_draft, utc_now, write_table, write_text
from dspark.verifier import COMPUTE_DTYPES, Verifier
from dspark.walkthrough import head_changes, transitions, walk_block
from experiments.cli import command, listed
from experiments.collect import evenly, load_verifier

console = Console(width=None if sys.stdout.isatty() else 150)


@command("evaluate")
def main(cfg: DictConfig) -> None:
    modes = {"replay": replay_sets, "decode": decode_sets, "lossless": check_lossless, "walk": walk}
    if cfg.mode not in modes:
        raise ValueError(f"mode is {cfg.mode!r}; expected one of {', '.join(modes)}.")
    if cfg.benchmark:
        benchmark(cfg)
    else:
        modes[cfg.mode](cfg)


# ---- replay


def replay_split(
    run: Run, cache: Features, *, split: str, limit: int | None = None, device: str = "cpu"
) -> dict[str, object]:
    """Replay one split's greedy answers (all of them, or `limit` spread over the split) with a run's best draft on `device`:
    greedy drafts, every trained proposal. A cache without greedy answers is replayed as it is.

    Writes `<run>/eval/<cache>-<split>/` and returns the summary. Raises ValueError for a cache of another verifier, or a
    split without documents.
    """
    draft, cache = draft_for_cache(run, cache, device)
    documents = cache.greedy_first(split)
    if not documents:
        raise ValueError(f"{cache.path} has no documents of split {split!r}; it has {cache.manifest.splits}.")
    documents = spread(documents, limit)
    dataset = cache_label(cache, split)
    slots, rounds = replay_tables(
        draft,
        cache,
        documents,
        run_id=run.path.name,
        dataset=dataset,
        draft_sampling="greedy",
        num_proposals=draft.config.num_proposals,
        confidence_threshold=None,
    )
    settings = {"mode": "replay", "cache": str(cache.path), "split": split, "draft_sampling": "greedy"}
    return write_set(run, dataset, slots, rounds, settings)


def replay_sets(cfg: DictConfig) -> None:
    """Replay every run on every cache and temperature asked for, then the table."""
    started = time.time()
    if cfg.prompts is not None:
        raise ValueError(
            "mode=replay reads answers from a cache, not prompts. Use mode=decode, or collect the answers first: "
            "python -m experiments.collect data=jsonl data.path=<file> name=<cache>, then cache=data/cache/<cache>."
        )
    runs = open_runs(cfg)
    caches: dict[str, FeatureCache] = {}
    measured, replayed = [], 0
    for run in runs:
        for path in listed(cfg.cache) or [run.manifest.data.get("cache")]:
            cache = caches.setdefault(str(path), open_cache(path, run))
            draft, cache = draft_for_cache(run, cache, cfg.device)
            for temperature in listed(cfg.temperature) or [None]:
                documents = select(cfg, cache, temperature)
                name = "-".join(
                    [cache_label(cache, cfg.split, cfg.domain), *suffixes(cfg, draft, temperature)]
                )
                began = time.time()
                with bar(cfg, f"replay {name}", len(documents)) as advance:
                    slots, rounds = replay_tables(
                        draft,
                        cache,
                        documents,
                        run_id=run.path.name,
                        dataset=name,
                        draft_sampling=cfg.draft_sampling,
                        num_proposals=proposals(cfg, draft),
                        confidence_threshold=cfg.confidence_threshold,
                        progress=advance,
                    )
                settings = {
                    "mode": "replay",
                    "cache": str(cache.path),
                    "reference_text": f"cached answers of {cache.manifest.responses_by}",
                    "seconds": round(time.time() - began, 2),
                    **common_settings(cfg, draft),
                }
                write_set(run, name, slots, rounds, settings)
                measured.append((slots, rounds))
                replayed += len(documents)
    report(cfg, runs, measured, f"{replayed} documents replayed in {time.time() - started:.0f} s")


def draft_for_cache(run: Run, cache: Features, device: str) -> tuple[Draft, Features]:
    """A run's best draft in fp32 with the verifier's embeddings, and the features with the layers that this draft reads.

    Raises ValueError when the two do not belong together.
    """
    draft, contract, _ = load_draft(run.checkpoint("best"), attention_backend="auto")
    cache = cache.for_draft(contract)
    contract.check(cache.contract(), mine=f"run {run.path.name}", theirs=f"{cache.name} {cache.path}")
    draft = draft.float().to(device)
    draft.set_embedding(cache.verifier_weights()["embed_tokens.weight"], torch.float32)
    return draft.eval(), cache


def open_cache(path: str | None, run: Run) -> FeatureCache:
    if not path:
        raise ValueError(f"run {run.path.name} does not say which cache it used; give cache=<folder>.")
    return FeatureCache.open(path, verify="sizes")


def select(cfg: DictConfig, cache: FeatureCache, temperature: float | None) -> list[int]:
    """Documents of the cache that the configuration asks for, spread evenly where `limit` cuts."""
    documents = cache.select(split=cfg.split, domain=cfg.domain, temperature=temperature)
    if not documents:
        facts = sorted({cache.info(i).temperature for i in range(len(cache))})
        raise ValueError(
            f"{cache.path} has no documents of split {cfg.split}, domain {cfg.domain}, temperature {temperature}; it has splits "
            f"{cache.manifest.splits}, domains {cache.manifest.domains}, temperatures {facts}."
        )
    return spread(documents, cfg.limit)


def spread(documents: list[int], limit: int | None) -> list[int]:
    """`limit` of the documents at even distances, or all."""
    return evenly(documents, int(limit or len(documents)))


# ---- decode


@dataclass
class Job:
    """Requests of one set at one temperature, with what the tables and the log say about each."""

    name: str
    requests: list[Request]
    limits: list[int] | None
    origins: dict[int, dict[str, object]]
    turns: list[int]
    rounds: list[Round]


def decode_sets(cfg: DictConfig) -> None:
    """Decode every run on every set and temperature, plain decoding beside it, then the tables."""
    runs = open_runs(cfg)
    verifier = load_verifier(cfg)
    plain: dict[str, tuple[list[Response], float]] = {}
    measured, speeds, texts = [], [], 0
    for run in runs:
        draft = draft_for_verifier(run, verifier, cfg.draft_dtype)
        settings = decode_settings(cfg, draft)
        for job in jobs(cfg, run, verifier, draft, settings):
            slots, rounds = decode_tables(
                job.rounds, job.origins, run_id=run.path.name, dataset=job.name, settings=settings
            )
            answers = dict(responses(iter(job.rounds)))
            facts = {
                "mode": "decode",
                "reference_text": "the verifier's own, along the accepted path",
                "verifier": verifier.info.name,
                "compute_dtype": verifier.info.compute_dtype,
                "draft_dtype": cfg.draft_dtype,
                "batch_size": int(cfg.batch_size),
                "max_new_tokens": int(cfg.max_new_tokens),
                "top_k": settings.top_k,
                "top_p": settings.top_p,
                **common_settings(cfg, draft),
            }
            folder = run.eval_folder(job.name)
            write_log(folder / "decoded.jsonl", verifier, job, answers)
            if cfg.plain:
                if job.name not in plain:
                    plain[job.name] = plain_decode(cfg, verifier, job)
                    write_log(folder / "plain.jsonl", verifier, job, dict(enumerate(plain[job.name][0])))
                speed = speed_row(run, job, rounds, *plain[job.name])
                speeds.append(speed)
                facts |= {"speed": speed}
                if job.requests[0].temperature == 0 and settings.top_k == 0:
                    facts |= greedy_agreement(cfg, verifier, job, answers, plain[job.name][0])
            write_set(run, job.name, slots, rounds, facts)
            measured.append((slots, rounds))
            texts += len(answers)
    out = report(cfg, runs, measured, None)
    if speeds:
        frame = pd.DataFrame(speeds)
        write_frames(out, {"speed": frame})
        print_table("Speed (generation only; plain decoding of the same requests beside it)", frame)
    last_line(cfg, measured, f"{texts} answers decoded; tables in {out}")


def draft_for_verifier(run: Run, verifier: Verifier, dtype: str) -> Draft:
    """A run's best draft beside its verifier. Raises ValueError when the run was trained for another verifier."""
    if dtype not in COMPUTE_DTYPES:
        raise ValueError(f"draft_dtype is {dtype!r}; expected one of {sorted(COMPUTE_DTYPES)}.")
    draft, contract, _ = load_draft(run.checkpoint("best"), attention_backend="auto")
    info = verifier.info
    facts = Contract(
        verifier_sha=info.weights_sha,
        tokenizer_sha=info.tokenizer_sha,
        hidden_size=info.hidden_size,
        vocab_size=info.vocab_size,
    )
    contract.check(facts, mine=f"run {run.path.name}", theirs=f"verifier {info.name}")
    draft = draft.to(device=verifier.device, dtype=COMPUTE_DTYPES[dtype])
    draft.set_embedding(verifier.embed_weight(), COMPUTE_DTYPES[dtype])
    return draft.eval()


def decode_settings(cfg: DictConfig, draft: Draft) -> DecodeSettings:
    return DecodeSettings(
        draft_sampling=cfg.draft_sampling,
        num_proposals=proposals(cfg, draft),
        confidence_threshold=cfg.confidence_threshold,
        top_k=int(cfg.top_k),
        top_p=float(cfg.top_p),
        max_new_tokens=int(cfg.max_new_tokens),
    )


def jobs(
    cfg: DictConfig, run: Run, verifier: Verifier, draft: Draft, settings: DecodeSettings
) -> Iterator[Job]:
    """Decoded sets: prompt files at each temperature, or the documents of a cache at their own."""
    if cfg.prompts is None:
        for path in listed(cfg.cache) or [run.manifest.data.get("cache")]:
            cache = open_cache(path, run)
            for temperature in listed(cfg.temperature) or [None]:
                yield decode_documents(cfg, cache, temperature, verifier, draft, settings)
        return
    for path in listed(cfg.prompts):
        prompts, skipped = prompt_file(cfg, path)
        if skipped:
            console.print(f"{path}: left out {skipped}", highlight=False)
        for temperature in listed(cfg.temperature) or [0.0]:
            name = "-".join([Path(path).stem, *suffixes(cfg, draft, temperature), "decode"])
            yield decode_prompts(cfg, name, prompts, float(temperature), verifier, draft, settings)


def prompt_file(cfg: DictConfig, path: str) -> tuple[list[Prompt], dict[str, int]]:
    """Prompts of one file in the domain that the configuration gives it."""
    prompts, skipped = read_jsonl(
        path,
        domain=str(cfg.domains.get(Path(path).stem, "chat")),
        split_fractions={"test": 1.0},
        role_map={},
        limit=None if cfg.limit is None else int(cfg.limit),
    )
    skipped.pop("over_limit", None)
    return prompts, dict(skipped)


def decode_documents(
    cfg: DictConfig,
    cache: FeatureCache,
    temperature: float | None,
    verifier: Verifier,
    draft: Draft,
    settings: DecodeSettings,
) -> Job:
    """Answer again, from the same prompts and at the same length, what a cache's documents hold."""
    requests, limits, origins, turns = [], [], {}, []
    for number in select(cfg, cache, temperature):
        ids, mask = cache.tokens(number)
        info = cache.info(number)
        edges = mask.long().diff(prepend=torch.zeros(1, dtype=torch.int64)).nonzero()[:, 0].tolist()
        for turn, (start, end) in enumerate(
            itertools.zip_longest(edges[::2], edges[1::2], fillvalue=len(ids))
        ):
            origins[len(requests)] = {
                "domain": info.domain,
                "prompt_id": info.prompt_id,
                "doc_id": info.doc_id,
                "temperature": info.temperature,
            }
            seed = row_seed(int(cfg.seed), info.prompt_id, info.temperature) + 7919 * turn
            requests.append(Request(prompt_ids=ids[:start].tolist(), temperature=info.temperature, seed=seed))
            limits.append(end - start)
            turns.append(turn)
    name = "-".join([cache_label(cache, cfg.split, cfg.domain), *suffixes(cfg, draft, temperature), "decode"])
    with bar(cfg, f"decode {name}", sum(limits)) as advance:
        rounds = []
        for step in decode(
            verifier,
            draft,
            requests,
            settings=settings,
            batch_size=int(cfg.batch_size),
            diagnostics=bool(cfg.diagnostics),
            limits=limits,
        ):
            rounds.append(step)
            advance(len(step.tokens))
    return Job(name, requests, limits, origins, turns, rounds)


def decode_prompts(
    cfg: DictConfig,
    name: str,
    prompts: Sequence[Prompt],
    temperature: float,
    verifier: Verifier,
    draft: Draft,
    settings: DecodeSettings,
) -> Job:
    """Answer every turn of every prompt, each in the conversation so far."""
    found: dict[tuple[int, ...], tuple[Request, list[Round]]] = {}
    with bar(cfg, f"decode {name}", len(prompts) * settings.max_new_tokens) as advance:

        def respond(
            verifier: Verifier, requests: Sequence[Request], *, max_new_tokens: int, batch_size: int
        ) -> Iterator[tuple[int, Response]]:
            rounds: list[Round] = []
            for step in decode(
                verifier,
                draft,
                requests,
                settings=settings,
                batch_size=batch_size,
                diagnostics=bool(cfg.diagnostics),
            ):
                rounds.append(step)
                advance(len(step.tokens))
            for i, request in enumerate(requests):
                mine = [step for step in rounds if step.request == i]
                found[tuple(request.prompt_ids)] = (request, mine)
            yield from responses(iter(rounds))

        documents, skipped = answer_prompts(
            verifier,
            prompts,
            temperature=temperature,
            seed=int(cfg.seed),
            max_new_tokens=settings.max_new_tokens,
            max_length=int(cfg.max_length),
            batch_size=int(cfg.batch_size),
            mask_token_id=draft.config.mask_token_id,
            template_options=OmegaConf.to_container(cfg.template_options, resolve=True),
            progress=lambda tokens: None,
            respond=respond,
        )
    if skipped:
        console.print(f"{name}: left out {dict(skipped)}", highlight=False)
    if not documents:
        raise ValueError(
            f"{name}: none of {len(prompts)} prompts could be answered; left out {dict(skipped)}."
        )
    return job_of_documents(name, documents, found)


def job_of_documents(
    name: str,
    documents: Sequence[TokenDocument],
    found: dict[tuple[int, ...], tuple[Request, list[Round]]],
) -> Job:
    """The requests behind finished conversations, in order, with their rounds renumbered."""
    job = Job(name, [], None, {}, [], [])
    for document in documents:
        info = document.info()
        for turn, (start, _) in enumerate(document.spans):
            request, rounds = found[document.input_ids[:start]]
            number = len(job.requests)
            job.requests.append(request)
            job.turns.append(turn)
            job.origins[number] = {
                "domain": info.domain,
                "prompt_id": info.prompt_id,
                "doc_id": info.doc_id,
                "temperature": info.temperature,
            }
            for step in rounds:
                step.request = number
                job.rounds.append(step)
    return job


def plain_decode(cfg: DictConfig, verifier: Verifier, job: Job) -> tuple[list[Response], float]:
    """The verifier alone on the same requests in the same batches; (answers, seconds)."""
    limit = max(job.limits) if job.limits else int(cfg.max_new_tokens)
    answers: dict[int, Response] = {}
    began = time.perf_counter()
    with bar(cfg, f"plain {job.name}", len(job.requests)) as advance:
        for i, response in generate(
            verifier, job.requests, max_new_tokens=limit, batch_size=int(cfg.batch_size)
        ):
            answers[i] = response
            advance(1)
    return [answers[i] for i in range(len(job.requests))], time.perf_counter() - began


def speed_row(
    run: Run, job: Job, rounds: pd.DataFrame, plain: Sequence[Response], plain_seconds: float
) -> dict[str, object]:
    """Tokens a second with and without speculation, and what a round costs."""
    real = rounds[rounds["visit"] > 0]
    seconds = (rounds["draft_ms"].sum() + rounds["verify_ms"].sum()) / 1000.0
    tokens, plain_tokens = rounds["emitted"].sum(), sum(len(r.token_ids) for r in plain)
    return {
        "run_id": run.path.name,
        "dataset": job.name,
        "temperature": job.requests[0].temperature,
        "tokens": int(tokens),
        "tokens_per_s": round(tokens / seconds, 1),
        "plain_tokens_per_s": round(plain_tokens / plain_seconds, 1),
        "speed_up": round((tokens / seconds) / (plain_tokens / plain_seconds), 3),
        "tau": round(1.0 + real["accepted"].sum() / len(real), 3),
        "draft_ms": round(real["draft_ms"].mean(), 2),
        "verify_ms": round(real["verify_ms"].mean(), 2),
        "plain_ms_per_token": round(1000.0 * plain_seconds / plain_tokens, 2),
    }


def greedy_agreement(
    cfg: DictConfig, verifier: Verifier, job: Job, answers: dict[int, Response], plain: Sequence[Response]
) -> dict[str, object]:
    """How many greedy texts equal plain decoding's, and whether the others part at ties."""
    rows = compare_greedy(
        log_entries(job, dict(enumerate(plain)), limited=True),
        log_entries(job, answers, limited=True),
        verifier,
        tie_logits=cfg.tie_logits,
    )
    counts = rows["verdict"].value_counts().to_dict()
    console.print(f"{job.name}: greedy text against plain decoding: {counts}", highlight=False)
    return {"greedy_text_against_plain": counts}


def log_entries(job: Job, answers: dict[int, Response], *, limited: bool) -> list[LogEntry]:
    entries = []
    for i, request in enumerate(job.requests):
        end = job.limits[i] if limited and job.limits else None
        entries.append(
            LogEntry(tuple(request.prompt_ids), tuple(answers[i].token_ids[:end]), request.temperature)
        )
    return entries


def write_log(path: Path, verifier: Verifier, job: Job, answers: dict[int, Response]) -> None:
    """Readable text beside token ids, one answer a line; `kept` are the accepted drafts of each round."""
    kept: dict[int, list[int]] = {}
    for step in job.rounds:
        if not step.prefill:
            kept.setdefault(step.request, []).append(step.accepted)
    lines = []
    for i, request in enumerate(job.requests):
        answer = answers[i]
        row = {
            "prompt_id": job.origins[i]["prompt_id"],
            "domain": job.origins[i]["domain"],
            "turn": job.turns[i],
            "temperature": request.temperature,
            "seed": request.seed,
            "finish_reason": answer.finish_reason,
            "prompt": verifier.tokenizer.decode(list(request.prompt_ids)),
            "text": verifier.tokenizer.decode(answer.token_ids),
            "prompt_token_ids": list(request.prompt_ids),
            "token_ids": answer.token_ids,
        }
        if path.name == "decoded.jsonl":
            row["kept"] = kept.get(i, [])
        lines.append(json.dumps(row, ensure_ascii=False))
    write_text(path, "\n".join(lines) + "\n")


# ---- losslessness


def check_lossless(cfg: DictConfig) -> None:
    """Compare two token logs, or this decoder with its verifier. Exits with an error if a difference is no tie."""
    if bool(cfg.log_a) != bool(cfg.log_b):
        raise ValueError("log_a and log_b go together: two token logs to compare.")
    if cfg.log_a:
        compare_logs(cfg, read_log(cfg.log_a), read_log(cfg.log_b))
        return
    (run,) = open_runs(cfg)[:1]
    if cfg.prompts is None:
        raise ValueError("mode=lossless needs prompts=<file.jsonl>, or two logs: log_a=<file> log_b=<file>.")
    verifier = load_verifier(cfg)
    draft = draft_for_verifier(run, verifier, cfg.draft_dtype)
    settings = decode_settings(cfg, draft)
    warm = max([float(t) for t in listed(cfg.temperature)] or [1.0])
    problems, lines = [], []
    for path in listed(cfg.prompts):
        prompts, _ = prompt_file(cfg, path)
        stem = Path(path).stem
        job = decode_prompts(cfg, f"{stem}-lossless", prompts, 0.0, verifier, draft, settings)
        plain, _ = plain_decode(cfg, verifier, job)
        rows = compare_greedy(
            log_entries(job, dict(enumerate(plain)), limited=False),
            log_entries(job, dict(responses(iter(job.rounds))), limited=False),
            verifier,
            tie_logits=cfg.tie_logits,
        )
        counts = rows["verdict"].value_counts().to_dict()
        lines.append(f"{stem}: greedy {counts}")
        if bad := counts.get("different", 0) + counts.get("length", 0):
            problems.append(f"{stem}: {bad} greedy texts differ without a tie")
        folder = run.eval_folder(f"{stem}-lossless")
        write_table(rows, folder / "greedy.parquet")
        if len(rows[rows["verdict"] != "equal"]):
            print_table(f"{stem}: where greedy texts part", rows[rows["verdict"] != "equal"])
        if warm > 0:
            test = sampled_test(cfg, verifier, draft, settings, prompts, warm)
            lines.append(f"temperature {warm:g}: {describe(test)}")
            if test["p_value"] < 1e-3:
                problems.append(
                    f"{stem}: draws at temperature {warm:g} do not follow the verifier ({describe(test)})"
                )
        found = {"greedy": counts, "sampled": test if warm > 0 else None}
        write_text(folder / "lossless.json", json.dumps(found, indent=2) + "\n")
    if problems:
        raise ValueError("not lossless: " + "; ".join(problems) + ".")
    console.print("[bold]lossless[/bold]: " + "; ".join(lines), highlight=False, soft_wrap=True)


def sampled_test(
    cfg: DictConfig,
    verifier: Verifier,
    draft: Draft,
    settings: DecodeSettings,
    prompts: Sequence[Prompt],
    temperature: float,
) -> dict[str, float]:
    """Draw many short answers to a few prompts and test every token after the first against the exact distribution."""
    options = OmegaConf.to_container(cfg.template_options, resolve=True)
    entries, tokens = [], int(cfg.sample_tokens)
    chosen = list(prompts)[: int(cfg.sample_prompts)]
    with bar(cfg, f"samples at temperature {temperature:g}", len(chosen) * int(cfg.samples)) as advance:
        for prompt in chosen:
            messages = prompt.messages[: prompt.turn_ends[0]]
            text = verifier.chat_text(messages, add_generation_prompt=True, template_options=options)
            ids = verifier.encode(text)
            requests = [
                Request(
                    prompt_ids=ids, temperature=temperature, seed=row_seed(i, prompt.prompt_id, temperature)
                )
                for i in range(int(cfg.samples))
            ]
            rounds = decode(
                verifier,
                draft,
                requests,
                settings=settings,
                batch_size=max(int(cfg.batch_size), 32),
                diagnostics=False,
                limits=[tokens] * len(requests),
            )
            for _, answer in responses(rounds):
                entries.append(LogEntry(tuple(ids), tuple(answer.token_ids), temperature))
                advance(1)
    test = conditional_test(
        entries,
        verifier,
        temperature=temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        positions=range(1, tokens),
    )
    return vars(test)


def compare_logs(cfg: DictConfig, a: list[LogEntry], b: list[LogEntry]) -> None:
    """Greedy logs token by token, sampled logs by a two-sample test of each of the first tokens."""
    if any(entry.temperature for entry in (*a, *b)):
        tests = {i: vars(two_sample_test(a, b, position=i)) for i in range(int(cfg.sample_tokens))}
        worst = min(test["p_value"] for test in tests.values())
        text = "; ".join(f"token {i}: {describe(test)}" for i, test in tests.items())
        if worst < 1e-3:
            raise ValueError(f"the two logs draw differently: {text}.")
        console.print(f"[bold]alike[/bold]: {text}", highlight=False, soft_wrap=True)
        return
    rows = compare_greedy(a, b, None)
    parted = [i for i, entry in enumerate(rows["verdict"]) if entry == "unexplained"]
    if parted:
        rows = compare_greedy(a, b, load_verifier(cfg), tie_logits=cfg.tie_logits)
        print_table("where greedy texts part", rows[rows["verdict"] != "equal"])
    counts = rows["verdict"].value_counts().to_dict()
    if bad := counts.get("different", 0) + counts.get("length", 0):
        raise ValueError(f"{bad} of {len(rows)} greedy texts differ without a tie: {counts}.")
    console.print(f"[bold]equal up to ties[/bold]: {len(rows)} texts: {counts}", highlight=False)


def describe(test: dict[str, float]) -> str:
    return f"chi-square {test['statistic']:.1f} on {test['degrees']} degrees, p = {test['p_value']:.3f}, {test['draws']} draws"


# ---- one block


def walk(cfg: DictConfig) -> None:
    """Write `walk.json`, `head_changes.parquet` and `transitions.parquet` for notebook 01."""
    (run,) = open_runs(cfg)[:1]
    cache = open_cache(next(iter(listed(cfg.cache)), run.manifest.data.get("cache")), run)
    draft, cache = draft_for_cache(run, cache, "cpu")
    verifier = load_verifier(cfg)
    decode_token = token_text(verifier)
    targets = CachedTargets(cache)
    documents = select(cfg, cache, 0.0 if cfg.temperature is None else float(cfg.temperature))
    held_out = HeldOutDocuments(cache, documents, dtype=torch.bfloat16)
    batches = [targets.normed(held_out[i][0]) for i in range(len(held_out))]
    place, anchor = choose_block(cfg, draft, batches, decode_token)
    record = walk_block(
        draft, batches[place], anchor, decode_token, top=int(cfg.top), context=int(cfg.context)
    )
    info = cache.info(documents[place])
    record |= {"run_id": run.path.name, "domain": info.domain, "doc_id": info.doc_id, "split": info.split}
    out = Path(cfg.out) if cfg.out else run.eval_folder("walk")
    write_text(out / "walk.json", json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    written = ["walk.json"]
    if draft.markov_head is not None:
        changes = head_changes(draft, batches, decode_token)
        write_frames(out, {"head_changes": changes.assign(documents=len(batches))}, formats=("parquet",))
        written.append("head_changes.parquet")
    if draft.config.head == "vanilla":
        counts = torch.zeros(draft.config.vocab_size, dtype=torch.int64)
        for ids, mask in map(cache.tokens, documents):
            counts += torch.bincount(ids[mask], minlength=len(counts))
        table = transitions(draft, counts.topk(14).indices.tolist(), decode_token, top=2)
        write_frames(out, {"transitions": table}, formats=("parquet",))
        written.append("transitions.parquet")
    write_manifest(cfg, out, [run])
    console.print(
        f"[bold]block at token {anchor}[/bold] of document {info.doc_id} ({info.domain}): {record['kept']} of "
        f"{len(record['proposals'])} drafts kept; {', '.join(written)} in {out}",
        highlight=False,
        soft_wrap=True,
    )


def choose_block(
    cfg: DictConfig, draft: Draft, batches: Sequence[DraftBatch], decode_token: Callable[[int], str]
) -> tuple[int, int]:
    """(document, anchor) as configured, else the block in which the head changes most of the drafts that are kept."""
    if cfg.anchor is not None:
        return int(cfg.document or 0), int(cfg.anchor)
    places = [int(cfg.document)] if cfg.document is not None else range(min(24, len(batches)))
    best = (-1.0, 0, 0)
    for place in places:
        for anchor in batches[place].anchors[0, 8::7].tolist():
            record = walk_block(draft, batches[place], anchor, decode_token, top=1, context=0)
            kept = [p for p in record["proposals"] if p.get("kept")]
            changed = sum(p["draft"] != p["base_draft"] for p in kept)
            full = len(kept) == draft.config.num_proposals
            best = max(best, (3 * changed + len(kept) - 2.5 * full, place, anchor))
    return best[1], best[2]


def token_text(verifier: Verifier) -> Callable[[int], str]:
    return lambda token: verifier.tokenizer.decode([token])


# ---- benchmark


def benchmark(cfg: DictConfig) -> None:
    """Replay and decode the same documents: how many rounds agree, and how much faster replay is."""
    (run,) = open_runs(cfg)[:1]
    cache = open_cache(next(iter(listed(cfg.cache)), run.manifest.data.get("cache")), run)
    verifier = load_verifier(cfg)
    decoder = draft_for_verifier(run, verifier, cfg.draft_dtype)
    draft, cache = draft_for_cache(run, cache, cfg.device)
    temperature = next(iter(listed(cfg.temperature)), 0.0)
    documents = select(cfg, cache, temperature)
    names = {"run_id": run.path.name, "dataset": "benchmark"}
    tokens = sum(cache.info(d).response_tokens for d in documents)
    began = time.perf_counter()
    with bar(cfg, "replay", len(documents)) as advance:
        slots, rounds = replay_tables(
            draft,
            cache,
            documents,
            draft_sampling=cfg.draft_sampling,
            num_proposals=proposals(cfg, draft),
            confidence_threshold=cfg.confidence_threshold,
            progress=advance,
            **names,
        )
    replay_seconds = time.perf_counter() - began
    settings = decode_settings(cfg, decoder)
    began = time.perf_counter()
    job = decode_documents(cfg, cache, temperature, verifier, decoder, settings)
    decode_seconds = time.perf_counter() - began
    decoded_slots, decoded = decode_tables(job.rounds, job.origins, settings=settings, **names)
    replayed, walked = summarise(slots, rounds), summarise(decoded_slots, decoded)
    result: dict[str, Any] = {
        "documents": len(documents),
        "response_tokens": tokens,
        "temperature": temperature,
        "batch_size": int(cfg.batch_size),
        "replay_s": round(replay_seconds, 2),
        "decode_s": round(decode_seconds, 2),
        "ratio": round(decode_seconds / replay_seconds, 1),
        "tau_replay": round(replayed["tau"], 4),
        "tau_decode": round(walked["tau"], 4),
    }
    if temperature == 0:
        result |= round_agreement(rounds, decoded)
    write_text(run.eval_folder("benchmark") / "benchmark.json", json.dumps(result, indent=2) + "\n")
    print_table("Replay against decode", pd.DataFrame([result]))
    console.print(
        f"[bold]replay is {result['ratio']} x faster than decode[/bold] on {len(documents)} documents ({tokens} answer tokens): "
        f"{replay_seconds:.1f} s against {decode_seconds:.1f} s at batch {cfg.batch_size}; tau {replayed['tau']:.3f} and "
        f"{walked['tau']:.3f}",
        highlight=False,
        soft_wrap=True,
    )


def round_agreement(replayed: pd.DataFrame, decoded: pd.DataFrame) -> dict[str, int]:
    """Rounds of greedy decoding that replay also has, with the same number of kept drafts."""
    keys = ["doc_id", "anchor"]
    a = replayed[replayed["visit"] > 0.5].set_index(keys)["accepted"]
    b = decoded[decoded["visit"] > 0.5].set_index(keys)["accepted"]
    both = pd.concat([a, b], axis=1, keys=["replay", "decode"])
    equal = int((both["replay"] == both["decode"]).sum())
    differing = both[both["replay"] != both["decode"]].index.get_level_values("doc_id").nunique()
    return {"rounds": len(b), "equal_rounds": equal, "documents_that_differ": int(differing)}


# ---- shared


def open_runs(cfg: DictConfig) -> list[Run]:
    """The runs asked for, each with a complete checkpoint."""
    if cfg.compare is not None and len(listed(cfg.compare)) != 2:
        raise ValueError(
            f"compare is {listed(cfg.compare)}; expected two run folders: compare=[runs/<a>,runs/<b>]."
        )
    paths = listed(cfg.compare) or listed(cfg.run)
    if not paths:
        raise ValueError("no run given: run=runs/<id>, run=pretrained, or compare=[runs/<a>,runs/<b>].")
    runs = [Run.open(path) for path in paths]
    for run in runs:
        run.checkpoint("best")
    return runs


def proposals(cfg: DictConfig, draft: Draft) -> int:
    return draft.config.num_proposals if cfg.num_proposals is None else int(cfg.num_proposals)


def cache_label(cache: Features, split: str | None, domain: str | None = None) -> str:
    """Name of a set: the cache folder's, which is the verifier's for the default data, with split and domain."""
    return "-".join([cache.path.name, *([split] if split else []), *([domain] if domain else [])])


def suffixes(cfg: DictConfig, draft: Draft, temperature: float | None) -> list[str]:
    """What a set's name says about how it was measured, beyond the defaults."""
    parts = [] if temperature is None else [f"t{float(temperature):g}"]
    if cfg.draft_sampling != "greedy":
        parts.append(cfg.draft_sampling)
    if proposals(cfg, draft) != draft.config.num_proposals:
        parts.append(f"n{proposals(cfg, draft)}")
    if cfg.confidence_threshold is not None:
        parts.append(f"c{float(cfg.confidence_threshold):g}")
    if cfg.mode != "replay":
        parts += [f"k{cfg.top_k}"] if cfg.top_k else []
        parts += [f"p{float(cfg.top_p):g}"] if cfg.top_p < 1 else []
    return parts


def common_settings(cfg: DictConfig, draft: Draft) -> dict[str, object]:
    return {
        "draft_sampling": cfg.draft_sampling,
        "num_proposals": proposals(cfg, draft),
        "confidence_threshold": cfg.confidence_threshold,
        "seed": int(cfg.seed),
    }


def write_set(
    run: Run, name: str, slots: pd.DataFrame, rounds: pd.DataFrame, settings: dict[str, object]
) -> dict[str, object]:
    """Store one set's tables and summary under the run; returns the summary."""
    summary = summarise(slots, rounds)
    folder = run.eval_folder(name)
    write_table(slots, folder / "slots.parquet")
    write_table(rounds, folder / "rounds.parquet")
    write_text(folder / "summary.json", json.dumps(finite({**summary, **settings}), indent=2) + "\n")
    return summary


def finite(value: Any) -> Any:
    """The value with nan replaced by None, which JSON can hold."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def report(
    cfg: DictConfig,
    runs: Sequence[Run],
    measured: Sequence[tuple[pd.DataFrame, pd.DataFrame]],
    done: str | None,
) -> Path:
    """Combine the sets of this call into tables, print them, and (with `done`) the last line. Returns their folder."""
    slots, rounds = (pd.concat(frames, ignore_index=True) for frames in zip(*measured, strict=True))
    options = {name: cfg.bootstrap[name] for name in ("draws", "level", "seed")}
    totals = tables.prompt_totals(slots, rounds)
    frames = {
        "acceptance": tables.acceptance_table(totals, **options),
        "positions": tables.position_table(totals, **options),
        "depth": tables.depth_table(slots, rounds, edges=list(cfg.depths), **options),
    }
    if cfg.compare is not None:
        a, b = (run.path.name for run in runs)
        frames["paired"] = tables.paired_table(totals, a, b, **options)
    out = Path(cfg.out) if cfg.out else runs[0].path / "eval" / f"tables-{cfg.mode}"
    write_frames(out, frames)
    write_manifest(cfg, out, runs, totals)
    title = "Acceptance (tau includes the bonus token; intervals by bootstrap over prompts)"
    print_table(title, frames["acceptance"], hide=("mode", "documents"))
    if "paired" in frames:
        print_table("Run b less run a, prompts paired", frames["paired"], hide=("mode",))
    if done is not None:
        last_line(cfg, measured, f"{done}; tables in {out}")
    return out


def write_manifest(
    cfg: DictConfig, out: Path, runs: Sequence[Run], totals: pd.DataFrame | None = None
) -> None:
    """What made the tables beside it: enough to name the runs, count what was measured and repeat the command."""
    facts = {
        "command": current_command(),
        "finished": utc_now(),
        "code": code_version(Path(__file__).resolve().parent.parent),
        "bootstrap": OmegaConf.to_container(cfg.bootstrap),
        "runs": {
            run.path.name: {
                key: getattr(run.manifest, key)
                for key in ("command", "seed", "verifier", "data", "config_sha")
            }
            for run in runs
        },
    }
    if totals is not None:
        sets = totals.groupby(["dataset", "temperature"])
        facts["sets"] = [
            {
                "dataset": dataset,
                "temperature": temperature,
                "prompts": int(rows["prompt_id"].nunique()),
                "rounds": round(float(rows["rounds"].sum()), 1),
            }
            for (dataset, temperature), rows in sets
        ]
    write_text(out / "manifest.json", json.dumps(facts, indent=2) + "\n")


def last_line(cfg: DictConfig, measured: Sequence[tuple[pd.DataFrame, pd.DataFrame]], done: str) -> None:
    """tau with its interval for each run and temperature, over all its sets."""
    slots, rounds = (pd.concat(frames, ignore_index=True) for frames in zip(*measured, strict=True))
    options = {name: cfg.bootstrap[name] for name in ("draws", "level", "seed")}
    table = tables.acceptance_table(tables.prompt_totals(slots, rounds), **options)
    parts = []
    for (run, temperature), rows in table.groupby(["run_id", "temperature"], sort=False):
        row = rows.iloc[-1]  # the widest mean comes last
        interval = "" if np.isnan(row["tau_low"]) else f" [{row['tau_low']:.3f}, {row['tau_high']:.3f}]"
        label = f"{run}, " if table["run_id"].nunique() > 1 else ""
        parts.append(
            f"{row['tau']:.3f}{interval} ({label}temperature {temperature:g}, {row['prompts']} prompts)"
        )
    console.print(f"[bold]tau {'; '.join(parts)}[/bold]; {done}", highlight=False, soft_wrap=True)


def write_frames(
    out: Path, frames: dict[str, pd.DataFrame], formats: Sequence[str] = ("parquet", "csv", "md")
) -> None:
    for name, frame in frames.items():
        for kind in formats:
            path = out / f"{name}.{kind}"
            match kind:
                case "parquet":
                    write_table(frame, path)
                case "csv":
                    write_text(path, frame.to_csv(index=False, float_format="%.6g"))
                case _:
                    write_text(path, tables.markdown(frame))


def print_table(title: str, frame: pd.DataFrame, hide: Sequence[str] = ()) -> None:
    """A frame on the terminal, intervals beside their value; columns that are the same in every row are left to the files."""
    shown = frame.drop(columns=[c for c in hide if c in frame])
    constant = [c for c in ("run_id", "dataset", "draft_sampling", "temperature") if c in shown]
    shown = shown.drop(columns=[c for c in constant if shown[c].nunique() == 1])
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD)
    names = [name for name in shown if not name.endswith(("_low", "_high"))]
    for name in names:
        numeric = pd.api.types.is_numeric_dtype(shown[name])
        table.add_column(name.replace("conditional_", "keep@"), justify="right" if numeric else "left")
    for row in shown.to_dict("records"):
        cells = []
        for name in names:
            digits = 0 if name == "rounds" else 2 if name.startswith("conditional_") else 3
            cells.append(f"{row[name]:g}" if name == "temperature" else cell(row[name], digits))
            if f"{name}_low" in row:
                cells[-1] += f" [{cell(row[f'{name}_low'], 2)}, {cell(row[f'{name}_high'], 2)}]"
        table.add_row(*cells)
    console.print(table)


def cell(value: object, digits: int) -> str:
    if not isinstance(value, float | np.floating):
        return str(value)
    return "–" if np.isnan(value) else f"{value:.{digits}f}"


@contextmanager
def bar(cfg: DictConfig, label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar; yields the function that advances it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not cfg.progress, transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda amount: progress.advance(task, amount)


if __name__ == "__main__":
    main()
