"""Fill a feature cache: `python -m experiments.collect [overrides]`.

Prompts or a token-level set go in, the verifier's hidden states along its own answers come out. Killed and started again, the
command continues with the next document. The last line counts documents, tokens, bytes and what was left out.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from dspark.data.capture import capture_documents, length_batches, recheck
from dspark.data.engine_log import engine_documents, read_engine_log
from dspark.data.features import (
    MANIFEST,
    SPLITS,
    Document,
    FeatureCache,
    FeatureWriter,
    Manifest,
    document_bytes,
)
from dspark.data.foreign import ForeignRow, foreign_documents, read_speculators, read_vllm
from dspark.data.online import OnlineFeatures
from dspark.data.prompts import Prompt, read_jsonl, self_prompts
from dspark.data.responses import AllTooLong, TokenDocument, TokenSet, answer_prompts
from dspark.data.synthetic import tiny_verifier
from dspark.data.templates import opening_of, template_prompts
from dspark.runs import current_command
from dspark.verifier import COMPUTE_DTYPES, Verifier, VerifierInfo, check_aux_layer_ids, default_aux_layer_ids
from experiments.cli import CONFIGS, command, listed

console = Console()

EMBEDDED = Path(__file__).resolve().parent.parent / "dspark" / "data" / "embedded" / "smollm2"


@command("collect")
def main(cfg: DictConfig) -> None:
    if cfg.show_mask:
        show_mask(cfg)
    elif cfg.tokens_only:
        collect_tokens(cfg)
    else:
        collect_cache(cfg)


def ensure_cache(cfg: DictConfig) -> FeatureCache:
    """The cache that `cfg.verifier` and `cfg.data` name, opened and verified; collected first when it does not exist.

    Works with any command's configuration that has these two groups; the rest is `configs/collect.yaml`.
    """
    options = collect_options(cfg)
    path = cache_path(options)
    if not (path / MANIFEST).is_file():
        if options.data.cache:
            raise ValueError(
                f"data.cache={options.data.cache} holds no finished cache; collect it first, or leave it null."
            )
        console.print(f"no cache at {path} yet: collecting it once", highlight=False)
        collect_cache(options)  # and reads it back
        cache = FeatureCache.open(path, verify="sizes")
    else:
        cache = FeatureCache.open(path)
    cache.progress = partial(progress_bar, options)
    wanted = {
        "aux_layer_ids": options.verifier.aux_layer_ids,
        "mask_token_id": options.verifier.mask_token_id,
    }
    for key, value in wanted.items():
        found = getattr(cache.manifest, key)
        asked = tuple(value) if OmegaConf.is_list(value) else value
        if asked is not None and asked != found:
            raise ValueError(
                f"cache {path} was collected with {key}={found}, verifier.{key} is {asked}. Set it to match, or collect "
                "another cache with `python -m experiments.collect name=<other>` and train on it with data.cache=<folder>."
            )
    return cache


def online_features(cfg: DictConfig) -> OnlineFeatures:
    """The documents of a cache that `cfg.verifier` and `cfg.data` name, in its order, captured when they are read.

    Answers to prompts are generated first unless they are there. Raises ValueError for data that come with hidden states.
    """
    options = collect_options(cfg)
    if options.data.cache:
        raise ValueError(
            f"data.source=online computes hidden states, but data.cache={options.data.cache} names a cache; use data.source=cache, "
            "or leave data.cache null."
        )
    if options.data.kind == "foreign":
        raise ValueError(
            f"data={options.data.name} holds hidden states that another tool captured; use data.source=cache."
        )
    verifier = load_verifier(options)
    aux_layer_ids, mask_token_id = aux_ids(options, verifier), checked_mask_token(options, verifier)
    tokens, _, provenance = token_documents(options, verifier, mask_token_id, estimate=False)
    batches = length_batches(
        [len(d.input_ids) for d in tokens],
        tokens_per_batch=batch_tokens(options, verifier),
        seed=int(options.seed),
    )
    features = OnlineFeatures(
        Path(options.data.path) if options.data.kind == "engine" else set_stem(options),
        described(verifier, aux_layer_ids, mask_token_id, provenance),
        verifier,
        [tokens[i] for batch in batches for i in batch],
        tokens_per_batch=batch_tokens(options.data, verifier),
    )
    features.progress = partial(progress_bar, options)
    return features


def collect_options(cfg: DictConfig) -> DictConfig:
    """`configs/collect.yaml` with the `verifier` and `data` groups of another command, quiet where its trainer is.

    Of several training processes on a machine, the first shows progress.
    """
    options = OmegaConf.load(Path(CONFIGS) / "collect.yaml")
    for key in ("defaults", "hydra"):
        options.pop(key)
    shown = OmegaConf.select(cfg, "trainer.progress", default=True)
    options.progress = bool(shown) and os.environ.get("LOCAL_RANK", "0") == "0"
    return OmegaConf.merge(options, {"verifier": cfg.verifier, "data": cfg.data})


def load_verifier(cfg: DictConfig) -> Verifier:
    """The verifier that the `verifier` group describes."""
    options = cfg.verifier
    if options.compute_dtype not in COMPUTE_DTYPES:
        raise ValueError(
            f"verifier.compute_dtype is {options.compute_dtype!r}; expected one of {sorted(COMPUTE_DTYPES)}."
        )
    dtype = COMPUTE_DTYPES[options.compute_dtype]
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":  # of several processes on a machine, each has its own GPU
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    match options.kind:
        case "smollm2":
            return Verifier.load_smollm2(cache_dir=options.cache_dir, compute_dtype=dtype, device=device)
        case "hf":
            return Verifier.load_hf(
                options.path,
                revision=options.revision,
                compute_dtype=dtype,
                device=device,
                name=options.name,
            )
        case "tiny":
            return tiny_verifier(
                options.family,
                hidden_size=options.hidden_size,
                num_layers=options.num_layers,
                seed=options.seed,
            )
        case other:
            raise ValueError(f"verifier.kind is {other!r}; expected smollm2, hf or tiny.")


def cache_path(cfg: DictConfig) -> Path:
    """Folder of the cache: `data.cache` as given, else `<caches>/<name>` with a name from verifier and data."""
    if cfg.data.cache:
        return Path(cfg.data.cache)
    verifier = cfg.verifier.name or Path(str(cfg.verifier.path)).name
    return Path(cfg.caches) / (
        cfg.name or (verifier if cfg.data.name == "embedded" else f"{verifier}-{cfg.data.name}")
    )


def set_stem(cfg: DictConfig) -> Path:
    """Where the token-level set lies, without extension: the one that was named, else beside the cache."""
    if cfg.data.kind == "tokens":
        return EMBEDDED if cfg.data.path == "embedded" else Path(cfg.data.path)
    return cache_path(cfg) / "responses"


def collect_cache(cfg: DictConfig) -> Manifest | None:
    """Everything from prompts or tokens to a verified cache; returns its manifest (None after an estimate)."""
    started = time.time()
    path = cache_path(cfg)
    verifier = load_verifier(cfg)
    aux_layer_ids = aux_ids(cfg, verifier)
    mask_token_id = checked_mask_token(cfg, verifier)
    rows: list[ForeignRow] = []
    if cfg.data.kind == "foreign":
        rows, skipped = foreign_rows(cfg)
        tokens = [row.document for row in rows]
        provenance: dict[str, Any] = {
            "dataset": f"{cfg.data.format}:{Path(cfg.data.path).name}",
            "responses_by": cfg.data.responses_by,
            "generation": {"temperature": cfg.data.temperature},
        }
    else:
        tokens, skipped, provenance = token_documents(
            cfg, verifier, mask_token_id, estimate=bool(cfg.estimate)
        )
    manifest = described(verifier, aux_layer_ids, mask_token_id, provenance, foreign=bool(rows))
    expected = estimated_bytes(tokens, manifest)
    console.print(
        f"{len(tokens)} documents, {sum(len(d.input_ids) for d in tokens)} tokens: about {gigabytes(expected)} at {path}",
        highlight=False,
    )
    if cfg.estimate:
        console.print(f"estimate: {expected} bytes for {len(tokens)} documents; nothing was written")
        return None

    with FeatureWriter(
        path,
        manifest,
        shard_bytes=int(cfg.shard_megabytes * 2**20),
        byte_budget=parse_bytes(cfg.byte_budget),
        max_bad_fraction=float(cfg.max_bad_fraction),
    ) as writer:
        writer.write_verifier(verifier)
        if writer.resumed:
            console.print(f"resuming: {writer.resumed} documents are already there", highlight=False)
        missing = [i for i, d in enumerate(tokens) if d.info().doc_id not in writer]
        documents: Iterable[Document]
        if rows:
            weights = {
                "norm.weight": verifier.final_norm_weight(),
                "lm_head.weight": verifier.head_weight(),
            }
            documents = foreign_documents([rows[i] for i in missing], weights=weights, manifest=manifest)
        else:
            documents = capture_documents(
                verifier,
                [tokens[i] for i in missing],
                aux_layer_ids=aux_layer_ids,
                tokens_per_batch=batch_tokens(cfg, verifier),
                seed=int(cfg.seed),
            )
        with progress_bar(cfg, "capturing", sum(len(tokens[i].input_ids) for i in missing)) as advance:
            for document in documents:
                if not writer.add(document):
                    break
                advance(document.info.tokens)
        written = writer.close(skipped=skipped)
    check_written(cfg, path, written, tokens, verifier)
    seconds = time.time() - started
    stopped = "" if written.stopped == "complete" else f" (stopped: {written.stopped})"
    console.print(
        f"[bold]{written.documents} documents[/bold], {written.tokens} tokens ({written.supervised_tokens} of answers), "
        f"{gigabytes(written.bytes)}, left out {written.skipped or 'none'}{stopped}; {seconds:.0f} s; cache {path}",
        highlight=False,
        soft_wrap=True,
    )
    return written


def described(
    verifier: Verifier,
    aux_layer_ids: tuple[int, ...],
    mask_token_id: int,
    provenance: dict[str, Any],
    *,
    foreign: bool = False,
) -> Manifest:
    """What the features of `verifier` mean and where their documents came from; nothing is counted yet."""
    return Manifest(
        verifier=verifier.info,
        aux_layer_ids=aux_layer_ids,
        mask_token_id=mask_token_id,
        last="pre_norm" if foreign else "post_norm",
        capture={"use_cache": False, "prefix_caching": False, "chunked_prefill": False, "foreign": foreign},
        command=current_command(),
        **provenance,
    )


def token_documents(
    cfg: DictConfig, verifier: Verifier, mask_token_id: int, *, estimate: bool
) -> tuple[list[TokenDocument], Counter[str], dict[str, Any]]:
    """The documents to capture, what was left out of them, and where they came from."""
    token_set = token_level_set(cfg, verifier, mask_token_id, set_stem(cfg), estimate=estimate)
    tokens, skipped = list(token_set.documents), Counter(token_set.manifest["skipped"])
    if cfg.limit and cfg.data.kind == "tokens":
        skipped["over_limit"] += max(0, len(tokens) - int(cfg.limit))
        tokens = evenly(tokens, int(cfg.limit))
    return tokens, skipped, {k: token_set.manifest[k] for k in ("dataset", "responses_by", "generation")}


def batch_tokens(options: DictConfig, verifier: Verifier) -> int:
    """`tokens_per_batch`, or what keeps the verifier's device busy."""
    default = 32768 if verifier.device.type == "cuda" else 2048
    return int(options.tokens_per_batch or default)


def collect_tokens(cfg: DictConfig) -> TokenSet:
    """Generate answers only and save them as a token-level set at `cfg.out`."""
    started = time.time()
    if not cfg.out:
        raise ValueError(
            "tokens_only=true needs out=<path without extension>, where the .npz and .json files go."
        )
    if cfg.data.kind not in ("templates", "jsonl"):
        raise ValueError(
            f"tokens_only=true generates answers to prompts; data={cfg.data.name} has none. Use data=templates."
        )
    verifier = load_verifier(cfg)
    partial = Path(f"{cfg.out}.partial")
    token_set = token_level_set(cfg, verifier, checked_mask_token(cfg, verifier), partial, estimate=False)
    files = token_set.save(cfg.out)
    for suffix in (".npz", ".json"):
        Path(f"{partial}{suffix}").unlink(missing_ok=True)
    facts = token_set.manifest
    console.print(
        f"[bold]{facts['documents']} documents[/bold], {facts['response_tokens']} answer tokens of {facts['tokens']}, "
        f"left out {facts['skipped'] or 'none'}; {sum(f.stat().st_size for f in files)} bytes in {files[0]} and {files[1].name}; "
        f"{time.time() - started:.0f} s",
        highlight=False,
        soft_wrap=True,
    )
    return token_set


def show_mask(cfg: DictConfig) -> None:
    """Print a few documents with the supervised tokens in colour, and how many masks are all zero or all one."""
    verifier = load_verifier(cfg)
    count = int(cfg.show_mask)
    if cfg.data.kind == "foreign":
        tokens = [row.document for row in foreign_rows(cfg)[0]]
    else:
        narrowed = OmegaConf.merge(cfg, {"limit": count}) if cfg.data.kind != "tokens" else cfg
        mask_token_id = checked_mask_token(cfg, verifier)
        tokens = list(
            token_level_set(narrowed, verifier, mask_token_id, set_stem(cfg), estimate=False).documents
        )
    for document in evenly(tokens, count):
        line = Text(
            f"[{document.domain}, {document.split}, T={document.temperature:g}, {document.finish_reason}] ",
            "bold",
        )
        for token, on in zip(document.input_ids, document.loss_mask, strict=True):
            line.append(verifier.tokenizer.decode([token]), "black on green" if on else "dim")
        console.print(line, soft_wrap=True)
        console.print()
    none = sum(not any(d.loss_mask) for d in tokens)
    whole = sum(all(d.loss_mask) for d in tokens)
    on = sum(sum(d.loss_mask) for d in tokens)
    total = sum(len(d.input_ids) for d in tokens)
    console.print(
        f"{len(tokens)} documents: {on} of {total} tokens supervised (green); {none} masks are all zero, {whole} all one",
        highlight=False,
    )


def aux_ids(cfg: DictConfig, verifier: Verifier) -> tuple[int, ...]:
    """The tapped layers: as configured, or five spread over depth."""
    ids = cfg.data.layer_ids[:-1] if cfg.data.kind == "foreign" else cfg.verifier.aux_layer_ids
    if cfg.data.kind == "foreign" and cfg.data.layer_ids[-1] != verifier.info.num_layers:
        raise ValueError(
            f"data.layer_ids are {list(cfg.data.layer_ids)}; the last must be {verifier.info.num_layers}, the verifier's raw "
            "output, from which targets are computed."
        )
    return check_aux_layer_ids(
        ids or default_aux_layer_ids(verifier.info.num_layers), verifier.info.num_layers
    )


def checked_mask_token(cfg: DictConfig, verifier: Verifier) -> int:
    """The configured mask token, after checking that the embedding has it and nothing else uses it.

    Raises ValueError that proposes candidates when none is configured.
    """
    token, info = cfg.verifier.mask_token_id, verifier.info
    taken = {info.bos_token_id, info.pad_token_id, *info.eos_token_ids} - {None}
    if token is None:
        spare = [i for i in verifier.tokenizer.all_special_ids if i not in taken]
        unused = list(range(info.tokenizer_size, info.vocab_size))
        raise ValueError(
            f"verifier.mask_token_id is not set for {info.name!r}. Choose an id that never occurs in text, for example one of "
            f"the special tokens {spare[:12]} or of the embedding rows beyond the tokenizer {unused[:8]}."
        )
    if not 0 <= token < info.vocab_size:
        raise ValueError(
            f"verifier.mask_token_id {token} is outside the {info.vocab_size} embedding rows of {info.name!r}."
        )
    if token in taken:
        raise ValueError(
            f"verifier.mask_token_id {token} is the bos, eos or pad token of {info.name!r}; choose another."
        )
    return int(token)


def token_level_set(
    cfg: DictConfig, verifier: Verifier, mask_token_id: int, stem: Path, *, estimate: bool
) -> TokenSet:
    """Documents as tokens: read from the set at `stem`, or the verifier's answers to prompts, saved there as they come."""
    data = cfg.data
    if data.kind == "tokens":
        token_set = TokenSet.load(stem)
        token_set.check_verifier(verifier.info)
        return token_set
    if data.kind == "engine":
        return engine_set(cfg, verifier, mask_token_id)
    if data.kind not in ("templates", "jsonl"):
        raise ValueError(f"data.kind is {data.kind!r}; expected tokens, templates, jsonl, engine or foreign.")
    if estimate:
        raise ValueError(
            f"estimate=true needs to know how long the answers are; data={data.name} has prompts only. Generate the answers first "
            "(tokens_only=true out=<path>), then estimate with data=embedded data.path=<path>; this takes no hidden states."
        )
    prompts, skipped = read_prompts(cfg, verifier)
    return answered(cfg, verifier, prompts, skipped, mask_token_id, stem)


def engine_set(cfg: DictConfig, verifier: Verifier, mask_token_id: int) -> TokenSet:
    """Answers of an engine that served this verifier."""
    data = cfg.data
    job, result = read_engine_log(data.path)
    documents, skipped = engine_documents(
        verifier,
        job,
        result,
        sets=list(data.sets) if data.sets else None,
        concurrency=data.concurrency,
        domains=dict(data.domains),
        split_fractions=dict(data.split_fractions),
        mask_token_id=mask_token_id,
    )
    engine = {k: result["engine"].get(k) for k in ("vllm", "torch", "device", "arguments")}
    return TokenSet.create(
        documents,
        verifier=verifier.info,
        command=current_command(),
        generation={
            "engine": engine,
            "cells": [d for d in job["cells"] if not data.sets or d["set"] in data.sets],
        },
        dataset=f"{data.name}:{Path(data.path).name}",
        skipped=skipped,
    )


def read_prompts(cfg: DictConfig, verifier: Verifier) -> tuple[list[Prompt], Counter[str]]:
    """Prompts of JSONL files, or templates and the verifier's own."""
    data = cfg.data
    if data.kind == "jsonl":
        return prompts_of_files(cfg)
    prompts = template_prompts(counts=dict(data.counts), domains=list(data.domains), seed=int(data.seed))
    skipped: Counter[str] = Counter()
    openings = partial(opening_of, domains=list(data.opened_domains), seed=int(data.seed))
    for kind, counts, opening in (("self", data.self_counts, None), ("opened", data.opened_counts, openings)):
        if not sum(counts.values()):
            continue
        console.print(
            f"{verifier.info.name} writes {sum(counts.values())} prompts"
            + (" from our first words" if opening else " of its own"),
            highlight=False,
        )
        own, left_out = self_prompts(
            verifier,
            counts=dict(counts),
            seed=int(data.seed),
            temperature=float(data.self_temperature),
            max_new_tokens=int(data.self_max_tokens),
            batch_size=int(data.responses.batch_size),
            template_options=template_options(cfg),
            opening=opening,
        )
        known = {p.prompt_id for p in prompts}
        prompts += [p for p in own if p.prompt_id not in known]
        skipped.update({f"{kind}_{k}": v for k, v in left_out.items()})
    if cfg.limit:
        skipped["over_limit"] += max(0, len(prompts) - int(cfg.limit))
        prompts = evenly(prompts, int(cfg.limit))
    return prompts, skipped


def prompts_of_files(cfg: DictConfig) -> tuple[list[Prompt], Counter[str]]:
    """Prompts of all files of `data.path`, at most `limit` of each; a prompt that two files hold counts with the first."""
    data = cfg.data
    prompts: dict[str, Prompt] = {}
    skipped: Counter[str] = Counter()
    for path in map(Path, listed(data.path)):
        found, left_out = read_jsonl(
            path,
            domain=str(data.domains.get(path.stem, data.domain)),
            split_fractions=dict(data.split_fractions),
            role_map=dict(data.role_map),
            limit=cfg.limit,
        )
        skipped.update(left_out)
        for prompt in found:
            if prompt.prompt_id in prompts:
                skipped["duplicate"] += 1
            prompts.setdefault(prompt.prompt_id, prompt)
    return list(prompts.values()), skipped


def answered(
    cfg: DictConfig,
    verifier: Verifier,
    prompts: Sequence[Prompt],
    skipped: Counter[str],
    mask_token_id: int,
    stem: Path,
) -> TokenSet:
    """The verifier's answers, generated in portions that are saved at `stem`; portions already there are not repeated."""
    settings = cfg.data.responses
    generation = {
        **OmegaConf.to_container(settings, resolve=True),
        "max_length": int(cfg.data.max_length),
        "seed": int(cfg.data.seed),
        "compute_dtype": verifier.info.compute_dtype,
    }
    dataset = cfg.data.name
    if cfg.data.kind == "jsonl":
        dataset += ":" + ",".join(Path(path).name for path in listed(cfg.data.path))

    def temperature(prompt: Prompt) -> float:
        sampled = fraction_of(prompt.prompt_id) < float(settings.sampled_share)
        return float(settings.temperature) if sampled else 0.0

    def pack(documents: Sequence[TokenDocument], left_out: Counter[str]) -> TokenSet:
        return TokenSet.create(
            documents,
            verifier=verifier.info,
            command=current_command(),
            generation=generation,
            dataset=dataset,
            skipped=left_out,
        )

    documents: list[TokenDocument] = []
    if Path(f"{stem}.json").is_file():
        earlier = TokenSet.load(stem)
        earlier.check_verifier(verifier.info)
        differing = {
            k: (generation[k], earlier.manifest["generation"].get(k))
            for k in generation
            if generation[k] != earlier.manifest["generation"].get(k)
        }
        if differing:
            raise ValueError(
                f"{stem}.npz holds answers under other settings (now, there): {differing}. Delete it or choose another name."
            )
        documents = list(earlier.documents)
        console.print(f"{len(documents)} answers are already at {stem}.npz", highlight=False)
    have = {d.prompt_id for d in documents}
    todo = [p for p in prompts if p.prompt_id not in have]
    portion = max(1, int(settings.batch_size))
    # Rows of similar length together, so that portions batch well.
    todo.sort(key=lambda p: (len(p.turn_ends), sum(len(m["content"]) for m in p.messages)))
    left_out = Counter(skipped)
    too_long: AllTooLong | None = None
    with progress_bar(cfg, f"{verifier.info.name} answers", len(todo)) as advance:
        for start in range(0, len(todo), portion):
            part = todo[start : start + portion]
            try:
                answers, why_not = answer_prompts(
                    verifier,
                    part,
                    temperature=temperature,
                    seed=int(cfg.data.seed),
                    max_new_tokens=int(settings.max_new_tokens),
                    max_length=int(cfg.data.max_length),
                    batch_size=int(settings.batch_size),
                    mask_token_id=mask_token_id,
                    template_options=template_options(cfg),
                    progress=lambda _tokens: advance(1),
                )
            except AllTooLong as error:  # of this portion
                too_long = error
                left_out["too_long"] += len(part)
                continue
            left_out += why_not
            documents += answers
            if documents:
                pack(documents, left_out).save(stem)
    if not documents and too_long:
        raise too_long
    if not documents:
        raise ValueError(
            f"no prompt of {dataset!r} could be answered; left out: {dict(left_out)}. Prompts count as too long at "
            f"data.max_length={cfg.data.max_length} tokens."
        )
    wanted = {p.prompt_id for p in prompts}
    extra = sum(d.prompt_id not in wanted for d in documents)
    if extra:
        console.print(
            f"{extra} earlier answers belong to prompts that are not asked for now; they are kept",
            highlight=False,
        )
    order = {SPLITS[i]: i for i in range(len(SPLITS))}
    documents.sort(key=lambda d: (order[d.split], d.temperature, d.domain, d.prompt_id))
    result = pack(documents, left_out)
    result.save(stem)
    return result


def foreign_rows(cfg: DictConfig) -> tuple[list[ForeignRow], Counter[str]]:
    """Rows captured by another tool."""
    data = cfg.data
    shared = {
        "temperature": float(data.temperature),
        "domain": data.domain,
        "split_fractions": dict(data.split_fractions),
    }
    match data.format:
        case "speculators":
            rows, skipped = read_speculators(data.path, **shared)
        case "vllm":
            rows, skipped = read_vllm(data.path, boundaries=data.boundaries, **shared)
        case other:
            raise ValueError(f"data.format is {other!r}; expected speculators or vllm.")
    if cfg.limit:
        skipped["over_limit"] += max(0, len(rows) - int(cfg.limit))
        rows = rows[: int(cfg.limit)]
    return rows, skipped


def check_written(
    cfg: DictConfig, path: Path, written: Manifest, tokens: Sequence[TokenDocument], verifier: Verifier
) -> None:
    """Open what was written as a reader would, count it, and re-run a sample of documents one at a time.

    Raises ValueError if documents are missing without a stated reason, or states differ.
    """
    cache = FeatureCache.open(path)
    ids = {d.info().doc_id for d in tokens}
    found = {cache.info(i).doc_id for i in range(len(cache))}
    lost = len(ids - found) - written.skipped.get("not_finite", 0)
    if lost > 0 and written.stopped == "complete":
        raise ValueError(
            f"{lost} of {len(ids)} documents are missing from {path} without a reason; collect again."
        )
    count = min(len(cache), int(cfg.recheck_max), max(1, round(float(cfg.recheck_fraction) * len(cache))))
    picked = random.Random(int(cfg.seed)).sample(range(len(cache)), count)
    result = recheck(
        verifier, [cache[i] for i in sorted(picked)], aux_layer_ids=written.aux_layer_ids, last=written.last
    )
    console.print(
        f"re-ran {result.documents} documents one by one: states differ by {result.aux:.2g} (aux) and {result.last:.2g} (last), "
        f"targets agree with the verifier's logits at {result.same_top1:.2%} of positions",
        highlight=False,
        soft_wrap=True,
    )
    if problem := result.problem(written.verifier.compute_dtype):
        raise ValueError(f"{path}: {problem}; the captured states are not this verifier's.")


def estimated_bytes(tokens: Sequence[TokenDocument], manifest: Manifest) -> int:
    """Bytes of the shards and of the verifier's weights, before any forward pass."""
    info: VerifierInfo = manifest.verifier
    tables = info.vocab_size * info.hidden_size * 2 * (1 if info.tied else 2)
    return tables + sum(
        document_bytes(
            len(d.input_ids), num_aux_layers=len(manifest.aux_layer_ids), hidden_size=info.hidden_size
        )
        for d in tokens
    )


def evenly(items: Sequence[Any], count: int) -> list[Any]:
    """`count` items spread evenly over the sequence, in order."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def fraction_of(prompt_id: str) -> float:
    """A number in [0, 1) that depends on the prompt alone."""
    return int(hashlib.sha256(f"temperature/{prompt_id}".encode()).hexdigest()[:12], 16) / 16**12


def template_options(cfg: DictConfig) -> dict[str, Any]:
    return OmegaConf.to_container(cfg.data.responses.template_options, resolve=True)


def parse_bytes(text: str | int | None) -> int | None:
    """Bytes from a number or from text such as "500MB" or "2.5GB" (powers of ten)."""
    if text is None or isinstance(text, int):
        return text
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    number, unit = str(text)[:-2], str(text)[-2:].upper()
    try:
        return int(float(number) * units[unit])
    except (KeyError, ValueError):
        raise ValueError(
            f"byte_budget is {text!r}; expected bytes, or a number with KB, MB, GB or TB."
        ) from None


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


@contextmanager
def progress_bar(cfg: DictConfig, label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar with rate and remaining time; yields the function that advances it."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not cfg.progress) as progress:
        task = progress.add_task(label, total=total, rate="")
        started = reported = time.time()
        done = 0

        def advance(amount: int) -> None:
            nonlocal done, reported
            done += amount
            now = time.time()
            rate = done / max(1e-6, now - started)
            shown = f"{rate:.0f}/s" if rate >= 10 else f"{rate:.1f}/s"
            progress.update(task, advance=amount, rate=shown)
            # A bar is drawn in terminals only; a log gets a line now and then.
            if cfg.progress and not console.is_terminal and now - reported > 30:
                reported = now
                console.print(
                    f"{label}: {done}/{total}, {shown}, {(total - done) / rate:.0f} s left", highlight=False
                )

        yield advance


if __name__ == "__main__":
    main()
