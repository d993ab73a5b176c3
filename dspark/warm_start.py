"""Where a draft's weights start: the verifier's own layers, a bigram table, or an earlier draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.sparse import coo_matrix
from scipy.sparse.linalg import svds
from torch import Tensor

from dspark.config import Contract
from dspark.nn.backbone import RMSNorm
from dspark.nn.draft import Draft
from dspark.vocab import VocabMap

LAYER_MATRICES = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)


@torch.no_grad()
def start_from_verifier_layers(
    draft: Draft,
    layers: Sequence[Mapping[str, Tensor]],
    final_norm: Float[Tensor, " H"],
    context_tap: int,
    states: Float[Tensor, "T L H"],
) -> None:
    """Copy the verifier's last layers into the draft's, and make its injected context resemble their input.

    `layers` holds one mapping of `LAYER_MATRICES` for each draft layer, in order. `fc` starts as the projection onto the tap
    with index `context_tap`, and the context norm takes the first layer's input norm, so keys and values begin as the verifier's
    own. Verifiers without per-head norms leave theirs to be set: each takes the root mean square of the queries or keys that
    `states` (aux states of some text) produce, so attention begins at the verifier's scale.

    Raises ValueError when a shape differs; `draft.init=random` needs no resemblance.
    """
    hidden = draft.config.hidden_size
    draft.fc.weight.zero_()
    draft.fc.weight[:, context_tap * hidden : (context_tap + 1) * hidden] = torch.eye(hidden)
    draft.hidden_norm.weight.copy_(layers[0]["input_layernorm.weight"])
    draft.norm.weight.copy_(final_norm)
    for layer, source in zip(draft.layers, layers, strict=True):
        own = dict(layer.named_parameters())
        for name in LAYER_MATRICES:
            if own[name].shape != source[name].shape:
                raise ValueError(
                    f"draft.init=verifier_layers: {name} is {tuple(own[name].shape)} in the draft and {tuple(source[name].shape)} in "
                    "the verifier. Leave the draft's widths at null, or use draft.init=random."
                )
            own[name].copy_(source[name])
        context = draft.context(states.to(draft.fc.weight.dtype))
        for norm, projection in (
            (layer.self_attn.q_norm, layer.self_attn.q_proj),
            (layer.self_attn.k_norm, layer.self_attn.k_proj),
        ):
            name = "q_norm" if norm is layer.self_attn.q_norm else "k_norm"
            given = source.get(f"self_attn.{name}.weight")
            norm.weight.copy_(_typical_scale(norm, projection(context)) if given is None else given)


def _typical_scale(norm: RMSNorm, projected: Float[Tensor, "T hd"]) -> Float[Tensor, " d"]:
    """Root mean square of all heads' activations: one number, since heads share the norm's weight."""
    rms = projected.pow(2).mean().sqrt()
    return torch.full_like(norm.weight, float(rms))


def bigram_counts(
    documents: Sequence[tuple[Tensor, Tensor]], vocab: VocabMap
) -> tuple[Int[Tensor, " E"], Int[Tensor, " E"], Int[Tensor, " E"]]:
    """(previous verifier id, next draft id, count) over supervised tokens whose next token the draft can propose."""
    previous, following = [], []
    for ids, mask in documents:
        keep = mask[1:].bool()
        previous.append(ids[:-1][keep])
        following.append(ids[1:][keep])
    prev, nxt = torch.cat(previous), vocab.target_to_draft(torch.cat(following))
    known = nxt >= 0
    pairs = prev[known] * len(vocab) + nxt[known]
    unique, counts = torch.unique(pairs, return_counts=True)
    return unique // len(vocab), unique % len(vocab), counts


@torch.no_grad()
def start_from_bigrams(
    draft: Draft,
    prev: Int[Tensor, " E"],
    following: Int[Tensor, " E"],
    counts: Int[Tensor, " E"],
    *,
    strength: float,
) -> None:
    """Give the Markov table the best rank-R fit of `strength * positive pointwise mutual information` of the bigrams.

    PPMI is log(count(a,b) N / (count(a) count(b))) where positive: how much likelier b is after a than anywhere. The factor
    matrices share the singular values evenly.
    """
    head = draft.markov_head
    if head is None:
        raise ValueError("head.init=bigram needs a sequential head; use head.init=zeros with head=none.")
    rows, columns = draft.config.vocab_size, draft.config.draft_vocab_size
    weight = counts.double()
    total = weight.sum()
    smooth = 1.0  # a pair seen once after a rare token says little: shrink its ratio
    row_sum = torch.zeros(rows, dtype=torch.float64).index_add_(0, prev, weight)
    column_sum = torch.zeros(columns, dtype=torch.float64).index_add_(0, following, weight)
    ratio = weight * total / ((row_sum[prev] + smooth) * (column_sum[following] + smooth))
    values = strength * ratio.log().clamp(min=0.0) * (weight / (weight + smooth))
    matrix = coo_matrix((values.numpy(), (prev.numpy(), following.numpy())), shape=(rows, columns)).tocsr()
    rank = min(head.rank, rows - 1, columns - 1)
    # The factorisation is part of the recipe, not of the run's seed.
    left, singular, right = svds(matrix, k=rank, v0=np.ones(min(rows, columns)))
    root = torch.from_numpy(singular.copy()).clamp(min=0.0).sqrt()
    head.markov_w1.weight[:, :rank] = (torch.from_numpy(left.copy()) * root).float()
    head.markov_w2.weight[:, :rank] = (torch.from_numpy(right.copy()).T * root).float()
    # Tokens never seen as a previous token keep a small random row, so that they can still learn.
    unseen = row_sum == 0
    head.markov_w1.weight[unseen] *= 0.1


def start_from_draft(
    draft: Draft, earlier: Draft, earlier_contract: Contract, *, current: Contract, convert_layout: bool
) -> list[str]:
    """Copy every weight of an earlier draft that fits; returns the names that kept their own start.

    `current` is this run's contract: the draft's and its cache's.

    Raises ValueError when the contract differs: another verifier, other taps, another vocabulary or, unless `convert_layout`,
    the other block layout (its slots mean other tokens). Block size and attention pattern may differ.
    """
    ignore = ("block_size", "layer_types", "sliding_window") + (
        ("sample_from_anchor",) if convert_layout else ()
    )
    earlier_contract.check(current, mine="the warm start", theirs="this run", ignore=ignore)
    own, given = draft.state_dict(), earlier.state_dict()
    kept = [name for name, tensor in own.items() if name not in given or given[name].shape != tensor.shape]
    draft.load_state_dict(
        {name: t for name, t in given.items() if name in own and name not in kept}, strict=False
    )
    return kept
