"""What a draft is: the geometry that checkpoints and exports serialise, and the contract between artefacts.

Layer ids follow one convention everywhere in this package: id `i` is the verifier's residual stream after `i`
decoder layers, before any final norm (the convention of vLLM and speculators; Transformers' `hidden_states[i]` for
`i < num_hidden_layers`; DeepSpec's `target_layer_ids` are one less). Only the exporter and importer convert.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

HEAD_KINDS = ("vanilla", "gated", "rnn", "none")
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Everything that decides what a draft's weights mean. Training knobs live elsewhere.

    `vocab_size` is the verifier's vocabulary W (its embedding rows); `draft_vocab_size` is V <= W.
    `block_size` is Q, the slots of one block; `num_proposals` is N, the tokens one block proposes.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int
    block_size: int
    sample_from_anchor: bool
    mask_token_id: int
    aux_layer_ids: Sequence[int]
    num_verifier_layers: int
    layer_types: Sequence[str]
    sliding_window: int | None
    head: str
    markov_rank: int
    confidence: bool
    confidence_uses_prev_embedding: bool
    logit_scale: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "aux_layer_ids", tuple(int(i) for i in self.aux_layer_ids))
        object.__setattr__(self, "layer_types", tuple(self.layer_types))
        problem = self._first_problem()
        if problem:
            raise ValueError(f"DraftConfig: {problem}")

    def _first_problem(self) -> str | None:
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        ):
            if getattr(self, name) < 1:
                return f"{name} is {getattr(self, name)}; expected a positive integer."
        if self.num_heads % self.num_kv_heads:
            return f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}."
        if self.head_dim % 2:
            return f"head_dim is {self.head_dim}; rotary embeddings need an even number."
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            return (
                f"draft_vocab_size is {self.draft_vocab_size}; expected 1 to {self.vocab_size} (vocab_size). "
                "Use the verifier's vocabulary size for an unpruned draft."
            )
        smallest = 1 if self.sample_from_anchor else 2
        if self.block_size < smallest:
            return f"block_size is {self.block_size}; this layout needs at least {smallest} to propose one token."
        if not 0 <= self.mask_token_id < self.vocab_size:
            return f"mask_token_id {self.mask_token_id} is outside the verifier's {self.vocab_size} embedding rows."
        ids = self.aux_layer_ids
        if not ids or list(ids) != sorted(set(ids)):
            return f"aux_layer_ids are {list(ids)}; expected at least one id, strictly increasing."
        if ids[0] < 1 or ids[-1] > self.num_verifier_layers - 1:
            return (
                f"aux_layer_ids are {list(ids)}; expected ids from 1 to {self.num_verifier_layers - 1} (residual after i "
                f"of {self.num_verifier_layers} decoder layers). 0 is the embedding and {self.num_verifier_layers} the last "
                "layer, which serving engines and Transformers disagree about."
            )
        if len(self.layer_types) != self.num_layers or set(self.layer_types) - set(LAYER_TYPES):
            return f"layer_types are {list(self.layer_types)}; expected {self.num_layers} entries out of {LAYER_TYPES}."
        if "sliding_attention" in self.layer_types and not (self.sliding_window and self.sliding_window > 0):
            return (
                f"sliding_window is {self.sliding_window}; sliding_attention layers need a positive window."
            )
        if self.head not in HEAD_KINDS:
            return f"head is {self.head!r}; expected one of {HEAD_KINDS}."
        if (self.head == "none") != (self.markov_rank == 0):
            return (
                f"head is {self.head!r} but markov_rank is {self.markov_rank}; a draft without a sequential head has rank 0, "
                "every other head a positive rank (`head=none` sets both)."
            )
        if self.confidence and self.confidence_uses_prev_embedding and self.head == "none":
            return (
                "confidence.use_prev_embedding is true but the draft has no sequential head, which owns that embedding; "
                "set confidence.use_prev_embedding=false or choose a head."
            )
        return None

    @property
    def num_proposals(self) -> int:
        """N: tokens proposed from one anchor; every slot when sampling from the anchor, else all but slot 0."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def first_slot(self) -> int:
        """Slot of proposal 1."""
        return 0 if self.sample_from_anchor else 1

    @property
    def pruned(self) -> bool:
        """Whether the draft proposes from a subset of the verifier's vocabulary."""
        return self.draft_vocab_size < self.vocab_size

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DraftConfig:
        """Rebuild from `asdict` output; unknown and missing keys are errors that name them."""
        known = {f.name for f in fields(cls)}
        unknown, missing = sorted(set(values) - known), sorted(known - set(values))
        if unknown or missing:
            raise ValueError(
                f"DraftConfig: unknown keys {unknown}, missing keys {missing}; was it written by this version?"
            )
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class Contract:
    """The facts that a cache, a checkpoint, an export and an engine must agree on.

    A field is None where the artefact does not fix it (a cache has no block size). `check` compares what both sides fix.
    """

    verifier_sha: str | None = None
    tokenizer_sha: str | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    num_verifier_layers: int | None = None
    aux_layer_ids: Sequence[int] | None = None
    last: str | None = None
    mask_token_id: int | None = None
    block_size: int | None = None
    sample_from_anchor: bool | None = None
    rope_theta: float | None = None
    draft_vocab_size: int | None = None
    vocab_map_sha: str | None = None
    layer_types: Sequence[str] | None = None
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        for name in ("aux_layer_ids", "layer_types"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(getattr(self, name)))

    def differences(self, other: Contract) -> dict[str, tuple[Any, Any]]:
        """Fields that both sides fix and on which they differ: name -> (mine, theirs)."""
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return {k: (a, b) for k, (a, b) in pairs.items() if a is not None and b is not None and a != b}

    def check(self, other: Contract, *, mine: str, theirs: str, ignore: tuple[str, ...] = ()) -> None:
        """Raise ValueError that lists every differing field with both values. `mine` and `theirs` name the artefacts."""
        differing = {k: v for k, v in self.differences(other).items() if k not in ignore}
        if differing:
            rows = "; ".join(f"{k}: {a!r} in {mine}, {b!r} in {theirs}" for k, (a, b) in differing.items())
            raise ValueError(f"{mine} and {theirs} do not belong together: {rows}.")

    def merged(self, **values: Any) -> Contract:
        """A copy with `values` fixed in addition."""
        return Contract(**{**asdict(self), **values})

    @classmethod
    def of_draft(cls, config: DraftConfig, *, vocab_map_sha: str | None) -> Contract:
        """What a draft's configuration fixes."""
        return cls(
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            num_verifier_layers=config.num_verifier_layers,
            aux_layer_ids=config.aux_layer_ids,
            mask_token_id=config.mask_token_id,
            block_size=config.block_size,
            sample_from_anchor=config.sample_from_anchor,
            rope_theta=config.rope_theta,
            draft_vocab_size=config.draft_vocab_size,
            vocab_map_sha=vocab_map_sha,
            layer_types=config.layer_types,
            sliding_window=config.sliding_window,
        )
