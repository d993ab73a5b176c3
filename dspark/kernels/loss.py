"""`dspark.losses.terms_with_gradient` in one kernel.

The element-wise form makes some twenty passes over a [rows, V] tensor in fp32; this one reads the bf16 logits of draft and
verifier three times, mostly from cache, and writes the gradient over the draft's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from dspark.losses import KERNEL_TERMS

# A program reads a row in tiles of LANES * EACH tokens, EACH contiguous ones a thread: what an H200 ran fastest of several, 4 to 5 %
# ahead of twice the threads.
LANES, EACH = 256, 8
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load(row, at, width: tl.constexpr):
    """Logits of tokens `at`, fp32 and unscaled; -1e30 beyond the last one stands for minus infinity, so differences stay numbers."""
    return tl.load(row + at, mask=at < width, other=-1.0e30).to(tl.float32)


@triton.jit
def _normaliser_step(z, top, total, place, start, scale):
    """Online softmax of every thread's own tokens: one exponential a token, and one for the sum so far."""
    higher = tl.maximum(top, tl.max(z, 1))
    place = tl.where(higher > top, start, place)
    # Differences come before the factor: fused the other way round, equal stand-ins would differ.
    total = total * tl.exp2((top - higher) * scale) + tl.sum(tl.exp2((z - higher[:, None]) * scale), 1)
    return higher, total, place


@triton.jit
def _normaliser(top, total, scale):
    """(maximum, log2 of the sum of 2^(scale * logit)) of the row."""
    highest = tl.max(top, 0)
    return highest, highest * scale + tl.log2(tl.sum(total * tl.exp2((top - highest) * scale), 0))


@triton.jit
def _first_of_highest(row, top, place, highest, lane, width: tl.constexpr):
    """The lowest token whose logit is the row's maximum; `place` is the tile in which each thread met its own."""
    at = tl.where(top == highest, place, width)[:, None] + lane
    return tl.min(tl.min(tl.where(_load(row, at, width) == highest, at, width), 1), 0)


@triton.jit
def _loss_terms(
    logits,  # [M, V], overwritten by the gradient
    target,  # [P, V] verifier logits
    target_row,  # [M]
    target_lse,  # [P]
    labels,  # [M], -1 for none
    row_weights,  # [M]
    stats,  # [4, M] fp32: alpha, label_keep, greedy_hit, loss
    rows,
    logit_scale,
    ce,
    tv,
    kl,
    nla,
    lk,
    lk_eta,
    width: tl.constexpr,
    DIVERGENCE: tl.constexpr,
    TEXT_LABEL: tl.constexpr,
    RENORMALISE: tl.constexpr,
    GRADIENT: tl.constexpr,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
):
    TILE: tl.constexpr = LANES * EACH
    LAST: tl.constexpr = (width - 1) // TILE * TILE
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(target_row + row).to(tl.int64)
    z_row = logits + row * width
    t_row = target + source * width
    lane = (tl.arange(0, LANES) * EACH)[:, None] + tl.arange(0, EACH)[None, :]
    scale = logit_scale * LOG2E  # logarithms are to base 2 below

    # First pass: normalisers and argmaxes, kept a thread apart until the end.
    z_top = tl.full((LANES,), -1.0e30, tl.float32)
    z_sum = tl.zeros((LANES,), tl.float32)
    z_at = tl.zeros((LANES,), tl.int32)
    t_top = tl.full((LANES,), -1.0e30, tl.float32)
    t_sum = tl.zeros((LANES,), tl.float32)
    t_at = tl.zeros((LANES,), tl.int32)
    for start in range(0, width, TILE):
        z_top, z_sum, z_at = _normaliser_step(
            _load(z_row, start + lane, width), z_top, z_sum, z_at, start, scale
        )
        if RENORMALISE or not TEXT_LABEL:
            t_top, t_sum, t_at = _normaliser_step(
                _load(t_row, start + lane, width), t_top, t_sum, t_at, start, scale
            )
    z_highest, z_lse = _normaliser(z_top, z_sum, scale)
    z_index = _first_of_highest(z_row, z_top, z_at, z_highest, lane, width)
    if RENORMALISE:
        t_highest, t_lse = _normaliser(t_top, t_sum, scale)
    else:
        t_highest = tl.max(t_top, 0)
        t_lse = tl.load(target_lse + source) * LOG2E

    # Second pass: overlap, the draft's mass where it falls short, and the sums of kl. One exponential gives the first two.
    # It runs backwards, because a cache holds what was read last.
    overlap = tl.zeros((LANES,), tl.float32)
    short = tl.zeros((LANES,), tl.float32)
    mass = tl.zeros((LANES,), tl.float32)
    cross = tl.zeros((LANES,), tl.float32)
    for start in range(0, width, TILE):
        at = LAST - start + lane
        z = _load(z_row, at, width) * scale
        log_q = z - z_lse
        log_p = _load(t_row, at, width) * scale - t_lse
        smaller = tl.exp2(tl.minimum(log_q, log_p))
        overlap += tl.sum(smaller, 1)
        short += tl.sum(tl.where(log_q < log_p, smaller, 0.0), 1)
        if DIVERGENCE:
            p = tl.exp2(log_p)
            mass += tl.sum(p, 1)
            cross += tl.sum(tl.where(p > 0.0, p * (log_p - z), 0.0), 1)
    alpha = tl.minimum(tl.sum(overlap, 0), 1.0)
    below = tl.sum(short, 0)
    kept = tl.sum(mass, 0)

    label = tl.load(labels + row).to(tl.int32)
    known = label >= 0
    place = tl.maximum(label, 0)
    z_label = _load(z_row, place, width) * scale
    t_label = _load(t_row, place, width) * scale
    ratio = tl.exp2(z_label - z_lse) / tl.maximum(tl.exp2(t_label - t_lse), 1.1754944e-38)
    if TEXT_LABEL:
        ce_place = place
        ce_weight = tl.where(known, ce, 0.0)
    else:
        ce_place = _first_of_highest(t_row, t_top, t_at, t_highest, lane, width)
        ce_weight = ce
    z_ce = _load(z_row, ce_place, width) * scale

    floor = tl.maximum(alpha, 1.1754944e-38)
    blend = tl.exp(-lk_eta * alpha)
    divergence = kl + lk * blend
    shared = tv + lk * (1.0 - blend)
    loss = shared * (1.0 - alpha) - nla * tl.log(floor) + ce_weight * (z_lse - z_ce) / LOG2E
    if DIVERGENCE:
        loss += divergence * (tl.sum(cross, 0) + kept * z_lse) / LOG2E
    tl.store(stats + row, alpha)
    tl.store(stats + rows + row, tl.where(known, tl.minimum(ratio, 1.0), 0.0))
    tl.store(stats + 2 * rows + row, tl.where(known & (z_index == label), 1.0, 0.0))
    tl.store(stats + 3 * rows + row, loss)

    # Third pass: the gradient replaces the logits.
    if GRADIENT:
        tl.debug_barrier()  # every thread has read the logits that it needs from others' lanes
        weight = tl.load(row_weights + row) * logit_scale
        pull = (shared + nla / floor) * weight
        ce_pull = ce_weight * weight
        above_factor = pull * below + ce_pull
        short_factor = above_factor - pull
        for start in range(0, width, TILE):
            at = start + lane
            log_q = _load(z_row, at, width) * scale - z_lse
            log_p = _load(t_row, at, width) * scale - t_lse
            q = tl.exp2(log_q)
            grad = q * tl.where(log_q < log_p, short_factor, above_factor)
            grad -= tl.where(at == ce_place, ce_pull, 0.0)
            if DIVERGENCE:
                grad += divergence * weight * (q * kept - tl.exp2(log_p))
            tl.store(z_row + at, grad.to(logits.dtype.element_ty), mask=at < width)


def loss_terms(
    logits: Float[Tensor, "M V"],
    target: Float[Tensor, "P V"],
    target_row: Int[Tensor, " M"],
    target_lse: Float[Tensor, " P"],
    labels: Int[Tensor, " M"],
    row_weights: Float[Tensor, " M"] | None,
    *,
    terms: Mapping[str, float],
    text_label: bool,
    renormalise: bool,
    scale: float,
    lk_eta: float,
) -> Float[Tensor, "4 M"]:
    """(alpha, label_keep, greedy_hit, loss) of every row; with `row_weights`, the gradient in place of `logits`.

    `logits` and `target` are unscaled products with the head. `renormalise` takes the verifier's normaliser over the V tokens
    given instead of `target_lse`. `terms` may hold the names in `KERNEL_TERMS` only.
    """
    rows, width = logits.shape
    lanes = min(LANES, triton.next_power_of_2(triton.cdiv(width, EACH)))
    stats = torch.empty(4, rows, dtype=torch.float32, device=logits.device)
    weight = {name: float(terms.get(name, 0.0)) for name in KERNEL_TERMS}
    _loss_terms[(rows,)](
        logits,
        target,
        target_row,
        target_lse,
        labels,
        target_lse if row_weights is None else row_weights,
        stats,
        rows,
        float(scale),
        weight["ce"],
        weight["tv"] + 2.0 * weight["l1"],
        weight["kl"],
        weight["nla"],
        weight["lk_hybrid"],
        float(lk_eta),
        width,
        DIVERGENCE=bool(weight["kl"] or weight["lk_hybrid"]),
        TEXT_LABEL=text_label,
        RENORMALISE=renormalise,
        GRADIENT=row_weights is not None,
        LANES=lanes,
        EACH=EACH,
        num_warps=max(1, lanes // 32),
    )
    return stats
