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
    scale,
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
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(target_row + row).to(tl.int64)
    z_row = logits + row * width
    t_row = target + source * width
    lane = tl.arange(0, BLOCK)

    # First pass: normalisers and argmaxes, kept a lane apart until the end. -1e30 stands for minus infinity: differences stay numbers.
    z_max = tl.full((BLOCK,), -1.0e30, tl.float32)
    z_sum = tl.zeros((BLOCK,), tl.float32)
    z_at = tl.zeros((BLOCK,), tl.int32)
    t_max = tl.full((BLOCK,), -1.0e30, tl.float32)
    t_sum = tl.zeros((BLOCK,), tl.float32)
    t_at = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, width, BLOCK):
        at = start + lane
        inside = at < width
        z = tl.where(inside, tl.load(z_row + at, mask=inside, other=0.0).to(tl.float32) * scale, -1.0e30)
        t = tl.where(inside, tl.load(t_row + at, mask=inside, other=0.0).to(tl.float32) * scale, -1.0e30)
        z_at = tl.where(z > z_max, at, z_at)
        t_at = tl.where(t > t_max, at, t_at)
        higher = tl.maximum(z_max, z)
        z_sum = z_sum * tl.exp(z_max - higher) + tl.exp(z - higher)
        z_max = higher
        higher = tl.maximum(t_max, t)
        if RENORMALISE:
            t_sum = t_sum * tl.exp(t_max - higher) + tl.exp(t - higher)
        t_max = higher
    z_top = tl.max(z_max, 0)
    z_lse = z_top + tl.log(tl.sum(z_sum * tl.exp(z_max - z_top), 0))
    z_index = tl.min(tl.where(z_max == z_top, z_at, width), 0)
    t_top = tl.max(t_max, 0)
    t_index = tl.min(tl.where(t_max == t_top, t_at, width), 0)
    if RENORMALISE:
        t_lse = t_top + tl.log(tl.sum(t_sum * tl.exp(t_max - t_top), 0))
    else:
        t_lse = tl.load(target_lse + source)

    # Second pass: overlap, the draft's mass where it falls short, and the sums of kl. One exponential gives the first two.
    overlap = tl.zeros((BLOCK,), tl.float32)
    short = tl.zeros((BLOCK,), tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    cross = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        at = start + lane
        inside = at < width
        z = tl.where(inside, tl.load(z_row + at, mask=inside, other=0.0).to(tl.float32) * scale, -1.0e30)
        t = tl.where(inside, tl.load(t_row + at, mask=inside, other=0.0).to(tl.float32) * scale, -1.0e30)
        log_q = z - z_lse
        log_p = t - t_lse
        smaller = tl.exp(tl.minimum(log_q, log_p))
        overlap += smaller
        short += tl.where(log_q < log_p, smaller, 0.0)
        if DIVERGENCE:
            p = tl.exp(log_p)
            mass += p
            cross += tl.where(p > 0.0, p * (log_p - z), 0.0)
    alpha = tl.minimum(tl.sum(overlap, 0), 1.0)
    below = tl.sum(short, 0)
    kept = tl.sum(mass, 0)

    label = tl.load(labels + row).to(tl.int32)
    known = label >= 0
    place = tl.maximum(label, 0)
    z_label = tl.load(z_row + place).to(tl.float32) * scale
    t_label = tl.load(t_row + place).to(tl.float32) * scale
    ratio = tl.exp(z_label - z_lse) / tl.maximum(tl.exp(t_label - t_lse), 1.1754944e-38)
    if TEXT_LABEL:
        ce_place = place
        ce_weight = tl.where(known, ce, 0.0)
    else:
        ce_place = t_index
        ce_weight = ce
    z_ce = tl.load(z_row + ce_place).to(tl.float32) * scale

    floor = tl.maximum(alpha, 1.1754944e-38)
    blend = tl.exp(-lk_eta * alpha)
    divergence = kl + lk * blend
    shared = tv + lk * (1.0 - blend)
    loss = shared * (1.0 - alpha) - nla * tl.log(floor) + ce_weight * (z_lse - z_ce)
    if DIVERGENCE:
        loss += divergence * (tl.sum(cross, 0) + kept * z_lse)
    tl.store(stats + row, alpha)
    tl.store(stats + rows + row, tl.where(known, tl.minimum(ratio, 1.0), 0.0))
    tl.store(stats + 2 * rows + row, tl.where(known & (z_index == label), 1.0, 0.0))
    tl.store(stats + 3 * rows + row, loss)

    # Third pass: the gradient replaces the logits.
    if GRADIENT:
        tl.debug_barrier()  # every thread has read the logits that it needs from others' lanes
        weight = tl.load(row_weights + row) * scale
        pull = shared + nla / floor
        for start in range(0, width, BLOCK):
            at = start + lane
            inside = at < width
            z = tl.load(z_row + at, mask=inside, other=0.0).to(tl.float32) * scale
            t = tl.load(t_row + at, mask=inside, other=0.0).to(tl.float32) * scale
            log_q = z - z_lse
            log_p = t - t_lse
            q = tl.exp(log_q)
            grad = pull * q * (below - tl.where(log_q < log_p, 1.0, 0.0))
            grad += ce_weight * (q - tl.where(at == ce_place, 1.0, 0.0))
            if DIVERGENCE:
                grad += divergence * (q * kept - tl.exp(log_p))
            tl.store(z_row + at, (grad * weight).to(logits.dtype.element_ty), mask=inside)


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
        BLOCK=min(4096, triton.next_power_of_2(width)),
        num_warps=8,
    )
    return stats
