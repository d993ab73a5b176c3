"""Checkpoints that others wrote, as drafts of ours: speculators, DeepSpec's dense layout, z-lab's DFlash, and our own exports.

Reading has two steps. `read_served` opens a folder and says what it is without judging it; `import_draft` turns that into a
`Draft` or says what this package cannot express. The doctor uses the first alone, on folders that are wrong on purpose.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dspark.config import Contract, DraftConfig
from dspark.export import DTYPES, FACTS_FILE, FORMAT, Origin, inventory
from dspark.nn.draft import Draft
from dspark.runs import Run, RunManifest, save_draft, utc_now
from dspark.vocab import VocabMap

ENGINE_ROPE_THETA = 1_000_000.0
FROZEN_FILE = "frozen.safetensors"
# Frozen copies and buffers of the trainer, which some releases wrote and nothing here needs.
SKIPPED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")


@dataclass(frozen=True)
class Served:
    """A checkpoint folder as found. `kind` is speculators-dspark, speculators-dflash, dense-dspark or dense-dflash."""

    folder: Path
    kind: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    facts: dict[str, Any]

    @property
    def decoder(self) -> dict[str, Any]:
        """The part of the configuration that describes the transformer."""
        return self.config["transformer_layer_config"] if self.nested else self.config

    @property
    def nested(self) -> bool:
        return self.kind.startswith("speculators")

    @property
    def layout(self) -> str:
        return "speculators" if self.nested else "dense"


@dataclass(frozen=True)
class Imported:
    """A foreign draft in our terms. `frozen` holds the verifier rows the folder shipped, so that it can be written back whole."""

    draft: Draft
    contract: Contract
    origin: Origin
    kind: str
    layout: str
    dtype: torch.dtype
    num_speculative_tokens: int
    frozen: dict[str, Tensor]
    notes: tuple[str, ...]


# ---- opening a folder


def read_served(folder: Path) -> Served:
    """Open a checkpoint folder.

    Raises ValueError when a file is missing or damaged, or the checkpoint is of another family.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not a checkpoint folder: it has no config.json.")
    try:
        config = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}).") from error
    facts_path = folder / FACTS_FILE
    facts = json.loads(facts_path.read_text()) if facts_path.is_file() else {}
    if facts and facts.get("format") != FORMAT:
        raise ValueError(f"{facts_path} has format {facts.get('format')!r}; this version reads {FORMAT!r}.")
    return Served(folder, _kind(config, path), config, _read_weights(folder), facts)


def _kind(config: Mapping[str, Any], path: Path) -> str:
    model = config.get("speculators_model_type")
    if model is not None:
        if model not in ("dspark", "dflash"):
            raise ValueError(
                f"{path} is a {model!r} speculator; this package reads dspark and dflash checkpoints only."
            )
        if "transformer_layer_config" not in config:
            raise ValueError(f"{path} has no transformer_layer_config, so its decoder is unknown.")
        return f"speculators-{model}"
    architectures = config.get("architectures") or []
    if "markov_rank" in config and "target_layer_ids" in config:
        return "dense-dspark"
    if "DFlashDraftModel" in architectures or "dflash_config" in config:
        return "dense-dflash"
    raise ValueError(
        f"{path} describes {architectures or 'no architecture'}; expected a speculators checkpoint (speculators_model_type dspark or "
        "dflash), a Qwen3DSparkModel with markov_rank and target_layer_ids, or a DFlashDraftModel with dflash_config."
    )


def _read_weights(folder: Path) -> dict[str, Tensor]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    tensors: dict[str, Tensor] = {}
    for name in names:
        if not (folder / name).is_file():
            found = sorted(p.name for p in folder.glob("*.safetensors"))
            raise ValueError(
                f"{folder} has no {name} (found {found or 'no safetensors file'}); is the download complete?"
            )
        try:
            with safe_open(folder / name, framework="pt") as file:
                tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{folder / name} is damaged ({error}); download it again.") from error
    return tensors


# ---- what the configuration means


def engine_config(served: Served, *, num_verifier_layers: int) -> DraftConfig:
    """The configuration as vLLM >= 0.27.0 reads it, with its silent defaults, whether or not that is what the writer meant.

    Raises ValueError for what the engine would refuse too, or what a `DraftConfig` cannot hold.
    """
    decoder, top = served.decoder, served.config
    method = served.kind.split("-")[1]
    required = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "rms_norm_eps",
        "max_position_embeddings",
    )
    if missing := [name for name in required if decoder.get(name) is None]:
        raise ValueError(f"{served.folder / 'config.json'} lacks {', '.join(missing)}.")
    layers = decoder["num_hidden_layers"]
    head = "none"
    if method == "dspark" and top.get("markov_rank"):
        head = top.get("markov_head_type") or "vanilla"
    confidence = method == "dspark" and bool(top.get("enable_confidence_head", False))
    block = top.get("block_size")
    if block is None:
        raise ValueError(f"{served.folder / 'config.json'} lacks block_size, the slots of a trained block.")
    return DraftConfig(
        hidden_size=decoder["hidden_size"],
        intermediate_size=decoder["intermediate_size"],
        num_layers=layers,
        num_heads=decoder["num_attention_heads"],
        num_kv_heads=decoder["num_key_value_heads"],
        head_dim=decoder.get("head_dim") or decoder["hidden_size"] // decoder["num_attention_heads"],
        rms_norm_eps=decoder["rms_norm_eps"],
        rope_theta=float(stated_rope_theta(decoder) or ENGINE_ROPE_THETA),
        max_position_embeddings=decoder["max_position_embeddings"],
        vocab_size=decoder["vocab_size"],
        draft_vocab_size=top.get("draft_vocab_size") or decoder["vocab_size"],
        block_size=block,
        sample_from_anchor=stated_layout(served),
        mask_token_id=_required(served, "mask_token_id"),
        aux_layer_ids=tuple(stated_taps(served)),
        num_verifier_layers=num_verifier_layers,
        layer_types=tuple(decoder.get("layer_types") or ("full_attention",) * layers),
        sliding_window=decoder.get("sliding_window"),
        head=head,
        markov_rank=top.get("markov_rank") or 0 if method == "dspark" else 0,
        confidence=confidence,
        confidence_uses_prev_embedding=confidence and bool(top.get("confidence_head_with_markov", False)),
        logit_scale=float(decoder.get("logit_scale", 1.0)),
    )


def stated_rope_theta(decoder: Mapping[str, Any]) -> float | None:
    """Theta in the new or the legacy form; None when neither is there. Raises ValueError when the two disagree."""
    new = (decoder.get("rope_parameters") or {}).get("rope_theta")
    legacy = decoder.get("rope_theta")
    if new is not None and legacy is not None and float(new) != float(legacy):
        raise ValueError(f"rope_parameters says theta {new} and rope_theta says {legacy}; which is meant?")
    return new if new is not None else legacy


def stated_layout(served: Served) -> bool:
    """`sample_from_anchor`; absent means fill-in for speculators, and for dense DSpark what `dspark_bonus_anchor` says."""
    if served.kind == "dense-dflash":
        return False
    if "sample_from_anchor" in served.config:
        return bool(served.config["sample_from_anchor"])
    if served.kind == "dense-dspark":
        return not served.config.get("dspark_bonus_anchor", False)
    return False


def stated_taps(served: Served) -> list[int]:
    """Tap ids in this package's convention. Dense configurations number layers by their own index, one less."""
    if served.nested:
        return list(_required(served, "aux_hidden_state_layer_ids"))
    return [i + 1 for i in _required(served, "target_layer_ids")]


def _required(served: Served, name: str) -> Any:
    value = served.config.get(name)
    if value is None:
        value = (served.config.get("dflash_config") or {}).get(name)
    if value is None:
        raise ValueError(f"{served.folder / 'config.json'} lacks {name}; engines refuse it as well.")
    return value


def stated_num_verifier_layers(served: Served) -> int | None:
    """Decoder layers of the verifier, where the checkpoint says; speculators configurations do not."""
    return served.facts.get("contract", {}).get("num_verifier_layers") or served.config.get(
        "num_target_layers"
    )


def stated_origin(served: Served) -> Origin:
    """What the checkpoint says about its verifier."""
    if "origin" in served.facts:
        return Origin(**served.facts["origin"])
    verifier = (served.config.get("speculators_config") or {}).get("verifier") or {}
    return Origin(
        verifier_name=verifier.get("name_or_path")
        or served.config.get("verifier_name_or_path")
        or served.config.get("_name_or_path")
        or "unknown",
        verifier_architecture=next(iter(verifier.get("architectures") or []), None)
        or served.config.get("verifier_architecture"),
        num_anchors=served.config.get("num_anchors"),
    )


# ---- turning it into a draft


def refuse_inexpressible(served: Served) -> None:
    """Raise ValueError for settings under which the folder's weights mean something that this draft module does not compute."""
    decoder = served.decoder
    rope = decoder.get("rope_parameters") or decoder.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    width = served.config.get("target_hidden_size")
    sliding = "sliding_attention" in (decoder.get("layer_types") or [])
    bidirectional = sliding and served.config.get("sliding_window_non_causal", False)
    checks = (
        (decoder.get("attention_bias"), "attention_bias is true; this draft's projections have no bias"),
        (kind != "default", f"rope type {kind!r}; this draft has plain rotary embeddings"),
        (
            rope.get("partial_rotary_factor", decoder.get("partial_rotary_factor") or 1.0) not in (None, 1.0),
            "partial rotary embeddings; this draft rotates all of a head",
        ),
        (
            decoder.get("is_neox_style") is False,
            "interleaved rotary pairs; this draft pairs the two halves of a head",
        ),
        (
            (decoder.get("hidden_act") or "silu") != "silu",
            f"hidden_act {decoder.get('hidden_act')!r}; this draft and vLLM have silu only",
        ),
        (
            width not in (None, decoder.get("hidden_size")),
            f"target_hidden_size {width}; this draft reads states of its own width",
        ),
        (decoder.get("is_causal") is not None, "is_causal overrides the attention of every layer"),
        (
            bidirectional,
            "sliding layers trained without a causal mask in the block; this draft's and vLLM's are causal there",
        ),
    )
    for wrong, reason in checks:
        if wrong:
            raise ValueError(f"{served.folder} cannot be imported: {reason}.")
    if stated_rope_theta(decoder) is None:
        raise ValueError(
            f"{served.folder / 'config.json'} states no rope theta (rope_parameters or rope_theta); vLLM would silently assume "
            f"{ENGINE_ROPE_THETA:.0f}. Add the value it was trained with."
        )
    if served.kind == "speculators-dspark" and "sample_from_anchor" not in served.config:
        raise ValueError(
            f"{served.folder / 'config.json'} does not say sample_from_anchor; engines read that as fill-in (false) and the paper's "
            "drafts are anchor-first (true). Add the value it was trained with."
        )


def draft_state(served: Served, config: DraftConfig, lm_head: Tensor | None) -> dict[str, Tensor]:
    """State of our `Draft` from the folder's tensors, and `lm_head` [W, H] of the verifier where the folder leaves it out.

    Raises ValueError that names every missing, unexpected or misshapen tensor.
    """
    found = {n: t for n, t in served.tensors.items() if n not in SKIPPED}
    expected = inventory(config, embed_tokens=True)
    optional = {"embed_tokens.weight"} | (set() if config.pruned else {"lm_head.weight"})
    problems = [f"missing {n}" for n in expected if n not in found and n not in optional | {"t2d"}]
    problems += [f"unexpected {n}" for n in found if n not in expected]
    problems += [
        f"{n} is {tuple(t.shape)}, expected {expected[n].shape}"
        for n, t in found.items()
        if n in expected and tuple(t.shape) != expected[n].shape
    ]
    if problems:
        raise ValueError(
            f"{served.folder}: {'; '.join(problems[:5])}" + (" ..." if problems[5:] else "") + "."
        )
    state = {n: t for n, t in found.items() if n not in ("embed_tokens.weight", "lm_head.weight", "d2t")}
    kept = torch.arange(config.vocab_size)
    if config.pruned:
        kept = found["d2t"].to(torch.int64) + torch.arange(config.draft_vocab_size)
    head = found.get("lm_head.weight")
    if head is None:
        if lm_head is None:
            raise ValueError(
                f"{served.folder} has a full vocabulary and no lm_head.weight: its head is the verifier's. Give a cache or a "
                "verifier to take it from."
            )
        head = lm_head
    return state | {"lm_head": head, "kept_ids": kept}


def import_draft(
    served: Served,
    *,
    verifier_contract: Contract | None,
    lm_head: Tensor | None,
    num_verifier_layers: int | None,
    sample_from_anchor: bool | None,
    convert_layout: bool,
    attention_backend: str,
) -> Imported:
    """The folder as a draft. `verifier_contract` and `lm_head` come from a cache or verifier, where one is given.

    `sample_from_anchor` asks for a block layout; the other one than trained needs `convert_layout`, since slots then mean other
    tokens and the draft must be trained again before use.

    Raises ValueError for anything unreadable, inexpressible, incomplete or inconsistent.
    """
    refuse_inexpressible(served)
    known = verifier_contract.num_verifier_layers if verifier_contract else None
    layers = num_verifier_layers or known or stated_num_verifier_layers(served)
    if layers is None:
        raise ValueError(
            f"{served.folder} does not say how many layers its verifier has; set num_verifier_layers, or give a cache."
        )
    config = engine_config(served, num_verifier_layers=layers)
    state = draft_state(served, config, lm_head)
    VocabMap(state["kept_ids"], config.vocab_size)
    _check_marks(served, state["kept_ids"])
    notes = []
    if sample_from_anchor is not None and sample_from_anchor != config.sample_from_anchor:
        if not convert_layout:
            raise ValueError(
                f"{served.folder} was trained with sample_from_anchor={str(config.sample_from_anchor).lower()}; its slots mean other "
                "tokens in the other layout. convert_layout=true converts it as a start for training."
            )
        config = replace(config, sample_from_anchor=sample_from_anchor)
        notes.append("layout converted: train it before use, its slots now mean other tokens")
    draft = Draft(config, attention_backend=attention_backend)
    draft.lm_head = draft.lm_head.to(state["lm_head"].dtype)
    draft.load_state_dict(state)
    given = served.facts.get("contract")
    contract = Contract(**given) if given else Contract()
    contract.check(
        draft.contract,
        mine=str(served.folder / FACTS_FILE),
        theirs=str(served.folder / "config.json"),
        ignore=("sample_from_anchor",) if convert_layout else (),
    )
    own = {k: v for k, v in vars(draft.contract).items() if v is not None}
    contract = contract.merged(**own)
    if verifier_contract is not None:
        contract.check(verifier_contract, mine=str(served.folder), theirs="the given verifier")
        contract = contract.merged(**{k: v for k, v in vars(verifier_contract).items() if v is not None})
    dtype = served.tensors["fc.weight"].dtype
    frozen = {}
    if "embed_tokens.weight" in served.tensors:
        draft.set_embedding(served.tensors["embed_tokens.weight"], dtype)
        frozen["embed_tokens.weight"] = served.tensors["embed_tokens.weight"]
    else:
        notes.append("no embed_tokens: the verifier's are used")
    return Imported(
        draft=draft,
        contract=contract,
        origin=stated_origin(served),
        kind=served.kind,
        layout=served.layout,
        dtype=dtype,
        num_speculative_tokens=stated_num_speculative_tokens(served, config),
        frozen=frozen,
        notes=tuple(notes),
    )


def stated_num_speculative_tokens(served: Served, config: DraftConfig) -> int:
    """Tokens a round as written, never more than the trained block proposes."""
    methods = (served.config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    stated = methods[0].get("speculative_tokens") or served.facts.get("num_speculative_tokens")
    return min(stated or config.num_proposals, config.num_proposals)


def _check_marks(served: Served, kept: Tensor) -> None:
    marks = served.tensors.get("t2d")
    if marks is not None and not torch.equal(marks.nonzero().squeeze(-1), kept):
        raise ValueError(
            f"{served.folder}: d2t and t2d disagree about the draft vocabulary ({len(kept)} ids against {int(marks.sum())} marks)."
        )


def write_run(imported: Imported, root: Path, *, source: str, command: str, overrides: list[str]) -> Run:
    """A run-like folder with the draft as its `best` checkpoint, so that every command takes it.

    Raises ValueError when the folder exists.
    """
    if root.exists():
        raise ValueError(f"{root} exists; name another folder with out=.")
    manifest = RunManifest(
        run_id=root.name,
        command=command,
        overrides=overrides,
        config_sha="",
        seed=0,
        verifier={
            "name": imported.origin.verifier_name,
            "architecture": imported.origin.verifier_architecture,
            "revision": imported.origin.verifier_revision,
            "weights_sha": imported.contract.verifier_sha,
        },
        data={"imported_from": source, "kind": imported.kind, "layout": imported.layout},
        parent={"imported_from": source},
    )
    run = Run.create(root.parent, manifest, f"imported_from: {json.dumps(source)}\n")
    dtype = next(name for name, value in DTYPES.items() if value == imported.dtype)
    facts = {
        "origin": vars(imported.origin),
        "imported": {
            "kind": imported.kind,
            "layout": imported.layout,
            "dtype": dtype,
            "num_speculative_tokens": imported.num_speculative_tokens,
            "at": utc_now(),
        },
    }
    save_draft(imported.draft, run.checkpoints / "best", imported.contract, facts)
    if imported.frozen:
        save_file(imported.frozen, run.path / FROZEN_FILE)
    run.finish("imported", {})
    return run
