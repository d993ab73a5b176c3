"""Where a draft's weights start: the verifier's own layers, a bigram table, or an earlier draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy.sparse import coo_matrix, csr_matrix, diags
from scipy.sparse.linalg import LinearOperator, eigsh
from threadpoolctl import threadpool_limits
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


@dataclass(frozen=True)
class BigramFactors:
    """A bigram model as the Markov head holds it: logits of what follows a token are `previous[token] @ following.T`.

    previous fp32 [W, R], meaningful where `seen` bool [W]; following fp32 [V, R].
    """

    previous: Float[Tensor, "W R"]
    following: Float[Tensor, "V R"]
    seen: Bool[Tensor, " W"]


def factorise_bigrams(
    prev: Int[Tensor, " E"],
    following: Int[Tensor, " E"],
    counts: Int[Tensor, " E"],
    *,
    rows: int,
    columns: int,
    rank: int,
) -> BigramFactors:
    """The best bigram model of `rank` (at most) for counted pairs of W = `rows` tokens and V = `columns` followers.

    For a pair seen c times the target logit is log(1 + c / p(b)) above that of an unseen one: additive smoothing with the
    unigram p as prior, up to a constant a row, which the softmax removes. The first rank holds log p(b); the others the
    right singular vectors of the pair logits, rows weighted by the root of their count, onto which every row is projected.
    """
    weight = counts.double()
    unigram = torch.zeros(columns, dtype=torch.float64).index_add_(0, following, weight) + 0.5
    unigram /= unigram.sum()
    values = torch.log1p(weight / unigram[following])
    row_counts = torch.zeros(rows, dtype=torch.float64).index_add_(0, prev, weight)
    seen = row_counts > 0
    place = seen.cumsum(0) - 1  # tokens that were never seen would be empty rows
    shape = (int(seen.sum()), columns)
    matrix = coo_matrix((values.numpy(), (place[prev].numpy(), following.numpy())), shape=shape).tocsr()
    prior = unigram.log() - unigram.log().mean()
    root = prior.std().sqrt()
    left, right = root.expand(rows, 1), (prior / root)[:, None]
    pairs = min(rank - 1, rows - 1, columns - 1)
    if pairs >= 1:
        scaled = (diags(row_counts[seen].sqrt().numpy()) @ matrix).tocsr()
        basis = torch.from_numpy(right_singular_vectors(scaled, pairs))  # [V, R-1]
        projected = torch.from_numpy(matrix @ basis.numpy())
        # Both factors at one scale, as one learning rate wants.
        balance = (projected.std() / basis.std()).sqrt()
        table = torch.zeros(rows, pairs, dtype=torch.float64)
        table[seen] = projected / balance
        left, right = torch.cat([left, table], dim=1), torch.cat([right, basis * balance], dim=1)
    return BigramFactors(left.float(), right.float(), seen)


def right_singular_vectors(matrix: csr_matrix, count: int) -> np.ndarray:
    """The `count` leading right singular vectors of a sparse [n, V], [V, count] in ascending order of singular values.

    Eigenvectors of the Gram matrix, by Lanczos steps from a fixed vector: the factorisation is part of the recipe, not of the
    run's seed. The steps' products are too small for several threads, which would spend their time waiting for each other.
    """
    transposed, size = matrix.T.tocsr(), matrix.shape[1]
    gram = LinearOperator((size, size), matvec=lambda x: transposed @ (matrix @ x), dtype=np.float64)
    with threadpool_limits(1, user_api="blas"):
        _, vectors = eigsh(gram, k=count, v0=np.ones(size), tol=1e-10)
    return np.ascontiguousarray(vectors)


@torch.no_grad()
def start_from_bigrams(draft: Draft, factors: BigramFactors, *, backbone_scale: float) -> None:
    """Make the Markov head begin as the bigram model `factors`, and the backbone as a whisper beside it.

    Rows of tokens that were never seen have the prior alone, and beyond it a trace of noise, so that they can still learn.
    `backbone_scale` multiplies the final norm: untrained hidden states through a full-scale norm would drown the table, and
    the first hundred steps would be spent on unlearning them.
    """
    head = draft.markov_head
    if head is None:
        raise ValueError("head.init=bigram needs a sequential head; use head.init=zeros with head=none.")
    width = factors.following.shape[1]
    table, columns = head.markov_w1.weight, head.markov_w2.weight
    table.mul_(0.01)
    table[:, 0] = factors.previous[:, 0]
    table[factors.seen, :width] = factors.previous[factors.seen]
    columns.zero_()
    columns[:, :width] = factors.following
    draft.norm.weight.mul_(backbone_scale)


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
