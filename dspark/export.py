"""From a draft to the folder that vLLM serves: tensor names, `config.json`, and what each engine version makes of them.

Two layouts. `speculators` nests the decoder's configuration and numbers taps as this package does; `dense` is the flat Qwen3
form, whose `target_layer_ids` are one less. A fill-in draft without a sequential head is written for DFlash, which it is.
Parameter names of `dspark.nn.draft.Draft` are the served ones; only the frozen buffers are renamed here.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor

from dspark.config import Contract, DraftConfig
from dspark.nn.draft import Draft
from dspark.runs import write_text
from dspark.vocab import VocabMap

FORMAT = "dspark-export-1"
FACTS_FILE = "dspark.json"
LAYOUTS = ("speculators", "dense")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
ENGINES = ("0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.30.0", "0.32.0", "0.33.0")
SPECULATORS_VERSION = "0.9.0"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What an export says about its verifier and recipe beyond the draft's own configuration.

    `verifier_name` is what `vllm serve` is given: a Hub id or a path. `num_anchors` is the training's anchors per row, a key that
    DeepSpec's loader asks for; None where nobody knows.
    """

    verifier_name: str
    verifier_architecture: str | None = None
    verifier_revision: str | None = None
    num_anchors: int | None = None


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one served tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True)
class EngineSupport:
    """Whether one vLLM version decodes an export as it was trained, and what to know about it."""

    version: str
    correct: bool
    note: str


@dataclass(frozen=True)
class ExportReport:
    """What was written."""

    folder: Path
    layout: str
    method: str
    num_speculative_tokens: int
    tensors: int
    bytes: int
    files: tuple[str, ...]
    engines: tuple[EngineSupport, ...]
    notes: tuple[str, ...]


def serving_method(config: DraftConfig) -> str:
    """The `method` of vLLM's speculative configuration that reads this draft.

    Without a sequential head a fill-in draft is plain DFlash. DFlash has no anchor-first form; that is DSpark of rank 0.
    """
    return "dflash" if config.head == "none" and not config.sample_from_anchor else "dspark"


# ---- tensors


def served_tensors(
    state: Mapping[str, Tensor],
    config: DraftConfig,
    *,
    embed_tokens: Float[Tensor, "W H"] | None,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Tensors under their served names, sorted. Works on the meta device too.

    With `embed_tokens` the verifier's frozen rows travel along: the embedding, and the head of an unpruned draft. Without them
    the engine aliases the verifier's own. The head rows and offsets of a pruned draft are always there; a full vocabulary must
    not ship a map. DFlash has no confidence head to load.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name in ("lm_head", "kept_ids"):
            continue
        if name.startswith("confidence_head.") and serving_method(config) == "dflash":
            continue
        tensors[name] = tensor.to(dtype)
    if config.pruned or embed_tokens is not None:
        tensors["lm_head.weight"] = state["lm_head"].to(dtype)
    if config.pruned:
        kept = state["kept_ids"]
        tensors["d2t"] = kept - torch.arange(len(kept), device=kept.device)
        marks = torch.zeros(config.vocab_size, dtype=torch.bool, device=kept.device)
        marks[kept] = True
        tensors["t2d"] = marks
    if embed_tokens is not None:
        tensors["embed_tokens.weight"] = embed_tokens.to(dtype)
    return dict(sorted(tensors.items()))


def inventory(
    config: DraftConfig, *, embed_tokens: bool, dtype: torch.dtype = torch.bfloat16
) -> dict[str, TensorSpec]:
    """Names, shapes and dtypes of the tensors that an export of `config` holds, without allocating any of them."""
    with torch.device("meta"):
        draft = Draft(config, attention_backend="grouped")
        tensors = served_tensors(
            draft.state_dict(), config, embed_tokens=draft.embed_tokens if embed_tokens else None, dtype=dtype
        )
    return {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in tensors.items()}


def check_complete(tensors: Mapping[str, Tensor], expected: Mapping[str, TensorSpec]) -> None:
    """Engines load an incomplete checkpoint without a word, so refuse one here.

    Raises ValueError that lists missing and unexpected names, wrong shapes and dtypes, and values that are not finite.
    """
    problems = [f"missing {name}" for name in expected if name not in tensors]
    problems += [f"unexpected {name}" for name in tensors if name not in expected]
    for name, tensor in tensors.items():
        spec = expected.get(name)
        if spec is None:
            continue
        if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
            problems.append(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {spec.dtype} {spec.shape}"
            )
        elif tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            problems.append(f"{name} has NaN or infinite values")
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"the checkpoint cannot be exported: {'; '.join(problems[:5])}{more}.")


# ---- config.json


def served_config(
    config: DraftConfig, origin: Origin, *, layout: str, num_speculative_tokens: int, dtype: torch.dtype
) -> dict[str, Any]:
    """The content of `config.json`: an allow-list built from the draft's own numbers, never a copy of the verifier's."""
    name = str(dtype).removeprefix("torch.")
    if layout == "dense":
        return _dense_config(config, origin, name)
    decoder = _decoder_config(config, name)
    method = serving_method(config)
    values: dict[str, Any] = {
        "architectures": ["DSparkDraftModel" if method == "dspark" else "DFlashDraftModel"],
        "speculators_model_type": method,
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": method,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": num_speculative_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": origin.verifier_name,
                "architectures": [origin.verifier_architecture] if origin.verifier_architecture else [],
            },
        },
        "aux_hidden_state_layer_ids": list(config.aux_layer_ids),
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        # Read for DFlash only, where one flag sets the causality of every layer.
        "sliding_window_non_causal": method == "dflash" and "sliding_attention" not in config.layer_types,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "dtype": name,
    }
    if method == "dspark":
        values |= _head_keys(config)
        if config.num_layers != len(config.aux_layer_ids):
            # 0.26.0 sizes `fc` by the number of draft layers unless it finds the taps here.
            decoder["dflash_config"] = _dflash_config(config)
    values["transformer_layer_config"] = decoder
    return values


def _dense_config(config: DraftConfig, origin: Origin, dtype: str) -> dict[str, Any]:
    """The flat form: DeepSpec's `Qwen3DSparkModel`, or z-lab's `DFlashDraftModel` without a head."""
    values = _decoder_config(config, dtype)
    method = serving_method(config)
    values |= {
        "architectures": ["Qwen3DSparkModel" if method == "dspark" else "DFlashDraftModel"],
        "num_target_layers": config.num_verifier_layers,
        "block_size": config.block_size,
        "verifier_name_or_path": origin.verifier_name,
        "verifier_architecture": origin.verifier_architecture,
    }
    if config.pruned:
        values["draft_vocab_size"] = config.draft_vocab_size
    if method == "dflash":
        return values | {"dflash_config": _dflash_config(config)}
    values |= _head_keys(config) | {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": _dense_taps(config),
        "num_anchors": origin.num_anchors,
        # 0.26.0 reads only the first, later versions only the second.
        "dspark_bonus_anchor": not config.sample_from_anchor,
        "sample_from_anchor": config.sample_from_anchor,
    }
    if config.num_layers != len(config.aux_layer_ids):
        values["dflash_config"] = _dflash_config(config)
    return values


def _decoder_config(config: DraftConfig, dtype: str) -> dict[str, Any]:
    values = {
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        # Both forms: Transformers 5 reads the first, older releases the second; an engine that finds neither assumes 1e6.
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "use_sliding_window": "sliding_attention" in config.layer_types,
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": dtype,
    }
    if config.logit_scale != 1.0:
        values["logit_scale"] = config.logit_scale
    return values


def _head_keys(config: DraftConfig) -> dict[str, Any]:
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla" if config.head == "none" else config.head,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence and config.confidence_uses_prev_embedding,
    }


def _dense_taps(config: DraftConfig) -> list[int]:
    """The same layers numbered by their own index: the state after i layers is the output of layer i - 1."""
    return [i - 1 for i in config.aux_layer_ids]


def _dflash_config(config: DraftConfig) -> dict[str, Any]:
    return {"target_layer_ids": _dense_taps(config), "mask_token_id": config.mask_token_id}


# ---- engines


def engine_support(config: DraftConfig, layout: str) -> tuple[EngineSupport, ...]:
    """One row a vLLM version, for `--speculative-config` with an explicit method and number of tokens."""
    return tuple(_support(version, config, layout) for version in ENGINES)


def _support(version: str, config: DraftConfig, layout: str) -> EngineSupport:
    refusal = unservable(config)
    if refusal:
        return EngineSupport(version, False, refusal)
    first = version == "0.26.0"
    if first and layout == "speculators" and serving_method(config) == "dspark" and config.sample_from_anchor:
        return EngineSupport(
            version,
            False,
            "reads every anchor-first draft of this layout as fill-in, drafts shifted by one; use layout=dense",
        )
    notes = []
    if not config.sample_from_anchor and version in ENGINES[:5] and serving_method(config) == "dspark":
        notes.append("reserves one slot too few ahead: a slightly worse last draft now and then")
    if first and config.num_layers != len(config.aux_layer_ids):
        notes.append("loads through the dflash_config key")
    if first:
        notes.append(f"serve with --max-model-len {config.max_position_embeddings} or less")
    if config.confidence and serving_method(config) == "dspark":
        notes.append(
            "ignores the confidence head" if version in ENGINES[:3] else "adaptive verification available"
        )
    return EngineSupport(version, True, "; ".join(notes))


def unservable(config: DraftConfig) -> str | None:
    """Why no engine can serve this draft; None if one can."""
    if config.head in ("gated", "rnn"):
        return f"no engine has the {config.head} head (vLLM raises a load error); only head=vanilla is served"
    if config.head == "none" and config.sample_from_anchor:
        return (
            "no engine is known to decode an anchor-first draft without a sequential head: DFlash is fill-in only, and dspark of rank 0 "
            "was seen to load, not to run"
        )
    if serving_method(config) == "dflash" and len(set(config.layer_types)) > 1:
        return "vLLM's DFlash sets one causality for all layers, so full and sliding layers cannot be mixed"
    return None


def engine_line(engines: Sequence[EngineSupport]) -> str:
    """The table in one line: versions that decode the export correctly, and those that cannot with the reason."""
    good = [e.version for e in engines if e.correct]
    bad = [e for e in engines if not e.correct]
    if not good:
        return f"no vLLM version serves it: {bad[0].note}"
    line = f"decoded correctly by vLLM {', '.join(good)}"
    for note in dict.fromkeys(e.note for e in bad):
        line += f"; not by {', '.join(e.version for e in bad if e.note == note)} ({note})"
    return line


def serve_command(folder: Path | str, origin: Origin, *, method: str, num_speculative_tokens: int) -> str:
    """The command that serves the verifier with this draft; method and number of tokens are always given."""
    settings = {
        "model": str(folder),
        "method": method,
        "num_speculative_tokens": num_speculative_tokens,
    }
    return f"vllm serve {origin.verifier_name} --speculative-config '{json.dumps(settings)}'"


# ---- the folder


def check_num_speculative_tokens(config: DraftConfig, wanted: int | None) -> int:
    """Tokens to draft a round: the trained N unless fewer are asked for.

    Raises ValueError for more: those slots were never trained, and every other slot would attend to them.
    """
    if wanted is None:
        return config.num_proposals
    if not 1 <= wanted <= config.num_proposals:
        layout = "anchor-first" if config.sample_from_anchor else "fill-in"
        raise ValueError(
            f"num_speculative_tokens is {wanted}; this draft was trained with block_size {config.block_size} in the {layout} layout, "
            f"so it proposes 1 to {config.num_proposals} tokens."
        )
    return wanted


def export_draft(
    draft: Draft,
    contract: Contract,
    origin: Origin,
    out: Path,
    *,
    layout: str,
    dtype: torch.dtype,
    embed_tokens: Float[Tensor, "W H"] | None,
    num_speculative_tokens: int | None,
    shard_bytes: int | None,
    allow_unservable: bool,
    card: Callable[[ExportReport], str],
    extra_files: Sequence[Path],
    facts: Mapping[str, Any],
) -> ExportReport:
    """Write the served folder: weights, `config.json`, `dspark.json` (contract, origin, `facts`), `README.md`, `extra_files`.

    Everything is built under a temporary name and renamed, so the folder is complete or absent. `card` turns the report into the
    text of `README.md`.

    Raises ValueError when the folder exists, the draft cannot be served, or a tensor is missing or damaged.
    """
    if out.exists():
        raise ValueError(f"{out} exists; name another folder or remove it first.")
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; expected one of {LAYOUTS}.")
    config = draft.config
    refusal = unservable(config)
    if refusal and not allow_unservable:
        raise ValueError(
            f"{refusal}. allow_unservable=true writes the folder anyway, for other readers of the format."
        )
    count = check_num_speculative_tokens(config, num_speculative_tokens)
    VocabMap(draft.kept_ids, config.vocab_size)  # raises when the kept ids are not a sorted subset
    tensors = served_tensors(
        {name: t.detach().cpu() for name, t in draft.state_dict().items()},
        config,
        embed_tokens=None if embed_tokens is None else embed_tokens.detach().cpu(),
        dtype=dtype,
    )
    check_complete(tensors, inventory(config, embed_tokens=embed_tokens is not None, dtype=dtype))
    engines = engine_support(config, layout)
    notes = tuple(_notes(config, layout, count, refusal))

    work = out.with_name(out.name + ".tmp")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    files = _write_weights(tensors, work, shard_bytes)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    values = served_config(config, origin, layout=layout, num_speculative_tokens=count, dtype=dtype)
    write_text(work / "config.json", json.dumps(values, indent=2) + "\n")
    description = {
        "format": FORMAT,
        "layout": layout,
        "method": serving_method(config),
        "num_speculative_tokens": count,
        "contract": asdict(contract),
        "origin": asdict(origin),
        **facts,
    }
    write_text(work / FACTS_FILE, json.dumps(description, indent=2) + "\n")
    for file in extra_files:
        shutil.copy2(file, work / file.name)
    report = ExportReport(
        folder=out,
        layout=layout,
        method=serving_method(config),
        num_speculative_tokens=count,
        tensors=len(tensors),
        bytes=total,
        files=tuple(files),
        engines=engines,
        notes=notes,
    )
    write_text(work / "README.md", card(report))
    os.replace(work, out)
    return report


def _notes(config: DraftConfig, layout: str, count: int, refusal: str | None) -> list[str]:
    notes = [f"no engine serves this: {refusal}"] if refusal else []
    if serving_method(config) == "dflash":
        notes.append(
            "no sequential head: written for method dflash"
            + (", without the confidence head" if config.confidence else "")
        )
    if count != config.num_proposals:
        notes.append(
            f"{count} of the {config.num_proposals} trained proposals: slots attend to each other, so every position changes; "
            "measure before use"
        )
    return notes


def _write_weights(tensors: Mapping[str, Tensor], folder: Path, shard_bytes: int | None) -> list[str]:
    """One file, or shards of at most `shard_bytes` (a larger tensor gets its own) with the usual index."""
    groups: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        own = tensor.numel() * tensor.element_size()
        if shard_bytes is not None and groups[-1] and size + own > shard_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = tensor.contiguous()
        size += own
    names = ["model.safetensors"]
    if len(groups) > 1:
        names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    for file, group in zip(names, groups, strict=True):
        save_file(group, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # safetensors writes for the owner alone; a server is often someone else
    if len(names) == 1:
        return names
    index = {
        "metadata": {"total_size": sum(t.numel() * t.element_size() for t in tensors.values())},
        "weight_map": {name: file for file, group in zip(names, groups, strict=True) for name in group},
    }
    write_text(folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")
    return names
